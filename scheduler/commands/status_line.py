"""A line that is rewritten while text streams: the last row of a terminal, kept free of text by a scroll region.

It writes to stderr and only if that is a terminal; to a file or a pipe nothing goes.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TextIO

INTERVAL_S = 0.1


class StatusLine:
    """Context manager; ``show`` may be called for every token."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.is_shown = self._stream.isatty() and sys.stdout.isatty()
        self._next_s = 0.0

    def __enter__(self) -> StatusLine:
        if self.is_shown:
            rows = self._rows()
            # A free row below, the region above it, and the cursor back into the region.
            self._write(f"\n\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8")
        return self

    def show(self, text: str, *, now: bool = False) -> None:
        """Put a text there, at most ten times a second unless ``now``."""
        if not self.is_shown or (time.monotonic() < self._next_s and not now):
            return
        self._next_s = time.monotonic() + INTERVAL_S
        columns, rows = os.get_terminal_size(self._stream.fileno())
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_shown:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows()};1H\x1b[2K\x1b8")

    def _rows(self) -> int:
        return os.get_terminal_size(self._stream.fileno()).lines

    def _write(self, text: str) -> None:
        sys.stdout.flush()
        self._stream.write(text)
        self._stream.flush()
