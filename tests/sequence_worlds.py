"""Worlds for random sequences: geometries with empty states, options and rates, random choices, and what may be wrong.

A world also holds a model of the device: whose bytes lie in each slot, and who reads or writes it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import config
from state_faults import FAULTS, Seen, make_seen

from trilane.cost import make_rates
from trilane.expert import Geometry, decision, make_geometry
from trilane.plan import Work, make_options, make_work
from trilane.records import record, record_at
from trilane.stash import Stash
from trilane.state import State, make_state

WORD = 0xFFFFFFFF
MOST_EVENTS = 40

# What a slot is used for, in the model.
IDLE, READ, WRITTEN, FILLED = range(4)  # by nobody; read, or written and then read, by the step in flight; by a fill

# Places in World.now.
RANDOM, LAYER, NUM_EXPERTS, LEFT, IN_FLIGHT, LEARNED, CLOCK, NUM_UNDER_WAY, DIGEST, OPTIONS, RATES, EVENT = range(12)
EVENTS = "plan", "wave", "learn", "hint", "background", "end fill", "wrong fill", "abandon", "release", "touch"
PLAN, WAVE, LEARN, HINT, BACKGROUND, END_FILL, WRONG_FILL, ABANDON, RELEASE, TOUCH = range(len(EVENTS))
OFTEN = np.array(
    [PLAN] * 6 + [WAVE] * 3 + [LEARN] * 3 + [HINT, BACKGROUND, BACKGROUND, END_FILL, END_FILL, END_FILL]
    + [WRONG_FILL, ABANDON, RELEASE, TOUCH], np.int64
)  # fmt: skip

REACHED = "hits", "streamed", "read in place", "by the CPU", "evictions", "left over", "long copies", "fills", "landed"
EVICTIONS, LEFT_OVER, LONG_COPIES, FILLS, LANDED = range(len(EVENTS) + 4, len(EVENTS) + len(REACHED))

WRONGS = FAULTS + (
    "a resident shard is no hit, or a hit is none",
    "a slot that is read holds other bytes, or is written",
    "a slot is given twice, or is in use",
    "a victim is not whom the slot was taken from",
    "an expert of the step in flight lost a shard",
    "a shard has a lane that was not allowed, or a slot that its lane does not use",
    "shards left over are not those that the plan names",
    "the lanes' bytes or counts are not the shards'",
    "the missed bytes are not all served once",
    "copies do not cover the streamed shards",
    "the predicted time is not the cost of the lanes",
    "more fills than allowed, or of a shard that is there, or not asked for",
    "a fill that is under way cannot be ended, or one that is not can",
    "ending no fill changed the state",
    "a slot's bytes are not its owner's",
    "a failed step left a slot of its fills taken, or took one of its hits",
)
(
    WRONG_HIT, WRONG_BYTES, IN_USE, WRONG_VICTIM, EVICTED, WRONG_LANE, WRONG_LEFT, WRONG_SUMS, NOT_SERVED, WRONG_COPIES,
    WRONG_TIME, WRONG_FILLS, WRONG_END, NOT_NOTHING, NOT_OWNED, NOT_ABANDONED,
) = range(len(FAULTS), len(WRONGS))  # fmt: skip


@record
class World(NamedTuple):
    """All arrays of a sequence, in one argument."""

    state: State
    geometry: Geometry
    work: Work
    fills: Work
    seen: Seen
    block: np.ndarray  # int64: the memory of all arrays of the state
    fresh: np.ndarray  # as it is at the start
    predicted: np.ndarray  # int64: the words of work.predicted_us
    content: np.ndarray  # int64 (slots,): the shard whose bytes lie there, -1 no one's
    use: np.ndarray  # int8 (slots,)
    owner_before: np.ndarray  # as owner, slot_of and work.lane were before the event
    slot_before: np.ndarray
    lane_before: np.ndarray
    experts: np.ndarray  # int32: of the step, and rows
    rows: np.ndarray
    hinted: np.ndarray  # int32: of the last hint
    marks: np.ndarray  # uint8 (most experts,): scratch
    fill_slot: np.ndarray  # int64 (slots,): fills under way
    fill_shard: np.ndarray
    sums: np.ndarray  # float64 (8,): bytes, then rows x bytes, by lane
    counts: np.ndarray  # int64 (4,)
    options_at: np.ndarray  # int64: addresses of options and rates
    rates_at: np.ndarray
    now: np.ndarray  # int64 (12,)
    reached: np.ndarray  # int64: how often each kind of event came, and what REACHED names
    checks: bool


def _random_options(rng):
    lanes = [name for name in ("stream", "zero_copy", "cpu") if rng.random() < 0.7] or ["stream"]
    by_ratio = "stream" in lanes and "cpu" in lanes and rng.random() < 0.3
    return make_options(
        lanes,
        admit=("always", "score")[rng.integers(2)],
        fills=bool(rng.random() < 0.8),
        slack_runs=float(rng.integers(3)),
        max_fills=int(rng.choice([1, 3, 1 << 30])),
        split="ratio" if by_ratio else "makespan",
        background=bool(rng.random() < 0.7),
        counts_copies=bool(rng.random() < 0.8),
    )


def _random_rates(rng):
    us = rng.integers(0, 30, 16) / 10.0
    no_copies, no_reads = rng.random(2) < 0.1  # rates that are not known
    return make_rates(
        step_fix_us=us[0],
        miss_fix_us=us[1],
        hit_us_per_byte=us[2] / 100,
        hit_row_us_per_byte=us[3] / 300,
        stream_fix_us=us[4],
        run_fix_us=us[5],
        stream_us_per_byte=np.inf if no_copies else 0.01 + us[6] / 50,
        stream_tail_us=us[7],
        zero_copy_fix_us=us[8],
        zero_copy_us_per_byte=np.inf if no_reads else us[9] / 50 + us[10] / 60 / np.arange(1, rng.integers(2, 9)),
        zero_copy_on_device=bool(rng.integers(2)),
        cpu_fix_us=us[11],
        cpu_us_per_byte=0.01 + us[12] / 50,
        cpu_row_us_per_byte=us[13] / 150,
        cpu_shard_us=us[14],
        both_us_per_byte=us[15] / 100,
        num_cores=float(rng.integers(3)),
        hit_cores=1.0,
        link_cores=float(rng.integers(2)),
        cpu_cores=2.0,
        link_slowdown=float(rng.integers(2)) / 5,
        cpu_slowdown=float(rng.integers(2)) / 10,
    )


_RNG = np.random.default_rng(5)
OPTIONS_OF = [Stash(_random_options(_RNG)) for _ in range(64)]
RATES_OF = [Stash(_random_rates(_RNG)) for _ in range(32)]


def _reader(stashes):
    """What gives the record at an address; in plain Python the very tuple."""
    if config.DISABLE_JIT:
        return {stash.address: stash.held for stash in stashes}.__getitem__
    return record_at(stashes[0].kind)


read_options, read_rates = _reader(OPTIONS_OF), _reader(RATES_OF)


def _in_one_block(state):
    """A copy of the state whose arrays all lie in one block of memory: (state, block)."""
    arrays = {name: field for name, field in state._asdict().items() if isinstance(field, np.ndarray)}
    words = {name: -(-array.nbytes // 8) for name, array in arrays.items()}
    block = np.zeros(sum(words.values()) + 1, np.int64)
    at = 0
    for name, array in arrays.items():
        part = block[at : at + words[name]].view(np.uint8)[: array.nbytes].view(array.dtype)
        arrays[name] = part.reshape(array.shape)
        arrays[name][...] = array
        at += words[name]
    return state._replace(**arrays), block


def make_world(seed):
    """A random geometry with slots, pools and an eviction, all empty."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 5))
    geometry = make_geometry(
        rng.integers(2, 13, layers).tolist(),
        [[int(size)] * int(n) + [int(rng.integers(1, size))] * int(m) for size, n, m in zip(
            rng.integers(40, 90, layers), rng.integers(1, 4, layers), rng.integers(0, 2, layers), strict=True)],
    )  # fmt: skip
    pool, shards = ("shared", "layer")[rng.integers(2)], geometry.num_shards * np.diff(geometry.first_expert)
    slots = (
        int(rng.integers(1, shards.sum() + 1)) if pool == "shared" else [int(rng.integers(1, n + 1)) for n in shards]
    )
    state, block = _in_one_block(
        make_state(
            geometry,
            slots,
            pool=pool,
            eviction=("lru", "decayed_frequency", "predicted", "predicted")[rng.integers(4)],
            half_life_steps=float(rng.choice([0.02, 1.0, 16.0])),
            prediction=float(rng.choice([0.0, 4.0])),
        )
    )
    return _model_of(geometry, state, block)


