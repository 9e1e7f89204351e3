"""A model file mapped for reading, and the record that says where a tensor lies in it.

A mapping of a file that is cut short under it kills the process at the next read (SIGBUS), and no handler can
prevent that in between two instructions. Hence :meth:`MappedFile.check_unchanged`, to be called before bytes
are read: what remains is a file that shrinks within the microseconds of one copy. It knows no file format.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.errors import ModelFileError

PAGE_NBYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a model file.

    Attributes
    ----------
    name : str
        As in the file.
    format : str
        Element type or block format in lower case: "bf16", "q4_k", "u8".
    shape : tuple of int
        In elements, the last one varies fastest (GGUF's dimensions in reverse).
    path : Path
        The file, one of many where a model is sharded.
    offset, nbytes : int
        Where its bytes are, counted from the start of the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"tensor {self.name!r} ({self.format}, {self.shape}) of {self.path}"


@functools.cache
def _madvise() -> Any:
    """The system's call. That of :mod:`mmap` keeps the interpreter lock, so that other threads would wait for it."""
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


class MappedFile:
    """A file mapped read-only. The mapping lives as long as the object or a view of its bytes.

    Raises
    ------
    ModelFileError
        There is no such file, or it is not one that can be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not block
        try:
            fd = os.open(path, flags)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise ModelFileError(f"{str(path)!r}: cannot be opened ({error}); check the path") from error
        weakref.finalize(self, os.close, fd)
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is no regular file; pass the path of a model file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: is empty (0 bytes), but a model file has a header; copy it again")
        self.nbytes = status.st_size
        self._modified_ns = status.st_mtime_ns
        try:
            self.map = mmap.mmap(fd, self.nbytes, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be mapped ({error}); copy it to a local disk") from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def check_unchanged(self) -> None:
        """Raise ModelFileError if the file is not what it was when it was mapped."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.nbytes, self._modified_ns):
            raise ModelFileError(
                f"{self.path}: was changed while it was read ({self.nbytes} bytes before, {status.st_size} now), "
                "but a model file must stay as it is until it is loaded; wait until it is complete, and load it again"
            )

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file as a read-only view, without a copy; checked first."""
        self.check_unchanged()
        return self.bytes[offset : offset + nbytes]

    def _advise(self, advice: str, offset: int, nbytes: int) -> None:
        """Advice on all pages that the range touches; systems without it read as they like."""
        option = getattr(mmap, advice, None)
        if option is None or nbytes == 0:
            return
        start = offset // PAGE_NBYTES * PAGE_NBYTES
        _madvise()(self.address + start, offset + nbytes - start, option)

    def fetch(self, offset: int, nbytes: int) -> None:
        """Have the system read a range that will be needed soon, unless it seems to be in memory.

        Going through the pages of a range takes a tenth of the time to copy it, so one page is asked for first.
        """
        if not self._is_cached(offset + nbytes // 2):
            self._advise("MADV_WILLNEED", offset, nbytes)

    def _is_cached(self, offset: int) -> bool:
        """Whether a byte can be had without waiting for the disk; False where the system cannot say."""
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except (AttributeError, OSError):
            return False

    def drop(self, offset: int, nbytes: int) -> None:
        """Give up the process's hold on the pages of a range; the system's own cache of the file stays."""
        self._advise("MADV_DONTNEED", offset, nbytes)


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """The tensors of a model, over one file or many.

    Attributes
    ----------
    kind : str
        "gguf" or "safetensors".
    path : Path
        What was opened.
    tensors : mapping of str to TensorInfo
    metadata : mapping
        GGUF's key-value pairs, or config.json; empty if there is none. Arrays are read when they are asked for.
    files : mapping of Path to MappedFile
    """

    kind: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any] = field(repr=False)
    files: Mapping[Path, MappedFile] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 (nbytes,), read-only: a view of the mapped file."""
        return self.files[tensor.path].view(tensor.offset, tensor.nbytes)

    def check_unchanged(self) -> None:
        """Raise ModelFileError if one of the files was changed since it was opened."""
        for file in self.files.values():
            file.check_unchanged()
