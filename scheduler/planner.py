"""The scheduler's decisions: `plan_layer` and what belongs to it. Nothing here moves a byte or allocates one.

`plan_layer` looks the routed experts up, has the missing shards split over the lanes (`split`), takes slots for
what may stay, and writes the plan into `plan.Work`. `plan_wave` plans what found no slot; `plan_fills` reserves
slots for hinted experts; `abandon_step` undoes a step that failed. All run compiled or as plain Python with the
same results, and time is passed in.
"""

from __future__ import annotations

from trilane.cost import Loads, write_terms
from trilane.eviction import advance_clock, count_hint, count_use, hold_expert, release_step, score_if_used
from trilane.expert import CPU, HIT, SKIP, STREAM, UNPLACED, ZERO_COPY, decision
from trilane.plan import EXHAUSTIVE_SHARDS, NUM_COPIES, NUM_EVICTIONS, NUM_FILLS, NUM_MISSING, NUM_UNPLACED
from trilane.residency import NO_PRICE, claim_slots, empty_slot, fill_slots, reserve_slot, slot_price, take_slots
from trilane.split import Step, allows, choose_split
from trilane.state import INDEX


@decision
def plan_layer(state, geometry, rates, options, layer, experts, rows, num_experts, clock, work):
    """Plan one layer-step: lanes and slots into ``work``, residency and scores into ``state``.

    Parameters
    ----------
    layer : int
    experts, rows : int32 (at least num_experts,)
        The unique routed experts of the layer, and how many rows each has.
    clock : int
        Running count of layer-steps, never falling; a negative one stands for `plan_wave`.

    Returns
    -------
    int
        Shards that found no place: 0, but where STREAM is the only lane and too few slots can be had. Run the
        plan, then call `plan_wave` for the rest; if not even one was placed, land or drop a fill first.

    Notes
    -----
    The step's experts are no victims until `release_step` or the next plan. A plan's fills may be written when the
    step before has read its slots, so steps run in the order of their plans.
    """
    return plan_step(state, geometry, rates, options, layer, experts, rows, num_experts, clock, clock < 0, work)


@decision
def plan_wave(state, geometry, rates, options, layer, experts, rows, num_experts, work):
    """Plan what the plan in ``work`` left UNPLACED, once the slots of its wave have been read.

    Shards of earlier waves become SKIP and may lose their slots; one whose background fill landed since is a HIT.
    Returns what is still UNPLACED.
    """
    wave = -1 - num_experts  # a variable: numba would compile `plan_layer` once more for a literal
    return plan_layer(state, geometry, rates, options, layer, experts, rows, num_experts, wave, work)


@decision(inline=True)
def plan_step(state, geometry, rates, options, layer, experts, rows, num_experts, clock, is_wave, work):
    """`plan_layer`, or `plan_wave` if ``is_wave``, for compiled loops.

    Inlined, since handing some fifty arrays over takes longer than the split itself. Call it at one place, with a
    variable ``is_wave``: each call compiles it again, for tens of seconds.
    """
    step = Step(layer, experts, rows, num_experts)
    release_step(state, geometry)
    if is_wave:
        _look_again(state, geometry, step, work)
    else:
        advance_clock(state, clock)
        _look_up(state, geometry, step, work)
    missing = _clear_counts(geometry, step, work)
    if missing > 0:
        choose_split(state, geometry, rates, options, step, work)
        _take_slots(state, geometry, options, step, work)
    counts, nbytes, row_nbytes = work.counts, work.lane_nbytes, work.lane_row_nbytes
    counts[NUM_UNPLACED] = missing - counts[STREAM] - counts[ZERO_COPY] - counts[CPU]
    loads = Loads(
        nbytes[HIT],
        row_nbytes[HIT],
        float(counts[NUM_COPIES]),
        nbytes[STREAM],
        row_nbytes[STREAM],
        counts[ZERO_COPY],
        nbytes[ZERO_COPY],
        row_nbytes[ZERO_COPY],
        counts[CPU],
        nbytes[CPU],
        row_nbytes[CPU],
    )
    write_terms(rates, loads, work.predicted_us)
    return counts[NUM_UNPLACED]


