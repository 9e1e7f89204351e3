"""What speed to expect of a model on a machine: routing through the live decision code, in modelled time, by slots.

A trace of the model says how it routes. Where there is none, routing is *assumed*, and every figure that rests on it
carries that word: ``uniform`` draws experts by chance, which no cache can foresee; ``skewed`` is made to repeat as
gpt-oss-20b's routing does. Slots begin with the experts that the first half of a trace uses most; the policy then runs
through all of it, and the second half is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trilane.config import Config
from trilane.errors import TraceError
from trilane.expert import LANE_NAMES
from trilane.laboratory import make_resident, most_used
from trilane.machines import ReplayMachine
from trilane.model_sizes import ModelSizes
from trilane.policy import empty_state, policy_options
from trilane.replay import Replay, ReplayResult
from trilane.traces.trace import STEP, Trace, TraceMeta, trace_of_tokens
from trilane.traces.trace_import import bundled_trace

TOKENS = 256  # of an assumed trace; the second half of them is counted
MOST_TOKENS = 2048  # of a recorded one, so that a plan is there in seconds
# Spread of experts' standing preference, and of what lasts from token to token, beside chance of spread 1. With these,
# 32 experts of which 4 are used repeat by 45 %, and LRU caches of 8, 12, 16 and 24 hit 66, 80, 90 and 98 % (of 4,000
# tokens); of 160 recorded conversations of gpt-oss-20b it is 45, and 66, 81, 90 and 98 %.
PREFERENCE, LASTING = 1.05, 0.3


@dataclass(frozen=True)
class Routing:
    """How experts are chosen: a trace, its name, whether it is assumed, and what it is in words."""

    name: str
    trace: Trace
    is_assumed: bool
    about: str


@dataclass(frozen=True)
class Speed:
    """A token's routed experts with some slots and some routing, in modelled time.

    Attributes
    ----------
    routing : str
    is_assumed : bool
        The routing is, and so are hit rate and times.
    num_slots : int
        Of one shard each.
    hit_rate : float
        Shards found in slots over shards routed to.
    moe_us : float
        Mean us of a token's MoE layers.
    lane_nbytes : dict
        Mean bytes of a token by lane.
    """

    routing: str
    is_assumed: bool
    num_slots: int
    hit_rate: float
    moe_us: float
    lane_nbytes: dict[str, float]

    @property
    def tokens_a_second(self) -> float:
        """At most: the routed experts alone."""
        return 1e6 / self.moe_us

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self) | {"tokens_a_second_at_most": self.tokens_a_second}


def routings_for(sizes: ModelSizes, recorded: Trace | None = None) -> list[Routing]:
    """The routings to judge a model by: a trace of it, else the bundled one if it is of this model, and assumed ones.

    Raises
    ------
    TraceError
        ``recorded`` is of another model, or has no two tokens.
    """
    if recorded is not None:
        return [recorded_routing(sizes, recorded)]
    if sizes.experts_per_token is None:
        return []
    assumed = [
        Routing("uniform", _assumed_trace(sizes, 0.0, 0.0), True, "experts drawn by chance: the worst for any cache"),
        Routing(
            "skewed", _assumed_trace(sizes, PREFERENCE, LASTING), True, "experts repeat as in gpt-oss-20b's routing"
        ),
    ]
    bundled = bundled_trace()
    shape = (bundled.meta.num_experts, int(bundled.top_k.max()))
    is_it = sizes.architecture.replace("-", "_") == "gpt_oss" and shape == (sizes.num_experts, sizes.experts_per_token)
    return [recorded_routing(sizes, bundled), *assumed] if is_it else assumed


def recorded_routing(sizes: ModelSizes, trace: Trace) -> Routing:
    """The first `MOST_TOKENS` of a trace, with the model's own bytes; steps of several rows (prompts) are left out."""
    theirs, ours, name = trace.meta.num_experts, sizes.num_experts, trace.meta.model or "a model without name"
    if theirs != ours:
        raise TraceError(
            f"trace of {name}: {_shape_text(theirs)}, but {sizes.name} has "
            f"{_shape_text(ours)}; give a trace of this model, or none"
        )
    single = (trace.kind == STEP) & (trace.rows == 1)
    used = set(np.unique(trace.top_k[single]).tolist())
    if sizes.experts_per_token is not None and used and used != {sizes.experts_per_token}:
        raise TraceError(
            f"trace of {name}: {sorted(used)} experts a token, but {sizes.name} "
            f"uses {sizes.experts_per_token}; give a trace of this model, or none"
        )
    chosen = _events(trace, single, _meta(sizes, trace.meta.model or sizes.name))
    num = int(chosen.passes[-1]) + 1 if chosen.num_events else 0
    if num < 2:
        raise TraceError(
            f"trace of {name}: {num} tokens of one row each, but 2 are needed, and the "
            "second half is counted; record a longer run"
        )
    left_out = int((trace.kind == STEP).sum() - single.sum())
    rest = f", {left_out:,} steps of several rows left out" if left_out else ""
    first = f"the first {MOST_TOKENS:,} of " if num > MOST_TOKENS else ""
    return Routing("recorded", chosen.first_passes(MOST_TOKENS), False, f"{first}{num:,} tokens of {name}{rest}")


def _events(trace: Trace, kept: np.ndarray, meta: TraceMeta) -> Trace:
    """Some steps of a trace, with nothing between them."""
    ids = trace.ids[np.repeat(kept, np.diff(trace.start))]
    columns = {name: getattr(trace, name)[kept] for name in ("kind", "layer", "rows", "top_k", "digest")}
    return Trace(meta, ids=ids, **columns)


