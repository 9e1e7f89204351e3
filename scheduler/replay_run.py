"""A trace through the live decision code, in compiled code: one pass over the events, with modelled time.

Times are the cost model's at the rates that are passed in. Fills that the trace hints at land as far as the link's
idle time between two layers goes; those of the policy use that and what a step leaves idle, and one that does not end
in it goes on in the next. On the host device they have the time between two layers alone, and one that does not fit is
not begun: what is not there when a step comes gives its slot back. In a verifying run what landed is what the trace
says, and plans are compared with its hashes.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from trilane.cost import STEP_US, stream_us
from trilane.digest import fills_digest, plan_digest
from trilane.expert import CPU, STREAM, ZERO_COPY, Geometry
from trilane.jit import compiled
from trilane.plan import NUM_EVICTIONS, NUM_FILLS, Options, Work
from trilane.planner import learn_step, note_stamp, note_step, plan_background, plan_fills, plan_layer, plan_wave
from trilane.records import record, record_at
from trilane.residency import drop_fill, fill_layer, land_fill
from trilane.routing import Grouping, group_rows
from trilane.state import State
from trilane.traces.trace import (
    BACKGROUND,
    GAP,
    HINT,
    LANDED,
    NOT_PLANNED,
    NUMBER_NBYTES,
    SETTLED,
    STEP,
    TOUCHED,
    UNDER_WAY,
    WAVE,
)
from trilane.wanted import list_coming

NO_SLOT, DIFFERS = -1, -2  # what `run_events` returns beside an event


class Sum(IntEnum):
    """Places in the array of sums; a lane's own places start at ``LANES + 3 * lane``: experts, shards, bytes."""

    STEPS = 0
    FILLS = 1
    BACKGROUND_FILLS = 2
    EVICTIONS = 3
    WAVES = 4
    CHECKED = 5
    LANES = 6
    SIZE = LANES + 3 * 4


class Now(IntEnum):
    """Places in the array of what a run remembers from event to event."""

    CLOCK = 0
    LAYER = 1  # of the last step, with its experts and the shards that wait for a further wave
    NUM_EXPERTS = 2
    WAITING = 3
    FILLS = 4  # under way, those of fill_work, and their layer
    FILLS_LAYER = 5
    BACKGROUND_SLOT = 6  # of the policy's own fill that is under way, -1 without one
    BACKGROUND_SHARD = 7
    SIZE = 8


@record
class Events(NamedTuple):
    """The columns of a `trace.Trace` in the types of compiled code; ``start`` as `Trace.start`."""

    kind: np.ndarray
    layer: np.ndarray
    rows: np.ndarray
    top_k: np.ndarray
    digest: np.ndarray
    start: np.ndarray
    ids: np.ndarray
    no_expert: int


@record
class ReplayRun(NamedTuple):
    """All arrays of one replay, in one argument."""

    events: Events
    grouping: Grouping
    state: State
    geometry: Geometry
    options: Options
    work: Work
    fill_work: Work
    sums: np.ndarray  # float64 (Sum.SIZE,)
    step_us: np.ndarray  # float64 (steps,): modelled us of each step
    now: np.ndarray  # int64 (Now.SIZE,)
    idle_us: np.ndarray  # float64 (1,): link time that background fills may still use
    left_us: np.ndarray  # float64 (1,): link time that the policy's own fill still takes
    next_use: np.ndarray  # float64 (entries,): the scores of those who know the future; else empty
    gap_us: float
    resumes: bool  # whether the policy's own fills use idle link time within steps too, and go on after them
    verify: bool


@compiled(counted=False, merge=True)
def _take_step(run, event):
    """Group a step's routing; its clock is the next one."""
    events, g, now, layer = run.events, run.grouping, run.now, int(run.events.layer[event])
    num_experts = run.geometry.first_expert[layer + 1] - run.geometry.first_expert[layer]
    first, count = events.start[event], events.start[event + 1] - events.start[event]
    for k in range(count):
        id_ = int(events.ids[first + k])
        g.ids[k] = -1 if id_ == events.no_expert else id_
        if run.next_use.size > 0 and id_ != events.no_expert:
            run.state.score[run.geometry.first_expert[layer] + id_] = run.next_use[first + k]
    now[Now.LAYER] = layer
    now[Now.CLOCK] += 1
    now[Now.NUM_EXPERTS] = group_rows(g, events.rows[event], events.top_k[event], num_experts)


