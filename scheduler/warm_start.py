"""What a start can take over from the run before: which shards lay in slots, what experts were worth, what was learned.

Slot numbers are not part of it: a start with other slots, pools or another eviction keeps the experts of most worth, as
many as fit. It is data about a model's routing and nothing that results depend on. How it is kept is in warm_file.py;
who copies the bytes, the runner knows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trilane.cost import Rates
from trilane.expert import Geometry
from trilane.observed import LEAST, MOST, NUM_LANES, Observed
from trilane.state import LRU, NUM_PAST, RAISED, State, check

MOST_WORTH = 2.0**64  # far above what any number of uses adds up to, far below where scores are rescaled


class Unusable(ValueError):
    """What was saved cannot be used; the text says why."""


@dataclass(frozen=True)
class HotSet:
    """What a scheduler's slots hold, and what it knows of its experts.

    Attributes
    ----------
    is_resident : bool (shards,)
    worth : float64 (experts,)
        Uses of late, one that is a half life old counting half; of absent experts too. Nothing of what is foretold.
    half_life_steps : float
        Passes over all layers in which a use's worth halves.
    past : uint32 (layers, words, passes)
        `State.past`, the last pass last; no passes where none were remembered.
    factors : float64 (NUM_LANES,), optional
        What lanes took against the profile (`Observed.factor`); None: not learned.
    profile : str
        Names the rates that the factors belong to (`rates_name`).
    """

    is_resident: NDArray[np.bool_]
    worth: NDArray[np.float64]
    half_life_steps: float
    past: NDArray[np.uint32]
    factors: NDArray[np.float64] | None = None
    profile: str = ""


@dataclass(frozen=True)
class WarmState:
    """A state whose slots are taken by a hot set, and the copies that make that true: ``shards`` into ``slots``."""

    state: State
    slots: NDArray[np.int64]
    shards: NDArray[np.int64]


def rates_name(rates: Sequence[Rates]) -> str:
    """A name of the rates of all layers: factors that were learned with others say nothing."""
    digest = hashlib.blake2b(digest_size=16)
    for one in rates:
        digest.update(np.concatenate([np.atleast_1d(np.asarray(value, np.float64)) for value in one]).tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ from a state
def take_hot_set(
    state: State,
    geometry: Geometry,
    half_life_steps: float,
    rates: Sequence[Rates] = (),
    learned: Observed | None = None,
) -> HotSet:
    """A copy of what is worth keeping of a state, and of the factors learned with these rates."""
    return HotSet(
        is_resident=state.slot_of >= 0,
        worth=np.minimum(_worth(state, geometry, half_life_steps), MOST_WORTH),
        half_life_steps=half_life_steps,
        past=np.roll(state.past, NUM_PAST - 1 - int(state.row[0]), axis=2),
        factors=None if learned is None else learned.factor.copy(),
        profile="" if learned is None else rates_name(rates),
    )


def _worth(state: State, geometry: Geometry, half_life_steps: float) -> NDArray[np.float64]:
    """Scores as uses of late. Of least recently used only the last use is known; an expert never used has 0."""
    if state.eviction == LRU:
        passes = (state.clock[0] - state.score) / geometry.num_layers
        return np.where(state.score > 0, np.exp2(-passes / half_life_steps), 0.0)
    raised = np.where(state.flags & RAISED, state.boost * state.boost_unit[geometry.layer_of], 0.0)
    return np.maximum((state.score - raised) / state.unit[0], 0.0)


# ------------------------------------------------------------------------------------------------ into a state
def check_hot_set(hot: HotSet, geometry: Geometry) -> None:
    """Refuse what compiled code must never see, and what cannot have been saved of such a model.

    Raises
    ------
    Unusable
    """
    experts, shards = int(geometry.first_expert[-1]), int(geometry.first_shard[-1])
    if hot.worth.shape != (experts,) or hot.is_resident.shape != (shards,):
        raise Unusable("its experts are not those of the model")
    if not ((hot.worth >= 0) & (hot.worth <= MOST_WORTH)).all():
        raise Unusable("an expert's worth is no number in range")
    if not 0 < hot.half_life_steps < np.inf:
        raise Unusable(f"its half life is {hot.half_life_steps}")
    if hot.past.ndim != 3 or hot.past.shape[0] != geometry.num_layers:
        raise Unusable("its past passes are not those of the model")
    factors = hot.factors
    if factors is not None and (factors.shape != (NUM_LANES,) or not ((factors >= LEAST) & (factors <= MOST)).all()):
        raise Unusable("a factor of a lane's rate is out of range")


def warm_state(hot: HotSet, empty: State, geometry: Geometry, half_life_steps: float) -> WarmState:
    """An empty state as it is once the hot set, or what fits of it, has been copied into its slots.

    Parameters
    ----------
    hot : HotSet
        Checked here.
    empty : State
        Its arrays become those of the result.

    Raises
    ------
    Unusable
    """
    check_hot_set(hot, geometry)
    experts, shards = _hottest_first(hot, geometry)
    slots = np.full(len(shards), -1, np.int64)
    pool_of_shard = empty.pool_of[geometry.layer_of[experts]]
    for pool, first in enumerate(empty.first_slot[:-1]):
        mine = np.flatnonzero(pool_of_shard == pool)[: empty.num_free[pool]]
        slots[mine] = first + np.arange(len(mine))  # the lowest ones, which lie on top of the stack
        empty.num_free[pool] -= len(mine)
    fits = slots >= 0
    experts, shards, slots = experts[fits], shards[fits], slots[fits]
    empty.owner[slots], empty.slot_of[shards] = shards, slots
    np.add.at(empty.resident, experts, 1)
    empty.score[:] = _scores(hot, empty, half_life_steps)
    _build_heaps(empty, geometry)
    if hot.past.shape == empty.past.shape:  # else only one of the two runs remembered passes
        empty.past[...] = hot.past
    try:
        check(empty, geometry)
    except AssertionError as error:
        raise Unusable(f"it makes no sound state ({error})") from None
    return WarmState(empty, slots, shards)


def _hottest_first(hot: HotSet, geometry: Geometry) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Experts and shards that were resident, experts of most worth first, each one's shards in order."""
    shards = np.flatnonzero(hot.is_resident)
    layer = np.searchsorted(geometry.first_shard, shards, side="right") - 1
    experts = geometry.first_expert[layer] + (shards - geometry.first_shard[layer]) // geometry.num_shards[layer]
    order = np.lexsort((shards, -experts, -hot.worth[experts]))  # as heaps have it, the higher key stays in a tie
    return experts[order], shards[order]


