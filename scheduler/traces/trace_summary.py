"""What a trace is like before any policy: its size, how often experts come again, and what an LRU cache would hit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trilane.errors import TraceError
from trilane.jit import compiled
from trilane.traces.trace import HINT, REQUEST, STEP, Trace


@dataclass(frozen=True)
class TraceSummary:
    """A trace in figures.

    Attributes
    ----------
    model, source, licence : str
    layers, passes, steps, rows, requests, hints, baselines : int
        ``passes`` over the layers are tokens at batch 1; ``baselines`` count the live stretches.
    num_experts, top_k : tuple of int
        The least and the most of any layer or step.
    repeat_rate : float or None
        Part of a token's experts that the token before had in the same layer; None unless rows are single tokens.
    lru_hit_rates : dict
        Slots of whole experts a layer -> hit rate of an LRU cache that starts cold and is filled on each miss.
    """

    model: str
    source: str
    licence: str
    layers: int
    passes: int
    steps: int
    rows: int
    requests: int
    hints: int
    baselines: int
    num_experts: tuple[int, int]
    top_k: tuple[int, int]
    repeat_rate: float | None
    lru_hit_rates: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)


def summarise(trace: Trace) -> TraceSummary:
    """The figures of a trace."""
    meta, steps = trace.meta, trace.kind == STEP
    top_k = trace.top_k[steps]
    return TraceSummary(
        model=meta.model,
        source=meta.source,
        licence=meta.licence,
        layers=meta.num_layers,
        passes=int(trace.passes[-1]) + 1 if steps.any() else 0,
        steps=int(steps.sum()),
        rows=int(trace.rows[steps].sum()),
        requests=int((trace.kind == REQUEST).sum()),
        hints=int((trace.kind == HINT).sum()),
        baselines=len(trace.baselines),
        num_experts=(min(meta.num_experts), max(meta.num_experts)),
        top_k=(int(top_k.min(initial=1 << 30)), int(top_k.max())) if len(top_k) else (0, 0),
        repeat_rate=_repeat_rate(trace),
        lru_hit_rates=_by_slots(reuse_distances(trace), max(meta.num_experts)),
    )


def _repeat_rate(trace: Trace) -> float | None:
    try:
        ids, _ = trace.tokens()
    except TraceError:
        return None
    if len(ids) < 2:
        return None
    again = np.zeros(ids.shape, bool)[1:]
    for rank in range(ids.shape[2]):
        again |= ids[1:] == ids[:-1, :, rank, None]
    return float(again.mean())


def reuse_distances(trace: Trace) -> np.ndarray:
    """How many other experts of its layer were used since an expert's last use: int64 (most experts + 1,) counts.

    The last entry counts first uses. An LRU cache of ``s`` slots a layer hits exactly the distances below ``s``,
    where ``s`` is at least what one step routes to.
    """
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(trace.meta.num_experts)])
    counts = np.zeros(max(trace.meta.num_experts) + 1, np.int64)
    stamp = np.full(int(first[-1]), -1, np.int64)
    kind, layer, ids = (np.ascontiguousarray(a) for a in (trace.kind, trace.layer, trace.ids.astype(np.uint16)))
    _count_distances(kind, layer, trace.start, ids, trace.meta.no_expert, first, stamp, counts)
    return counts


@compiled
def _count_distances(kind, layers, start, ids, no_expert, first, stamp, counts):
    """All of a step are looked up before any is used; those used together rank by their number, as in the planner."""
    for event in range(kind.size):
        if kind[event] != STEP:
            continue
        base, stop = first[layers[event]], first[layers[event] + 1]
        for at in range(start[event], start[event + 1]):
            id_ = int(ids[at])
            if id_ != no_expert and stamp[base + id_] != event:
                mine = stamp[base + id_]
                distance = 0
                for other in range(base, stop):
                    later = stamp[other] > mine or (stamp[other] == mine and other > base + id_)
                    distance += later and stamp[other] != event
                counts[distance if mine >= 0 else counts.size - 1] += 1
        for at in range(start[event], start[event + 1]):
            if ids[at] != no_expert:
                stamp[base + ids[at]] = event


def _by_slots(counts: np.ndarray, num_experts: int) -> dict[int, float]:
    """Hit rates at an eighth, a quarter, three eighths, a half and three quarters of a layer's experts."""
    total = int(counts.sum())
    slots = sorted({max(1, num_experts * part // 8) for part in (1, 2, 3, 4, 6)}) if total else []
    return {s: float(counts[:s].sum() / total) for s in slots}
