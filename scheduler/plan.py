"""A plan as data: the options that bound it, the arrays that it is written into, and its form for people.

`planner` fills `Work` without allocating; an engine reads it from there. `freeze_plan` copies it into a frozen
`Plan` for `explain`, for logs and for comparing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import NUM_TERMS, STEP_US, TERM_NAMES, Loads, Rates, step_us
from trilane.expert import CPU, HIT, LANE_NAMES, STREAM, ZERO_COPY, ExpertPlan, Geometry, Plan, decision
from trilane.records import record

EXHAUSTIVE_SHARDS = 8  # so many missing shards are split by trying all subsets

# Places in Work.counts; the first four are shards by lane.
NUM_UNPLACED = 4
NUM_COPIES = 5
NUM_FILLS = 6
NUM_EVICTIONS = 7
NUM_MISSING = 8
NUM_RUNS = 9
ADMITS = ("always", "score")
SPLITS = ("makespan", "ratio")


@record
class Options(NamedTuple):
    """What a plan may do; made by `make_options`.

    Attributes
    ----------
    lanes : int
        Bit ``1 << lane`` for each lane that may serve a miss; a single bit forces it.
    admit_by_score : bool
        Fill a slot only if the expert's score is at least the victim's.
    fills : bool
        Whether what is read in place may be kept in a slot.
    slack_runs : float
        How many copies' fixed cost a step may lose to fetch the experts with most expected reuse.
    max_fills : int
        Most shards that one `plan_fills` or `plan_background` reserves slots for.
    by_ratio : bool
        Split by the rates' ratio alone, as a fixed rule does (`split.ratio_split`); for comparisons.
    background : bool
        Whether idle link time fills slots with what is to come and what was missed of late.
    counts_copies : bool
        Whether the split expects as many copies as plans needed of late (`State.scatter`).
    coming_from, coming_layers : int
        How many layers after a step the first is that background fills begun after it can serve, and for how many
        layers they are looked for.
    least_rate : int
        How surely, in 256ths, an expert must be foretold to be filled in the background; 0: however it is, and what was
        missed of late is filled, too.
    """

    lanes: int
    admit_by_score: bool
    fills: bool
    slack_runs: float
    max_fills: int
    by_ratio: bool
    background: bool
    counts_copies: bool
    coming_from: int
    coming_layers: int
    least_rate: int


def make_options(
    lanes: Sequence[str] = LANE_NAMES[1:],
    *,
    force: str | None = None,
    admit: str = "always",
    fills: bool = True,
    slack_runs: float = 1.0,
    max_fills: int = 1 << 30,
    split: str = "makespan",
    background: bool = False,
    counts_copies: bool = True,
    coming_from: int = 1,
    coming_layers: int = 1,
    least_rate: int = 0,
) -> Options:
    """Options from names: ``force`` sends every miss to one lane, ``admit`` is "always" or "score".

    ``split`` is "makespan", the least step, or "ratio", a fixed rule.
    """
    chosen = [force] if force is not None else list(lanes)
    wrong = [name for name in chosen if name not in LANE_NAMES[1:]]
    if wrong or not chosen:
        raise ValueError(f"lanes for misses are {chosen}: use one or more of {', '.join(LANE_NAMES[1:])}")
    if admit not in ADMITS:
        raise ValueError(f"admit is {admit!r}: use one of {', '.join(ADMITS)}")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}: use one of {', '.join(SPLITS)}")
    mask = sum({1 << LANE_NAMES.index(name) for name in chosen})
    return Options(
        lanes=mask,
        admit_by_score=admit == "score",
        fills=bool(fills),
        slack_runs=float(slack_runs),
        max_fills=int(max_fills),
        by_ratio=split == "ratio",
        background=bool(background),
        counts_copies=bool(counts_copies),
        coming_from=int(coming_from),
        coming_layers=int(coming_layers),
        least_rate=int(least_rate),
    )


@decision(inline=True)
def allows(options, lane):
    """Whether a miss may take the lane."""
    return (options.lanes >> lane) & 1 == 1


@record
class Work(NamedTuple):
    """Arrays of one plan, allocated once. Index ``i * num_shards + j`` is shard ``j`` of the ``i``-th expert.

    Attributes
    ----------
    lane : int8
        HIT, STREAM, ZERO_COPY, CPU; SKIP done in an earlier wave; UNPLACED for the next one.
    slot : int32
        HIT where it is; STREAM and ZERO_COPY where it goes (-1 read in place and not kept); else -1.
    victim : int64
        Shard key that lost the slot, or -1.
    run : int32
        At the first shard of each copy, how many neighbouring shards it moves to neighbouring slots; else 0.
    counts : int64 (16,)
        Shards by lane, then NUM_UNPLACED, NUM_COPIES, NUM_FILLS, NUM_EVICTIONS, NUM_MISSING, NUM_RUNS (of
        neighbouring shards streamed; no fewer copies than these).
    lane_nbytes, lane_row_nbytes : float64 (4,)
        Bytes, and rows x bytes, by lane.
    predicted_us : float64 (8,)
        By `cost.TERM_NAMES`.
    fill_shard, fill_slot, fill_victim : int64, int32, int64
        What the last `plan_fills` reserved.

    The others are scratch. What hits hold: num_hits; hits (bytes, rows x bytes). By expert: reuse, which orders them;
    worth, what admission weighs; missing shards; how many of these may be streamed, with their bytes and runs (open,
    open_nbytes, open_runs); order. By entry of the link order (`link_order`): who, the how-manieth expert; mark, which
    of its shards; bound, where it starts in the order, and where the last one ends, with sums of what lies before
    (nbytes, row_nbytes, runs). Such sums by shard, if these are few; bytes of the first shards of an expert (sizes);
    how many experts miss so many shards (lengths); by subset. `State.scatter` as the split saw it.
    """

    lane: NDArray[np.int8]
    slot: NDArray[np.int32]
    victim: NDArray[np.int64]
    run: NDArray[np.int32]
    counts: NDArray[np.int64]
    lane_nbytes: NDArray[np.float64]
    lane_row_nbytes: NDArray[np.float64]
    predicted_us: NDArray[np.float64]
    fill_shard: NDArray[np.int64]
    fill_slot: NDArray[np.int32]
    fill_victim: NDArray[np.int64]
    num_hits: NDArray[np.int64]
    hits: NDArray[np.float64]
    reuse: NDArray[np.float64]
    missing: NDArray[np.int32]
    open: NDArray[np.int32]
    open_nbytes: NDArray[np.float64]
    open_runs: NDArray[np.float64]
    scatter: NDArray[np.float64]
    worth: NDArray[np.float64]
    order: NDArray[np.int32]
    who: NDArray[np.int32]
    mark: NDArray[np.int8]
    bound: NDArray[np.int32]
    nbytes: NDArray[np.float64]
    row_nbytes: NDArray[np.float64]
    runs: NDArray[np.float64]
    few: NDArray[np.float64]
    sizes: NDArray[np.float64]
    lengths: NDArray[np.int32]
    subset: NDArray[np.float64]


def make_work(geometry: Geometry, max_experts: int | None = None) -> Work:
    """Work for plans of up to ``max_experts`` experts a layer (all of the largest layer by default)."""
    most = int(np.diff(geometry.first_expert).max()) if max_experts is None else max_experts
    size = most * geometry.shard_nbytes.shape[1]
    return Work(
        lane=np.zeros(size, np.int8),
        slot=np.zeros(size, np.int32),
        victim=np.zeros(size, np.int64),
        run=np.zeros(size, np.int32),
        counts=np.zeros(16, np.int64),
        lane_nbytes=np.zeros(4, np.float64),
        lane_row_nbytes=np.zeros(4, np.float64),
        predicted_us=np.zeros(NUM_TERMS, np.float64),
        fill_shard=np.zeros(size, np.int64),
        fill_slot=np.zeros(size, np.int32),
        fill_victim=np.zeros(size, np.int64),
        num_hits=np.zeros(1, np.int64),
        hits=np.zeros(2, np.float64),
        reuse=np.zeros(most, np.float64),
        scatter=np.zeros(1, np.float64),
        worth=np.zeros(most, np.float64),
        missing=np.zeros(most, np.int32),
        open=np.zeros(most, np.int32),
        open_nbytes=np.zeros(most, np.float64),
        open_runs=np.zeros(most, np.float64),
        order=np.zeros(most + 1, np.int32),
        who=np.zeros(2 * most, np.int32),
        mark=np.zeros(2 * most, np.int8),
        bound=np.zeros(2 * most + 1, np.int32),
        nbytes=np.zeros(2 * most + 1, np.float64),
        row_nbytes=np.zeros(2 * most + 1, np.float64),
        runs=np.zeros(2 * most + 1, np.float64),
        few=np.zeros((3, EXHAUSTIVE_SHARDS + 1), np.float64),
        sizes=np.zeros(geometry.shard_nbytes.shape[1] + 1, np.float64),
        lengths=np.zeros(geometry.shard_nbytes.shape[1] + 1, np.int32),
        subset=np.zeros((4, 1 << EXHAUSTIVE_SHARDS), np.float64),
    )


def freeze_plan(
    geometry: Geometry,
    rates: Rates,
    layer: int,
    experts: NDArray[np.int32],
    rows: NDArray[np.int32],
    num_experts: int,
    clock: int,
    work: Work,
) -> Plan:
    """The plan in ``work`` as frozen data, with the cost of each single lane beside its own."""
    num_shards = int(geometry.num_shards[layer])
    frozen = []
    for i in range(num_experts):
        part = slice(i * num_shards, (i + 1) * num_shards)
        frozen.append(
            ExpertPlan(
                int(experts[i]),
                int(rows[i]),
                tuple(work.lane[part].tolist()),
                tuple(work.slot[part].tolist()),
                tuple(work.victim[part].tolist()),
            )
        )
    terms = tuple(zip(TERM_NAMES, work.predicted_us.tolist(), strict=True))
    return Plan(int(layer), int(clock), tuple(frozen), terms, _why(geometry, rates, layer, rows, num_experts, work))


def _why(geometry: Geometry, rates: Rates, layer: int, rows: NDArray[np.int32], num_experts: int, work: Work) -> str:
    lanes = [f"{work.counts[lane]} {LANE_NAMES[lane]}" for lane in range(4) if work.counts[lane]]
    text = f"{', '.join(lanes) or 'nothing'} in {work.predicted_us[STEP_US]:.1f} us"
    if not work.counts[STREAM : CPU + 1].any():
        return text
    alone = single_lane_us(geometry, rates, layer, rows, num_experts, work)
    return text + "; one lane alone: " + ", ".join(f"{name} {us:.1f}" for name, us in alone.items())


def single_lane_us(
    geometry: Geometry, rates: Rates, layer: int, rows: NDArray[np.int32], num_experts: int, work: Work
) -> dict[str, float]:
    """Predicted us of the step in ``work`` if one lane served all its misses, by lane."""
    lane = work.lane[: num_experts * geometry.num_shards[layer]].reshape(num_experts, -1)
    sizes = np.broadcast_to(geometry.shard_nbytes[layer, : lane.shape[1]], lane.shape)
    row_sizes = sizes * np.asarray(rows[:num_experts], np.int64)[:, None]
    hit, miss = lane == HIT, lane > HIT
    runs = float((miss & ~np.pad(miss, ((0, 0), (1, 0)))[:, :-1]).sum())
    hits = float(sizes[hit].sum()), float(row_sizes[hit].sum())
    load = float(sizes[miss].sum()), float(row_sizes[miss].sum())
    count, hit_load = int(miss.sum()), Loads(*hits, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0, 0.0)
    alone = {
        STREAM: hit_load._replace(stream_runs=runs, stream_nbytes=load[0], stream_row_nbytes=load[1]),
        ZERO_COPY: hit_load._replace(zero_copy_shards=count, zero_copy_nbytes=load[0], zero_copy_row_nbytes=load[1]),
        CPU: hit_load._replace(cpu_shards=count, cpu_nbytes=load[0], cpu_row_nbytes=load[1]),
    }
    return {LANE_NAMES[name]: float(step_us(rates, loads)) for name, loads in alone.items()}
