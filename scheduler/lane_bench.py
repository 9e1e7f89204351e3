"""Each lane alone and all of them together, on the same misses; experts in pinned memory against pageable.

On a GPU a row is steps with the same number of hits and misses, drawn anew each time; what differs from row to row is
the lane that misses are sent to, and whether the store is pinned. On the host device nothing is pinned. The file
measures; what a lane does with pageable memory is the device's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trilane.config import Config
from trilane.cuda_step_bench import LayerSteps, StepSample, awake
from trilane.engine import ExpertScheduler
from trilane.expert import LANE_NAMES
from trilane.profile import MachineProfile
from trilane.random_store import StepShape
from trilane.step_bench import measure_steps
from trilane.store import ExpertStore

LANES = ("stream", "zero_copy", "cpu", None)
SPLIT = "all together"


@dataclass(frozen=True)
class LaneRow:
    """Steps whose misses went to one lane.

    Attributes
    ----------
    device : str
        "cuda" or "host".
    memory : str
        "pinned" or "pageable"; "host" where there is no such difference.
    lane : str
        A lane's name, or "all together".
    hits, misses : int
        Experts of a step.
    p50_us, p90_us : float
        NaN where nothing was measured.
    missed_gb_s : float
        Missed bytes over the median step.
    shards : dict
        Mean shards of each lane: a lane that cannot serve a miss leaves it to another.
    """

    device: str
    memory: str
    lane: str
    hits: int
    misses: int
    p50_us: float
    p90_us: float
    missed_gb_s: float
    shards: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON; what was not measured is None."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


def measure_cuda_lanes(
    store: ExpertStore, hits: int, misses: int, *, slots: float = 0.25, repeats: int = 40,
    profile: MachineProfile | None = None,
) -> Iterator[LaneRow]:  # fmt: skip
    """Rows for each lane and all together, the store pinned and then pageable; lanes take turns.

    Parameters
    ----------
    slots : float
        Part of all experts that have slots.
    profile : MachineProfile, optional
        For the split; None: measured once, pinned.
    """
    for memory, limit in (("pinned", None), ("pageable", 0)):
        config = Config(cache={"fraction": slots, "pool": "layer"}, host={"pin_limit": limit}, cpu=awake())
        with ExpertScheduler(store, profile=profile, config=config, device="cuda") as scheduler:
            profile, steps = scheduler.profile, LayerSteps(scheduler)
            lanes = [lane for lane in LANES if memory == "pinned" or lane != "zero_copy"]
            try:
                samples: dict[str | None, list[StepSample | None]] = {lane: [] for lane in lanes}
                for _ in range(repeats + 2):
                    for lane in lanes:
                        steps.force(lane)
                        samples[lane].append(steps.sample(hits, misses))
                for lane in lanes:
                    found = [sample for sample in samples[lane][2:] if sample is not None]
                    yield _row(memory, lane, hits, misses, found, steps.expert_nbytes)
            finally:
                steps.close()


def _row(
    memory: str, lane: str | None, hits: int, misses: int, samples: list[StepSample], expert_nbytes: int
) -> LaneRow:
    us = np.array([sample.us for sample in samples])
    p50, p90 = (float(value) for value in np.quantile(us, [0.5, 0.9])) if len(us) else (float("nan"),) * 2
    shards = {name: float(np.mean([sample.shards[name] for sample in samples])) for name in LANE_NAMES if samples}
    return LaneRow("cuda", memory, lane or SPLIT, hits, misses, p50, p90, 1e-3 * misses * expert_nbytes / p50, shards)


def measure_host_lanes(
    store: ExpertStore, shape: StepShape, misses: int, *, repeats: int = 40, profile: MachineProfile | None = None
) -> Iterator[LaneRow]:
    """The same on the host device, with half of the experts in slots."""
    configs = [Config(cache={"fraction": 0.5}, policy={"force": lane}) for lane in LANES]
    nbytes = misses * int(store.layers[0].layout.shard_nbytes.sum())
    rows = measure_steps(store, shape, configs, misses=[misses], repeats=repeats, profile=profile)
    for lane, row in zip(LANES, rows, strict=True):
        gb_s = 1e-3 * nbytes / row.measured_us
        yield LaneRow("host", "host", lane or SPLIT, row.hits, misses, row.measured_us, row.p90_us, gb_s, row.lanes)


def pinned_gains(rows: list[LaneRow]) -> dict[str, float]:
    """Pageable over pinned medians, by lane, where both were measured."""
    by_lane = {(row.memory, row.lane): row.p50_us for row in rows if row.p50_us == row.p50_us}
    return {
        lane: by_lane["pageable", lane] / us
        for (memory, lane), us in by_lane.items()
        if memory == "pinned" and ("pageable", lane) in by_lane
    }