def _model_of(geometry, state, block):
    work, most, slots = make_work(geometry), int(np.diff(geometry.first_expert).max()), state.owner.size
    return World(
        state=state,
        geometry=geometry,
        work=work,
        fills=make_work(geometry),
        seen=make_seen(state),
        block=block,
        fresh=block.copy(),
        predicted=work.predicted_us.view(np.int64),
        content=np.zeros(slots, np.int64),
        use=np.zeros(slots, np.int8),
        owner_before=state.owner.copy(),
        slot_before=state.slot_of.copy(),
        lane_before=work.lane.copy(),
        experts=np.zeros(most, np.int32),
        rows=np.zeros(most, np.int32),
        hinted=np.zeros(most, np.int32),
        marks=np.zeros(most, np.uint8),
        fill_slot=np.zeros(slots, np.int64),
        fill_shard=np.zeros(slots, np.int64),
        sums=np.zeros(8),
        counts=np.zeros(4, np.int64),
        options_at=np.array([stash.address for stash in OPTIONS_OF], np.int64),
        rates_at=np.array([stash.address for stash in RATES_OF], np.int64),
        now=np.zeros(12, np.int64),
        reached=np.zeros(len(EVENTS) + len(REACHED), np.int64),
        checks=True,
    )


# ------------------------------------------------------------------------------------------------ random choices
@decision
def draw(world, n):
    """A number from 0 to ``n - 1`` (xorshift; the same compiled and plain)."""
    x = int(world.now[RANDOM])
    x ^= (x << 13) & WORD
    x ^= x >> 17
    x ^= (x << 5) & WORD
    world.now[RANDOM] = x
    return (x >> 4) % int(n)


