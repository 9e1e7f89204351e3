"""Which shard lies in which slot: taking, giving back and landing slots. No scores, no costs, no lanes.

A slot is free, holds a landed shard, or is reserved by a background fill. A demand fill counts as landed when
it is planned, since the step that fills it also reads it; `planner.abandon_step` undoes that after a fault.
"""

from __future__ import annotations

from trilane.eviction import first_victim, push_expert, remove_expert
from trilane.expert import decision, expert_of, first_shard_of
from trilane.state import HELD, INDEX

FREE_PRICE = -1.0  # below every score
NO_PRICE = float("inf")  # no slot can be had


@decision(inline=True)
def slot_price(state, pool):
    """Score of the expert that would lose a slot: -1 if one is free, infinite if none can be had."""
    if state.num_free[pool] > 0:
        return FREE_PRICE
    if first_victim(state, pool) >= 0:
        return state.heap_score[state.first_heap[pool]]
    return NO_PRICE


@decision(inline=True)
def take_slots(state, geometry, pool, score, count, slots, victims, at):
    """Take up to ``count`` slots whose price is at most ``score``; returns how many.

    They are written to ``slots[at:]``, with the shards that lost them (-1: it was free) in ``victims[at:]``, and
    belong to nobody until `fill_slot` or `reserve_slot`.
    """
    taken = claim_slots(state, geometry, pool, score, count, slots, at)
    for k in range(at, at + taken):
        victims[k] = state.owner[slots[k]]
    return taken


@decision(inline=True)
def claim_slots(state, geometry, pool, score, count, slots, at):
    """`take_slots` for one who asks `State.owner` for the victims: it names them until the slots are filled."""
    taken = 0
    while taken < count:
        if state.num_free[pool] > 0:
            taken += _take_free(state, pool, count - taken, slots, at + taken)
            continue
        victim = first_victim(state, pool)
        if victim < 0 or state.heap_score[state.first_heap[pool]] > score:
            break
        taken += _take_victim(state, geometry, pool, victim, count - taken, slots, at + taken)
    return taken


@decision(inline=True)
def _take_free(state, pool, count, slots, at):
    """Pop up to ``count`` free slots."""
    left = state.num_free[pool]
    number = min(count, left)
    top = state.first_slot[pool] + left - 1
    for k in range(number):
        slots[at + k] = state.free[top - k]
    state.num_free[pool] = left - number
    return number


@decision(inline=True)
def _take_victim(state, geometry, pool, expert, count, slots, at):
    """Take up to ``count`` slots of a victim, last shard first, and list them the other way round.

    So shards that lie as a run from shard 0 stay such a run, and what must be fetched is one too; slots mostly rise
    with the shards. Of ``n`` resident shards one lies at ``n - 1`` or above: in such a run just there, else not far.
    """
    first = int(first_shard_of(geometry, expert))
    left = int(state.resident[expert])
    number = min(count, left)
    for k in range(number):
        shard = (first + left - 1 - k) & INDEX
        while state.slot_of[shard] < 0:
            shard = (shard + 1) & INDEX
        slots[(at + number - 1 - k) & INDEX] = state.slot_of[shard]
        state.slot_of[shard] = -1
    state.resident[expert] = left - number
    if left == number:
        remove_expert(state, pool, expert)
    return number


@decision(inline=True)
def fill_slot(state, slot, shard):
    """A claimed slot holds a shard of a held expert, whose ``resident`` the caller counts; returns the victim or -1."""
    victim = state.owner[slot]
    state.owner[slot] = shard
    state.slot_of[shard & INDEX] = slot
    return victim


@decision(inline=True)
def empty_slot(state, pool, slot, expert):
    """Free the slot of a landed shard; the expert leaves the victims with its last slot."""
    state.slot_of[state.owner[slot]] = -1
    state.resident[expert] -= 1
    if state.resident[expert] == 0 and state.heap_pos[expert] >= 0:
        remove_expert(state, pool, expert)
    _free_slot(state, pool, slot)


@decision(inline=True)
def _free_slot(state, pool, slot):
    state.owner[slot] = -1
    state.free[state.first_slot[pool] + state.num_free[pool]] = slot
    state.num_free[pool] += 1


@decision(inline=True)
def reserve_slot(state, pool, slot, shard):
    """A taken slot belongs to a background fill until `land_fill` or `drop_fill`."""
    state.owner[slot] = shard
    state.filling[slot] = 1
    state.slot_of[shard] = -2 - slot
    state.num_filling[pool] += 1


@decision
def fill_layer(geometry, shard):
    """Layer and bytes of a shard key."""
    expert = expert_of(geometry, shard)
    layer = geometry.layer_of[expert]
    return layer, float(geometry.shard_nbytes[layer, shard - first_shard_of(geometry, expert)])


@decision(inline=True)
def _end_fill(state, geometry, slot, shard):
    """Expert and pool of a fill that is under way; (-1, -1) if this slot is not being filled with it."""
    if slot < 0 or slot >= state.owner.size or state.filling[slot] == 0 or state.owner[slot] != shard:
        return -1, -1
    expert = int(expert_of(geometry, shard))
    pool = int(state.pool_of[geometry.layer_of[expert]])
    state.filling[slot] = 0
    state.num_filling[pool] -= 1
    return expert, pool


@decision
def land_fill(state, geometry, slot, shard):
    """A background fill's bytes are in the slot: from now on it hits, and may be a victim.

    Returns
    -------
    bool
        False, and nothing changed, if no such fill is under way.
    """
    expert, pool = _end_fill(state, geometry, slot, shard)
    if expert < 0:
        return False
    state.slot_of[shard] = slot
    state.resident[expert] += 1
    if state.resident[expert] == 1 and state.flags[expert] & HELD == 0:
        push_expert(state, pool, expert)
    return True


@decision
def drop_fill(state, geometry, slot, shard):
    """A background fill was given up: its slot is free again. False if no such fill is under way."""
    expert, pool = _end_fill(state, geometry, slot, shard)
    if expert < 0:
        return False
    state.slot_of[shard] = -1
    _free_slot(state, pool, slot)
    return True
