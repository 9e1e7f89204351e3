"""A place in the bytes of a header that moves on as values are read, and never past the end.

Every refusal names the file, the value, and where it is. It knows numbers and strings, no file format.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from trilane.errors import ModelFileError

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
MAX_STRINGS = 1 << 23  # of a file: ten times what the largest vocabularies need, passed over in a second or two


class Cursor:
    """Reads little-endian values from ``data`` (bytes or a mapping), from byte 0 on."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data, self.path = data, path
        self.at, self.end = 0, len(data)
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

    def take(self, kind: struct.Struct, what: str) -> Any:
        self.need(kind.size, what)
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return value

    def skip(self, nbytes: int, what: str) -> None:
        self.need(nbytes, what)
        self.at += nbytes

    def text(self, what: str, limit: int) -> str:
        """A string with its length in front, of at most ``limit`` bytes of UTF-8."""
        nbytes = self.take(U64, f"the length of {what}")
        if nbytes > limit:
            raise self.error(what, f"has {nbytes} bytes, but at most {limit} are allowed: the file is damaged")
        self.need(nbytes, what)
        raw = bytes(self.data[self.at : self.at + nbytes])
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
        data, at, unpack = self.data, self.at, U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):  # the next length would lie behind the end
            at = self.end + 1
        self.skip(at - self.at, what)
