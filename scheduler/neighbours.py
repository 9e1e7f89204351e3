"""Past passes whose routing was most like this one's, and what they foretell: the next layer, and the next pass.

Tokens of a kind bring nearly the same experts in all layers, so who knows which passes began like this one knows how
it goes on. Of the last NUM_PAST passes the experts of each layer are kept, a bit each. How like this pass is to each
of them is the number of experts in common, summed over layers with a weight that fades, and goes on from pass to pass,
since what follows like passes is alike too. The likest ones, each weighed by the fourth power of that, say how likely
an expert of the next layer is now, and one of this layer in the next pass. The second is a *boost* of scores until the
layer's next step; the first is what may be fetched ahead (`wanted`). All of it is arithmetic on integers, so that
compiled and plain code agree. Nothing here moves a slot.
"""

from __future__ import annotations

import numpy as np

from trilane.eviction import NOT_RAISED, settle_expert
from trilane.expert import decision
from trilane.state import INDEX, MOST_FOLLOWED, NUM_NEAR, NUM_PAST, RAISED, WORD

ONE = 256  # a rate of 1; and the likeness that one expert in common adds
FADE = 2  # each layer a quarter of the likeness so far is forgotten
FINE = 4  # likeness is weighed in 16ths of an expert
CHANCE = 1 << FADE  # the likest passes of routing without any pattern have about one expert in four in common
DE_BRUIJN = 0x077CB531  # its 32 windows of five bits are all different, so a power of two is found by one product
BIT_OF = np.array([[(DE_BRUIJN << bit & 0xFFFFFFFF) >> 27 for bit in range(WORD)].index(w) for w in range(WORD)])


@decision(inline=True)
def follow_step(state, geometry, layer, experts, num_experts):
    """Learn from the step that was planned last, find the passes most like it, and foretell the layer's next step."""
    if starts_pass(state, geometry, layer, state.clock[0]):
        _begin_pass(state)
    state.last_layer[0], state.last_clock[0] = layer, state.clock[0]
    num = num_experts if num_experts <= MOST_FOLLOWED else 0
    _compare(state, layer, experts, num)
    _find_nearest(state, num)
    for k in range(num):
        id_ = int(experts[k])
        state.past[layer, id_ // WORD, state.row[0]] |= 1 << id_ % WORD
    _foretell(state, geometry, layer)


@decision(inline=True)
def starts_pass(state, geometry, layer, clock):
    """Whether a step of this layer belongs to another pass than the last one; steps in between may be unknown."""
    return layer <= state.last_layer[0] or clock - state.last_clock[0] >= geometry.num_layers


@decision
def _begin_pass(state):
    """Take the row of the oldest pass. To what came after a pass the new one is as like as this one was to it."""
    before = state.alike[NUM_PAST - 1]
    for row in range(NUM_PAST):
        state.alike[row], before = before, state.alike[row]
    row = (state.row[0] + 1) % NUM_PAST
    state.row[0] = row
    state.alike[row] = 0
    for layer in range(state.past.shape[0]):
        for word in range(state.past.shape[1]):
            state.past[layer, word, row] = 0


@decision
def _compare(state, layer, experts, num):
    """Move likeness on by the experts in common."""
    for row in range(NUM_PAST):
        state.alike[row] -= state.alike[row] >> FADE
    for k in range(num):
        id_ = int(experts[k])
        word, bit = id_ // WORD, id_ % WORD
        for row in range(NUM_PAST):
            state.alike[row] += ((state.past[layer, word, row] >> bit) & 1) * ONE
    state.alike[state.row[0]] = 0


@decision
def _find_nearest(state, num):
    """List the likest passes, and their weights as rates that add up to ONE at most."""
    count = least = 0
    for row in range(NUM_PAST):
        alike = state.alike[row]
        if alike <= least:
            continue
        at = count if count < NUM_NEAR else NUM_NEAR - 1
        while at > 0 and state.alike[state.near[at - 1]] < alike:
            state.near[at] = state.near[at - 1]
            at -= 1
        state.near[at] = row
        count += 1 if count < NUM_NEAR else 0
        least = state.alike[state.near[NUM_NEAR - 1]] if count == NUM_NEAR else 0
    total = _weight((num * ONE << FADE) // CHANCE)
    for k in range(count):
        total += _weight(state.alike[state.near[k]])
    for k in range(count):
        state.near_rate[k] = _weight(state.alike[state.near[k]]) * ONE // total
    state.num_near[0] = count if num > 0 else 0


@decision(inline=True)
def _weight(alike):
    squared = (int(alike) >> FINE) * (int(alike) >> FINE)
    return squared * squared


@decision
def tally_near(state, tally, layer, passes):
    """Add to ``tally``, by id, the rates of a layer's experts in the passes so many after the likest ones."""
    for k in range(state.num_near[0]):
        row = (state.near[k] + passes) % NUM_PAST
        if passes > 0 and row == state.row[0]:
            continue  # it is only under way
        for word in range(state.past.shape[1]):
            bits = np.int64(state.past[layer, word, row])
            while bits > 0:
                tally[word * WORD + BIT_OF[((bits & -bits) * DE_BRUIJN & 0xFFFFFFFF) >> 27]] += state.near_rate[k]
                bits &= bits - 1


@decision
def tally_ahead(state, geometry, layer):
    """Tally the rates by which the plan of the next layer will weigh its experts, while nothing waits for them."""
    after = layer + 1 if layer + 1 < geometry.num_layers else 0
    for id_ in range(geometry.first_expert[after + 1] - geometry.first_expert[after]):
        state.ahead[id_] = 0
    passes = 2 if after <= layer else 1  # of the use after that of the next plan
    state.ahead_layer[0], state.ahead_passes[0] = after, passes
    tally_near(state, state.ahead, after, passes)


@decision(inline=True)
def has_tally(state, layer, passes):
    """Whether `State.ahead` is of this layer, so many passes after the likest ones."""
    return state.ahead_layer[0] == layer and state.ahead_passes[0] == passes


@decision(inline=True)
def rate_near(state, layer, id_, passes):
    """The same rate of one expert."""
    used, bit = state.past[layer, (id_ & INDEX) // WORD], (id_ & INDEX) % WORD
    under_way = state.row[0] if passes > 0 else -1
    rate = 0
    for k in range(state.num_near[0]):
        row = (state.near[k] + passes) & (NUM_PAST - 1)
        if (np.int64(used[row]) >> bit) & 1 and row != under_way:
            rate += state.near_rate[k]
    return rate


@decision
def _foretell(state, geometry, layer):
    """Take what was foretold for this step out of the scores, and put in what is foretold for the next one."""
    pool, first = state.pool_of[layer], geometry.first_expert[layer]
    count = geometry.first_expert[layer + 1] - first
    tally_near(state, state.tally, layer, 1)
    unit = state.unit[0] * state.prediction / ONE
    for id_ in range(count):
        expert = (first + id_) & INDEX
        boost = state.tally[id_]
        state.tally[id_] = 0
        if boost == 0 and state.boost[expert] == 0:
            continue
        rest = state.score[expert] - float(state.boost[expert]) * state.boost_unit[layer]
        state.score[expert] = (rest if rest > 0.0 else 0.0) + boost * unit
        state.boost[expert] = boost
        state.flags[expert] = (state.flags[expert] | RAISED) if boost > 0 else (state.flags[expert] & NOT_RAISED)
        settle_expert(state, pool, expert)
    state.boost_unit[layer] = unit
