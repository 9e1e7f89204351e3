"""Records a run on a GPU: what the control thread has put on its tape goes to a trace file, a piece at a time.

The control thread writes while it decides (cuda_tape.py). A thread of ours holds it for a moment now and then, takes
what is there, and writes that to the file with the thread let go. Where the taping has ended, since something happened
that is no event or the tape was full, it begins anew with the whole state. For that no fill may be under way, so none
is begun meanwhile. A disk that fails ends the recording only.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trilane.cpu_kernels.team import TeamError
from trilane.cuda_threads import CudaThreads
from trilane.cuda_words import Control, Stage
from trilane.errors import TrilaneError
from trilane.state import State
from trilane.tape import Tape, copy_tape, make_baseline, tape_block, write_event
from trilane.traces.trace import REQUEST, Baseline, TraceMeta
from trilane.traces.trace_file import encode_baseline, encode_events, open_appender

log = logging.getLogger("trilane")

TAPE_EVENTS, TAPE_ENTRIES = 1 << 16, 1 << 19  # of some tenths of a second at full speed
DRAIN_S = 0.05


class CudaRecorder:
    """Appends what one scheduler on a GPU does to a trace file.

    Parameters
    ----------
    path : path
        A new file, or one that holds a trace of the same model.
    meta : TraceMeta
    threads : CudaThreads
    tape : Tape
        Of the control thread.
    look : callable
        Returns settings, rates by layer and the state, as a `trace.Baseline` holds them; called while it is held.

    Raises
    ------
    TraceError, OSError
        The file cannot be recorded to.
    """

    def __init__(
        self,
        path: Path | str,
        meta: TraceMeta,
        threads: CudaThreads,
        tape: Tape,
        look: Callable[[], tuple[dict[str, Any], Any, State]],
    ) -> None:
        self.path, self.meta = Path(path), meta
        self.failure: str | None = None
        self._threads, self._tape, self._look, self._pid = threads, tape, look, os.getpid()
        self._appender = open_appender(path, meta)
        self._writing, self._closing = threading.Lock(), threading.Event()
        self.drain()
        self._thread = threading.Thread(target=self._drain_often, name="trilane-recorder", daemon=True)
        self._thread.start()

    def lose_track(self) -> None:
        """Something happened that is no event. The control thread is held, and :meth:`drain` comes next."""
        self._threads.control[Control.TAPING] = 0

    def request(self) -> None:
        """Record that a request begins."""
        with self._threads.holding():
            if self._threads.control[Control.TAPING] and write_event.py_func(self._tape, REQUEST, 0, 0, 0, 0) < 0:
                self.lose_track()

    def drain(self) -> None:
        """Write what is on the tape, and begin anew where the taping has ended, if that can be now."""
        with self._writing:
            if self.failure is not None:
                return
            try:
                with self._threads.holding():
                    taken, baseline = copy_tape(self._tape), self._begin_anew()
                    self._tape.used[:] = 0
                if taken.used[0]:
                    self._appender.append(encode_events(tape_block(taken, self.meta)))
                if baseline is not None:
                    self._appender.append(encode_baseline(baseline))
            except Exception as error:  # whatever a disk or a dead thread does
                self._end(error)

    def _begin_anew(self) -> Baseline | None:
        """A baseline if one is needed and can be had; else no fills are begun until it can."""
        control = self._threads.control
        if control[Control.TAPING]:
            return None
        idle = control[Control.FILL_STAGE] == Stage.IDLE and not control[Control.FROZEN]
        control[Control.NO_FILLS] = not idle
        if not idle:
            return None
        settings, rates, state = self._look()
        control[Control.TAPED_CLOCK], control[Control.TAPING] = state.clock[0], 1
        return make_baseline({**settings, "clock": int(state.clock[0])}, rates, state)

    def _end(self, error: Exception) -> None:
        control = self._threads.control
        control[Control.TAPING] = control[Control.NO_FILLS] = 0
        self.failure = f"{self.path}: {error}"
        if not isinstance(error, (TeamError, TrilaneError)):  # else who runs the steps hears of it
            log.warning("recording ended: %s", self.failure)

    def _drain_often(self) -> None:
        while not self._closing.wait(DRAIN_S):
            if self.failure is not None:
                return
            if self._tape.used[0] or not self._threads.control[Control.TAPING]:
                self.drain()

    def close(self) -> None:
        """Write what is left and close the file; in a forked child only let go of it."""
        if os.getpid() != self._pid or self._appender.file.closed:
            return
        self._closing.set()
        self._thread.join()
        self.drain()
        self._appender.close()
