"""A file of checked blocks that can be appended to and that survives a crash; it knows nothing of what they hold.

The file starts with 16 bytes: a magic text of 12 and a version. Each block has a head of 20 bytes (marker, kind, codec,
stored and raw bytes, CRC-32 of head and payload), then its payload. A block is written by one call, so what a crash
leaves behind is a torn last block, which readers drop and the next writer cuts off. All numbers are little-endian.
"""

from __future__ import annotations

import json
import lzma
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trilane.errors import TraceError

try:
    import fcntl
except ImportError:  # no advisory locks there: two writers of one file are not noticed
    fcntl = None  # type: ignore[assignment]

MAGIC = b"trilanetrace"
VERSION = 1
FILE_HEAD = struct.Struct("<12sI")
MARKER = b"\xb7Tb\n"  # no text file has it
HEAD = struct.Struct("<4sBBHIII")  # marker, kind, codec, 0, stored bytes, raw bytes, CRC of the rest
CHECKED = HEAD.size - 4
RAW, ZLIB, XZ = 0, 1, 2
MAX_BLOCK_NBYTES = 1 << 26
XZ_MEMORY = 1 << 27  # what a decoder may take: hostile heads ask for gigabytes
ARRAY_TYPES = ("|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")


def check_regular(path: Path) -> None:
    """Refuse what is there and is no regular file: reading a pipe could wait for ever."""
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: it is no regular file; name a trace file")


class Block(NamedTuple):
    """One block: its kind, its payload, and where the next one starts."""

    kind: int
    payload: bytes
    end: int


class Damage(NamedTuple):
    """Bytes that are no sound block: where they start, how many up to the end of the file, and why."""

    offset: int
    nbytes: int
    why: str


def pack_arrays(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A payload: the length of a JSON text, the text (with names, types and shapes of the arrays), their bytes."""
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    plain = {name: array.astype(array.dtype.newbyteorder("<"), copy=False) for name, array in plain.items()}
    described = [[name, array.dtype.str, list(array.shape)] for name, array in plain.items()]
    text = json.dumps({"values": values, "arrays": described}, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in plain.values())])


def unpack_arrays(payload: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The reverse of `pack_arrays`; a payload that is not consistent raises a TraceError."""
    try:
        (length,) = struct.unpack_from("<I", payload)
        head = json.loads(payload[4 : 4 + length])
        at, arrays = 4 + length, {}
        for name, kind, shape in head["arrays"]:
            if kind not in ARRAY_TYPES or len(shape) > 3 or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
                raise ValueError(f"array {str(name)[:40]!r} of type {str(kind)[:10]!r}")
            count = 1
            for n in shape:
                count *= n
            # frombuffer refuses what the payload does not hold, and copies nothing
            array = np.frombuffer(payload, np.dtype(kind), count, at) if count else np.zeros(0, kind)
            arrays[str(name)] = array.reshape(shape)
            at += array.nbytes
        values = head["values"]
        if not isinstance(values, dict) or at != len(payload):
            raise ValueError(f"{len(payload)} bytes, of which {at} are described")
        return values, arrays
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"a block of the trace does not fit its own description ({str(error)[:100]})") from None


def encode_block(kind: int, payload: bytes, codec: int = ZLIB) -> bytes:
    """A block as it stands in the file."""
    if len(payload) > MAX_BLOCK_NBYTES:
        raise TraceError(f"a block of {len(payload)} bytes, but a trace file has blocks of {MAX_BLOCK_NBYTES} at most")
    stored = {RAW: lambda b: b, ZLIB: zlib.compress, XZ: lambda b: lzma.compress(b, preset=6 | lzma.PRESET_EXTREME)}[
        codec
    ](payload)
    head = HEAD.pack(MARKER, kind, codec, 0, len(stored), len(payload), 0)[:CHECKED]
    return head + struct.pack("<I", zlib.crc32(stored, zlib.crc32(head))) + stored


def _decode(codec: int, stored: bytes, raw_nbytes: int) -> bytes:
    """The payload, never more than one byte beyond what the head said."""
    if codec == ZLIB:
        return zlib.decompressobj().decompress(stored, raw_nbytes + 1)
    if codec == XZ:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY).decompress(stored, raw_nbytes + 1)
    return stored


