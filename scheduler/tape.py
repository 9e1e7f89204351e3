"""Events of a run as compiled code writes them down: on a tape, arrays of fixed size that become blocks of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trilane.cost import Rates
from trilane.jit import compiled
from trilane.records import record
from trilane.state import State
from trilane.traces.trace import Baseline, TraceMeta
from trilane.traces.trace_file import COLUMNS, EventBlock

TAPE_EVENTS = 1 << 13
TAPE_ENTRIES = 1 << 16
NO_EXPERT = 0xFFFF  # 0xFF once its low byte alone is kept


@record
class Tape(NamedTuple):
    """Events before they are written, as in `trace.Trace`; ``used`` counts events and entries."""

    used: np.ndarray
    kind: np.ndarray
    layer: np.ndarray
    rows: np.ndarray
    top_k: np.ndarray
    digest: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def make_tape(num_entries: int | None = None, num_events: int | None = None) -> Tape:
    """An empty tape; by default of the usual size."""
    num_entries, num_events = num_entries or TAPE_ENTRIES, num_events or TAPE_EVENTS
    columns = {name: np.zeros(num_events, kind) for name, kind in COLUMNS.items()}
    ids, weights = np.zeros(num_entries, np.uint16), np.zeros(num_entries, np.float32)
    return Tape(used=np.zeros(2, np.int64), **columns, ids=ids, weights=weights)


@compiled(counted=False)
def write_event(tape, kind, layer, rows, top_k, digest):
    """Add an event; where its entries go, or -1 if it does not fit."""
    event, entry = tape.used[0], tape.used[1]
    if event == tape.kind.size or entry + rows * top_k > tape.ids.size:
        return -1
    tape.kind[event], tape.layer[event] = kind, layer
    tape.rows[event], tape.top_k[event], tape.digest[event] = rows, top_k, digest
    tape.used[0], tape.used[1] = event + 1, entry + rows * top_k
    return entry


def copy_tape(tape: Tape) -> Tape:
    """What is on a tape, in arrays of its own."""
    events, entries = (int(n) for n in tape.used)
    columns = {name: getattr(tape, name)[:events].copy() for name in COLUMNS}
    return Tape(used=tape.used.copy(), **columns, ids=tape.ids[:entries].copy(), weights=tape.weights[:entries].copy())


def make_baseline(settings: dict[str, Any], rates: Sequence[Rates], state: State) -> Baseline:
    """All that the plans which follow depend on, in copies; layers that share their rates share them here."""
    kept: dict[int, dict[str, Any]] = {}
    of_layers = tuple(kept.setdefault(id(one), _plain_copy(one)) for one in rates)
    return Baseline(0, settings, of_layers, _plain_copy(state))


def _plain_copy(values: Any) -> dict[str, Any]:
    """A NamedTuple as a dict of its own copies."""
    return {name: v.copy() if isinstance(v, np.ndarray) else v for name, v in values._asdict().items()}


def tape_block(tape: Tape, meta: TraceMeta) -> EventBlock:
    """A tape's content as it goes to the file (views: encode it before the tape is used again)."""
    events, entries = (int(n) for n in tape.used)
    columns = {name: getattr(tape, name)[:events] for name in COLUMNS}
    with np.errstate(over="ignore"):
        weights = tape.weights[:entries].astype(np.float16)
    return EventBlock(columns, tape.ids[:entries].astype(meta.id_type), weights)