@decision
def draw_experts(world, layer, experts):
    """Distinct experts of the layer, seldom many and some far more often than others; how many."""
    count = int(world.geometry.first_expert[layer + 1] - world.geometry.first_expert[layer])
    num = draw(world, count + 1) if draw(world, 6) == 0 else 1 + draw(world, min(count, 4))
    world.marks[:] = 0
    for k in range(num):
        id_ = draw(world, 1 + count // 3) if draw(world, 2) == 0 else draw(world, count)
        while world.marks[id_] != 0:
            id_ = (id_ + 1) % count
        world.marks[id_] = 1
        experts[k] = id_
    return num


@decision
def draw_ticks(world):
    """By how much the clock moves on: mostly a layer-step, seldom past all that is remembered."""
    if draw(world, 4) != 0:
        return 1
    if draw(world, 8) != 0:
        return draw(world, 3)
    jump = int(world.state.max_jump)
    return (1000, jump - 1, 3 * jump, 8 * jump + 1)[draw(world, 4)]


@decision
def mix(world, value):
    """One more word into the digest."""
    digest = ((int(world.now[DIGEST]) ^ (int(value) & WORD)) * 0x01000193) & WORD
    world.now[DIGEST] = digest ^ (digest >> 15)


@decision
def copy_to(target, source):
    for k in range(source.size):
        target[k] = source[k]


@decision
def remember(world):
    """What the next event is compared with."""
    copy_to(world.owner_before, world.state.owner)
    copy_to(world.slot_before, world.state.slot_of)
    copy_to(world.lane_before, world.work.lane)


@decision
def begin_sequence(world, seed):
    """Everything as at the start; the work arrays keep what the sequence before left there."""
    copy_to(world.block, world.fresh)
    world.content[:] = -1
    world.use[:] = IDLE
    world.now[:] = 0
    world.now[RANDOM] = (seed * 0x9E3779B1 + 0x7F4A7C15) & WORD | 1
    world.now[DIGEST] = 0x811C9DC5


@decision
def digest_of(world):
    """A hash of all of the state."""
    kept = world.now[DIGEST]
    for k in range(world.block.size):
        mix(world, world.block[k])
        mix(world, world.block[k] >> 32)
    digest = int(world.now[DIGEST])
    world.now[DIGEST] = kept
    return digest
