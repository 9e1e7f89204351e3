"""A model file open for reading, and the record that says where a tensor lies in it.

Files are read by calls, not through a mapping: a mapped file that is cut short, or whose disk fails, ends the process
at the next access (SIGBUS), and no handler can prevent that. A call returns what happened, and it becomes an error
with the file's name. Only :meth:`ModelFile.view` maps, for callers that want bytes without a copy. It knows no file
format.
"""

from __future__ import annotations

import contextlib
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

READ_AHEAD_NBYTES = 128 << 10  # what any system reads ahead for one request; more may be cut


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


class ModelFile:
    """A file open for reading. ``len(file)`` and ``file[start:stop]`` are those of its bytes, read when asked for.

    Attributes
    ----------
    path : Path
    fd : int
        Its descriptor; open as long as the object lives.
    nbytes : int
        Its size when it was opened.

    Raises
    ------
    ModelFileError
        There is no such file, or it is no regular one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a pipe must not block
        try:
            fd = os.open(path, flags)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            remedy = "change its permissions" if isinstance(error, PermissionError) else "check the path"
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelFileError(f"{str(path)!r}: cannot be opened ({reason}); {remedy}") from error
        weakref.finalize(self, os.close, fd)
        self.fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is no regular file; pass the path of a model file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: is empty (0 bytes), but a model file has a header; copy it again")
        self.nbytes = status.st_size
        self._modified_ns = status.st_mtime_ns

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.nbytes)
        return self.read(start, max(0, stop - start)).tobytes()

    def read(self, offset: int, nbytes: int, what: TensorInfo | None = None) -> NDArray[np.uint8]:
        """A copy of some bytes of the file, uint8 (nbytes,).

        Parameters
        ----------
        offset, nbytes : int
        what : TensorInfo, optional
            Whose bytes they are, for errors.

        Raises
        ------
        ModelFileError
            They are not there any more, or the system cannot read them.
        """
        found = np.empty(nbytes, np.uint8)
        left = memoryview(found.data)
        while left:
            try:
                got = os.preadv(self.fd, [left], offset + nbytes - len(left))
            except OSError as error:
                raise self.read_error(error.errno or 0, what) from error
            if got == 0:
                raise self.read_error(0, what)
            left = left[got:]
        return found

    def read_error(self, code: int, what: TensorInfo | None = None) -> ModelFileError:
        """The error of a read that failed: ``code`` is the system's number, 0 where the file ended too early."""
        name = f"{self.path}: the file" if what is None else f"{what}: the file"
        if code > 0:
            return ModelFileError(f"{name} cannot be read ({os.strerror(code)}); check the disk, or copy it again")
        try:
            self.check_unchanged(what)
        except ModelFileError as changed:
            return changed
        return ModelFileError(f"{name} ends before its {self.nbytes} bytes are read; copy it to a local disk")

    def check_unchanged(self, what: TensorInfo | None = None) -> None:
        """Raise ModelFileError if the file is not what it was when it was opened; ``what`` was being read."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != (self.nbytes, self._modified_ns):
            raise ModelFileError(
                f"{self.path if what is None else what}: the file was changed while it was read ({self.nbytes} bytes "
                f"before, {status.st_size} now), but a model file must stay as it is until it is loaded; wait until it "
                "is complete, and load it again"
            )

    @functools.cached_property
    def _mapped(self) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(mmap.mmap(self.fd, self.nbytes, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # ValueError: it is shorter by now
            raise ModelFileError(f"{self.path}: cannot be mapped ({error}); copy it to a local disk") from error

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file as a read-only view of a mapping, without a copy.

        The file is checked first. If it is cut short *later*, to look at the view ends the process with SIGBUS, as with
        any mapped file: :meth:`read` has no such danger.
        """
        self.check_unchanged()
        return self._mapped[offset : offset + nbytes]

    def prefetch(self, offset: int, nbytes: int) -> bool:
        """Have the system begin to read a range that will be needed soon, unless it seems to be in memory.

        Returns
        -------
        bool
            Whether it had to be asked. The page in the middle of the range stands for all of it.
        """
        if nbytes == 0 or self._is_cached(offset + nbytes // 2):
            return False
        for start in range(offset, offset + nbytes, READ_AHEAD_NBYTES):
            self._advise("POSIX_FADV_WILLNEED", start, min(READ_AHEAD_NBYTES, offset + nbytes - start))
        return True

    def release(self, offset: int, nbytes: int) -> None:
        """Let the system's cache give up a range: for what :meth:`prefetch` brought in, and nobody else had there."""
        if nbytes:  # 0 would mean all of the file
            self._advise("POSIX_FADV_DONTNEED", offset, nbytes)

    def _advise(self, advice: str, offset: int, nbytes: int) -> None:
        """Advice that systems may leave alone, and some do not take."""
        option = getattr(os, advice, None)
        if option is not None:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, offset, nbytes, option)

    def _is_cached(self, offset: int) -> bool:
        """Whether the page of a byte is in memory, told without a read that would bring it there.

        True where the system cannot say: of files that belong to others, Linux says so of every page.
        """
        first, found = self._asked_at, ctypes.c_ubyte()
        if first is None:
            return True
        status = _mincore()(first + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, found)
        return status != 0 or bool(found.value & 1)

    @functools.cached_property
    def _asked_at(self) -> int | None:
        """Address of a mapping by which the system is asked of pages, and nothing is read; None: it cannot be asked.

        One for all questions: a mapping that comes or goes stops every thread that touches new memory meanwhile.
        """
        try:
            _mincore()
            return int(self._mapped.ctypes.data)
        except (AttributeError, OSError, TypeError, ModelFileError):
            return None


@functools.cache
def _mincore() -> Any:
    """mincore(2), called with the interpreter locked: to hand the lock over takes longer than the call."""
    function = ctypes.PyDLL(None).mincore
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte))
    return function


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
    files : mapping of Path to ModelFile
    """

    kind: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any] = field(repr=False)
    files: Mapping[Path, ModelFile] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 (nbytes,), read-only: a view of a mapping.

        See :meth:`ModelFile.view` for what happens if the file is cut short while the view is in use.
        """
        return self.files[tensor.path].view(tensor.offset, tensor.nbytes)

    def check_unchanged(self) -> None:
        """Raise ModelFileError if one of the files was changed since it was opened."""
        for file in self.files.values():
            file.check_unchanged()
