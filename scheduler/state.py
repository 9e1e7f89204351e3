"""The scheduler's one state: who holds which slot, who may lose it, and `check`, which asserts all of it.

Plain arrays in a NamedTuple, so that compiled code and plain Python share them. `eviction` orders experts,
`residency` moves slots, `planner` decides; nothing else writes here, but that `warm_start` makes whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.expert import Geometry
from trilane.records import record

LRU = 0
DECAYED_FREQUENCY = 1
PREDICTED = 2
GIVEN = 3  # scores are set from outside, as a replay that knows the future does; no configuration has it
EVICTIONS = ("lru", "decayed_frequency", "predicted", "given")
NUM_PAST, NUM_NEAR = 256, 8  # so many passes are remembered, and so many of the likest foretell what comes
WORD = 32  # experts in a word of bits
MOST_FOLLOWED = 16  # steps of more experts neither teach nor predict: all passes are alike
NUM_WANTED = 8
NUM_COMING = 8
POOLS = ("shared", "layer")

HELD = 1  # flag: the expert belongs to the step in flight, so it is no victim
HINTED = 2  # flag: a hint counted the coming use already
RAISED = 4  # flag: the score holds what `State.boost` foretells
INDEX = (1 << 31) - 1  # `index & INDEX` is plainly not negative: no code is made to count it from the end


@record
class State(NamedTuple):
    """Residency and eviction state; each array says what membership in it means.

    Attributes
    ----------
    slot_of : int32 (shards,)
        Slot that holds the shard; -1 absent; ``-2 - slot`` while a background fill is under way (no hit).
    owner : int64 (slots,)
        Shard key that the slot holds or is being filled with; -1 free.
    filling : uint8 (slots,)
        1 while reserved by a background fill: neither hit nor victim.
    resident : int16 (experts,)
        Slots that hold shards of the expert (fills under way do not count).
    pool_of : int32 (layers,), first_slot : int64 (pools + 1,), slot_nbytes : int64 (pools,)
        Each layer's slots are those of its pool, all of one size.
    free : int32 (slots,), num_free : int64 (pools,)
        A stack of free slots for each pool, from ``first_slot[pool]`` up.
    num_filling : int64 (pools,)
    heap : int32 (experts,), heap_score : float64 (experts,), heap_pos : int32 (experts,)
    first_heap : int64 (pools,), heap_size : int64 (pools,)
        A binary heap for each pool over the experts which own a slot, least score on top; a held one may be missing,
        or have the score there that it had before. Scores are kept beside the experts, so that a way through the heap
        waits for one load a level and not two.
    score : float64 (experts,)
        What orders the heap, of absent experts too: clock of the last use, or decayed frequency in growing
        units.
    flags : uint8 (experts,)
        HELD, HINTED, RAISED.
    past : uint32 (layers, words, NUM_PAST or 0)
        Which experts of a layer were used in each of the last passes: bit ``id % WORD`` of word ``id // WORD``; none
        where the step was not seen or had too many. No passes unless ``eviction`` is PREDICTED.
    row : int64 (1,)
        The column of the pass under way; the one behind it is the oldest (round the end).
    last_layer, last_clock : int64 (1,)
        Layer and clock of the last step that was learned from.
    alike : int32 (NUM_PAST,)
        How like the pass under way is to each of the last ones; 0 of itself.
    near, near_rate : int32 (NUM_NEAR,), num_near : int64 (1,)
        Columns of the likest passes, and their weights in 256ths.
    tally : int32 (most experts of a layer,)
        Scratch by id in a layer; all 0 between calls.
    ahead : int32 (most experts of a layer,), ahead_layer, ahead_passes : int64 (1,)
        By id the rates in 256ths with which these passes foretell the use after the next step, of that step's layer,
        which is so many passes after them. Layer -1: not tallied.
    boost : uint16 (experts,), boost_unit : float64 (layers,)
        The rate in 256ths with which these passes foretell the expert; what 1 of it adds to a score.
    coming : int32 (NUM_COMING,), coming_score : float64 (NUM_COMING,), num_coming : int64 (1,)
        Experts of the next layer which miss shards and are likely to be used, best first, and what they are worth.
    scatter : float64 (1,)
        How often of late a streamed shard did not go into the slot behind that of its neighbour: a copy more each.
    wanted : int32 (NUM_WANTED,), num_wanted : int64 (1,)
        Experts of late that miss shards: candidates for background fills.
    held : int32 (most experts of a layer,), num_held : int64 (1,)
        The experts of the step in flight.
    clock, unit : int64 (1,), float64 (1,)
        Last clock seen; what one use adds to a score now.
    eviction : int
        LRU, DECAYED_FREQUENCY, PREDICTED or GIVEN.
    growth : float
        Factor of ``unit`` for one tick of the clock.
    max_jump : int
        Ticks in which ``unit`` grows by 2**256.
    prediction, coming_worth : float
        Uses that a certain one in the next pass is worth to a score, and one in the next layer to `coming_score`.
    """

    slot_of: NDArray[np.int32]
    owner: NDArray[np.int64]
    filling: NDArray[np.uint8]
    resident: NDArray[np.int16]
    pool_of: NDArray[np.int32]
    first_slot: NDArray[np.int64]
    slot_nbytes: NDArray[np.int64]
    free: NDArray[np.int32]
    num_free: NDArray[np.int64]
    num_filling: NDArray[np.int64]
    heap: NDArray[np.int32]
    heap_score: NDArray[np.float64]
    heap_pos: NDArray[np.int32]
    first_heap: NDArray[np.int64]
    heap_size: NDArray[np.int64]
    score: NDArray[np.float64]
    flags: NDArray[np.uint8]
    past: NDArray[np.uint32]
    row: NDArray[np.int64]
    last_layer: NDArray[np.int64]
    last_clock: NDArray[np.int64]
    alike: NDArray[np.int32]
    near: NDArray[np.int32]
    near_rate: NDArray[np.int32]
    num_near: NDArray[np.int64]
    tally: NDArray[np.int32]
    ahead: NDArray[np.int32]
    ahead_layer: NDArray[np.int64]
    ahead_passes: NDArray[np.int64]
    boost: NDArray[np.uint16]
    boost_unit: NDArray[np.float64]
    coming: NDArray[np.int32]
    coming_score: NDArray[np.float64]
    num_coming: NDArray[np.int64]
    scatter: NDArray[np.float64]
    wanted: NDArray[np.int32]
    num_wanted: NDArray[np.int64]
    held: NDArray[np.int32]
    num_held: NDArray[np.int64]
    clock: NDArray[np.int64]
    unit: NDArray[np.float64]
    eviction: int
    growth: float
    max_jump: int
    prediction: float
    coming_worth: float


def make_state(
    geometry: Geometry,
    num_slots: int | Sequence[int],
    *,
    pool: str = "shared",
    eviction: str = "lru",
    half_life_steps: float = 16.0,
    prediction: float = 2.0,
) -> State:
    """An empty cache.

    Parameters
    ----------
    num_slots : int or sequence of int
        Slots in all (dealt out evenly over the pools), or those of each pool.
    pool : "shared" or "layer"
        One pool for all layers, with slots of the largest shard; or one for each layer.
    eviction : "lru", "decayed_frequency", "predicted" or "given"
    half_life_steps : float
        Model steps (passes over all layers) after which a use counts half. The clock counts layer-steps.
    prediction : float
        Weight of what is foretold for the next pass against what was used of late, both as rates (PREDICTED).
    """
    for name, value, known in (("pool", pool, POOLS), ("eviction", eviction, EVICTIONS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: use one of {', '.join(known)}")
    if not half_life_steps > 0:
        raise ValueError(f"half_life_steps is {half_life_steps}: use a number of model steps above 0")
    if not 0 <= prediction < 1e6:
        raise ValueError(f"prediction is {prediction}: use a weight of 0 or more")
    layers = geometry.num_layers
    pool_of = np.zeros(layers, np.int32) if pool == "shared" else np.arange(layers, dtype=np.int32)
    slots = _slots_of_pools(num_slots, int(pool_of.max()) + 1)
    first_slot = np.concatenate([np.zeros(1, np.int64), np.cumsum(slots)])
    half_life = half_life_steps * layers
    num_experts = int(geometry.first_expert[-1])
    largest = int(np.diff(geometry.first_expert).max())
    passes = NUM_PAST if eviction == "predicted" else 0
    certain = 1.0 / (1.0 - 2.0 ** (-1.0 / half_life_steps))  # uses of late of an expert that every pass uses
    return State(
        slot_of=np.full(int(geometry.first_shard[-1]), -1, np.int32),
        owner=np.full(int(first_slot[-1]), -1, np.int64),
        filling=np.zeros(int(first_slot[-1]), np.uint8),
        resident=np.zeros(num_experts, np.int16),
        pool_of=pool_of,
        first_slot=first_slot,
        slot_nbytes=np.array([geometry.shard_nbytes[pool_of == p].max() for p in range(len(slots))], np.int64),
        free=_descending(first_slot),
        num_free=slots.copy(),
        num_filling=np.zeros(len(slots), np.int64),
        heap=np.zeros(num_experts, np.int32),
        heap_score=np.zeros(num_experts, np.float64),
        heap_pos=np.full(num_experts, -1, np.int32),
        first_heap=np.zeros(1, np.int64) if pool == "shared" else geometry.first_expert[:-1].copy(),
        heap_size=np.zeros(len(slots), np.int64),
        score=np.zeros(num_experts, np.float64),
        flags=np.zeros(num_experts, np.uint8),
        past=np.zeros((layers, -(-largest // WORD), passes), np.uint32),
        row=np.full(1, NUM_PAST - 1),
        last_layer=np.zeros(1, np.int64),
        last_clock=np.zeros(1, np.int64),
        alike=np.zeros(NUM_PAST, np.int32),
        near=np.zeros(NUM_NEAR, np.int32),
        near_rate=np.zeros(NUM_NEAR, np.int32),
        num_near=np.zeros(1, np.int64),
        tally=np.zeros(largest, np.int32),
        ahead=np.zeros(largest, np.int32),
        ahead_layer=np.full(1, -1),
        ahead_passes=np.zeros(1, np.int64),
        boost=np.zeros(num_experts, np.uint16),
        boost_unit=np.zeros(layers, np.float64),
        coming=np.zeros(NUM_COMING, np.int32),
        coming_score=np.zeros(NUM_COMING, np.float64),
        num_coming=np.zeros(1, np.int64),
        scatter=np.zeros(1, np.float64),
        wanted=np.zeros(NUM_WANTED, np.int32),
        num_wanted=np.zeros(1, np.int64),
        held=np.zeros(largest, np.int32),
        num_held=np.zeros(1, np.int64),
        clock=np.zeros(1, np.int64),
        unit=np.ones(1, np.float64),
        eviction=EVICTIONS.index(eviction),
        growth=float(2.0 ** (1.0 / half_life)),
        max_jump=max(1, int(256 * half_life)),
        prediction=float(prediction * certain),
        coming_worth=float((1.0 + prediction / 2.0) * certain),
    )


def _slots_of_pools(num_slots: int | Sequence[int], num_pools: int) -> NDArray[np.int64]:
    if isinstance(num_slots, (int, np.integer)):
        share, more = divmod(int(num_slots), num_pools)
        slots = [share + (p < more) for p in range(num_pools)]
    else:
        slots = [int(n) for n in num_slots]
    if len(slots) != num_pools or min(slots) < 0:
        raise ValueError(
            f"num_slots is {num_slots}: give a count of 0 or more, or one for each of the {num_pools} pools"
        )
    return np.array(slots, np.int64)


def _descending(first_slot: NDArray[np.int64]) -> NDArray[np.int32]:
    """Stacks of free slots whose top is the lowest, so that a run of shards gets neighbouring slots."""
    pools = [np.arange(b - 1, a - 1, -1) for a, b in zip(first_slot[:-1], first_slot[1:], strict=True)]
    return np.concatenate(pools).astype(np.int32)


def check(state: State, geometry: Geometry) -> None:
    """Assert every invariant of the state (plain Python; tests call it after every event)."""
    _check_slots(state)
    _check_experts(state, geometry)
    _check_pools(state, geometry)
    for p in range(len(state.heap_size)):
        _check_heap(state, geometry, p)
    _check_past(state, geometry)
    assert state.unit[0] > 0 and np.isfinite(state.unit[0]), f"unit {state.unit[0]}"
    assert np.isfinite(state.score).all() and (state.score >= 0).all(), "a score is negative or not finite"


def _check_past(state: State, geometry: Geometry) -> None:
    """What is remembered of passes names experts of the layer; a boost is in a score where the flag says so."""
    for layer, count in enumerate(np.diff(geometry.first_expert).tolist()):
        beyond = state.past[layer].copy()
        beyond[: count // WORD] = 0
        beyond[count // WORD : count // WORD + 1] >>= count % WORD
        assert not beyond.any(), "a past expert is outside its layer"
    assert 0 <= state.row[0] < NUM_PAST and (0 <= state.near).all() and (state.near < NUM_PAST).all(), "a pass is none"
    assert 0 <= state.num_near[0] <= NUM_NEAR, f"num_near {state.num_near}"
    rates = state.near_rate[: state.num_near[0]]
    assert (state.near_rate >= 0).all() and rates.sum() <= 256, f"rates of the likest passes {rates}"
    assert 0 <= state.last_layer[0] < geometry.num_layers, f"last layer {state.last_layer}"
    assert 0 <= state.last_clock[0] <= state.clock[0], "the last step is to come"
    assert (state.alike >= 0).all() and (state.alike <= MOST_FOLLOWED * 1024).all(), "likeness is out of range"
    assert not state.tally.any(), "the tally is not cleared"
    assert (0 <= state.ahead).all() and (state.ahead <= 256).all(), "a rate ahead is out of range"
    assert np.isfinite(state.boost_unit).all() and (state.boost_unit >= 0).all(), "a boost is no number"
    assert (state.boost[(state.flags & RAISED) == 0] == 0).all(), "a boost is not in its score"
    assert 0 <= state.scatter[0] <= 1, f"scatter {state.scatter}"
    for name, list_, num in (("wanted", state.wanted, state.num_wanted), ("coming", state.coming, state.num_coming)):
        experts = list_[: num[0]].tolist()
        assert len(set(experts)) == len(experts) == num[0], f"{name} {experts}"
        assert all(0 <= e < geometry.first_expert[-1] for e in experts), f"{name} {experts}"


def _check_slots(state: State) -> None:
    """`slot_of` and `owner` are inverses, and the coding of fills agrees on both sides."""
    for slot, shard in enumerate(state.owner):
        if shard < 0:
            assert not state.filling[slot], f"free slot {slot} is being filled"
            continue
        code = -2 - slot if state.filling[slot] else slot
        assert state.slot_of[shard] == code, f"slot {slot} owns shard {shard}, which says {state.slot_of[shard]}"
    for shard in np.flatnonzero(state.slot_of != -1):
        code = int(state.slot_of[shard])
        slot = code if code >= 0 else -2 - code
        assert state.owner[slot] == shard, f"shard {shard} says {code}, slot {slot} owns {state.owner[slot]}"


def _check_experts(state: State, geometry: Geometry) -> None:
    """`resident` counts landed slots; a shard lies in its layer's pool; `held` is what the flags say."""
    for layer in range(geometry.num_layers):
        a, b = geometry.first_shard[layer : layer + 2]
        x, y = geometry.first_expert[layer : layer + 2]
        slots = state.slot_of[a:b].reshape(y - x, -1)
        assert (state.resident[x:y] == (slots >= 0).sum(axis=1)).all(), f"resident counts of layer {layer}"
        used = np.where(slots >= 0, slots, -2 - slots)[slots != -1]
        low, high = state.first_slot[state.pool_of[layer] :][:2]
        assert ((used >= low) & (used < high)).all(), f"layer {layer} has a slot outside its pool"
        fits = geometry.shard_nbytes[layer].max() <= state.slot_nbytes[state.pool_of[layer]]
        assert fits, f"layer {layer}: a shard is larger than a slot"
    held = sorted(state.held[: state.num_held[0]].tolist())
    assert held == np.flatnonzero(state.flags & HELD).tolist(), f"held {held} against the flags"
    assert len(held) == state.num_held[0], f"num_held {state.num_held}"


