"""Replay: a trace through the live decision code on a machine of your choice, with modelled times.

What a policy would have done with a trace, and what that would have taken. The loop itself is in replay_run.py;
whether a recorded run's plans come out the same is verify.py's question. Nothing here decides or measures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.config import Config
from trilane.cost import Rates
from trilane.errors import TraceError
from trilane.expert import LANE_NAMES, Geometry, make_geometry
from trilane.machines import ReplayMachine
from trilane.plan import Options, make_work
from trilane.policy import empty_state, num_slots, policy_options
from trilane.replay_run import Events, Now, ReplayRun, Sum, make_loop
from trilane.routing import make_grouping
from trilane.stash import Stash, stash_each
from trilane.state import State
from trilane.traces.trace import STEP, Trace, TraceMeta

EVENTS_PER_CALL = 1 << 15  # between two looks at signals
MAX_SHARDS = 1 << 12


@dataclass(frozen=True)
class LaneShare:
    """What one lane served: experts with at least one shard there, shards, and their bytes."""

    experts: int
    shards: int
    nbytes: int


@dataclass(frozen=True)
class ReplayResult:
    """What a policy did with a trace.

    Attributes
    ----------
    name : str
    num_slots : int
        Of one shard each.
    steps, passes : int
        Layer-steps, and passes over the layers (tokens at batch 1).
    hit_rate : float or None
        Shards found in slots over shards routed to.
    lanes : mapping of LaneShare
    fills, background_fills, evictions : int
        In shards.
    pass_us : tuple of float
        Modelled us of each pass, the gaps between layers included.
    moe_us : float
        Mean us of a pass's MoE layers alone.
    single_lane_us : mapping
        Mean us of a pass if one lane served every miss, by lane; a lane that cannot is left out.
    """

    name: str
    num_slots: int
    steps: int
    passes: int
    hit_rate: float | None
    lanes: Mapping[str, LaneShare]
    fills: int
    background_fills: int
    evictions: int
    pass_us: tuple[float, ...] = field(repr=False)
    moe_us: float
    single_lane_us: Mapping[str, float]

    @property
    def mean_us(self) -> float:
        return float(np.mean(self.pass_us)) if self.pass_us else 0.0

    def quantile_us(self, q: float) -> float:
        """Quantile of the us of a pass."""
        return float(np.quantile(self.pass_us, q)) if self.pass_us else 0.0

    @property
    def best_single_lane(self) -> str | None:
        return min(self.single_lane_us, key=self.single_lane_us.__getitem__, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON; the times of single passes are summed up."""
        values = {name: value for name, value in asdict(self).items() if name != "pass_us"}
        times = {"mean_us": self.mean_us, "p50_us": self.quantile_us(0.5), "p99_us": self.quantile_us(0.99)}
        return {**values, **times, "best_single_lane": self.best_single_lane}


def shards_of(meta: TraceMeta, expert_nbytes: int | None, num_shards: int | None) -> list[tuple[int, ...]]:
    """Bytes of each shard of an expert, by layer.

    Parameters
    ----------
    expert_nbytes : int, optional
        Instead of what the trace says.
    num_shards : int, optional
        Equal parts of an expert; None: as many as the trace says, else 1 (experts are placed whole).

    Raises
    ------
    TraceError
        The size is neither given nor in the trace, or cannot be split so.
    """
    if expert_nbytes is None and not meta.shard_nbytes:
        raise TraceError("the trace does not say how large an expert is: give its size (--expert-bytes)")
    if expert_nbytes is None and num_shards is None:
        return list(meta.shard_nbytes)
    split = []
    for layer in range(meta.num_layers):
        known = meta.shard_nbytes[layer] if meta.shard_nbytes else ()
        split.append(
            _equal_parts(sum(known) if expert_nbytes is None else expert_nbytes, num_shards or len(known) or 1)
        )
    return split


