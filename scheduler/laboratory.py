"""What a policy is judged by in replay: fixed rules to beat, and a reference that knows the future.

All take the same trace, machine, slots and modelled times as the policy. `compare_cell` puts them beside it and says
how much of the way from FreeToken's published rule to the clairvoyant reference the policy goes. Nothing here decides
anything in a live run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.config import Config
from trilane.expert import Geometry, first_shard_of
from trilane.jit import compiled
from trilane.machines import ReplayMachine
from trilane.plan import Options, make_options
from trilane.policy import empty_state, policy_options
from trilane.replay import Replay, ReplayResult
from trilane.residency import NO_PRICE, land_fill, reserve_slot, take_slots
from trilane.state import State, make_state
from trilane.traces.trace import STEP, Trace

FAR = 2.0**40  # a score: this less the number of the step that uses an expert next


@dataclass(frozen=True)
class Cell:
    """A policy beside the rules and the reference, in mean us of a pass's MoE layers (no gaps between layers).

    Attributes
    ----------
    machine : str
    expert_nbytes, num_shards : int
    slots : float
        Slots as a part of all experts.
    policy_us, rule_us, hot_list_us, clairvoyant_us : float
        The policy; FreeToken's rule; a static hot list; Belady's residency with the best split and fills.
    single_us : mapping
        The best of several caches for each lane that serves all misses alone.
    hit_rate, rule_hit_rate, clairvoyant_hit_rate : float
    """

    machine: str
    expert_nbytes: int
    num_shards: int
    slots: float
    policy_us: float
    rule_us: float
    hot_list_us: float
    clairvoyant_us: float
    single_us: dict[str, float]
    hit_rate: float
    rule_hit_rate: float
    clairvoyant_hit_rate: float

    @property
    def best_single_us(self) -> float:
        return min(self.single_us.values())

    @property
    def reference_us(self) -> float:
        """The better of clairvoyance and the best single lane."""
        return min(self.clairvoyant_us, self.best_single_us)

    @property
    def gap_closed(self) -> float:
        """How far the policy goes from the rule (0) to the reference (1)."""
        return (self.rule_us - self.policy_us) / (self.rule_us - self.reference_us)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        derived = {"best_single_us": self.best_single_us, "reference_us": self.reference_us}
        return {**asdict(self), **derived, "gap_closed": self.gap_closed}


def next_uses(trace: Trace) -> NDArray[np.float64]:
    """For each id of the trace a score that is the higher the sooner its expert is used again; 0: never."""
    start, found = trace.start, np.zeros(len(trace.ids))
    steps = np.flatnonzero(trace.kind == STEP)
    coming = [np.zeros(trace.meta.no_expert + 1) for _ in trace.meta.num_experts]
    for number in range(len(steps) - 1, -1, -1):
        event = steps[number]
        ids = trace.ids[start[event] : start[event + 1]]
        of_layer = coming[trace.layer[event]]
        found[start[event] : start[event + 1]] = of_layer[ids]
        of_layer[ids] = FAR - number
    return found


def run_clairvoyant(replay: Replay, slots: int, *, next_use: NDArray[np.float64] | None = None) -> ReplayResult:
    """Belady's residency (what is used last goes first) with the best split, and fills in idle link time."""
    state = make_state(replay.geometry, slots, eviction="given")
    options = make_options(admit="score", background=True)
    return _done(
        replay.run_state(
            "clairvoyant", state, options, next_use=next_uses(replay.trace) if next_use is None else next_use
        )
    )


def run_rule(replay: Replay, slots: int) -> ReplayResult:
    """FreeToken's published rule (`split.ratio_split`) with an LRU cache; meant for experts of one shard."""
    options = make_options(["stream", "cpu"], split="ratio", admit="always")
    return _done(replay.run_state("ratio rule", make_state(replay.geometry, slots), options))


def run_hot_list(replay: Replay, slots: int) -> ReplayResult:
    """The experts that the whole trace uses most, resident from the start for good; misses are split at best."""
    state = make_state(replay.geometry, slots, eviction="given")
    ranked = most_used(replay.trace, replay.geometry)
    state.score[ranked] = np.arange(len(ranked), 0, -1, dtype=np.float64)  # none is worth another's slot
    make_resident(state, replay.geometry, ranked)
    options = make_options(admit="score", fills=False)
    return _done(replay.run_state("static hot list", state, options))


