"""Slots: every event keeps the invariants, fills neither hit nor lose their slot before they end."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trilane.cost import make_rates
from trilane.eviction import release_step, touch_expert
from trilane.expert import CPU, HIT, SKIP, STREAM, UNPLACED, ZERO_COPY, expert_of, first_shard_of, make_geometry
from trilane.plan import NUM_FILLS, make_options, make_work
from trilane.planner import abandon_step, plan_fills, plan_layer, plan_wave
from trilane.residency import drop_fill, land_fill
from trilane.state import check, make_state

RATES = make_rates(stream_us_per_byte=1.0, run_fix_us=5.0, zero_copy_us_per_byte=1.1, cpu_us_per_byte=1.2)
LANES = st.lists(st.sampled_from(["stream", "zero_copy", "cpu"]), min_size=1, unique=True)


@pytest.mark.parametrize(
    "num_experts, sizes, what",
    [
        ([], [], "at least one"),
        ([2], [[1], [1]], "one entry for each"),
        ([0], [[1]], "at least one expert"),
        ([2], [[]], "at least one expert"),
        ([2], [[4, 0]], "at least one byte"),
    ],
)
def test_a_geometry_without_sense_is_refused(num_experts, sizes, what):
    with pytest.raises(ValueError, match=what):
        make_geometry(num_experts, sizes)


@pytest.mark.parametrize(
    "change, what",
    [
        ({"pool": "none"}, "pool"),
        ({"eviction": "fifo"}, "eviction"),
        ({"half_life_steps": 0}, "half_life_steps"),
        ({"num_slots": -1}, "num_slots"),
        ({"num_slots": [1, 2, 3]}, "num_slots"),
    ],
)
def test_a_state_without_sense_is_refused(change, what):
    with pytest.raises(ValueError, match=what):
        make_state(make_geometry([2, 2], [[1]] * 2), **{"num_slots": 3, **change})


def test_keys_are_numbered_through():
    geometry = make_geometry([3, 2, 4], [[8], [8, 8, 4], [8, 8]])
    shard = 0
    for layer, (experts, shards) in enumerate([(3, 1), (2, 3), (4, 2)]):
        for e in range(experts):
            key = geometry.first_expert[layer] + e
            assert geometry.layer_of[key] == layer
            assert first_shard_of(geometry, key) == shard
            for _ in range(shards):
                assert expert_of(geometry, shard) == key
                shard += 1
    assert shard == geometry.first_shard[-1]


def test_slots_are_dealt_to_pools():
    geometry = make_geometry([2, 2, 2], [[8], [16], [4]])
    assert np.diff(make_state(geometry, 8, pool="layer").first_slot).tolist() == [3, 3, 2]
    state = make_state(geometry, [1, 0, 2], pool="layer")
    assert np.diff(state.first_slot).tolist() == [1, 0, 2]
    assert state.slot_nbytes.tolist() == [8, 16, 4]
    assert make_state(geometry, 8).slot_nbytes.tolist() == [16]
    check(state, geometry)


def plan(state, geometry, options, experts, clock, work, layer=0):
    ids = np.array(experts, np.int32)
    return plan_layer(state, geometry, RATES, options, layer, ids, np.ones(len(ids), np.int32), len(ids), clock, work)


def test_victims_go_shard_by_shard_from_the_last():
    geometry = make_geometry([4], [[10, 10, 10]])
    state, work, options = make_state(geometry, 4), make_work(geometry), make_options(force="stream")
    plan(state, geometry, options, [0], 1, work)
    plan(state, geometry, options, [1], 2, work)
    assert state.slot_of.tolist()[:6] == [0, -1, -1, 1, 2, 3]  # the free slot first, then two of expert 0
    assert sorted(work.victim[:3].tolist()) == [-1, 1, 2]


def test_a_fill_neither_hits_nor_is_a_victim_until_it_lands():
    geometry = make_geometry([4], [[10, 10]])
    state, work, options = make_state(geometry, 2), make_work(geometry), make_options(["stream", "cpu"])
    assert plan_fills(state, geometry, options, 0, np.array([1], np.int32), 1, 1, work) == 2
    check(state, geometry)
    fills = list(zip(work.fill_slot[:2].tolist(), work.fill_shard[:2].tolist(), strict=True))
    assert [shard for _, shard in fills] == [2, 3]
    plan(state, geometry, options, [1, 2], 2, work)
    assert work.lane[:4].tolist() == [CPU] * 4  # no slot can be had, and the fill's bytes are not there yet
    assert plan_fills(state, geometry, options, 0, np.array([1, 2], np.int32), 2, 2, work) == 0
    assert not land_fill(state, geometry, fills[0][0], 0)  # another shard
    assert not land_fill(state, geometry, 99, 2) and not drop_fill(state, geometry, -1, 2)
    assert land_fill(state, geometry, *fills[0])
    assert not land_fill(state, geometry, *fills[0])  # only once
    assert drop_fill(state, geometry, *fills[1])
    check(state, geometry)
    plan(state, geometry, options, [1], 3, work)
    assert work.lane[0] == HIT and work.slot[0] == fills[0][0]


def test_a_hint_must_beat_its_victims_and_spares_its_own():
    geometry = make_geometry([4], [[10, 10]])
    state = make_state(geometry, 3, eviction="decayed_frequency")
    work, options = make_work(geometry), make_options(force="stream")
    for clock in range(1, 4):
        plan(state, geometry, options, [0], clock, work)
    plan(state, geometry, options, [1], 4, work)  # takes the free slot and one of expert 0
    release_step(state, geometry)
    before = state.slot_of.copy()
    assert plan_fills(state, geometry, options, 0, np.array([2], np.int32), 1, 4, work) == 0  # 1 use against 1
    assert (state.slot_of == before).all()
    assert plan_fills(state, geometry, options, 0, np.array([0], np.int32), 1, 4, work) == 1
    assert work.fill_victim[0] == 3  # expert 1's last shard
    check(state, geometry)


def test_no_hinted_expert_pays_for_another():
    """The later one of the list is the cheapest victim, and the likelier one before it misses shards."""
    geometry = make_geometry([4], [[10, 10]])
    state = make_state(geometry, 4, eviction="decayed_frequency")
    work, options = make_work(geometry), make_options(force="stream")
    plan(state, geometry, options, [0], 1, work)
    for clock in range(2, 5):
        plan(state, geometry, options, [1], clock, work)
    release_step(state, geometry)
    hinted = np.array([2, 0, 0], np.int32)  # named twice as well
    assert plan_fills(state, geometry, options, 0, hinted, 3, 5, work) == 0
    check(state, geometry)
    assert plan_fills(state, geometry, options, 0, hinted, 1, 5, work) == 2
    assert sorted(work.fill_victim[:2].tolist()) == [0, 1]
    check(state, geometry)


def test_fills_keep_to_their_budget_and_their_layer():
    geometry = make_geometry([4], [[10, 10]])
    state, work = make_state(geometry, 8), make_work(geometry)
    options = make_options(max_fills=3)
    assert plan_fills(state, geometry, options, 0, np.arange(4, dtype=np.int32), 4, 1, work) == 3
    with pytest.raises(ValueError, match="outside its layer"):
        plan_fills(state, geometry, options, 0, np.array([4], np.int32), 1, 1, work)


def test_a_failed_step_leaves_its_slots_free():
    geometry = make_geometry([4], [[10, 10]])
    state, work = make_state(geometry, 4), make_work(geometry)
    options = make_options(force="stream")
    plan(state, geometry, options, [0], 1, work)
    plan(state, geometry, options, [0, 1], 2, work)
    abandon_step(state, geometry, 0, np.array([0, 1], np.int32), 2, work)
    check(state, geometry)
    assert state.slot_of.tolist() == [0, 1] + [-1] * 6  # what hit still lies there
    assert state.num_free[0] == 2 and state.num_held[0] == 0


def test_waves_serve_a_step_that_is_larger_than_its_pool():
    geometry = make_geometry([6], [[10, 10, 10]])
    state, work = make_state(geometry, 4), make_work(geometry)
    options, ids, rows = make_options(force="stream"), np.array([0, 1, 5], np.int32), np.ones(3, np.int32)
    left = plan(state, geometry, options, ids.tolist(), 1, work)
    assert left == 5
    done = (work.lane[:9] == STREAM).astype(int)
    while left:
        left = plan_wave(state, geometry, RATES, options, 0, ids, rows, 3, work)
        check(state, geometry)
        assert (work.lane[:9] != HIT).all()
        done += work.lane[:9] == STREAM
    assert (done == 1).all() and set(work.lane[:9].tolist()) <= {SKIP, STREAM}


def test_without_any_slot_nothing_is_placed_and_waves_say_so():
    geometry = make_geometry([2], [[10]])
    state, work, options = make_state(geometry, 1), make_work(geometry), make_options(force="stream")
    assert plan_fills(state, geometry, options, 0, np.array([1], np.int32), 1, 1, work) == 1
    ids, rows = np.array([0, 1], np.int32), np.ones(2, np.int32)
    assert plan_layer(state, geometry, RATES, options, 0, ids, rows, 2, 2, work) == 2
    assert plan_wave(state, geometry, RATES, options, 0, ids, rows, 2, work) == 2
    assert land_fill(state, geometry, 0, 1)
    assert plan_wave(state, geometry, RATES, options, 0, ids, rows, 2, work) == 1
    assert work.lane[:2].tolist() == [UNPLACED, HIT]  # what landed meanwhile hits, and is not taken
    assert plan_wave(state, geometry, RATES, options, 0, ids, rows, 2, work) == 0
    assert work.lane[:2].tolist() == [STREAM, SKIP]


def test_check_sees_a_broken_state():
    geometry = make_geometry([4], [[10]])
    state, work = make_state(geometry, 3), make_work(geometry)
    plan(state, geometry, make_options(force="stream"), [0, 1], 1, work)
    release_step(state, geometry)
    for name in ("owner", "slot_of", "resident", "heap_pos", "num_free", "filling", "flags", "score", "unit"):
        array = getattr(state, name)
        keep = array.copy()
        array[0] = array[0] + 1 if name not in ("score", "unit") else -1
        with pytest.raises(AssertionError):
            check(state, geometry)
        array[:] = keep
    check(state, geometry)


class Events(RuleBasedStateMachine):
    """Any order of plans, waves, fills, landings, faults and touches keeps every invariant."""

    @initialize(
        slots=st.integers(0, 14),
        pool=st.sampled_from(["shared", "layer"]),
        eviction=st.sampled_from(["lru", "decayed_frequency"]),
        half_life=st.sampled_from([0.02, 1.0, 16.0]),
    )
    def start(self, slots, pool, eviction, half_life):
        self.geometry = make_geometry([4, 3, 4], [[10, 10, 4], [8], [10, 10]])
        self.state = make_state(self.geometry, slots, pool=pool, eviction=eviction, half_life_steps=half_life)
        self.work, self.hints = make_work(self.geometry), make_work(self.geometry)
        self.clock, self.fills, self.left = 0, [], 0
        self.layer, self.ids = 0, np.zeros(0, np.int32)

    @rule(
        data=st.data(),
        layer=st.integers(0, 2),
        ticks=st.integers(0, 3),
        lanes=LANES,
        admit=st.sampled_from(["always", "score"]),
        fills=st.booleans(),
    )
    def plan(self, data, layer, ticks, lanes, admit, fills):
        count = int(np.diff(self.geometry.first_expert)[layer])
        ids = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
        self.rows = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids))), np.int32)
        self.layer, self.ids = layer, np.array(ids, np.int32)
        self.clock += ticks
        self.options = make_options(lanes, admit=admit, fills=fills)
        before = self.state.slot_of.copy()
        self.left = plan_layer(
            self.state, self.geometry, RATES, self.options, layer, self.ids, self.rows, len(ids), self.clock, self.work
        )
        self.see_plan(before)

    def see_plan(self, before):
        """No shard of the step loses its slot; no slot is given twice; lanes are allowed ones."""
        shards = int(self.geometry.num_shards[self.layer])
        slots = []
        for at in range(len(self.ids) * shards):
            key = self.geometry.first_shard[self.layer] + self.ids[at // shards] * shards + at % shards
            lane, slot = self.work.lane[at], self.work.slot[at]
            if lane == HIT:
                assert before[key] == slot == self.state.slot_of[key]
            elif slot >= 0:
                assert lane in (STREAM, ZERO_COPY) and self.state.slot_of[key] == slot and before[key] == -1
            assert lane in (HIT, SKIP) or (lane == UNPLACED and self.left) or self.options.lanes >> int(lane) & 1
            assert lane != STREAM or slot >= 0
            if slot >= 0:
                slots.append(int(slot))
        assert len(set(slots)) == len(slots)
        assert self.left == (self.work.lane[: len(self.ids) * shards] == UNPLACED).sum()
        assert self.work.run[: len(self.ids) * shards].sum() == self.work.counts[STREAM]

    @precondition(lambda self: self.left)
    @rule()
    def wave(self):
        before = self.state.slot_of.copy()
        self.left = plan_wave(
            self.state, self.geometry, RATES, self.options, self.layer, self.ids, self.rows, len(self.ids), self.work
        )
        shards = int(self.geometry.num_shards[self.layer])
        lanes = self.work.lane[: len(self.ids) * shards]
        assert self.work.counts[NUM_FILLS] == (lanes == STREAM).sum()
        for at in np.flatnonzero(lanes == HIT):
            key = self.geometry.first_shard[self.layer] + self.ids[at // shards] * shards + at % shards
            assert self.state.slot_of[key] == before[key] == self.work.slot[at]

    @rule(layer=st.integers(0, 2), data=st.data(), most=st.integers(0, 9))
    def hint(self, layer, data, most):
        count = int(np.diff(self.geometry.first_expert)[layer])
        ids = np.array(data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count)), np.int32)
        num = plan_fills(
            self.state, self.geometry, make_options(max_fills=most), layer, ids, len(ids), self.clock, self.hints
        )
        self.fills += zip(self.hints.fill_slot[:num].tolist(), self.hints.fill_shard[:num].tolist(), strict=True)

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), lands=st.booleans())
    def end_fill(self, data, lands):
        slot, shard = self.fills.pop(data.draw(st.integers(0, len(self.fills) - 1)))
        assert (land_fill if lands else drop_fill)(self.state, self.geometry, slot, shard)
        assert not drop_fill(self.state, self.geometry, slot, shard)

    @rule()
    def fail(self):
        abandon_step(self.state, self.geometry, self.layer, self.ids, len(self.ids), self.work)
        self.left = 0
        self.work.lane[:] = SKIP

    @rule()
    def finish(self):
        release_step(self.state, self.geometry)

    @rule(expert=st.integers(0, 10), ticks=st.integers(0, 2))
    def touch(self, expert, ticks):
        self.clock += ticks
        touch_expert(self.state, self.geometry, expert, self.clock)

    @invariant()
    def holds(self):
        if hasattr(self, "state"):
            check(self.state, self.geometry)
            assert self.state.num_filling.sum() == len(self.fills)


Events.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestEvents = Events.TestCase