def _equal_parts(nbytes: int, num: int) -> tuple[int, ...]:
    part = -(-nbytes // num)
    if nbytes < 1:
        raise TraceError(
            f"an expert of {nbytes} bytes has nothing to move: give its size (--expert-bytes), such as 13.2MB"
        )
    if not 1 <= num <= MAX_SHARDS or part * (num - 1) >= nbytes:
        raise TraceError(f"an expert of {nbytes} bytes cannot be {num} shards; use fewer, up to {MAX_SHARDS}")
    return (part,) * (num - 1) + (nbytes - part * (num - 1),)


class Replay:
    """One trace on one machine, ready for any policy.

    Parameters
    ----------
    trace : Trace
    machine : ReplayMachine
    expert_nbytes, num_shards : int, optional
        See `shards_of`.

    Raises
    ------
    TraceError
    """

    def __init__(
        self,
        trace: Trace,
        machine: ReplayMachine,
        *,
        expert_nbytes: int | None = None,
        num_shards: int | None = None,
    ) -> None:
        sizes = shards_of(trace.meta, expert_nbytes, num_shards)
        self.machine, self.meta, self.passes = machine, trace.meta, trace.passes
        self.geometry = make_geometry(trace.meta.num_experts, sizes)
        distinct = {row: machine.rates(row) for row in dict.fromkeys(sizes)}
        self.rates = [distinct[row] for row in sizes]
        self.trace = trace
        self._events = trace_events(trace)

    @property
    def most_slots(self) -> int:
        """A slot for each shard: more are of no use."""
        return int(self.geometry.first_shard[-1])

    def slots_for(self, config: Config, *, per_layer: int | None, total: int | None, nbytes: int | None) -> int:
        """Slots (of one shard each): experts a layer, experts in all, bytes, or what the configuration says.

        No more than `most_slots`.
        """
        return min(self.asked_slots(config, per_layer=per_layer, total=total, nbytes=nbytes), self.most_slots)

    def asked_slots(self, config: Config, *, per_layer: int | None, total: int | None, nbytes: int | None) -> int:
        """The same without the limit: what was asked for."""
        layers = self.geometry.num_layers
        if per_layer is not None:
            return per_layer * int(self.geometry.num_shards.sum())
        if total is not None:
            return total * int(self.geometry.num_shards.sum()) // layers
        if nbytes is not None:
            return nbytes // int(self.geometry.shard_nbytes.max())
        return num_slots(config, self.geometry)

    def run(
        self,
        name: str,
        config: Config,
        slots: int,
        *,
        single_lanes: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> ReplayResult:
        """Replay with one policy.

        Parameters
        ----------
        slots : int
            Of one shard each.
        single_lanes : bool
            Also replay with each lane alone, for comparison (three more passes, side by side).
        progress : callable, optional
            Called with the number of events done, from several threads.

        Raises
        ------
        TraceError
            Only the stream lane is allowed, and a step finds no slot.
        """
        options = policy_options(config)
        runs = {"": options}
        if single_lanes:
            runs |= {
                lane: options._replace(lanes=1 << k, by_ratio=False, background=False)
                for k, lane in enumerate(LANE_NAMES)
                if k
            }
        stopped = threading.Event()

        def advance(events: int) -> None:
            if stopped.is_set():
                raise InterruptedError
            if progress is not None:
                progress(events)

        self._compile(config, slots, options)
        pool = ThreadPoolExecutor(max_workers=2)
        try:
            found = {key: pool.submit(self._pass, config, slots, one, advance) for key, one in runs.items()}
            done = {key: future.result() for key, future in found.items()}
        finally:
            stopped.set()  # after Ctrl-C, whoever is still at work ends after its next events
            pool.shutdown(cancel_futures=True)
        result = done.pop("")
        if result is None:
            raise TraceError(
                f"{name}: {slots} slots of one shard are too few for a step, and only the stream lane is allowed; "
                "give more slots, or more lanes (policy.lanes)"
            )
        sums, step_us = result
        alone = {lane: float(self._pass_us(one[1]).mean()) for lane, one in done.items() if one is not None}
        return _result(name, slots, sums, self._pass_us(step_us), step_us, alone)

    def run_state(
        self, name: str, state: State, options: Options, *, next_use: NDArray[np.float64] | None = None
    ) -> ReplayResult | None:
        """Replay from a state with these options; None where a step finds no slot.

        Parameters
        ----------
        state : State
            Its slots and scores are where the replay begins; it is changed.
        next_use : float64, optional
            For each id of the trace the score of its expert from that step on (a state with "given" scores).
        """
        done = self._play(state, options, None, next_use)
        if done is None:
            return None
        return _result(name, len(state.owner), done[0], self._pass_us(done[1]), done[1], {})

    def _pass(
        self, config: Config, slots: int, options: Options, progress: Callable[[int], None] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        return self._play(empty_state(config, self.geometry, slots), options, progress)

    def _compile(self, config: Config, slots: int, options: Options) -> None:
        """Compile what passes run, on this thread: Ctrl-C ends it at once, and not when a pool's threads are done."""
        run = make_run(self._events, self.geometry, empty_state(config, self.geometry, slots), options)
        run_events(run, self.rates, 0, 0)

    def _play(
        self,
        state: State,
        options: Options,
        progress: Callable[[int], None] | None,
        next_use: NDArray[np.float64] | None = None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Sums and the us of each step; None where a step found no slot."""
        run = make_run(
            self._events,
            self.geometry,
            state,
            options,
            gap_us=self.machine.gap_us,
            resumes=self.machine.resumes_fills,
            next_use=next_use,
        )
        stop = len(self._events.kind)
        if run_events(run, self.rates, 0, stop, progress)[1] != 0:
            return None
        return run.sums, run.step_us

    def _pass_us(self, step_us: NDArray[np.float64]) -> NDArray[np.float64]:
        if not len(step_us):
            return np.zeros(0)
        return np.bincount(self.passes, step_us + self.machine.gap_us).astype(np.float64)


def trace_events(trace: Trace) -> Events:
    """The trace's columns in the types that the compiled loop takes."""
    ids = trace.ids.astype(np.uint16)
    return Events(
        trace.kind.astype(np.uint8),
        trace.layer.astype(np.uint16),
        trace.rows.astype(np.int32),
        trace.top_k.astype(np.int32),
        trace.digest.astype(np.uint32),
        trace.start,
        ids,
        trace.meta.no_expert,
    )


def make_run(
    events: Events,
    geometry: Geometry,
    state: State,
    options: Options,
    *,
    gap_us: float = 0.0,
    resumes: bool = True,
    clock: int = 0,
    verify: bool = False,
    next_use: NDArray[np.float64] | None = None,
) -> ReplayRun:
    """The one argument of the compiled loop."""
    experts = int(np.diff(geometry.first_expert).max())
    now = np.zeros(Now.SIZE, np.int64)
    now[Now.CLOCK], now[Now.BACKGROUND_SLOT] = clock, -1
    return ReplayRun(
        events=events,
        grouping=make_grouping(int(np.diff(events.start).max(initial=1)), experts),
        state=state,
        geometry=geometry,
        options=options,
        work=make_work(geometry),
        fill_work=make_work(geometry),
        sums=np.zeros(Sum.SIZE),
        step_us=np.zeros(int((events.kind == STEP).sum())),
        now=now,
        idle_us=np.zeros(1),
        left_us=np.zeros(1),
        next_use=np.zeros(0) if next_use is None else next_use,
        gap_us=float(gap_us),
        resumes=bool(resumes),
        verify=verify,
    )


def run_events(
    run: ReplayRun, rates: Sequence[Rates], first: int, stop: int, progress: Callable[[int], None] | None = None
) -> tuple[int, int]:
    """Run events ``first`` to ``stop``, or only compile what runs them; see `replay_run.make_loop` for the result."""
    held = Stash(run)
    stashes = stash_each(rates)
    addresses = np.array([stash.address for stash in stashes], np.int64)
    loop = make_loop(held.kind, stashes[0].kind)
    for start in range(first, max(stop, first + 1), EVENTS_PER_CALL):
        end = min(stop, start + EVENTS_PER_CALL)
        event, status = loop(held.address, addresses, start, end)
        if status != 0:
            return int(event), int(status)
        if progress is not None:
            progress(end - start)
    return stop, 0


def _result(
    name: str,
    slots: int,
    sums: NDArray[np.float64],
    pass_us: NDArray[np.float64],
    step_us: NDArray[np.float64],
    alone: Mapping[str, float],
) -> ReplayResult:
    lanes = sums[Sum.LANES :].reshape(len(LANE_NAMES), 3)
    shares = {lane: LaneShare(*(int(n) for n in row)) for lane, row in zip(LANE_NAMES, lanes, strict=True)}
    routed = lanes[:, 1].sum()
    return ReplayResult(
        name=name,
        num_slots=slots,
        steps=int(sums[Sum.STEPS]),
        passes=len(pass_us),
        hit_rate=float(lanes[0, 1] / routed) if routed else None,
        lanes=shares,
        fills=int(sums[Sum.FILLS]),
        background_fills=int(sums[Sum.BACKGROUND_FILLS]),
        evictions=int(sums[Sum.EVICTIONS]),
        pass_us=tuple(pass_us.tolist()),
        moe_us=float(step_us.sum() / len(pass_us)) if len(pass_us) else 0.0,
        single_lane_us=dict(alone),
    )