def _check_pools(state: State, geometry: Geometry) -> None:
    """The free stacks hold exactly the free slots, the counters of fills are right."""
    for p, (a, b) in enumerate(zip(state.first_slot[:-1], state.first_slot[1:], strict=True)):
        stack = sorted(state.free[a : a + state.num_free[p]].tolist())
        free = (np.flatnonzero(state.owner[a:b] == -1) + a).tolist()
        assert stack == free, f"pool {p}: free stack {stack}, free slots {free}"
        assert len(free) == state.num_free[p], f"pool {p}: num_free"
        assert state.num_filling[p] == state.filling[a:b].sum(), f"pool {p}: num_filling"


def _check_heap(state: State, geometry: Geometry, p: int) -> None:
    """The experts that own slots, each at its place, no child before its parent; held ones may be missing or old."""
    a, size = int(state.first_heap[p]), int(state.heap_size[p])
    heap = state.heap[a : a + size]
    scores = state.heap_score[a : a + size]
    assert (heap >= 0).all(), f"pool {p}: heap {heap}"
    mine = state.pool_of[geometry.layer_of] == p
    held = (state.flags & HELD) != 0
    outside = mine.copy()
    outside[heap] = False
    wrong = np.flatnonzero(outside & (state.resident > 0) & ~held).tolist()
    assert not wrong, f"pool {p}: owners {wrong} are not in the heap"
    assert (mine[heap] & (state.resident[heap] > 0)).all(), f"pool {p}: a member of the heap owns no slot"
    assert len(heap) == size, f"pool {p}: heap_size {size}"
    assert (state.heap_pos[heap] == np.arange(size)).all(), f"pool {p}: heap_pos"
    assert ((scores == state.score[heap]) | held[heap]).all(), f"pool {p}: heap_score"
    assert (state.heap_pos[outside] == -1).all(), f"pool {p}: an expert outside the heap has a place in it"
    for i in range(1, size):
        up, down = (i - 1) // 2, i
        assert (scores[up], heap[up]) < (scores[down], heap[down]), f"pool {p}: heap order at {i}"