@decision(inline=True)
def _look_up(state, geometry, step, work):
    """Hold the experts, keep their scores from before this use, mark each shard HIT or UNPLACED."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    first = geometry.first_expert[layer]
    count = geometry.first_expert[layer + 1] - first
    _clear_marks(work.lane, work.slot, work.victim, work.run, step.num_experts * num_shards)
    num_hits = nbytes = row_nbytes = 0
    for i in range(step.num_experts):
        if step.experts[i] < 0 or step.experts[i] >= count:
            raise ValueError("an expert id is outside its layer: drop skipped ids before planning")
        expert = (first + step.experts[i]) & INDEX
        hold_expert(state, state.pool_of[layer], expert)
        work.reuse[i] = state.score[expert]
        count_use(state, expert)
        work.missing[i] = num_shards - state.resident[expert]
        if state.resident[expert] == 0:
            continue
        num_hits += int(state.resident[expert])
        shard = geometry.first_shard[layer] + step.experts[i] * num_shards
        size = 0
        for j in range(num_shards):
            slot = state.slot_of[(shard + j) & INDEX]
            if slot >= 0:
                at = (i * num_shards + j) & INDEX
                work.lane[at] = HIT
                work.slot[at] = slot
                size += geometry.shard_nbytes[layer, j]
        nbytes += size
        row_nbytes += size * step.rows[i]
    work.num_hits[0] = num_hits
    work.hits[0], work.hits[1] = float(nbytes), float(row_nbytes)


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
def _clear_counts(geometry, step, work):
    """Begin the counts with the hits; returns how many shards are missing."""
    missing = 0
    for i in range(step.num_experts):
        missing += work.missing[i]
    for k in range(NUM_MISSING):
        work.counts[k] = 0
    for lane in range(4):
        work.lane_nbytes[lane] = work.lane_row_nbytes[lane] = 0.0
    work.counts[NUM_MISSING] = missing
    work.counts[HIT] = work.num_hits[0]
    work.lane_nbytes[HIT], work.lane_row_nbytes[HIT] = work.hits[0], work.hits[1]
    return missing


@decision(inline=True)
def _take_slots(state, geometry, options, step, work):
    """Follow the split in link order, run by run; what is refused a slot falls back to a lane that needs none."""
    first_expert = geometry.first_expert[step.layer]
    num_shards = geometry.num_shards[step.layer]
    pool = state.pool_of[step.layer]
    asks = options.admit_by_score and options.lanes != 1 << STREAM
    stretch = k = 0
    while k < work.counts[NUM_MISSING]:
        end = work.bound[stretch + 1]
        if work.side[k] != work.side[end - 1] or work.counts[NUM_MISSING] <= EXHAUSTIVE_SHARDS:
            end = _side_end(work.side, k, end)  # else the split is a prefix
        lane = int(work.side[k])
        who, start = work.who[stretch] & INDEX, work.bound[stretch]
        at, shard = int(work.entry[stretch]) + k - start, work.shard[stretch] + k - start
        j = at - who * num_shards
        taken = 0
        if (lane == STREAM or (lane == ZERO_COPY and options.fills)) and state.slot_of[shard] == -1:
            expert = first_expert + step.experts[who]
            score = state.score[expert] if asks else NO_PRICE
            taken = claim_slots(state, geometry, pool, score, end - k, work.slot, at)
            if lane == STREAM and taken > 0:
                _sort_slots(work.slot, at, at + taken)
                _mark_copies(state, geometry, step, work, at, taken, j)
            work.counts[NUM_EVICTIONS] += fill_slots(state, expert, shard, work.slot, work.victim, at, taken)
            work.counts[NUM_FILLS] += taken
        if lane == STREAM:
            _give_lane(work, at, j, taken, step.rows[who], lane)
            at, j, k = at + taken, j + taken, k + taken
            lane = _without_slot(options)
        _give_lane(work, at, j, end - k, step.rows[who], lane)
        k = end
        if k == work.bound[stretch + 1]:
            stretch += 1


@decision(inline=True)
def _side_end(side, k, stop):
    """End of the shards from ``k`` up which the split gives one lane."""
    end = k + 1
    while end < stop and side[end] == side[k]:
        end += 1
    return end


@decision(inline=True)
def _give_lane(work, at, j, count, rows, lane):
    """Give ``count`` shards of one expert, from index ``at`` and its shard ``j`` up, a lane; count them in it."""
    if count == 0 or lane < 0:
        return
    for k in range(count):
        work.lane[(at + k) & INDEX] = lane
    nbytes = work.sizes[(j + count) & INDEX] - work.sizes[j & INDEX]
    work.counts[lane] += count
    work.lane_nbytes[lane] += nbytes
    work.lane_row_nbytes[lane] += nbytes * rows


@decision(inline=True)
def _without_slot(options):
    if allows(options, ZERO_COPY):
        return ZERO_COPY
    return CPU if allows(options, CPU) else UNPLACED


@decision(inline=True)
def _mark_copies(state, geometry, step, work, at, count, j):
    """Mark the copies of ``count`` shards from ``j`` up: a copy goes on where slots are neighbours too."""
    layer = step.layer
    slot_nbytes = state.slot_nbytes[state.pool_of[layer]]
    copy = 0
    copies = 1
    work.run[at] = 1
    for k in range(1, count):  # without branches: slots are not foreseen
        here = (at + k) & INDEX
        is_next = (work.slot[here] == work.slot[(here - 1) & INDEX] + 1) & (
            geometry.shard_nbytes[layer, (j + k - 1) & INDEX] == slot_nbytes
        )
        copy = copy if is_next else k
        copies += 0 if is_next else 1
        work.run[(at + copy) & INDEX] = k + 1 - copy
    work.counts[NUM_COPIES] += copies


@decision
def _sort_slots(slots, start, stop):
    """Sort slots, so that neighbouring shards get neighbouring slots and make long copies.

    Slots of one victim come last shard first, so a falling row is turned round before it is sorted.
    """
    if slots[start] > slots[stop - 1]:
        for k in range((stop - start) // 2):
            a, b = (start + k) & INDEX, (stop - 1 - k) & INDEX
            slots[a], slots[b] = slots[b], slots[a]
    for at in range(start + 1, stop):
        slot = slots[at & INDEX]
        to = at
        while to > start and slots[(to - 1) & INDEX] > slot:
            slots[to & INDEX] = slots[(to - 1) & INDEX]
            to -= 1
        slots[to & INDEX] = slot


@decision(inline=True)
def _look_again(state, geometry, step, work):
    """Mark what is done SKIP, and HIT where a fill landed since; hold the experts which take part in this wave."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    num_hits = 0
    nbytes = row_nbytes = 0.0
    for i in range(step.num_experts):
        key = geometry.first_shard[layer] + step.experts[i] * num_shards
        takes_part = False
        missing = 0
        for j in range(num_shards):
            at = i * num_shards + j
            slot = state.slot_of[key + j]
            if work.lane[at] != UNPLACED:
                _mark(work.lane, work.slot, work.victim, work.run, at, SKIP, -1)
                continue
            takes_part = True
            if slot < 0:
                missing += 1
                continue
            _mark(work.lane, work.slot, work.victim, work.run, at, HIT, slot)
            num_hits += 1
            nbytes += geometry.shard_nbytes[layer, j]
            row_nbytes += geometry.shard_nbytes[layer, j] * step.rows[i]
        work.missing[i] = missing
        if takes_part:
            hold_expert(state, state.pool_of[layer], geometry.first_expert[layer] + step.experts[i])
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