def _scores(hot: HotSet, state: State, half_life_steps: float) -> NDArray[np.float64]:
    """Worth as this state's scores; its unit is still 1 and its clock 0."""
    if state.eviction == LRU:  # all of it was before the first step, in this order
        scores = np.zeros(len(hot.worth))
        scores[np.lexsort((np.arange(len(scores)), hot.worth))] = np.arange(len(scores)) / len(scores)
        return scores
    return np.minimum(hot.worth * (_certain(half_life_steps) / _certain(hot.half_life_steps)), MOST_WORTH)


def _certain(half_life_steps: float) -> float:
    """Uses of late of an expert that every pass uses: what worth is measured against if the half life changes."""
    return -1.0 / math.expm1(-math.log(2.0) / half_life_steps)


def _build_heaps(state: State, geometry: Geometry) -> None:
    """Experts in order are a heap."""
    order = np.lexsort((np.arange(len(state.score)), state.score))
    order = order[state.resident[order] > 0]
    pool_of = state.pool_of[geometry.layer_of[order]]
    for pool, first in enumerate(state.first_heap):
        members = order[pool_of == pool]
        size = len(members)
        state.heap[first : first + size], state.heap_score[first : first + size] = members, state.score[members]
        state.heap_pos[members], state.heap_size[pool] = np.arange(size), size
