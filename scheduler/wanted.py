"""Experts that may deserve a background fill: those that the next layer will likely use, and those missed of late.

Two short lists. An expert of them may have become resident since, or worth less than any victim;
`planner.plan_background` asks and drops it then. Nothing here moves a slot or knows the link.
"""

from __future__ import annotations

from trilane.expert import decision
from trilane.followers import GAIN, ONE
from trilane.residency import slot_price
from trilane.state import INDEX, MOST_FOLLOWED


@decision
def want_expert(state, expert):
    """Put an expert on the list, in place of the one of least score if it is full and that one is worth less."""
    num = state.num_wanted[0]
    least = 0
    for k in range(num):
        if state.wanted[k] == expert:
            return
        if _precedes(state, state.wanted[least], state.wanted[k]):
            least = k
    if num < state.wanted.size:
        state.wanted[num] = expert
        state.num_wanted[0] = num + 1
    elif _precedes(state, expert, state.wanted[least]):
        state.wanted[least] = expert


@decision
def want_followers(state, geometry, layer, experts, num_experts):
    """Want what the step's experts foretell for the next pass, as far as it is worth more than the cheapest victim."""
    if num_experts > MOST_FOLLOWED:
        return
    first, price = geometry.first_expert[layer], slot_price(state, state.pool_of[layer])
    for k in range(num_experts):
        row = (first + experts[k]) & INDEX
        for j in range(state.follower.shape[1]):
            expert = (first + int(state.follower[row, j])) & INDEX
            absent = state.resident[expert] < geometry.num_shards[layer]
            if absent and state.follow_rate[row, j] > 0 and state.score[expert] > price:
                want_expert(state, expert)


@decision(inline=True)
def _precedes(state, a, b):
    return state.score[a] > state.score[b] or (state.score[a] == state.score[b] and a < b)


@decision
def best_wanted(state):
    """Place of the expert of the highest score; the list is not empty."""
    best = 0
    for k in range(1, state.num_wanted[0]):
        if _precedes(state, state.wanted[k], state.wanted[best]):
            best = k
    return best


@decision
def drop_wanted(state, place):
    """Take the expert at this place off the list."""
    last = state.num_wanted[0] - 1
    state.wanted[place] = state.wanted[last]
    state.num_wanted[0] = last


@decision
def list_coming(state, geometry, layer, experts, num_experts):
    """List what of the next layer the step's experts foretell and misses shards, the likeliest first."""
    state.num_coming[0] = 0
    after = layer + 1 if layer + 1 < geometry.num_layers else 0
    if num_experts > MOST_FOLLOWED or num_experts == 0 or after == layer:
        return
    own, first = geometry.first_expert[layer], geometry.first_expert[after]
    for k in range(num_experts):
        row = (own + experts[k]) & INDEX
        for j in range(state.ahead.shape[1]):
            state.tally[state.ahead[row, j]] += state.ahead_rate[row, j]
    unit = state.unit[0] * state.coming_worth / (ONE * num_experts)
    for k in range(num_experts):
        row = (own + experts[k]) & INDEX
        for j in range(state.ahead.shape[1]):
            id_ = int(state.ahead[row, j])
            rate = state.tally[id_]
            state.tally[id_] = 0
            if rate > 0 and state.resident[(first + id_) & INDEX] < geometry.num_shards[after]:
                _insert_coming(state, (first + id_) & INDEX, rate * unit)


@decision(inline=True)
def _insert_coming(state, expert, score):
    """Into the list in falling order, if there is room or the last one is worth less."""
    at = state.num_coming[0]
    if at < state.coming.size:
        state.num_coming[0] = at + 1
    else:
        at -= 1
        if state.coming_score[at] >= score:
            return
    while at > 0 and state.coming_score[at - 1] < score:
        state.coming[at], state.coming_score[at] = state.coming[at - 1], state.coming_score[at - 1]
        at -= 1
    state.coming[at], state.coming_score[at] = expert, score


@decision
def has_victim(state, geometry, layer, score):
    """Whether a slot can be had for less than this; one of the layer whose step is next must not be foretold itself."""
    pool = state.pool_of[layer]
    if slot_price(state, pool) >= score:
        return False
    if state.num_free[pool] > 0:
        return True
    victim = state.heap[state.first_heap[pool]]
    return geometry.layer_of[victim] != layer or not _is_foretold(state, geometry, layer, victim)


@decision
def _is_foretold(state, geometry, layer, expert):
    """Whether the step before names an expert of the layer among the followers of its own."""
    before = layer - 1 if layer > 0 else geometry.num_layers - 1
    id_ = expert - geometry.first_expert[layer]
    for k in range(state.num_last[before]):
        row = (geometry.first_expert[before] + state.last_experts[before, k]) & INDEX
        for j in range(state.ahead.shape[1]):
            if state.ahead[row, j] == id_ and state.ahead_rate[row, j] >= GAIN:
                return True
    return False


@decision
def drop_coming(state):
    """Take the first expert off the list of those to come."""
    for k in range(1, state.num_coming[0]):
        state.coming[k - 1], state.coming_score[k - 1] = state.coming[k], state.coming_score[k]
    state.num_coming[0] -= 1