@decision
def plan_fills(state, geometry, options, layer, experts, num_experts, clock, work):
    """Reserve slots for hinted experts whose score, were they used now, beats that of the shards they displace.

    Parameters
    ----------
    experts : int32 (at least num_experts,)
        Experts of the layer that are likely to be used, most likely first.

    Returns
    -------
    int
        Fills reserved (at most ``options.max_fills``), in ``work.fill_shard``, ``fill_slot``, ``fill_victim``. Each
        must end in `residency.land_fill` or `drop_fill`. The victims are gone at once: a copy may start when no
        step that read them is under way.
    """
    advance_clock(state, clock)
    count = 0
    for i in range(num_experts):
        if experts[i] < 0 or experts[i] >= geometry.first_expert[layer + 1] - geometry.first_expert[layer]:
            raise ValueError("an expert id is outside its layer: drop skipped ids before planning")
        count = _reserve_expert(state, geometry, options, layer, experts[i], work, count)
    return count


@decision(inline=True)
def _reserve_expert(state, geometry, options, layer, id_, work, count):
    """Reserve slots for the absent shards of one hinted expert; return the new count."""
    pool = state.pool_of[layer]
    expert = geometry.first_expert[layer] + id_
    value = score_if_used(state, expert)
    hinted = False
    for j in range(geometry.num_shards[layer]):
        shard = geometry.first_shard[layer] + id_ * geometry.num_shards[layer] + j
        if state.slot_of[shard] != -1:
            continue
        if not hinted and slot_price(state, pool) < value:
            count_hint(state, pool, expert)  # before any victim is taken: it must not be its own
            hinted = True
        if count >= min(options.max_fills, work.fill_slot.size) or slot_price(state, pool) >= value:
            break
        take_slots(state, geometry, pool, NO_PRICE, 1, work.fill_slot, work.fill_victim, count)
        reserve_slot(state, pool, int(work.fill_slot[count]), shard)
        work.fill_shard[count] = shard
        count += 1
    return count


@decision
def abandon_step(state, geometry, layer, experts, num_experts, work):
    """Undo the residency of a failed step's fills: their slots hold nothing, their victims stay gone.

    Call it before the next plan. The uses stay counted; the step's experts are released.
    """
    num_shards = geometry.num_shards[layer]
    for at in range(num_experts * num_shards):
        id_ = experts[at // num_shards]
        slot = work.slot[at]
        shard = geometry.first_shard[layer] + id_ * num_shards + at % num_shards
        if (work.lane[at] == STREAM or work.lane[at] == ZERO_COPY) and slot >= 0 and state.slot_of[shard] == slot:
            empty_slot(state, state.pool_of[layer], slot, geometry.first_expert[layer] + id_)
    release_step(state, geometry)
