"""Records a live run: every plan's routing with a hash of the plan, and all else that plans depend on.

Compiled code copies a step into a *tape*, arrays of fixed size; a thread of its own turns full tapes into blocks of
the trace file. What happens outside of the usual order (a failed step, other options) is not recorded as such: a new
baseline with the whole state follows it. The recorder decides nothing, and a disk that fails ends the recording only.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numba import typeof

from trilane.config import Config
from trilane.digest import plan_digest
from trilane.host_run import Step
from trilane.jit import compiled
from trilane.stash import Stash, on_stashes
from trilane.state import State
from trilane.store import ExpertStore
from trilane.tape import NO_EXPERT, make_baseline, make_tape, tape_block, write_event
from trilane.traces.trace import BACKGROUND, HAS_IDS, HINT, REQUEST, SETTLED, STEP, WAVE, Baseline, TraceMeta
from trilane.traces.trace_file import encode_baseline, encode_events, open_appender

log = logging.getLogger("trilane")

NUM_TAPES = 3
VARIABLE = "TRILANE_RECORD_PATH"
FLUSH_S = 2.0  # what a killed process loses at most of a run that goes on


def trace_meta(store: ExpertStore) -> TraceMeta:
    """What a trace of a store's model says of it."""
    return TraceMeta(
        model="" if store.model is None else store.model.path.name,
        num_experts=tuple(layer.num_experts for layer in store.layers),
        shard_nbytes=tuple(tuple(layer.layout.shard_nbytes.tolist()) for layer in store.layers),
    )


def record_path(config: Config) -> Path | None:
    """Where to record: what the configuration says, else what who runs the program asks for by `trilane record`."""
    asked = os.environ.get(VARIABLE)
    return config.record.path or (Path(asked).expanduser() if asked else None)


@compiled(counted=False)
def write_step(run, tape):
    """Add the plan in ``run`` with its routing; False if it does not fit."""
    rows, top_k = run.step[Step.NUM_ROWS], run.step[Step.TOP_K]
    entry = _write_plan(run, tape, STEP, rows, top_k)
    if entry < 0:
        return False
    layer = run.step[Step.LAYER]
    num_experts = run.geometry.first_expert[layer + 1] - run.geometry.first_expert[layer]
    for k in range(rows * top_k):
        id_ = run.grouping.ids[k]
        tape.ids[entry + k] = id_ if 0 <= id_ < num_experts else NO_EXPERT
        tape.weights[entry + k] = run.ws.weights[k]
    return True


@compiled(counted=False)
def write_wave(run, tape):
    """Add a further plan of the step in ``run``; False if it does not fit."""
    return _write_plan(run, tape, WAVE, 0, 0) >= 0


@compiled(counted=False)
def _write_plan(run, tape, kind, rows, top_k):
    layer, num_experts = run.step[Step.LAYER], run.step[Step.NUM_EXPERTS]
    shards = run.geometry.num_shards[layer]
    digest = plan_digest(layer, run.grouping.experts, run.grouping.rows, num_experts, shards, run.work)
    return write_event(tape, kind, layer, rows, top_k, digest)


