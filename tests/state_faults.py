"""The invariants of `trilane.state.check` said a second time, for compiled code: `find_fault` looks after every event.

It counts from the slots where `check` compares arrays, so that a mistake in one is not one in both. A test breaks
states in every way and asks both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trilane.expert import decision, expert_of
from trilane.neighbours import ONE
from trilane.records import record
from trilane.state import HELD, MOST_FOLLOWED, NUM_COMING, NUM_NEAR, NUM_PAST, NUM_WANTED, RAISED, WORD

FAULTS = (
    "none",
    "a free slot is being filled",
    "a slot's owner is no shard, or says that it lies elsewhere",
    "a slot holds a shard of another pool, or one that is too large for it",
    "more shards say that they lie in a slot than slots own one",
    "resident does not count the landed shards",
    "a free stack does not hold just the free slots",
    "num_filling does not count the fills",
    "the bytes in slots exceed the pool's budget",
    "held is not what the flags say",
    "a heap has a wrong member, place or score",
    "a heap's child comes before its parent",
    "a heap lacks a member",
    "a score or the unit is negative or no number",
    "a boost is no number, or not in its score",
    "a past expert is outside its layer, or a likest pass is none",
    "the tally is not cleared, or one ahead has a rate above 1",
    "the last step is of no layer or to come",
    "a list of wanted or coming experts is wrong",
    "scatter is no part of one",
)
(
    SOUND, FREE_FILLING, OWNER, POOL, SHARD, RESIDENT, FREE, FILLING, BUDGET, HELD_LIST, HEAP, HEAP_ORDER, HEAP_LACKS,
    SCORE, BOOST, PAST, TALLY, LAST_STEP, LISTS, SCATTER,
) = range(len(FAULTS))  # fmt: skip
INFINITE = float("inf")


@record
class Seen(NamedTuple):
    """Counts of one look; `make_seen`."""

    landed: np.ndarray  # int32 (experts,): slots that hold a shard of the expert
    marks: np.ndarray  # uint8 (slots or experts,)
    members: np.ndarray  # int64 (pools,): experts with a place in the heap


def make_seen(state):
    """Scratch for states of this size."""
    experts, slots = state.flags.size, state.owner.size
    return Seen(
        np.zeros(experts, np.int32), np.zeros(max(experts, slots), np.uint8), np.zeros(state.heap_size.size, np.int64)
    )


@decision
def find_fault(state, geometry, seen):
    """The first broken invariant, a place in `FAULTS`; 0 without one."""
    fault = _slots_fault(state, geometry, seen)
    if fault == SOUND:
        fault = _free_fault(state, seen)
    if fault == SOUND:
        fault = _held_fault(state, seen)
    if fault == SOUND:
        fault = _heaps_fault(state, geometry, seen)
    if fault == SOUND:
        fault = _scores_fault(state)
    if fault == SOUND:
        fault = _past_fault(state, geometry)
    if fault == SOUND:
        fault = _lists_fault(state, geometry)
    return fault


@decision(inline=True)
def _is_number(value):
    """Finite and not negative."""
    return value >= 0.0 and value < INFINITE


@decision
def _slots_fault(state, geometry, seen):
    """Each slot's shard says so, lies in its pool and fits; there are no other shards in slots; `resident` counts."""
    seen.landed[:] = 0
    owned = 0
    for pool in range(state.num_free.size):
        filling = nbytes = 0
        for slot in range(state.first_slot[pool], state.first_slot[pool + 1]):
            shard = state.owner[slot]
            if shard < 0:
                if shard != -1 or state.filling[slot] != 0:
                    return FREE_FILLING
                continue
            if shard >= state.slot_of.size or state.filling[slot] > 1:
                return OWNER
            if state.slot_of[shard] != (-2 - slot if state.filling[slot] else slot):
                return OWNER
            expert = expert_of(geometry, shard)
            layer = geometry.layer_of[expert]
            size = geometry.shard_nbytes[layer, (shard - geometry.first_shard[layer]) % geometry.num_shards[layer]]
            if state.pool_of[layer] != pool or size > state.slot_nbytes[pool]:
                return POOL
            owned, nbytes, filling = owned + 1, nbytes + size, filling + state.filling[slot]
            seen.landed[expert] += 1 - state.filling[slot]
        if filling != state.num_filling[pool]:
            return FILLING
        if nbytes > (state.first_slot[pool + 1] - state.first_slot[pool]) * state.slot_nbytes[pool]:
            return BUDGET
    for shard in range(state.slot_of.size):
        owned -= 1 if state.slot_of[shard] != -1 else 0
    if owned != 0:
        return SHARD
    for expert in range(state.resident.size):
        if state.resident[expert] != seen.landed[expert]:
            return RESIDENT
    return SOUND


