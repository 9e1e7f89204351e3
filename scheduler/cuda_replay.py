"""Tokens through the decision code as the control thread of a GPU runs it, with modelled times: for measurements.

`replay_run` plans every step, as the host device does. On a GPU a step whose experts all lie in slots asks nobody: the
control thread is told what it used, and learns from it (cuda_control.py). It is the same here, by the same functions.
Background fills go through the stages of cuda_fills.py, each ended by the step that would end it, and their copies take
the link's time when no step with misses is under way; one that is then shares the link with it.

What differs from a live run: there, steps without misses that come while the control thread answers or learns may be
missed by it. Copies that the driver does not take in time are not played.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import STEP_US, Loads, Rates, step_us
from trilane.cuda_control import average_time
from trilane.cuda_fills import MARGIN_NS, fill_ns, fills_at_once
from trilane.cuda_words import Stage
from trilane.expert import STREAM, ZERO_COPY, Geometry
from trilane.jit import compiled
from trilane.plan import Options, Work, make_work
from trilane.planner import learn_step, note_step, plan_background, plan_layer
from trilane.records import record
from trilane.residency import land_fill
from trilane.stash import Stash, on_stashes
from trilane.state import State
from trilane.wanted import list_coming


class Clock(IntEnum):
    """Places of the replay's times, in us."""

    NOW = 0
    DONE = 1  # when the last step with misses was over
    IDLE = 2  # from then to the next one, averaged, in ns
    COPIED = 3  # when the fill's copy that is under way has landed
    SIZE = 4


class Under(IntEnum):
    """Places of what is known of the background fills under way."""

    STAGE = 0
    NUM = 1
    COPIED = 2
    LANDED = 3  # of all
    IS_COPYING = 4  # whether a copy is on the link
    WAITS = 5  # whether copies begin when the step is over
    SIZE = 6


@record
class CudaReplay(NamedTuple):
    """All arrays of such a replay, in one argument."""

    ids: np.ndarray  # int32 (tokens, layers, top_k): rising in each step, as the GPU groups them
    experts: np.ndarray  # int32 (top_k,): of the step in hand
    rows: np.ndarray  # int32 (top_k,): 1
    times: np.ndarray  # float64, by Clock
    under: np.ndarray  # int64, by Under
    gap_us: np.ndarray  # float64 (1,): between two steps
    state: State
    geometry: Geometry
    options: Options
    work: Work
    fills: Work
    step_us: np.ndarray  # float64 (tokens, layers)
    missing: np.ndarray  # int64 (tokens, layers): shards


class CudaReplayed(NamedTuple):
    """Modelled us and missing shards of each step, (tokens, layers), and how many background fills landed."""

    step_us: NDArray[np.float64]
    missing: NDArray[np.int64]
    background_fills: int


def replay_tokens(
    ids: NDArray[np.int32], geometry: Geometry, state: State, options: Options, rates: Rates, gap_us: float = 0.0
) -> CudaReplayed:
    """Replay tokens of one row from a state, which is changed.

    Parameters
    ----------
    ids : int32 (tokens, layers, top_k)
        Different experts in each step, all ranks used.
    rates : Rates
        Of every layer: all are of one kind.
    gap_us : float
        From the end of a step to the next one's begin.
    """
    tokens, layers, top_k = ids.shape
    run = CudaReplay(
        np.sort(ids, axis=2).astype(np.int32), np.zeros(top_k, np.int32), np.ones(top_k, np.int32),
        np.zeros(Clock.SIZE), np.zeros(Under.SIZE, np.int64), np.full(1, gap_us), state, geometry, options,
        make_work(geometry), make_work(geometry), np.zeros((tokens, layers)), np.zeros((tokens, layers), np.int64),
    )  # fmt: skip
    held, constants = Stash(run), Stash(rates)
    on_stashes(run_tokens, held.kind, constants.kind)(held.address, constants.address)
    return CudaReplayed(run.step_us, run.missing, int(run.under[Under.LANDED]))


@compiled(counted=False)
def run_tokens(run, rates):
    """All steps, one behind the other."""
    tokens, layers = run.step_us.shape
    clock = 0
    for token in range(tokens):
        for layer in range(layers):
            clock += 1
            fill_us = 1e-3 * fill_ns(rates, run.geometry.shard_nbytes[layer, 0])
            _publish(run)
            missing = _route(run, token, layer)
            run.missing[token, layer] = missing
            us = _hits_us(run, rates, layer, clock) if missing == 0 else _miss_us(run, rates, layer, clock)
            run.step_us[token, layer] = us
            _pass_time(run, us, missing > 0, fill_us)
            _begin_fills(run, layer, fill_us)