class Recorder:
    """Appends what one scheduler does to a trace file.

    Parameters
    ----------
    path : path
        A new file, or one that holds a trace of the same model.
    meta : TraceMeta
    run : HostStep
        Of the scheduler; another one of the same type may be passed to :meth:`step`.
    look : callable
        Returns settings, rates by layer and the state: what a `trace.Baseline` holds.

    Raises
    ------
    TraceError, OSError
        The file cannot be recorded to.
    """

    def __init__(
        self, path: Path | str, meta: TraceMeta, run: Stash, look: Callable[[], tuple[dict[str, Any], Any, State]]
    ) -> None:
        self.path, self.meta = Path(path), meta
        self.failure: str | None = None
        self._look, self._pid, self._due = look, os.getpid(), False
        self._is_lost = True  # the next event needs a baseline
        self._appender = open_appender(path, meta)
        self._free: queue.SimpleQueue[Stash] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Stash | Baseline | None] = queue.SimpleQueue()
        for _ in range(NUM_TAPES - 1):
            self._free.put(Stash(make_tape()))
        self._tape: Stash | None = Stash(make_tape())
        self._write_step, self._write_wave = (
            on_stashes(function, run.kind, self._tape.kind) for function in (write_step, write_wave)
        )
        for function in (self._write_step, self._write_wave):
            function.compile((typeof(0), typeof(0)))
        self._thread = threading.Thread(target=self._write_blocks, name="trilane-recorder", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- what happens
    def lose_track(self) -> None:
        """Something happened that is no event: the next event begins with a new baseline."""
        self._is_lost = True

    def ready(self) -> None:
        """Before a plan, with no fill under way: give it a baseline if it needs one."""
        if self._is_lost and self.failure is None:
            baseline = make_baseline(*self._look())
            self._flush()
            self._full.put(baseline)
            self._is_lost = False

    def step(self, run: Stash, *, is_wave: bool = False) -> None:
        """Record the plan that was just made, with its routing unless it is a further wave."""
        if self._is_lost or self.failure is not None:
            return
        write = self._write_wave if is_wave else self._write_step
        if self._due or self._tape is None:
            self._flush()
        if not write(run.address, self._current().address):
            self._flush(int(run.held.step[Step.NUM_ROWS] * run.held.step[Step.TOP_K]))
            write(run.address, self._current().address)

    def hint(self, layer: int, experts: Sequence[int], digest: int) -> None:
        """Record which experts were hinted, and the hash of what was reserved for them (`fills_digest`)."""
        self._add(HINT, layer, experts, digest)

    def background(self, most: int, digest: int) -> None:
        """Record that up to ``most`` fills were asked for, and the hash of what was reserved (layer 0)."""
        self._add(BACKGROUND, 0, (most,), digest)

    def settled(self, landed: Sequence[int]) -> None:
        """Record which of the reserved fills landed."""
        self._add(SETTLED, 0, landed)

    def request(self) -> None:
        """Record that a request begins."""
        self._add(REQUEST, 0, ())

    def _add(self, kind: int, layer: int, ids: Sequence[int], digest: int = 0) -> None:
        if self._is_lost or self.failure is not None:
            return
        rows = 1 if kind in HAS_IDS else 0
        entry = write_event.py_func(self._current().held, kind, layer, rows, len(ids), digest)
        if entry < 0:
            self._flush(len(ids))
            entry = write_event.py_func(self._current().held, kind, layer, rows, len(ids), digest)
        tape = self._current().held
        tape.ids[entry : entry + rows * len(ids)] = ids
        tape.weights[entry : entry + rows * len(ids)] = 0

    # ------------------------------------------------------------------------------------------ writing
    def _current(self) -> Stash:
        if self._tape is None:
            self._tape = self._free.get()
        return self._tape

    def _flush(self, num_entries: int = 0) -> None:
        """Hand the tape to the writer and take an empty one with room for so many entries."""
        full, self._tape, self._due = self._tape, None, False  # an interrupt from here on loses events, never order
        if full is not None:
            self._full.put(full)
        if num_entries > self._current().held.ids.size:
            self._tape = Stash(make_tape(num_entries))

    def _write_blocks(self) -> None:
        """The writer's thread. After a failure it only hands tapes back."""
        while True:
            try:
                item = self._full.get(timeout=FLUSH_S)
            except queue.Empty:
                self._due = True
                continue
            if item is None:
                return
            try:
                if self.failure is None:
                    self._write(item)
            except Exception as error:
                self.failure = f"{self.path}: {error}"
                log.warning("recording ended: %s", self.failure)
            if isinstance(item, Stash):
                item.held.used[:] = 0
                self._free.put(item)

    def _write(self, item: Stash | Baseline) -> None:
        if isinstance(item, Baseline):
            self._appender.append(encode_baseline(item))
        elif item.held.used[0]:
            self._appender.append(encode_events(tape_block(item.held, self.meta)))

    def close(self) -> None:
        """Write what is left and close the file; in a forked child only let go of it."""
        if os.getpid() != self._pid or self._appender.file.closed:
            return
        self._flush()
        self._full.put(None)
        self._thread.join()
        self._appender.close()