@decision
def _free_fault(state, seen):
    """A stack names free slots of its pool, none twice, and as many as there are."""
    seen.marks[:] = 0
    for pool in range(state.num_free.size):
        first, stop = state.first_slot[pool], state.first_slot[pool + 1]
        free = 0
        for slot in range(first, stop):
            free += 1 if state.owner[slot] == -1 else 0
        if state.num_free[pool] != free:
            return FREE
        for k in range(first, first + free):
            slot = state.free[k]
            if slot < first or slot >= stop or state.owner[slot] != -1 or seen.marks[slot] != 0:
                return FREE
            seen.marks[slot] = 1
    return SOUND


@decision
def _held_fault(state, seen):
    """`held` names just the experts of the flag, each once."""
    seen.marks[:] = 0
    if state.num_held[0] < 0 or state.num_held[0] > state.held.size:
        return HELD_LIST
    for k in range(state.num_held[0]):
        expert = state.held[k]
        if expert < 0 or expert >= state.flags.size or seen.marks[expert] != 0:
            return HELD_LIST
        seen.marks[expert] = 1
    for expert in range(state.flags.size):
        if (state.flags[expert] & HELD != 0) != (seen.marks[expert] != 0):
            return HELD_LIST
    return SOUND


@decision
def _heaps_fault(state, geometry, seen):
    """Experts with a place in their pool's heap own landed slots, parents come first, and none is missing.

    A held one may be missing, or have another score in the heap than its own.
    """
    seen.members[:] = 0
    for expert in range(state.flags.size):
        pool = state.pool_of[geometry.layer_of[expert]]
        is_in, is_held = state.heap_pos[expert] != -1, state.flags[expert] & HELD != 0
        if is_in and state.resident[expert] <= 0 or not is_in and not is_held and state.resident[expert] > 0:
            return HEAP_LACKS
        if not is_in:
            continue
        seen.members[pool] += 1
        place = state.heap_pos[expert]
        if place < 0 or place >= state.heap_size[pool] or state.heap[state.first_heap[pool] + place] != expert:
            return HEAP
        score = state.heap_score[state.first_heap[pool] + place]
        if not is_held and score != state.score[expert]:
            return HEAP
        if place > 0:
            up = state.first_heap[pool] + (place - 1) // 2
            above, least = state.heap[up], state.heap_score[up]
            if above < 0 or above >= state.flags.size:
                return HEAP
            if not (least < score or (least == score and above < expert)):
                return HEAP_ORDER
    for pool in range(state.heap_size.size):
        if seen.members[pool] != state.heap_size[pool]:
            return HEAP
    return SOUND


@decision
def _scores_fault(state):
    if not (_is_number(state.unit[0]) and state.unit[0] > 0.0):
        return SCORE
    for expert in range(state.score.size):
        if not _is_number(state.score[expert]):
            return SCORE
        if state.boost[expert] != 0 and state.flags[expert] & RAISED == 0:
            return BOOST
    for layer in range(state.boost_unit.size):
        if not _is_number(state.boost_unit[layer]):
            return BOOST
    return SOUND if state.scatter[0] >= 0.0 and state.scatter[0] <= 1.0 else SCATTER


@decision
def _past_fault(state, geometry):
    """Past passes name experts of their layers, the likest ones are passes, and the last step is one that was."""
    for layer in range(state.past.shape[0]):
        count = geometry.first_expert[layer + 1] - geometry.first_expert[layer]
        for word in range(state.past.shape[1]):
            inside = max(0, min(WORD, count - word * WORD))
            for row in range(state.past.shape[2]):
                if np.int64(state.past[layer, word, row]) >> inside != 0:
                    return PAST
    if state.row[0] < 0 or state.row[0] >= NUM_PAST or state.num_near[0] < 0 or state.num_near[0] > NUM_NEAR:
        return PAST
    rates = 0
    for k in range(NUM_NEAR):
        if state.near[k] < 0 or state.near[k] >= NUM_PAST or state.near_rate[k] < 0:
            return PAST
        rates += state.near_rate[k] if k < state.num_near[0] else 0
    if rates > ONE:
        return PAST
    for row in range(NUM_PAST):
        if state.alike[row] < 0 or state.alike[row] > MOST_FOLLOWED * 1024:
            return PAST
    if state.last_layer[0] < 0 or state.last_layer[0] >= geometry.num_layers:
        return LAST_STEP
    if state.last_clock[0] < 0 or state.last_clock[0] > state.clock[0]:
        return LAST_STEP
    for id_ in range(state.tally.size):
        if state.tally[id_] != 0 or state.ahead[id_] < 0 or state.ahead[id_] > ONE:
            return TALLY
    return SOUND


@decision
def _lists_fault(state, geometry):
    num = geometry.first_expert[geometry.num_layers]
    if _list_is_wrong(state.wanted, state.num_wanted[0], NUM_WANTED, num):
        return LISTS
    return LISTS if _list_is_wrong(state.coming, state.num_coming[0], NUM_COMING, num) else SOUND


@decision
def _list_is_wrong(experts, count, most, num):
    if count < 0 or count > most:
        return True
    for k in range(count):
        if experts[k] < 0 or experts[k] >= num:
            return True
        for other in range(k):
            if experts[other] == experts[k]:
                return True
    return False
