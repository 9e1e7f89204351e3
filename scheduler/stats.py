"""What happened: counters of every lane since the start or since a request began, as a frozen snapshot.

The engine adds to one float64 array, :class:`Total` numbers its places, and a snapshot or the difference of
two becomes a :class:`Stats`. Nothing here measures or decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from trilane.expert import CPU, HIT, LANE_NAMES, STREAM, ZERO_COPY

NUM_LANES = 4


class Total(IntEnum):
    """Places in the array of totals; a lane's own places start at ``LANES + 4 * lane``."""

    STEPS = 0
    ROWS = 1
    STEP_US = 2
    PREDICTED_STEP_US = 3
    HITS_US = 4
    FETCH_US = 5
    CPU_US = 6
    PLAN_US = 7
    FILLS = 8
    BACKGROUND_FILLS = 9
    EVICTIONS = 10
    MISS_STEPS = 11
    LANES = 12
    SIZE = LANES + 4 * NUM_LANES


class LaneTotal(IntEnum):
    """A lane's places, after its start."""

    EXPERTS = 0
    SHARDS = 1
    NBYTES = 2
    PREDICTED_US = 3


@dataclass(frozen=True)
class LaneStats:
    """One lane: experts with at least one shard there, shards, weight bytes read, us predicted and observed."""

    experts: int
    shards: int
    nbytes: int
    predicted_us: float
    observed_us: float


@dataclass(frozen=True)
class Stats:
    """A snapshot of a scheduler's work, since it started or for one request.

    Attributes
    ----------
    steps, rows : int
        Layer-steps, and their activation rows in all.
    lanes : mapping of LaneStats
        ``hit``, ``stream``, ``zero_copy``, ``cpu``. Stream and zero-copy share one link, so each is shown the
        link's observed time in proportion to its predicted share.
    hits_us, fetch_us, cpu_us, step_us, plan_us : float
        Observed us in all: device work on resident shards, link, CPU lane, whole steps, planning.
    predicted_step_us : float
    hit_rate : float or None
        Shards found in slots over shards routed to; None before the first.
    fills, background_fills, evictions : int
    bytes_pinned, bytes_pageable : int
        Where the store's bytes are. Only a GPU needs them pinned; on the host device all are pageable.
    inactive : mapping
        Lane or feature that this device has -> why it is not used.
    played : mapping
        Lane -> the rate in GB/s that it plays instead of its own.
    warm_shards : int
        Shards that lay in slots before the first step, taken over from the run before.
    """

    steps: int
    rows: int
    lanes: Mapping[str, LaneStats]
    hits_us: float
    fetch_us: float
    cpu_us: float
    step_us: float
    plan_us: float
    predicted_step_us: float
    hit_rate: float | None
    fills: int
    background_fills: int
    evictions: int
    bytes_pinned: int
    bytes_pageable: int
    inactive: Mapping[str, str]
    played: Mapping[str, float]
    warm_shards: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """A few lines for people; the figures are those of the attributes."""
        rate = "-" if self.hit_rate is None else f"{self.hit_rate:.1%}"
        lines = [
            f"{self.steps:,} steps, {self.rows:,} rows, hit rate {rate}; {self.fills:,} fills, "
            f"{self.background_fills:,} in the background, {self.evictions:,} evictions",
            f"{self.step_us:,.1f} us in steps, {self.predicted_step_us:,.1f} predicted; {self.plan_us:,.1f} planning",
            f"{'lane':9s} {'experts':>11s} {'shards':>11s} {'MB':>13s} {'us predicted':>15s} {'us observed':>15s}",
        ]
        for name, lane in self.lanes.items():
            counts = f"{lane.experts:11,} {lane.shards:11,} {lane.nbytes / 1e6:13,.2f}"
            lines.append(f"{name:9s} {counts} {lane.predicted_us:15,.1f} {lane.observed_us:15,.1f}")
        lines += [f"not used: {name}: {reason}" for name, reason in self.inactive.items()]
        lines += [f"played: {name} at {gb_s:g} GB/s" for name, gb_s in self.played.items()]
        if self.warm_shards:
            lines.append(f"warm start: {self.warm_shards:,} shards in slots before the first step")
        return "\n".join(lines)


def make_stats(
    totals: np.ndarray,
    *,
    bytes_pinned: int,
    bytes_pageable: int,
    inactive: Mapping[str, str],
    played: Mapping[str, float],
    warm_shards: int = 0,
) -> Stats:
    """Totals (float64 of ``Total.SIZE``) as a :class:`Stats`."""
    by_lane = totals[Total.LANES : Total.SIZE].reshape(NUM_LANES, -1)
    observed = _observed_us(totals, by_lane)
    lanes = {
        name: LaneStats(
            experts=int(by_lane[lane, LaneTotal.EXPERTS]),
            shards=int(by_lane[lane, LaneTotal.SHARDS]),
            nbytes=int(by_lane[lane, LaneTotal.NBYTES]),
            predicted_us=float(by_lane[lane, LaneTotal.PREDICTED_US]),
            observed_us=observed[lane],
        )
        for lane, name in enumerate(LANE_NAMES)
    }
    routed = by_lane[:, LaneTotal.SHARDS].sum()
    return Stats(
        steps=int(totals[Total.STEPS]),
        rows=int(totals[Total.ROWS]),
        lanes=lanes,
        hits_us=float(totals[Total.HITS_US]),
        fetch_us=float(totals[Total.FETCH_US]),
        cpu_us=float(totals[Total.CPU_US]),
        step_us=float(totals[Total.STEP_US]),
        plan_us=float(totals[Total.PLAN_US]),
        predicted_step_us=float(totals[Total.PREDICTED_STEP_US]),
        hit_rate=float(by_lane[HIT, LaneTotal.SHARDS] / routed) if routed else None,
        fills=int(totals[Total.FILLS]),
        background_fills=int(totals[Total.BACKGROUND_FILLS]),
        evictions=int(totals[Total.EVICTIONS]),
        bytes_pinned=bytes_pinned,
        bytes_pageable=bytes_pageable,
        inactive=dict(inactive),
        played=dict(played),
        warm_shards=warm_shards,
    )


def _observed_us(totals: np.ndarray, by_lane: np.ndarray) -> dict[int, float]:
    stream, zero_copy = (by_lane[lane, LaneTotal.PREDICTED_US] for lane in (STREAM, ZERO_COPY))
    share = float(stream / (stream + zero_copy)) if stream + zero_copy > 0 else 0.0
    fetch = float(totals[Total.FETCH_US])
    return {
        HIT: float(totals[Total.HITS_US]),
        STREAM: fetch * share,
        ZERO_COPY: fetch * (1 - share) if stream + zero_copy > 0 else 0.0,
        CPU: float(totals[Total.CPU_US]),
    }
