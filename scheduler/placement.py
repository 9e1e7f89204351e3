"""The split carried out in a plan: slots for what may stay, a lane for every missing shard, and what each lane got.

Follows the link order run by run of neighbouring shards; what is refused a slot falls back to a lane that needs none.
"""

from __future__ import annotations

from trilane.expert import CPU, STREAM, UNPLACED, ZERO_COPY, decision
from trilane.plan import NUM_COPIES, NUM_EVICTIONS, NUM_FILLS, NUM_MISSING, NUM_RUNS, allows
from trilane.residency import NO_PRICE, claim_slots, fill_slot
from trilane.state import INDEX


@decision(inline=True)
def place_missing(state, geometry, options, step, work, split):
    """Give each missing shard the lane that the split says, and a slot if the lane fills one."""
    num_shards = geometry.num_shards[step.layer]
    rest = UNPLACED if options.lanes == 1 << STREAM else CPU
    no_fills = state.num_filling[state.pool_of[step.layer]] == 0
    entry = k = 0
    while k < work.counts[NUM_MISSING]:
        i, mark, stop = work.who[entry] & INDEX, work.mark[entry], work.bound[entry + 1]
        is_whole = no_fills and stop - k == num_shards  # then no shard need be looked at
        entry += 1
        j = 0
        if split.subset < 0 and k >= split.linked:
            nbytes = work.nbytes[entry] - work.nbytes[entry - 1]
            _give_rest(work, i * num_shards, num_shards, mark, rest, stop - k, nbytes, nbytes * step.rows[i])
            k = stop
        while k < stop:
            at = (i * num_shards + j) & INDEX
            if not is_whole and work.lane[at] != mark:
                j += 1
                continue
            lane, number = _side_of(split, work.counts[NUM_MISSING], k, rest)
            number = min(number, stop - k)
            shard = geometry.first_shard[step.layer] + step.experts[i] * num_shards + j
            if not is_whole:
                number = _count_neighbours(state.slot_of, work.lane, at, shard, mark, number)
            _place_run(state, geometry, options, step, work, i, j, shard, lane, number)
            j, k = j + number, k + number


@decision(inline=True)
def _give_rest(work, at, num_shards, mark, lane, count, nbytes, row_nbytes):
    """Give all of an entry, which needs no slots, one lane."""
    _replace(work.lane, at, num_shards, mark, lane)
    if lane >= 0:
        _count_lane(work, lane, count, nbytes, row_nbytes)


@decision(inline=True)
def _replace(lanes, at, num_shards, mark, lane):
    for here in range(at, at + num_shards):
        lanes[here] = lane if lanes[here] == mark else lanes[here]


@decision(inline=True)
def _count_lane(work, lane, count, nbytes, row_nbytes):
    work.counts[lane] += count
    work.lane_nbytes[lane] += nbytes
    work.lane_row_nbytes[lane] += row_nbytes


@decision(inline=True)
def _side_of(split, total, k, rest):
    """Lane of the shard at ``k`` in link order, and how many from there up surely have the same."""
    if split.subset >= 0:
        return (split.subset_lane if _is_in(split.subset, total, k) else CPU), _count_alike(split.subset, total, k)
    if k < split.streamed:
        return STREAM, split.streamed - k
    if k < split.linked:
        return ZERO_COPY, split.linked - k
    return rest, total - k


@decision(inline=True)
def _is_in(subset, total, k):
    return (subset >> (total - 1 - k)) & 1


@decision
def _count_alike(subset, total, k):
    number = 1
    while k + number < total and _is_in(subset, total, k + number) == _is_in(subset, total, k):
        number += 1
    return number


@decision(inline=True)
def _count_neighbours(slot_of, lanes, at, shard, mark, most):
    """How many shards from ``at`` up have the mark and are, like the first, being filled or not; ``most`` at most."""
    filled = slot_of[shard & INDEX] < -1
    number = 1
    while number < most and lanes[(at + number) & INDEX] == mark and (slot_of[(shard + number) & INDEX] < -1) == filled:
        number += 1
    return number


@decision(inline=True)
def _place_run(state, geometry, options, step, work, i, j, shard, lane, number):
    """Give ``number`` neighbouring shards of the ``i``-th expert, from its shard ``j`` up, slots and the lane."""
    layer = step.layer
    pool = state.pool_of[layer]
    asks = options.admit_by_score and options.lanes != 1 << STREAM
    at = (i * geometry.num_shards[layer] + j) & INDEX
    taken = 0
    if (lane == STREAM or (lane == ZERO_COPY and options.fills)) and state.slot_of[shard] == -1:
        expert = geometry.first_expert[layer] + step.experts[i]
        score = work.worth[i] if asks else NO_PRICE
        taken = claim_slots(state, geometry, pool, score, number, work.slot, at)
        if taken > 1:
            _sort_slots(work.slot, at, at + taken)
        _fill_run(state, geometry, step, work, at, shard, j, taken, lane == STREAM)
        state.resident[expert] += taken
        work.counts[NUM_RUNS] += 1 if lane == STREAM and taken > 0 else 0
    if lane == STREAM:
        _give_lane(work, at, j, taken, step.rows[i], lane)
        at, j, number = at + taken, j + taken, number - taken
        lane = _without_slot(options)
    if number > 0:
        _give_lane(work, at, j, number, step.rows[i], lane)


@decision(inline=True)
def _fill_run(state, geometry, step, work, at, shard, j, count, is_copied):
    """Fill the claimed slots from index ``at`` up with ``count`` shards from ``shard`` up, shard ``j`` of its expert.

    Notes victims, and marks copies: one goes on where slots are neighbours too and the shard before fills its own.
    """
    layer = step.layer
    slot_nbytes = state.slot_nbytes[state.pool_of[layer]]
    copy = copies = lost = 0
    follower = -1
    for k in range(count):  # without branches: slots are not foreseen
        here = (at + k) & INDEX
        slot = work.slot[here] & INDEX
        victim = fill_slot(state, slot, shard + k)
        work.victim[here] = victim
        lost += int(victim >= 0)
        is_next = int(slot == follower)
        copy = copy * is_next + k * (1 - is_next)
        copies += 1 - is_next
        work.run[(at + copy) & INDEX] = k + 1 - copy if is_copied else 0
        follower = slot + 1 if geometry.shard_nbytes[layer, (j + k) & INDEX] == slot_nbytes else -1
    work.counts[NUM_COPIES] += copies if is_copied else 0
    work.counts[NUM_EVICTIONS] += lost
    work.counts[NUM_FILLS] += count


@decision(inline=True)
def _give_lane(work, at, j, count, rows, lane):
    """Give ``count`` shards of one expert, from index ``at`` and its shard ``j`` up, a lane; count them in it."""
    for k in range(count):
        work.lane[(at + k) & INDEX] = lane
    if lane >= 0:
        nbytes = work.sizes[(j + count) & INDEX] - work.sizes[j & INDEX]
        _count_lane(work, lane, count, nbytes, nbytes * rows)


@decision(inline=True)
def _without_slot(options):
    if allows(options, ZERO_COPY):
        return ZERO_COPY
    return CPU if allows(options, CPU) else UNPLACED


@decision
def _sort_slots(slots, start, stop):
    """Sort slots, so that neighbouring shards get neighbouring slots and make long copies (most are sorted)."""
    for at in range(start + 1, stop):
        slot = slots[at & INDEX]
        to = at
        while to > start and slots[(to - 1) & INDEX] > slot:
            slots[to & INDEX] = slots[(to - 1) & INDEX]
            to -= 1
        slots[to & INDEX] = slot