def _meta(sizes: ModelSizes, model: str) -> TraceMeta:
    return TraceMeta(model, sizes.num_experts, sizes.shard_nbytes)


def _shape_text(num_experts: Sequence[int]) -> str:
    counts = " or ".join(str(n) for n in sorted(set(num_experts)))
    return f"{len(num_experts)} layers of {counts} experts"


def _assumed_trace(sizes: ModelSizes, preference: float, lasting: float) -> Trace:
    """A token takes the experts with the highest sums of a standing preference, what lasts between tokens, chance."""
    rng, counts = np.random.default_rng(0), np.array(sizes.num_experts)
    top_k, shape = sizes.experts_per_token, (len(counts), int(counts.max()))
    assert top_k is not None, "without it there is no routing to assume"
    absent = np.arange(shape[1]) >= counts[:, None]
    standing = np.where(absent, -np.inf, preference * rng.standard_normal(shape))
    ids = np.empty((TOKENS, len(counts), top_k), np.uint16)
    changing = rng.standard_normal(shape)
    for token in range(TOKENS):
        changing = lasting * changing + np.sqrt(1 - lasting**2) * rng.standard_normal(shape)
        ids[token] = np.argpartition(-(standing + changing), top_k - 1, axis=1)[:, :top_k]
    return trace_of_tokens(_meta(sizes, sizes.name), ids)


class Expectation:
    """A routing on a machine, ready for any number of slots."""

    def __init__(self, routing: Routing, machine: ReplayMachine) -> None:
        self.routing = routing
        self._whole = Replay(routing.trace, machine)
        num = int(routing.trace.passes[-1]) + 1
        self._start = Replay(routing.trace.first_passes(num // 2), machine)
        self._most_used = most_used(self._start.trace, self._start.geometry)

    def speed(self, slots: int) -> Speed:
        """What the default policy does with so many slots of one shard."""
        whole, start = self._run(self._whole, slots), self._run(self._start, slots)
        tokens = whole.passes - start.passes
        lanes = {name: _lane(whole, name) - _lane(start, name) for name in LANE_NAMES}
        shards = sum(whole.lanes[name].shards - start.lanes[name].shards for name in LANE_NAMES)
        return Speed(
            routing=self.routing.name,
            is_assumed=self.routing.is_assumed,
            num_slots=slots,
            hit_rate=(whole.lanes["hit"].shards - start.lanes["hit"].shards) / shards,
            moe_us=(whole.moe_us * whole.passes - start.moe_us * start.passes) / tokens,
            lane_nbytes={name: nbytes / tokens for name, nbytes in lanes.items()},
        )

    def _run(self, replay: Replay, slots: int) -> ReplayResult:
        config = Config()
        state = empty_state(config, replay.geometry, slots)
        make_resident(state, replay.geometry, self._most_used)
        result = replay.run_state("plan", state, policy_options(config))
        assert result is not None, "no step waits for a slot where the CPU may serve it"
        return result


def _lane(result: ReplayResult, name: str) -> int:
    return result.lanes[name].nbytes


@dataclass(frozen=True)
class Outlook:
    """What to expect of a model on a machine.

    Attributes
    ----------
    machine : ReplayMachine
    routings : tuple of Routing
        Empty where the files do not say how many experts a token uses, and no trace does.
    speeds : tuple of Speed
        For each routing by slots, fewest first.
    trunk_us : float
        At least what a token takes beside routed experts.
    """

    machine: ReplayMachine
    routings: tuple[Routing, ...]
    speeds: tuple[Speed, ...]
    trunk_us: float

    def tokens_a_second(self, speed: Speed) -> float:
        """At most, with the trunk."""
        return 1e6 / (speed.moe_us + self.trunk_us)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        where = self.machine
        machine = {"name": where.name, "gpu": where.profile.machine.gpu, "gap_us": where.gap_us, "source": where.source}
        routings = [{"name": r.name, "is_assumed": r.is_assumed, "about": r.about} for r in self.routings]
        rows = [s.to_dict() | {"tokens_a_second_with_trunk": self.tokens_a_second(s)} for s in self.speeds]
        return {"machine": machine, "trunk_us": self.trunk_us, "routings": routings, "by_slots": rows}


def look_ahead(routings: Sequence[Routing], machine: ReplayMachine, slots: Sequence[int], read_nbytes: int) -> Outlook:
    """Every routing with every number of slots.

    Parameters
    ----------
    routings : sequence of Routing
        See `routings_for`.
    machine : ReplayMachine
        See `machine_for`.
    slots : sequence of int
        Of one shard each; see `slots_to_compare`.
    read_nbytes : int
        Bytes that a token reads beside routed experts.
    """
    expected = [Expectation(routing, machine) for routing in routings]
    speeds = tuple(one.speed(count) for one in expected for count in slots)
    # 1 GB/s is 1000 bytes a us
    trunk_us = read_nbytes / (machine.profile.device_experts[machine.format] * 1e3)
    return Outlook(machine, tuple(routings), speeds, trunk_us)


def slots_to_compare(num_shards: int, here: int | None) -> list[int]:
    """Numbers of slots for a table: parts of all shards, and what there is here."""
    parts = {num_shards * eighths // 8 for eighths in (0, 1, 2, 3, 4, 6, 8)}
    return sorted(parts | ({here} if here is not None else set()))


def machine_for(machine: ReplayMachine, format_name: str) -> ReplayMachine:
    """The machine with its rates of a weight format, if it has some of its own for that."""
    profile = machine.profile
    if format_name not in profile.cpu_experts or format_name not in profile.device_experts:
        return machine
    return replace(machine, format=format_name, source=f"measured profile, rates of {format_name}")