def most_used(trace: Trace, geometry: Geometry) -> NDArray[np.int64]:
    """All expert keys, int64 (experts,), in the order of how often a trace uses them."""
    per_event = np.diff(trace.start)
    ids = trace.ids.astype(np.int64)
    known = np.repeat(trace.kind == STEP, per_event) & (ids != trace.meta.no_expert)
    keys = geometry.first_expert[np.repeat(trace.layer, per_event)[known].astype(np.int64)] + ids[known]
    counts = np.bincount(keys, minlength=int(geometry.first_expert[-1]))
    return np.argsort(-counts, kind="stable")


def make_resident(state: State, geometry: Geometry, ranked: NDArray[np.int64]) -> None:
    """Fill the free slots of a state with experts, in the order of ``ranked``."""
    _fill_slots(state, geometry, ranked, np.zeros(1, np.int32), np.zeros(1, np.int64))


@compiled
def _fill_slots(state, geometry, ranked, slots, victims):
    """The same with scratch for a slot and its victim, of which there is none."""
    for expert in ranked:
        layer = geometry.layer_of[expert]
        pool = state.pool_of[layer]
        first = first_shard_of(geometry, expert)
        for shard in range(first, first + geometry.num_shards[layer]):
            if state.num_free[pool] == 0:
                break
            take_slots(state, geometry, pool, NO_PRICE, 1, slots, victims, 0)
            reserve_slot(state, pool, slots[0], shard)
            land_fill(state, geometry, slots[0], shard)


def run_references(whole: Replay, split: Replay, slots: int) -> list[ReplayResult]:
    """FreeToken's rule on whole experts, the static hot list and clairvoyance, for ``slots`` of ``split``'s shards."""
    shards = int(split.geometry.num_shards[0])
    rule = run_rule(whole, slots // shards)
    counts = {name: getattr(rule, name) * shards for name in ("num_slots", "fills", "evictions")}
    return [replace(rule, **counts), run_hot_list(split, slots), run_clairvoyant(split, slots)]


def run_single_lanes(whole: Replay, split: Replay, part: float) -> dict[str, float]:
    """Mean us in MoE layers of each lane alone: the best of all evictions, whole experts and shards."""
    found: dict[str, float] = {}
    for replay in (whole, split):
        slots = int(part * int(replay.geometry.first_shard[-1]))
        for lane in ("stream", "zero_copy", "cpu"):
            for eviction in ("lru", "decayed_frequency", "predicted") if lane != "cpu" else ("lru",):
                state = make_state(replay.geometry, slots, eviction=eviction)
                result = replay.run_state(lane, state, make_options(force=lane))
                if result is not None:
                    found[lane] = min(found.get(lane, np.inf), result.moe_us)
    return found


def compare_cell(
    trace: Trace,
    machine: ReplayMachine,
    expert_nbytes: int,
    num_shards: int,
    part: float,
    *,
    config: Config | None = None,
    next_use: NDArray[np.float64] | None = None,
) -> Cell:
    """One cell of the table: a machine, a size of experts, and slots for a ``part`` of all of them.

    Parameters
    ----------
    config : Config, optional
        The policy; the default one if not given.
    next_use : float64, optional
        `next_uses` of the trace, where several cells share it.
    """
    chosen = Config() if config is None else config
    whole = Replay(trace, machine, expert_nbytes=expert_nbytes, num_shards=1)
    split = Replay(trace, machine, expert_nbytes=expert_nbytes, num_shards=num_shards)
    of_whole, of_split = (int(part * int(one.geometry.first_shard[-1])) for one in (whole, split))
    options: Options = policy_options(chosen)
    ours = _done(split.run_state("policy", empty_state(chosen, split.geometry, of_split), options))
    rule, known = run_rule(whole, of_whole), run_clairvoyant(split, of_split, next_use=next_use)
    hot = run_hot_list(split, of_split)
    return Cell(
        machine.name,
        expert_nbytes,
        num_shards,
        part,
        ours.moe_us,
        rule.moe_us,
        hot.moe_us,
        known.moe_us,
        run_single_lanes(whole, split, part),
        ours.hit_rate or 0.0,
        rule.hit_rate or 0.0,
        known.hit_rate or 0.0,
    )


def _done(result: ReplayResult | None) -> ReplayResult:
    assert result is not None, "no step waits for a slot where the CPU may serve it"
    return result
