"""Tokens through the decision code as the control thread of a GPU runs it, with modelled times: for measurements.

`replay_run` plans every step, as the host device does. On a GPU a step whose experts all lie in slots asks nobody: the
control thread sees their uses later, from the stamps that the GPU writes, and learns nothing else of such a step
(cuda_control.py). It is the same here, by the same functions. No fills are made between steps.

What differs from a live run: stamps are read as they were at the end of a step with misses. Live, the GPU may have gone
on by then, and a later stamp hides such a use until the expert's next turn. Copies that the driver does not take in
time are not played.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import STEP_US, Loads, Rates, step_us
from trilane.cuda_control import count_hits
from trilane.cuda_words import Control, Place, Wire
from trilane.expert import Geometry
from trilane.jit import compiled
from trilane.plan import Options, Work, make_work
from trilane.planner import learn_step, plan_layer
from trilane.records import record
from trilane.stash import Stash, on_stashes
from trilane.state import State


@record
class CudaReplay(NamedTuple):
    """All arrays of such a replay, in one argument."""

    ids: np.ndarray  # int32 (tokens, layers, top_k): rising in each step, as the GPU groups them
    experts: np.ndarray  # int32 (top_k,): of the step in hand
    rows: np.ndarray  # int32 (top_k,): 1
    stamps: np.ndarray  # uint32 by expert: the clock of the last use
    wire: Wire  # where `count_hits` finds the stamps, and how far it has looked
    seen: np.ndarray  # int64 by expert: the clock up to which uses are counted
    state: State
    geometry: Geometry
    options: Options
    work: Work
    step_us: np.ndarray  # float64 (tokens, layers)
    missing: np.ndarray  # int64 (tokens, layers): shards


class CudaReplayed(NamedTuple):
    """Modelled us and missing shards of each step, (tokens, layers)."""

    step_us: NDArray[np.float64]
    missing: NDArray[np.int64]


def replay_tokens(
    ids: NDArray[np.int32], geometry: Geometry, state: State, options: Options, rates: Rates
) -> CudaReplayed:
    """Replay tokens of one row from a state, which is changed.

    Parameters
    ----------
    ids : int32 (tokens, layers, top_k)
        Different experts in each step, all ranks used.
    rates : Rates
        Of every layer: all are of one kind.
    """
    tokens, layers, top_k = ids.shape
    experts = int(geometry.first_expert[-1])
    stamps = np.zeros(experts, np.uint32)
    run = CudaReplay(
        np.sort(ids, axis=2).astype(np.int32), np.zeros(top_k, np.int32), np.ones(top_k, np.int32), stamps,
        _make_wire(stamps), np.zeros(experts, np.int64), state, geometry, options, make_work(geometry),
        np.zeros((tokens, layers)), np.zeros((tokens, layers), np.int64),
    )  # fmt: skip
    held, constants = Stash(run), Stash(rates)
    on_stashes(run_tokens, held.kind, constants.kind)(held.address, constants.address)
    return CudaReplayed(run.step_us, run.missing)


def _make_wire(stamps: NDArray[np.uint32]) -> Wire:
    places = np.zeros(Place.SIZE, np.int64)
    places[Place.STAMPS] = stamps.ctypes.data
    control, few = np.zeros(Control.SIZE, np.int64), np.zeros(1, np.int64)
    return Wire(places, control, few, few, np.zeros((1, 3), np.int64), np.zeros(1, np.int8))


@compiled(counted=False)
def run_tokens(run, rates):
    """All steps, one behind the other."""
    tokens, layers = run.step_us.shape
    clock = 0
    for token in range(tokens):
        for layer in range(layers):
            clock += 1
            missing = _route(run, token, layer, clock)
            run.missing[token, layer] = missing
            us = _hits_us(run, rates, layer) if missing == 0 else _miss_us(run, rates, layer, clock)
            run.step_us[token, layer] = us


@compiled(counted=False)
def _route(run, token, layer, clock):
    """Take the step's experts and stamp them; shards that are missing."""
    first, missing = run.geometry.first_expert[layer], 0
    for i in range(run.experts.size):
        expert = run.ids[token, layer, i]
        run.experts[i] = expert
        run.stamps[first + expert] = clock
        missing += run.geometry.num_shards[layer] - run.state.resident[first + expert]
    return missing


@compiled(counted=False)
def _hits_us(run, rates, layer):
    """A step that nobody plans."""
    nbytes = 0.0
    for j in range(run.geometry.num_shards[layer]):
        nbytes += run.experts.size * run.geometry.shard_nbytes[layer, j]
    return step_us(rates, Loads(nbytes, nbytes, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0, 0.0))


@compiled(counted=False)
def _miss_us(run, rates, layer, clock):
    """A step that is planned and learned from, and what the control thread then sees of steps before it."""
    count = run.experts.size
    plan_layer(run.state, run.geometry, rates, run.options, layer, run.experts, run.rows, count, clock, run.work)
    learn_step(run.state, run.geometry, run.options, layer, run.experts, count)
    first = run.geometry.first_expert[layer]
    for i in range(count):
        run.seen[first + run.experts[i]] = clock
    count_hits(run.wire, run.seen, run.state, run.geometry, clock)
    return run.work.predicted_us[STEP_US]