@compiled(counted=False)
def _publish(run):
    """A step begins: it acknowledges what the fills under way wait for."""
    stage = run.under[Under.STAGE]
    if stage == Stage.INVALIDATING:
        run.under[Under.STAGE], run.under[Under.WAITS] = Stage.COPYING, 1
    elif stage == Stage.VALIDATING:
        for k in range(run.under[Under.NUM]):
            land_fill(run.state, run.geometry, run.fills.fill_slot[k], run.fills.fill_shard[k])
        run.under[Under.LANDED] += run.under[Under.NUM]
        run.under[Under.STAGE] = Stage.IDLE


@compiled(counted=False)
def _route(run, token, layer):
    """Take the step's experts; shards that are missing."""
    first, missing = run.geometry.first_expert[layer], 0
    for i in range(run.experts.size):
        expert = run.ids[token, layer, i]
        run.experts[i] = expert
        missing += run.geometry.num_shards[layer] - run.state.resident[first + expert]
    return missing


@compiled(counted=False)
def _hits_us(run, rates, layer, clock):
    """A step that nobody plans."""
    note_step(run.state, run.geometry, run.options, layer, run.experts, run.experts.size, clock)
    nbytes = 0.0
    for j in range(run.geometry.num_shards[layer]):
        nbytes += run.experts.size * run.geometry.shard_nbytes[layer, j]
    return step_us(rates, Loads(nbytes, nbytes, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0, 0.0))


@compiled(counted=False)
def _miss_us(run, rates, layer, clock):
    """A step that is planned and learned from; where a fill's copy is under way, it shares the link with it."""
    count, times = run.experts.size, run.times
    idle_ns = np.int64(1e3 * (times[Clock.NOW] - times[Clock.DONE]))
    times[Clock.IDLE] = average_time(np.int64(times[Clock.IDLE]), idle_ns)
    plan_layer(run.state, run.geometry, rates, run.options, layer, run.experts, run.rows, count, clock, run.work)
    learn_step(run.state, run.geometry, run.options, layer, run.experts, count)
    us = run.work.predicted_us[STEP_US]
    link = run.work.predicted_us[STREAM] + run.work.predicted_us[ZERO_COPY]
    if run.under[Under.IS_COPYING] and link > 0.0:
        beside = min(link, max(0.0, times[Clock.COPIED] - times[Clock.NOW]))
        us += max(0.0, link + beside - (us - rates.step_fix_us - rates.miss_fix_us))
    times[Clock.DONE] = times[Clock.NOW] + us
    return us


@compiled(counted=False)
def _pass_time(run, us, missed, fill_us):
    """Until the next step: copies of fills land, and others begin where no misses are served and they end in time."""
    times, under, begin = run.times, run.under, run.times[Clock.NOW]
    end, free = begin + us + run.gap_us[0], begin + (us if missed or under[Under.WAITS] else 0.0)
    times[Clock.NOW], under[Under.WAITS] = end, 0
    while under[Under.STAGE] == Stage.COPYING:
        if under[Under.IS_COPYING]:
            if times[Clock.COPIED] > end:
                return
            free = max(free, times[Clock.COPIED])
            under[Under.IS_COPYING] = 0
            under[Under.COPIED] += 1
            if under[Under.COPIED] == under[Under.NUM]:
                under[Under.STAGE] = Stage.VALIDATING
        elif free < end and (free + fill_us <= end or fill_us + 1e-3 * MARGIN_NS > end - begin):
            under[Under.IS_COPYING], times[Clock.COPIED] = 1, free + fill_us
        else:
            return


@compiled(counted=False)
def _begin_fills(run, layer, fill_us):
    """Fills of the policy's own, as `cuda_fills.begin_background` begins them."""
    if not run.options.background or run.under[Under.STAGE] != Stage.IDLE:
        return
    most = fills_at_once(np.int64(run.times[Clock.IDLE]), np.int64(1e3 * fill_us))
    if most == 0:
        return
    if run.state.past.shape[2] > 0:
        list_coming(run.state, run.geometry, run.options, layer)
    run.under[Under.NUM] = plan_background(run.state, run.geometry, run.options, most, run.fills)
    run.under[Under.COPIED] = 0
    if run.under[Under.NUM] > 0:
        run.under[Under.STAGE] = Stage.INVALIDATING
