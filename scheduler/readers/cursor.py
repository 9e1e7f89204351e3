"""A place in the bytes of a header that moves on as values are read, and never past the end.

Every refusal names the file, the value, and where it is. It knows numbers and strings, no file format.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Protocol

from trilane.errors import ModelFileError

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
MAX_STRINGS = 1 << 23  # of a file: ten times what the largest vocabularies need, passed over in a second or two
WINDOW_NBYTES = 1 << 16  # what is read at a time


class Data(Protocol):
    """The bytes of a file: ``bytes``, or an open :class:`~trilane.readers.model_file.ModelFile`."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


class Cursor:
    """Reads little-endian values from ``data``, from byte ``at`` on."""

    def __init__(self, data: Data, path: Path, at: int = 0) -> None:
        self.data, self.path = data, path
        self.at, self.end = at, len(data)
        self._window, self._window_start = b"", 0
        self._strings_left = MAX_STRINGS

    def error(self, what: str, rule: str) -> ModelFileError:
        return ModelFileError(f"{self.path}, byte {self.at}: {what} {rule}")

    def need(self, nbytes: int, what: str) -> None:
        """Raise unless so many bytes are left."""
        if nbytes > self.end - self.at:
            raise self.error(
                what,
                f"needs {nbytes} bytes, but the file ends {self.end - self.at} bytes on: it is damaged or was "
                "not copied to its end; copy it again",
            )

    def _place(self, nbytes: int) -> int:
        """Where ``nbytes`` from here on begin in the window, which is read anew unless it holds them."""
        place = self.at - self._window_start
        if not 0 <= place <= len(self._window) - nbytes:
            self._window = self.data[self.at : self.at + max(nbytes, WINDOW_NBYTES)]
            self._window_start, place = self.at, 0
        return place

    def take(self, kind: struct.Struct, what: str) -> Any:
        self.need(kind.size, what)
        place = self._place(kind.size)  # first: it may replace the window
        (value,) = kind.unpack_from(self._window, place)
        self.at += kind.size
        return value

    def skip(self, nbytes: int, what: str) -> None:
        self.need(nbytes, what)
        self.at += nbytes

    def peek(self, nbytes: int, what: str) -> bytes:
        """The next bytes; stays where it is."""
        self.need(nbytes, what)
        place = self._place(nbytes)
        return self._window[place : place + nbytes]

    def text(self, what: str, limit: int) -> str:
        """A string with its length in front, of at most ``limit`` bytes of UTF-8."""
        nbytes = self.take(U64, f"the length of {what}")
        if nbytes > limit:
            raise self.error(what, f"has {nbytes} bytes, but at most {limit} are allowed: the file is damaged")
        raw = self.peek(nbytes, what)
        try:
            found = raw.decode()
        except UnicodeDecodeError:
            raise self.error(what, f"is {raw[:40]!r}, which is no UTF-8: the file is damaged") from None
        self.at += nbytes
        return found

    def skip_strings(self, count: int, what: str) -> None:
        """Pass ``count`` strings by their lengths alone: a vocabulary has hundreds of thousands."""
        self.need(8 * count, f"{count} lengths of {what}")
        self._strings_left -= count
        if self._strings_left < 0:
            raise self.error(what, f"has {count} strings, but a header may have at most {MAX_STRINGS} in all")
        unpack = U64.unpack_from
        while count > 0:
            self.need(8, what)
            at, window = self._place(8), self._window
            last = len(window) - 8
            while count > 0 and at <= last:
                at += 8 + unpack(window, at)[0]
                count -= 1
            self.skip(at + self._window_start - self.at, what)