def _block_at(file: BinaryIO, offset: int, size: int) -> Block | str:
    """The block at an offset, or why there is none."""
    file.seek(offset)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return "a block's head is cut short"
    marker, kind, codec, zero, stored_nbytes, raw_nbytes, crc = HEAD.unpack(head)
    if marker != MARKER or zero or codec not in (RAW, ZLIB, XZ) or max(raw_nbytes, stored_nbytes) > MAX_BLOCK_NBYTES:
        return "no block starts there"
    end = offset + HEAD.size + stored_nbytes
    if end > size:
        return "a block is cut short"
    stored = file.read(stored_nbytes)
    if zlib.crc32(stored, zlib.crc32(head[:CHECKED])) != crc:
        return "a block's checksum does not fit"
    try:
        payload = _decode(codec, stored, raw_nbytes)
    except (zlib.error, lzma.LZMAError, EOFError, MemoryError) as error:
        return f"a block cannot be unpacked ({error})"
    return Block(kind, payload, end) if len(payload) == raw_nbytes else "a block has another length than it says"


def is_block_file(file: BinaryIO) -> bool:
    """Whether an open file starts as one."""
    file.seek(0)
    return file.read(len(MAGIC)) == MAGIC


def read_blocks(file: BinaryIO, name: str) -> Iterator[Block | Damage]:
    """All sound blocks in order; a `Damage` comes last if something follows that is none.

    Raises
    ------
    TraceError
        The file is no trace, or of a later version.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    head = file.read(FILE_HEAD.size)
    if len(head) < FILE_HEAD.size or head[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{name}: it is no trace file; give one that trilane recorded, or a .npz of ids")
    version = FILE_HEAD.unpack(head)[1]
    if version != VERSION:
        raise TraceError(f"{name}: a trace of version {version}, but this release reads version {VERSION}; update it")
    offset = FILE_HEAD.size
    while offset < size:
        block = _block_at(file, offset, size)
        if isinstance(block, str):
            yield Damage(offset, size - offset, block)
            return
        yield block
        offset = block.end


def sound_block_after(file: BinaryIO, offset: int) -> int | None:
    """Offset of the first sound block behind ``offset``, or None: then all that follows is a torn end."""
    size, at, step = os.fstat(file.fileno()).st_size, offset + 1, 1 << 20
    while at < size:
        file.seek(at)
        chunk = file.read(step + len(MARKER) - 1)
        found = chunk.find(MARKER)
        if found < 0:
            at += step
        elif isinstance(_block_at(file, at + found, size), Block):
            return at + found
        else:
            at += found + 1
    return None


class BlockAppender:
    """Appends blocks to a file that it holds a lock on.

    Parameters
    ----------
    path : Path
        Made where there is none. An existing file must be sound up to ``end``, where writing begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            self.file = open(path, "r+b" if path.exists() else "x+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise TraceError(f"{path}: it cannot be written ({error.strerror}); name another file") from error
        try:
            _lock(self.file, path)
        except BaseException:
            self.file.close()
            raise

    @property
    def is_new(self) -> bool:
        return os.fstat(self.file.fileno()).st_size < FILE_HEAD.size

    def begin(self, end: int = 0) -> None:
        """Cut off what lies behind ``end`` (0: everything, and begin the file anew)."""
        self.file.truncate(end)
        self.file.seek(end)
        if end == 0:
            self._write(FILE_HEAD.pack(MAGIC, VERSION))

    def append(self, block: bytes) -> None:
        """Write one encoded block; if that fails, nothing of it stays."""
        start = self.file.tell()
        try:
            self._write(block)
        except OSError:
            self.file.truncate(start)
            self.file.seek(start)
            raise

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.file.write(view) :]

    def close(self) -> None:
        """Bring everything to the disk and give up the lock."""
        if not self.file.closed:
            try:
                os.fsync(self.file.fileno())
            finally:
                self.file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise TraceError(f"{path}: another scheduler is recording to it; give each its own file") from None
