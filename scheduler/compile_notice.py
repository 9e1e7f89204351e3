"""What people are told while code is compiled: one line in the log, once it has taken a while.

The compiler may be busy with a single function for a minute, so a timer speaks and not the next compilation. The file
knows neither the compiler nor its cache.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

NOTICE_S = 1.0  # seconds of compiling after which the log says what takes so long
log = logging.getLogger("trilane")


class CompileNotice:
    """Says once in the log that code is being compiled; what is cached stays silent.

    Parameters
    ----------
    folder : callable
        Where the code will be kept, asked for when it is said.
    after_s : float
        Seconds of compiling after which it is said: of one function, or of several one after the other.

    Notes
    -----
    Whoever compiles holds the compiler's lock, so compilations nest and never overlap.
    """

    def __init__(self, folder: Callable[[], object], after_s: float = NOTICE_S) -> None:
        self._folder, self._left_s, self._said = folder, after_s, False
        self._depth, self._begin_s = 0, 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """A function was not in the cache: its compilation begins."""
        self._depth += 1
        if self._depth > 1 or self._said:
            return
        self._begin_s = time.perf_counter()
        self._timer = threading.Timer(max(0.0, self._left_s), self._say)
        self._timer.daemon = True  # a program that ends while it compiles need not wait
        self._timer.start()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """What was begun within the block ends with it, with an error too."""
        before = self._depth
        try:
            yield
        finally:
            self._end(before)

    def _end(self, depth: int) -> None:
        ended, self._depth = self._depth > depth, depth
        if self._timer is not None and ended and depth == 0:
            self._timer.cancel()
            self._timer = None
            self._left_s -= time.perf_counter() - self._begin_s

    def _say(self) -> None:
        self._said = True
        log.warning(
            "trilane compiles its code for this processor, which can take minutes once; it is kept in %s",
            self._folder(),
        )
