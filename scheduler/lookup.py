"""Which of a step's shards are there: the routed experts are held, and each shard is marked a hit or missing.

`look_up` begins a step, `look_again` one more wave of it. No lanes are chosen here, and no slot is taken.
"""

from __future__ import annotations

from trilane.eviction import count_use, hold_expert
from trilane.expert import HIT, SKIP, UNPLACED, decision
from trilane.neighbours import ONE, has_tally, rate_near, starts_pass
from trilane.residency import NO_PRICE, empty_slot, slot_price
from trilane.state import INDEX, MOST_FOLLOWED


@decision(inline=True)
def look_up(state, geometry, step, work):
    """Hold the experts, keep their scores from before this use, mark each shard HIT or UNPLACED; sum both."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    first = geometry.first_expert[layer]
    count = geometry.first_expert[layer + 1] - first
    whole = work.sizes[num_shards]
    _clear_marks(work.lane, work.slot, work.victim, work.run, step.num_experts * num_shards)
    num_hits = 0
    nbytes = row_nbytes = 0.0
    for i in range(step.num_experts):
        if step.experts[i] < 0 or step.experts[i] >= count:
            raise ValueError("an expert id is outside its layer: drop skipped ids before planning")
        expert = (first + step.experts[i]) & INDEX
        hold_expert(state, expert)
        work.reuse[i] = state.score[expert]
        count_use(state, expert)
        work.worth[i] = state.score[expert]
        number = int(state.resident[expert])
        work.missing[i] = work.open[i] = num_shards - number
        work.open_nbytes[i], work.open_runs[i] = whole, 1.0
        if number == 0:
            continue
        num_hits += number
        shard = geometry.first_shard[layer] + step.experts[i] * num_shards
        if number == num_shards:
            size, starts = whole, 0
            _mark_whole(state.slot_of, work.lane, work.slot, i * num_shards, shard, num_shards)
        else:
            sizes = geometry.shard_nbytes[layer]
            size, starts = _mark_part(state.slot_of, work.lane, work.slot, i * num_shards, shard, num_shards, sizes)
        work.open_nbytes[i], work.open_runs[i] = whole - size, float(starts)
        nbytes += size
        row_nbytes += size * step.rows[i]
    work.num_hits[0] = num_hits
    work.hits[0], work.hits[1] = nbytes, row_nbytes


@decision(inline=True)
def _mark_whole(slot_of, lanes, slots, at, shard, num_shards):
    """All shards of an expert are hits."""
    for j in range(num_shards):
        lanes[(at + j) & INDEX] = HIT
        slots[(at + j) & INDEX] = slot_of[(shard + j) & INDEX]


@decision(inline=True)
def _mark_part(slot_of, lanes, slots, at, shard, num_shards, sizes):
    """Mark an expert's shards, some of which are there; bytes of these, and runs of the others."""
    size = starts = before = 0
    for j in range(num_shards):  # without branches: what is resident could not be foreseen
        slot = slot_of[(shard + j) & INDEX]
        hits = int(slot >= 0)
        here = (at + j) & INDEX
        lanes[here] = HIT if hits else UNPLACED
        slots[here] = slot if hits else -1
        size += sizes[j] * hits
        starts += (1 - hits) & (1 - before)
        before = 1 - hits
    return float(size), starts


@decision
def weigh_experts(state, geometry, layer, experts, num_experts, order, num, worth, reuse):
    """What the ``num`` ordered experts are worth with what is foretold for after this step (scores are told later)."""
    if num_experts > MOST_FOLLOWED:
        return
    passes = 2 if starts_pass(state, geometry, layer, state.clock[0]) else 1  # after the likest ones of the step before
    is_tallied = has_tally(state, layer, passes)  # not where layers were left out
    unit = state.unit[0] * state.prediction / ONE
    for k in range(num):
        i = order[k] & INDEX
        expert = (geometry.first_expert[layer] + experts[i]) & INDEX
        id_ = int(experts[i])
        rate = int(state.ahead[id_ & INDEX]) if is_tallied else rate_near(state, layer, id_, passes)
        worth[i] += rate * unit - float(state.boost[expert]) * state.boost_unit[layer]
        reuse[i] = worth[i]


@decision(inline=True)
def _clear_marks(lanes, slots, victims, runs, count):
    """Loops over one array each, which become fills of memory."""
    for at in range(count):
        lanes[at] = UNPLACED
    for at in range(count):
        slots[at] = -1
    for at in range(count):
        victims[at] = -1
    for at in range(count):
        runs[at] = 0


@decision(inline=True)
def _mark(lanes, slots, victims, runs, at, lane, slot):
    lanes[at] = lane
    slots[at] = slot
    victims[at] = -1
    runs[at] = 0


@decision(inline=True)
def look_again(state, geometry, step, work):
    """Mark what is done SKIP, and HIT where a fill landed since; hold the experts which take part in this wave."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    num_hits = 0
    nbytes = row_nbytes = 0.0
    for i in range(step.num_experts):
        key = geometry.first_shard[layer] + step.experts[i] * num_shards
        takes_part = False
        missing = 0
        size = starts = 0.0
        for j in range(num_shards):
            at = i * num_shards + j
            slot = state.slot_of[key + j]
            if work.lane[at] != UNPLACED:
                _mark(work.lane, work.slot, work.victim, work.run, at, SKIP, -1)
                continue
            takes_part = True
            if slot < 0:
                starts += 0.0 if j > 0 and work.lane[at - 1] == UNPLACED else 1.0
                missing += 1
                size += geometry.shard_nbytes[layer, j]
                continue
            _mark(work.lane, work.slot, work.victim, work.run, at, HIT, slot)
            num_hits += 1
            nbytes += geometry.shard_nbytes[layer, j]
            row_nbytes += geometry.shard_nbytes[layer, j] * step.rows[i]
        work.missing[i] = work.open[i] = missing
        work.open_nbytes[i], work.open_runs[i] = size, starts
        if takes_part:
            hold_expert(state, geometry.first_expert[layer] + step.experts[i])
    work.num_hits[0] = num_hits
    work.hits[0], work.hits[1] = nbytes, row_nbytes
    if slot_price(state, state.pool_of[layer]) == NO_PRICE:
        _empty_done(state, geometry, step, work)


@decision(inline=True)
def _empty_done(state, geometry, step, work):
    """The step is larger than its pool: the slots of its own finished shards are all there is to take."""
    num_shards = geometry.num_shards[step.layer]
    first = geometry.first_shard[step.layer]
    for at in range(step.num_experts * num_shards):
        id_ = step.experts[at // num_shards]
        slot = state.slot_of[first + id_ * num_shards + at % num_shards]
        if work.lane[at] == SKIP and slot >= 0:
            empty_slot(state, state.pool_of[step.layer], slot, geometry.first_expert[step.layer] + id_)
