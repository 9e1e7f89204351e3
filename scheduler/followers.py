"""Which experts follow which in the next pass, learned as steps go by, and what that foretells for scores.

Routing of consecutive tokens is alike beyond the experts that repeat: an expert used now makes some others of its
layer likelier in the next pass, and some of the next layer likelier right now. For each expert the likeliest followers
of both kinds are kept with their rates, exponential averages in 256ths, so that all arithmetic is exact. After a step
the rates of its experts are summed up into a *boost* of the score of each follower in its own layer, which lasts
until the layer's next step; those in the next layer are what may be fetched ahead (`wanted`). Nothing here moves a
slot.
"""

from __future__ import annotations

from trilane.eviction import NOT_RAISED, settle_expert
from trilane.expert import decision
from trilane.state import HELD, INDEX, MOST_FOLLOWED, RAISED

ONE = 256
SHIFT = 4  # an average over about 16 steps
GAIN = ONE >> SHIFT
REPLACED_BELOW = GAIN + GAIN // 2  # a likelier follower is not given up for one that was seen once


@decision(inline=True)
def follow_step(state, geometry, layer, experts, num_experts):
    """Learn from the step whose experts are held, and foretell the layer's next one."""
    pool, first = state.pool_of[layer], geometry.first_expert[layer]
    num_last = state.num_last[layer]
    if state.clock[0] - state.last_clock[layer] <= geometry.num_layers:  # else it was not the pass before
        turn = pass_turn(state.clock[0] // geometry.num_layers)
        for k in range(num_last):
            row = (first + state.last_experts[layer, k]) & INDEX
            candidate = int(experts[(turn + k) % num_experts]) if num_experts > 0 else -1
            _learn(state, pool, layer, first, row, candidate)
    _look_back(state, geometry, layer, experts, num_experts)
    for k in range(num_last):
        _lower_followers(state, layer, first, (first + state.last_experts[layer, k]) & INDEX)
    num = num_experts if num_experts <= MOST_FOLLOWED else 0
    if num > 0:
        state.boost_unit[layer] = state.unit[0] * state.prediction / (ONE * num)
    for k in range(num):
        _sum_followers(state, first, (first + experts[k]) & INDEX)
    for k in range(num):
        _raise_followers(state, layer, first, (first + experts[k]) & INDEX)
    for k in range(num_last):
        _settle_followers(state, pool, first, (first + state.last_experts[layer, k]) & INDEX)
    for k in range(num):
        _settle_followers(state, pool, first, (first + experts[k]) & INDEX)
        state.last_experts[layer, k] = experts[k]
    state.num_last[layer] = num
    state.last_clock[layer] = state.clock[0]


@decision(inline=True)
def _look_back(state, geometry, layer, experts, num_experts):
    """Teach the experts of the layer before, if that was the step before, what came after them."""
    before = layer - 1 if layer > 0 else geometry.num_layers - 1
    if before == layer or num_experts == 0 or state.clock[0] - state.last_clock[before] != 1:
        return
    turn, first = pass_turn(state.clock[0] // geometry.num_layers), geometry.first_expert[before]
    for k in range(state.num_last[before]):
        row = (first + state.last_experts[before, k]) & INDEX
        _learn_ahead(state, geometry.first_expert[layer], row, int(experts[(turn + k) % num_experts]))


@decision(inline=True)
def _learn_ahead(state, first, row, candidate):
    """`_learn` of the next layer's experts, of which no score knows."""
    least, place = ONE, 0
    is_known = False
    for j in range(state.ahead.shape[1]):
        rate, follower = int(state.ahead_rate[row, j]), int(state.ahead[row, j])
        is_known |= (rate > 0) & (follower == candidate)
        used = int(state.flags[(first + follower * int(rate > 0)) & INDEX] & HELD)
        moved = min(rate - ((rate + GAIN - 1) >> SHIFT) + used * GAIN, ONE - 1)
        rate = moved if rate > 0 else 0
        state.ahead_rate[row, j] = rate
        place = j if rate < least else place
        least = rate if rate < least else least
    if not is_known and least <= REPLACED_BELOW:
        state.ahead[row, place] = candidate
        state.ahead_rate[row, place] = GAIN


@decision(inline=True)
def pass_turn(number):
    """Whose turn to become a follower it is in a pass: no period that routing could share."""
    return ((number & 0xFFFF) * 40503) >> 8


@decision(inline=True)
def _learn(state, pool, layer, first, row, candidate):
    """Move the rates of one expert's followers on by a step; the candidate may replace the least likely one."""
    least, place = ONE, 0
    is_known = candidate < 0
    for j in range(state.follower.shape[1]):
        rate = int(state.follow_rate[row, j])
        follower = int(state.follower[row, j])
        if rate > 0:
            is_known |= follower == candidate
            used = int(state.flags[(first + follower) & INDEX] & HELD)
            rate = min(rate - ((rate + GAIN - 1) >> SHIFT) + used * GAIN, ONE - 1)
            if rate == 0:
                _forget(state, pool, layer, (first + follower) & INDEX)
            state.follow_rate[row, j] = rate
        place = j if rate < least else place
        least = rate if rate < least else least
    if not is_known and least <= REPLACED_BELOW:
        if least > 0:
            _forget(state, pool, layer, (first + int(state.follower[row, place])) & INDEX)
        state.follower[row, place] = candidate
        state.follow_rate[row, place] = GAIN


@decision
def _forget(state, pool, layer, expert):
    """Take a boost out of the score at once, since the expert may lose the entry by which it is found."""
    _lower(state, layer, expert)
    settle_expert(state, pool, expert)


@decision(inline=True)
def _lower(state, layer, expert):
    if state.flags[expert] & RAISED:
        rest = state.score[expert] - float(state.boost[expert]) * state.boost_unit[layer]
        state.score[expert] = rest if rest > 0.0 else 0.0
        state.boost[expert] = 0
        state.flags[expert] &= NOT_RAISED


@decision(inline=True)
def _lower_followers(state, layer, first, row):
    for j in range(state.follower.shape[1]):
        if state.follow_rate[row, j] > 0:
            _lower(state, layer, (first + int(state.follower[row, j])) & INDEX)


@decision(inline=True)
def _sum_followers(state, first, row):
    for j in range(state.follower.shape[1]):
        expert = (first + int(state.follower[row, j])) & INDEX
        state.boost[expert] += state.follow_rate[row, j]


@decision(inline=True)
def _raise_followers(state, layer, first, row):
    for j in range(state.follower.shape[1]):
        expert = (first + int(state.follower[row, j])) & INDEX
        if state.follow_rate[row, j] > 0 and state.flags[expert] & RAISED == 0:
            state.score[expert] += float(state.boost[expert]) * state.boost_unit[layer]
            state.flags[expert] |= RAISED


@decision(inline=True)
def _settle_followers(state, pool, first, row):
    """Move those in the heap to where their scores belong."""
    for j in range(state.follower.shape[1]):
        expert = (first + int(state.follower[row, j])) & INDEX
        place = state.heap_pos[expert]
        if state.follow_rate[row, j] > 0 and place >= 0:
            if state.heap_score[(state.first_heap[pool] + place) & INDEX] != state.score[expert]:
                settle_expert(state, pool, expert)