@compiled(counted=False, merge=True)
def _plan_step(run, rates):
    """Plan the step that was taken."""
    g, now = run.grouping, run.now
    now[Now.WAITING] = plan_layer(
        run.state, run.geometry, rates, run.options, now[Now.LAYER], g.experts, g.rows, now[Now.NUM_EXPERTS],
        now[Now.CLOCK], run.work,
    )  # fmt: skip


@compiled(counted=False)
def _note_step(run):
    """Take in a step of a recording that nobody planned."""
    now = run.now
    now[Now.WAITING] = 0
    note_step(
        run.state, run.geometry, run.options, now[Now.LAYER], run.grouping.experts, now[Now.NUM_EXPERTS],
        now[Now.CLOCK],
    )  # fmt: skip


@compiled(counted=False)
def _number(run, entry):
    """A number from entries of a byte each."""
    number = 0
    for k in range(NUMBER_NBYTES):
        number |= int(run.events.ids[entry + k]) << 8 * k
    return number


@compiled(counted=False)
def _touch(run, event):
    """Take in a use that was heard of late; False if it is of no expert, or from before the run."""
    first, layer = run.events.start[event], int(run.events.layer[event])
    expert = run.geometry.first_expert[layer] + int(run.events.ids[first])
    clock = run.now[Now.CLOCK] - _number(run, first + 1)
    if expert >= run.geometry.first_expert[layer + 1] or clock < 0:
        return False
    note_stamp(run.state, run.geometry, expert, clock)
    return True


@compiled(counted=False)
def _plan_more(run, rates):
    """Plan the next wave; False where it finds no slot at all."""
    now, g = run.now, run.grouping
    before = now[Now.WAITING]
    now[Now.WAITING] = plan_wave(
        run.state, run.geometry, rates, run.options, now[Now.LAYER], g.experts, g.rows, now[Now.NUM_EXPERTS], run.work
    )
    run.sums[Sum.WAVES] += 1
    return now[Now.WAITING] < before


@compiled(counted=False, merge=True)
def _is_same(run, event):
    """Whether the plan in ``run`` has the hash that the trace says."""
    g, now = run.grouping, run.now
    layer, num = now[Now.LAYER], now[Now.NUM_EXPERTS]
    run.sums[Sum.CHECKED] += 1
    digest = plan_digest(layer, g.experts, g.rows, num, run.geometry.num_shards[layer], run.work)
    return digest == run.events.digest[event]


@compiled(counted=False, merge=True)
def _account(run):
    """A plan's shards, bytes and fills, and experts by lane, into the sums; its modelled us into the step's."""
    sums, work, now = run.sums, run.work, run.now
    shards = run.geometry.num_shards[now[Now.LAYER]]
    for i in range(now[Now.NUM_EXPERTS]):
        used = 0
        for at in range(i * shards, (i + 1) * shards):
            if work.lane[at] >= 0:
                used |= 1 << work.lane[at]
        for lane in range(4):
            sums[Sum.LANES + 3 * lane] += (used >> lane) & 1
    for lane in range(4):
        sums[Sum.LANES + 3 * lane + 1] += work.counts[lane]
        sums[Sum.LANES + 3 * lane + 2] += work.lane_nbytes[lane]
    sums[Sum.FILLS] += work.counts[NUM_FILLS]
    sums[Sum.EVICTIONS] += work.counts[NUM_EVICTIONS]
    run.step_us[int(sums[Sum.STEPS]) - 1] += work.predicted_us[STEP_US]


@compiled(counted=False)
def _end_fill(run, k, landed):
    slot, shard = int(run.fill_work.fill_slot[k]), int(run.fill_work.fill_shard[k])
    if landed:
        land_fill(run.state, run.geometry, slot, shard)
        run.sums[Sum.BACKGROUND_FILLS] += 1
    else:
        drop_fill(run.state, run.geometry, slot, shard)


