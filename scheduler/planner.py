"""The scheduler's decisions: `plan_layer` and what belongs to it. Nothing here moves a byte or allocates one.

`plan_layer` looks the routed experts up, has the missing shards split over the lanes (`split`), takes slots for
what may stay, and writes the plan into `plan.Work`. `learn_step` comes after it, while the lanes run. `plan_wave`
plans what found no slot; `note_step` takes in a step of hits that asked nobody. `plan_fills` reserves slots for hinted
experts, `plan_background` for what is to come or was missed of late; `abandon_step` undoes a step that failed. All run
compiled or as plain Python with the same results, and time is passed in.
"""

from __future__ import annotations

from trilane.cost import Loads, write_terms
from trilane.demotion import demote_hits
from trilane.eviction import (
    advance_clock,
    count_hint,
    push_expert,
    release_step,
    remove_expert,
    score_if_used,
    settle_expert,
    settle_step,
    touch_expert,
)
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, decision, first_shard_of
from trilane.link_order import Step, find_missing, sum_sizes
from trilane.lookup import look_again, look_up, weigh_experts
from trilane.neighbours import follow_step, tally_ahead
from trilane.placement import place_missing
from trilane.plan import NUM_COPIES, NUM_MISSING, NUM_RUNS, NUM_UNPLACED
from trilane.residency import NO_PRICE, empty_slot, reserve_slot, slot_price, take_slots
from trilane.split import choose_split, learn_scatter
from trilane.state import HELD, LRU
from trilane.wanted import best_wanted, drop_coming, drop_wanted, has_victim, list_coming, want_expert, want_foretold


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
    sum_sizes(geometry.shard_nbytes[layer], work.sizes, geometry.num_shards[layer])
    if is_wave:
        look_again(state, geometry, step, work)
    else:
        advance_clock(state, clock)
        look_up(state, geometry, step, work)
        demote_hits(rates, options, geometry, step, work)
    missing = _clear_counts(geometry, step, work)
    if missing > 0:
        num = find_missing(step, work)
        if state.past.shape[2] > 0 and not is_wave:
            weigh_experts(state, geometry, layer, experts, num_experts, work.order, num, work.worth, work.reuse)
        split = choose_split(state, geometry, rates, options, step, work, num)
        place_missing(state, geometry, options, step, work, split)
        if options.counts_copies:
            learn_scatter(state, work.counts[STREAM], work.counts[NUM_RUNS], work.counts[NUM_COPIES])
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
def _clear_counts(geometry, step, work):
    """Begin the counts with the hits; returns how many shards are missing."""
    missing = 0
    for i in range(step.num_experts):
        missing += work.missing[i]
    for k in range(NUM_MISSING):
        work.counts[k] = 0
    for lane in range(4):
        work.lane_nbytes[lane] = work.lane_row_nbytes[lane] = 0.0
    work.counts[NUM_MISSING], work.counts[NUM_RUNS] = missing, 0
    work.counts[HIT] = work.num_hits[0]
    work.lane_nbytes[HIT], work.lane_row_nbytes[HIT] = work.hits[0], work.hits[1]
    return missing


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
        step that read them is under way. None of the hinted experts is a victim of another.
    """
    advance_clock(state, clock)
    pool, first, count = state.pool_of[layer], geometry.first_expert[layer], 0
    for i in range(num_experts):
        if experts[i] < 0 or experts[i] >= geometry.first_expert[layer + 1] - first:
            raise ValueError("an expert id is outside its layer: drop skipped ids before planning")
    for i in range(num_experts):
        if state.heap_pos[first + experts[i]] >= 0:
            remove_expert(state, pool, first + experts[i])
    for i in range(num_experts):
        count = _reserve_expert(state, geometry, options, layer, experts[i], work, count)
    for i in range(num_experts):
        expert = first + experts[i]
        if state.heap_pos[expert] < 0 and state.resident[expert] > 0 and state.flags[expert] & HELD == 0:
            push_expert(state, pool, expert)
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
            count_hint(state, pool, expert)
            hinted = True
        if count >= min(options.max_fills, work.fill_slot.size) or slot_price(state, pool) >= value:
            break
        take_slots(state, geometry, pool, NO_PRICE, 1, work.fill_slot, work.fill_victim, count)
        reserve_slot(state, pool, int(work.fill_slot[count]), shard)
        work.fill_shard[count] = shard
        count += 1
    return count


@decision
def learn_step(state, geometry, options, layer, experts, num_experts):
    """Learn from the step that was just planned, for the next ones. Call it once a step, before the next plan.

    It changes scores and what is wanted, never residency, so it can run while the plan is carried out.
    """
    if state.past.shape[2] > 0:
        follow_step(state, geometry, layer, experts, num_experts)
        tally_ahead(state, geometry, layer)
    settle_step(state, geometry)
    if options.background:
        if state.past.shape[2] > 0:
            if options.coming_from == 1:  # where fills take longer, who begins them lists what is to come
                list_coming(state, geometry, options, layer)
            want_foretold(state, geometry, layer)
        for i in range(num_experts):
            expert = geometry.first_expert[layer] + experts[i]
            if state.resident[expert] < geometry.num_shards[layer]:
                want_expert(state, expert)


@decision
def note_step(state, geometry, options, layer, experts, num_experts, clock):
    """Take in a step that nobody planned, since all it used was in slots: count the uses, and learn from it."""
    release_step(state, geometry)
    for i in range(num_experts):
        touch_expert(state, geometry, geometry.first_expert[layer] + experts[i], clock)
    learn_step(state, geometry, options, layer, experts, num_experts)


@decision
def note_stamp(state, geometry, expert, clock):
    """Count a use at ``clock`` that is heard of late: order by it where the last use counts, else by a use now."""
    if state.eviction == LRU:
        state.score[expert] = max(state.score[expert], float(clock))
        settle_expert(state, state.pool_of[geometry.layer_of[expert]], expert)
    else:
        touch_expert(state, geometry, expert, state.clock[0])


@decision
def plan_background(state, geometry, options, most, work):
    """Reserve slots for shards of experts that are worth more than what they displace: those to come, then the wanted.

    Where fills must be sure of their use (``options.least_rate``), for those to come alone.

    Parameters
    ----------
    most : int
        Fills at most; ``options.max_fills`` is a limit too.

    Returns
    -------
    int
        Fills reserved, in the places where `plan_fills` puts them, and ended as its are.
    """
    count = 0
    most = min(most, options.max_fills, work.fill_slot.size)
    while count < most and state.num_coming[0] > 0:
        expert, score = state.coming[0], state.coming_score[0]
        layer = geometry.layer_of[expert]
        shard = _first_absent(state, geometry, expert)
        if shard < 0 or not has_victim(state, geometry, layer, score):
            drop_coming(state)
            continue
        _reserve_shard(state, geometry, state.pool_of[layer], shard, work, count)
        count += 1
    while count < most and state.num_wanted[0] > 0 and options.least_rate == 0:
        place = best_wanted(state)
        expert = state.wanted[place]
        pool = state.pool_of[geometry.layer_of[expert]]
        shard = _first_absent(state, geometry, expert)
        if shard < 0 or slot_price(state, pool) >= state.score[expert]:
            drop_wanted(state, place)
            continue
        _reserve_shard(state, geometry, pool, shard, work, count)
        count += 1
    return count


@decision
def _reserve_shard(state, geometry, pool, shard, work, at):
    take_slots(state, geometry, pool, NO_PRICE, 1, work.fill_slot, work.fill_victim, at)
    reserve_slot(state, pool, int(work.fill_slot[at]), shard)
    work.fill_shard[at] = shard


@decision
def _first_absent(state, geometry, expert):
    """Key of the expert's first shard that is neither there nor on its way; -1 without one."""
    first = first_shard_of(geometry, expert)
    for shard in range(first, first + geometry.num_shards[geometry.layer_of[expert]]):
        if state.slot_of[shard] == -1:
            return shard
    return -1


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
