"""Experts that may deserve a background fill: those that the next layer will likely use, and those missed of late.

Two short lists. An expert of them may have become resident since, or worth less than any victim;
`planner.plan_background` asks and drops it then. Nothing here moves a slot or knows the link.
"""

from __future__ import annotations

from trilane.expert import decision
from trilane.neighbours import ONE, rate_near, tally_near
from trilane.residency import slot_price
from trilane.state import INDEX

LIKELY = ONE >> 4  # a rate below which an expert does not count as foretold


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
def want_foretold(state, geometry, layer):
    """Want what is foretold for the layer's next step, as far as it is worth more than the cheapest victim."""
    price, num_shards = slot_price(state, state.pool_of[layer]), geometry.num_shards[layer]
    for expert in range(geometry.first_expert[layer], geometry.first_expert[layer + 1]):
        if state.boost[expert] > 0 and state.resident[expert] < num_shards and state.score[expert] > price:
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
def list_coming(state, geometry, options, layer):
    """List what the likest passes foretell of the layers to come and misses shards, the likeliest first.

    These are ``options.coming_layers`` layers from the ``options.coming_from``-th on, the next one being the first:
    where a fill takes some layers to become a hit, what is needed sooner would come too late.
    """
    state.num_coming[0] = 0
    if state.num_near[0] == 0:
        return
    last = min(options.coming_from + options.coming_layers, geometry.num_layers)
    for distance in range(options.coming_from, last):
        after = layer + distance
        if after < geometry.num_layers:
            _list_layer(state, geometry, after, 0, options.least_rate)
        else:
            _list_layer(state, geometry, after - geometry.num_layers, 1, options.least_rate)


@decision
def _list_layer(state, geometry, after, passes, least_rate):
    first, count = geometry.first_expert[after], geometry.first_expert[after + 1] - geometry.first_expert[after]
    tally_near(state, state.tally, after, passes)
    unit = state.unit[0] * state.coming_worth / ONE
    for id_ in range(count):
        rate = state.tally[id_]
        state.tally[id_] = 0
        if rate > 0 and rate >= least_rate and state.resident[(first + id_) & INDEX] < geometry.num_shards[after]:
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
    """Whether the likest passes foretell an expert of the layer whose step is next."""
    passes = 1 if layer <= state.last_layer[0] else 0
    return rate_near(state, layer, int(expert - geometry.first_expert[layer]), passes) >= LIKELY


@decision
def drop_coming(state):
    """Take the first expert off the list of those to come."""
    for k in range(1, state.num_coming[0]):
        state.coming[k - 1], state.coming_score[k - 1] = state.coming[k], state.coming_score[k]
    state.num_coming[0] -= 1