@compiled(counted=False)
def _settle_modelled(run, rates):
    """End the fills under way: as many landed as the link's idle time allows, the rest is given up."""
    layer = run.now[Now.FILLS_LAYER]
    first, shards = run.geometry.first_shard[layer], run.geometry.num_shards[layer]
    for k in range(run.now[Now.FILLS]):
        shard = int(run.fill_work.fill_shard[k])
        nbytes = float(run.geometry.shard_nbytes[layer, (shard - first) % shards])
        run.idle_us[0] -= stream_us(rates, 1.0, nbytes)
        _end_fill(run, k, run.idle_us[0] >= 0.0)
    run.now[Now.FILLS] = 0


@compiled(counted=False)
def _settle_recorded(run, event):
    """End the fills under way as the trace says; False if it tells of others."""
    first = run.events.start[event]
    if run.events.start[event + 1] - first != run.now[Now.FILLS]:
        return False
    left, work = 0, run.fill_work
    for k in range(run.now[Now.FILLS]):
        how = run.events.ids[first + k]
        if how == UNDER_WAY:
            work.fill_slot[left], work.fill_shard[left] = work.fill_slot[k], work.fill_shard[k]
            left += 1
        else:
            _end_fill(run, k, how == LANDED)
    run.now[Now.FILLS] = left
    return True


@compiled(counted=False)
def _idle_us(run, rates):
    """Link time that the planned step leaves idle; where the CPU lane runs, as far as host memory has room too."""
    terms, nbytes = run.work.predicted_us, run.work.lane_nbytes
    idle = terms[STEP_US] - terms[STREAM] - terms[ZERO_COPY]
    if nbytes[CPU] > 0 and rates.both_us_per_byte > 0:
        crossed = nbytes[STREAM] + nbytes[ZERO_COPY] + nbytes[CPU]
        spare = max(0.0, terms[STEP_US] / rates.both_us_per_byte - crossed)
        idle = min(idle, spare * rates.stream_us_per_byte)
    return max(0.0, idle)


@compiled(counted=False)
def _shard_us(run, rates):
    """Link time of one shard of the step's layer."""
    return stream_us(rates, 1.0, float(run.geometry.shard_nbytes[run.now[Now.LAYER], 0]))


@compiled(counted=False)
def _fill_background(run, rates):
    """Spend the idle link time on the policy's own fills; the last one keeps what it has of its bytes."""
    now, idle = run.now, run.idle_us
    while idle[0] > 0.0:
        if now[Now.BACKGROUND_SLOT] < 0:
            if idle[0] < _shard_us(run, rates):  # what is fetched ahead is of use only if it is there in time
                run.state.num_coming[0] = 0
                if not run.resumes:
                    return
            if plan_background(run.state, run.geometry, run.options, 1, run.fill_work) == 0:
                return
            _count_victims(run, 1)
            now[Now.BACKGROUND_SLOT], now[Now.BACKGROUND_SHARD] = (
                run.fill_work.fill_slot[0],
                run.fill_work.fill_shard[0],
            )
            run.left_us[0] = stream_us(rates, 1.0, fill_layer(run.geometry, now[Now.BACKGROUND_SHARD])[1])
        taken = min(idle[0], run.left_us[0])
        idle[0] -= taken
        run.left_us[0] -= taken
        if run.left_us[0] > 0.0:
            run.left_us[0] += rates.run_fix_us  # its rest is a copy of its own
            return
        land_fill(run.state, run.geometry, now[Now.BACKGROUND_SLOT], now[Now.BACKGROUND_SHARD])
        run.sums[Sum.BACKGROUND_FILLS] += 1
        now[Now.BACKGROUND_SLOT] = -1


@compiled(counted=False)
def _count_victims(run, num):
    """Count what the reserved fills displaced."""
    for k in range(num):
        run.sums[Sum.EVICTIONS] += 1 if run.fill_work.fill_victim[k] >= 0 else 0


