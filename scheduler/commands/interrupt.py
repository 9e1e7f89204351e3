"""Ctrl-C on the command line: what it ends at once, and that it is told as what it was.

An interrupt in the midst of an import leaves half a module behind, and comes out as any other error or not at all:
NumPy's lazy modules look for themselves until the stack is full. So there the program ends where it is. Elsewhere a
KeyboardInterrupt is raised, so that threads, files and schedulers are closed. What runs is not known here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from trilane.errors import TrilaneError

INTERRUPTED = 130  # what a shell reports for Ctrl-C
_IMPORT = "<frozen importlib._bootstrap>"


class Interrupts:
    """Context manager around a program; ``came``: whether there was a Ctrl-C.

    Parameters
    ----------
    name : str
        The program's, for what is printed.
    """

    def __init__(self, name: str) -> None:
        self.came, self._name, self._is_installed = False, name, False

    def __enter__(self) -> Interrupts:
        is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, or another's
        if is_usual and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._take)
            self._is_installed = True
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if is_importing(frame):
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            self.tell()
            os._exit(INTERRUPTED)
        signal.default_int_handler(number, frame)

    def tell(self) -> None:
        """Say it on stderr."""
        with contextlib.suppress(Exception):  # stderr may be closed, or in use by what was interrupted
            print(f"{self._name}: interrupted", file=sys.stderr, flush=True)

    def ended_by(self, error: BaseException) -> bool:
        """Whether a program that ends with ``error`` was interrupted; an orderly end is none."""
        if isinstance(error, SystemExit):
            return self.came and error.code not in (0, None)
        return self.came or isinstance(error, KeyboardInterrupt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is loaded in a frame or in one that called it."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def run_program(name: str, work: Callable[[], object], error_text: Callable[[BaseException], str] = str) -> None:
    """Run a program; Ctrl-C and errors that users can cause are a line on stderr each, and an exit code.

    Parameters
    ----------
    name : str
        The program's, for what is printed.
    work : callable
    error_text : callable, optional
        What is told of an error.
    """
    interrupts = Interrupts(name)
    try:
        with interrupts:
            work()
    except BaseException as error:
        if interrupts.ended_by(error):
            interrupts.tell()
            sys.exit(INTERRUPTED)
        if not isinstance(error, (OSError, TrilaneError, MemoryError)):
            raise
        print(f"{name}: {error_text(error)}", file=sys.stderr)
        sys.exit(1)
