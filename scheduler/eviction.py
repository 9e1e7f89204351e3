"""Who loses a slot first: scores of experts, and a heap of them for each pool.

All shards of an expert are used together, so experts are ordered and not shards. A score only changes when its
expert is used: LRU keeps the clock of the last use; decayed frequency adds a *growing* unit for each use, which
orders experts as the decaying sum would without touching the others; "predicted" adds to that what the experts
which were just used foretell (`neighbours`). Ties go to the lower expert key, so that
the order never depends on history. The experts of the step in flight are *held*: no victims. They may stay in the heap,
by their old scores, until `settle_step`, since to take them out and put them in again would make plans wait. This file
moves no slots.
"""

from __future__ import annotations

from trilane.expert import decision
from trilane.state import GIVEN, HELD, HINTED, INDEX, LRU, RAISED

RESCALE_AT = 2.0**512
RESCALE_BY = 2.0**-512  # a power of two: exact, so that rescaling changes no order
NOT_HELD = 0xFF ^ HELD
NOT_HINTED = 0xFF ^ HINTED
NOT_RAISED = 0xFF ^ RAISED


@decision(inline=True)
def power(base, exponent):
    """``base ** exponent`` by multiplication alone: the same bits compiled and plain, unlike libm's pow."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@decision
def advance_clock(state, clock):
    """Move to ``clock`` (layer-steps, never backwards), growing the unit of decayed frequency."""
    ticks = clock - state.clock[0]
    if ticks < 0:
        raise ValueError("the clock ran backwards: pass a running count of layer-steps")
    state.clock[0] = clock
    if state.eviction == LRU or state.eviction == GIVEN:
        return
    if ticks > 8 * state.max_jump:  # 2048 half lives: nothing of the past is left
        state.score[:] = 0.0
        state.boost[:] = 0
        for e in range(state.flags.size):
            state.flags[e] &= NOT_RAISED
        state.unit[0] = 1.0
        _rebuild_heaps(state)
        return
    while ticks > 0:
        jump = min(ticks, state.max_jump)
        state.unit[0] *= power(state.growth, jump)
        ticks -= jump
        if state.unit[0] >= RESCALE_AT:
            _rescale(state)


@decision
def _rescale(state):
    """Once in 512 half lives. Scores that fall to 0 tie from then on, so the heaps are ordered anew."""
    state.unit[0] *= RESCALE_BY
    for e in range(state.score.size):
        state.score[e] *= RESCALE_BY
    for layer in range(state.boost_unit.size):
        state.boost_unit[layer] *= RESCALE_BY
    _rebuild_heaps(state)


@decision
def _rebuild_heaps(state):
    for pool in range(state.heap_size.size):
        first, size = state.first_heap[pool], state.heap_size[pool]
        for at in range(first, first + size):
            state.heap_score[at] = state.score[state.heap[at]]
        for i in range(size // 2 - 1, -1, -1):
            expert = state.heap[first + i]
            _sift(state.heap, state.heap_score, state.heap_pos, first, size, i, i, expert, state.score[expert])


@decision(inline=True)
def score_if_used(state, expert):
    """The score that a use now would give."""
    if state.eviction == LRU:
        return float(state.clock[0])
    if state.flags[expert] & HINTED or state.eviction == GIVEN:
        return state.score[expert]
    return state.score[expert] + state.unit[0]


@decision(inline=True)
def count_use(state, expert):
    """Give an expert its score for a use now, which `settle_expert` must follow; one foretold by a hint counts once."""
    state.score[expert] = score_if_used(state, expert)
    state.flags[expert] &= NOT_HINTED


@decision(inline=True)
def _before(x, a, y, b):
    """Whether expert ``a`` of score ``x`` loses its slots before ``b`` (without branches: none could be predicted)."""
    return (x < y) | ((x == y) & (a < b))


@decision
def _sift(heap, scores, heap_pos, first, size, top, i, expert, score):
    """Put an expert into the hole at ``i``: down to a leaf, where it mostly belongs, then up, to ``top`` at most.

    Two levels at a time: the pairs below both children are compared while it is open which of these moves up.
    """
    while 4 * i + 6 < size:
        near, far = 2 * i + 1, 4 * i + 3
        left, right = _lesser(heap, scores, first + far), _lesser(heap, scores, first + far + 2)
        side = _lesser(heap, scores, first + near)
        _move_up(heap, scores, heap_pos, first, near + side, i)
        i = far + left + side * (2 + right - left)  # without a branch
        _move_up(heap, scores, heap_pos, first, i, near + side)
    while 2 * i + 1 < size:
        below = 2 * i + 1
        if below + 1 < size:
            below += _lesser(heap, scores, first + below)
        _move_up(heap, scores, heap_pos, first, below, i)
        i = below
    _sift_up(heap, scores, heap_pos, first, top, i, expert, score)


@decision(inline=True)
def _lesser(heap, scores, at):
    """Which of two neighbours comes first, 0 or 1."""
    at &= INDEX
    return int(_before(scores[at + 1], heap[at + 1], scores[at], heap[at]))


@decision(inline=True)
def _move_up(heap, scores, heap_pos, first, i, hole):
    at, to = (first + i) & INDEX, (first + hole) & INDEX
    heap[to] = heap[at]
    scores[to] = scores[at]
    heap_pos[heap[at] & INDEX] = hole


@decision(inline=True)
def _sift_up(heap, scores, heap_pos, first, top, i, expert, score):
    while i > top:
        up = (i - 1) >> 1
        at = (first + up) & INDEX
        above = heap[at]
        if not _before(score, expert, scores[at], above):
            break
        hole = (first + i) & INDEX
        heap[hole] = above
        scores[hole] = scores[at]
        heap_pos[above & INDEX] = i
        i = up
    heap[first + i] = expert
    scores[first + i] = score
    heap_pos[expert] = i


@decision(inline=True)
def push_expert(state, pool, expert):
    """Put an expert that owns slots among the possible victims."""
    size = state.heap_size[pool]
    state.heap_size[pool] = size + 1
    score = state.score[expert]
    _sift_up(state.heap, state.heap_score, state.heap_pos, state.first_heap[pool], 0, size, expert, score)


@decision(inline=True)
def remove_expert(state, pool, expert):
    """Take an expert out of the heap."""
    first = state.first_heap[pool]
    i = state.heap_pos[expert]
    size = state.heap_size[pool] - 1
    state.heap_size[pool] = size
    state.heap_pos[expert] = -1
    if i < size:
        last, score = state.heap[first + size], state.heap_score[first + size]
        _sift(state.heap, state.heap_score, state.heap_pos, first, size, 0, i, last, score)


@decision
def touch_expert(state, geometry, expert, clock):
    """Count a use that no plan saw (a hit of a step which did not wait for the host)."""
    advance_clock(state, clock)
    count_use(state, expert)
    settle_expert(state, state.pool_of[geometry.layer_of[expert]], expert)


@decision(inline=True)
def settle_expert(state, pool, expert):
    """Restore the heap's order after an expert's score changed."""
    i = state.heap_pos[expert]
    if i >= 0:
        first, size = state.first_heap[pool], state.heap_size[pool]
        _sift(state.heap, state.heap_score, state.heap_pos, first, size, 0, i, expert, state.score[expert])


@decision(inline=True)
def hold_expert(state, expert):
    """An expert of the step in flight is no victim; it stays where it is in the heap."""
    if state.flags[expert] & HELD:
        raise ValueError("an expert was listed twice: pass the unique routed experts of the layer")
    state.flags[expert] |= HELD
    state.held[state.num_held[0]] = expert
    state.num_held[0] += 1


@decision(inline=True)
def first_victim(state, pool):
    """The expert that would lose its slots first, then on top of the heap; -1 without one. Held ones on top leave."""
    while state.heap_size[pool] > 0:
        expert = state.heap[state.first_heap[pool]] & INDEX
        if state.flags[expert] & HELD == 0:
            return expert
        remove_expert(state, pool, expert)
    return -1


@decision
def settle_step(state, geometry):
    """Order the experts of the step in flight by their new scores. `release_step` would do it, when a plan waits."""
    for i in range(state.num_held[0]):
        expert = state.held[i] & INDEX
        pool = state.pool_of[geometry.layer_of[expert]]
        place = state.heap_pos[expert]
        if place < 0:
            if state.resident[expert] > 0:
                push_expert(state, pool, expert)
        elif state.heap_score[state.first_heap[pool] + place] != state.score[expert]:
            settle_expert(state, pool, expert)


@decision
def release_step(state, geometry):
    """The step in flight has read its slots: its experts may lose them from now on."""
    settle_step(state, geometry)
    for i in range(state.num_held[0]):
        state.flags[state.held[i] & INDEX] &= NOT_HELD
    state.num_held[0] = 0


@decision(inline=True)
def count_hint(state, pool, expert):
    """Count a use that a hint foretells, once however often it is foretold; the use itself adds no more."""
    state.score[expert] = score_if_used(state, expert)
    state.flags[expert] |= HINTED
    settle_expert(state, pool, expert)