@compiled(counted=False)
def _run_hint(run, event):
    """Reserve fills for hinted experts; whether they are those of the trace."""
    events, now, layer = run.events, run.now, int(run.events.layer[event])
    first, count = events.start[event], events.start[event + 1] - events.start[event]
    for k in range(count):
        run.grouping.experts[k] = events.ids[first + k]
    now[Now.FILLS_LAYER] = layer
    now[Now.FILLS] = plan_fills(
        run.state, run.geometry, run.options, layer, run.grouping.experts, count, now[Now.CLOCK], run.fill_work
    )
    _count_victims(run, now[Now.FILLS])
    if not run.verify:
        return True
    run.sums[Sum.CHECKED] += 1
    return fills_digest(layer, now[Now.FILLS], run.fill_work) == events.digest[event]


@compiled(counted=False)
def _run_background(run, event):
    """Reserve what a recorded run reserved by itself; whether it is the same."""
    now = run.now
    most = int(run.events.ids[run.events.start[event]])
    if run.options.coming_from != 1 and run.state.past.shape[2] > 0:  # else it was listed with the step
        list_coming(run.state, run.geometry, run.options, now[Now.LAYER])
    now[Now.FILLS] = plan_background(run.state, run.geometry, run.options, most, run.fill_work)
    _count_victims(run, now[Now.FILLS])
    run.sums[Sum.CHECKED] += 1
    return fills_digest(0, now[Now.FILLS], run.fill_work) == run.events.digest[event]


@compiled(counted=False, merge=True)
def _run_step(run, rates, event):
    """A step from its routing to its modelled time; 0, NO_SLOT or DIFFERS."""
    run.sums[Sum.STEPS] += 1
    _take_step(run, event)
    if run.verify and run.events.digest[event] == NOT_PLANNED:
        _note_step(run)
        return 0
    _plan_step(run, rates)
    if run.verify and not _is_same(run, event):
        return DIFFERS
    _account(run)
    learn_step(run.state, run.geometry, run.options, run.now[Now.LAYER], run.grouping.experts, run.now[Now.NUM_EXPERTS])
    run.idle_us[0] = run.gap_us
    if run.options.background and run.resumes and not run.verify:
        run.idle_us[0] += _idle_us(run, rates)
    while run.now[Now.WAITING] > 0 and not run.verify:
        if not _plan_more(run, rates):
            return NO_SLOT
        _account(run)
    if run.options.background and not run.verify:
        _fill_background(run, rates)
        run.idle_us[0] = min(run.idle_us[0], run.gap_us)
    return 0


@compiled(counted=False)
def _run_wave(run, rates, event):
    """A recorded further wave of the last step; 0 or DIFFERS."""
    if run.now[Now.WAITING] <= 0 or run.events.layer[event] != run.now[Now.LAYER]:
        return DIFFERS
    _plan_more(run, rates)
    if not _is_same(run, event):
        return DIFFERS
    _account(run)
    return 0


@functools.cache
def make_loop(run_kind: Any, rates_kind: Any) -> Any:
    """``loop(run address, addresses of each layer's rates, first event, last event)``, compiled for these types.

    It returns (event, status): behind the last event and 0; or the event that found NO_SLOT or DIFFERS.
    """
    read_run, read_rates = record_at(run_kind), record_at(rates_kind)

    @compiled(counted=False)
    def loop(address, rates_of, first, stop):
        run = read_run(address)
        for event in range(first, stop):
            kind, status = run.events.kind[event], 0
            if run.now[Now.FILLS] > 0 and not run.verify and (kind == STEP or kind == HINT):
                _settle_modelled(run, read_rates(rates_of[run.now[Now.FILLS_LAYER]]))
            if kind == STEP:
                status = _run_step(run, read_rates(rates_of[run.events.layer[event]]), event)
            elif kind == HINT:
                status = 0 if _run_hint(run, event) else DIFFERS
            elif kind == BACKGROUND and run.verify:
                status = 0 if _run_background(run, event) else DIFFERS
            elif kind == SETTLED and run.verify:
                status = 0 if _settle_recorded(run, event) else DIFFERS
            elif kind == GAP and run.verify:
                run.now[Now.CLOCK] += _number(run, run.events.start[event])
            elif kind == TOUCHED and run.verify:
                status = 0 if _touch(run, event) else DIFFERS
            elif kind == WAVE and run.verify:
                status = _run_wave(run, read_rates(rates_of[run.events.layer[event]]), event)
            if status != 0:
                return event, status
        return stop, 0

    return loop
