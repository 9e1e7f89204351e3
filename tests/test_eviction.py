"""Scores and heaps against plain implementations of LRU and decayed frequency."""

import math
import random

import numpy as np
import pytest

from trilane import eviction
from trilane.cost import make_rates
from trilane.eviction import advance_clock, count_hint, power, score_if_used, touch_expert
from trilane.expert import make_geometry
from trilane.plan import make_options, make_work
from trilane.planner import plan_layer
from trilane.residency import NO_PRICE, slot_price
from trilane.state import check, make_state

RATES = make_rates(stream_us_per_byte=1.0, zero_copy_us_per_byte=1.0, cpu_us_per_byte=1.0)
STREAM_ONLY = make_options(force="stream")


class PlainCache:
    """Whole experts of one shard, ordered by an obvious score: the last use, or the decaying sum of uses."""

    def __init__(self, num_slots, half_life=None):
        self.num_slots, self.half_life = num_slots, half_life
        self.uses, self.resident = {}, set()

    def score(self, expert, now):
        uses = self.uses.get(expert, [])
        if self.half_life is None:
            return uses[-1] if uses else 0
        return math.fsum(0.5 ** ((now - t) / self.half_life) for t in uses)

    def step(self, experts, now):
        for e in experts:
            self.uses.setdefault(e, []).append(now)
        missing = [e for e in experts if e not in self.resident]
        others = sorted(self.resident - set(experts), key=lambda e: (self.score(e, now), e))
        for e in missing:
            if len(self.resident) == self.num_slots:
                self.resident.remove(others.pop(0))
            self.resident.add(e)
        return missing


def run_plans(state, geometry, steps):
    """Plan steps of (clock, experts) and yield the experts that missed."""
    work, rows = make_work(geometry), np.ones(8, np.int32)
    for clock, experts in steps:
        ids = np.array(experts, np.int32)
        assert plan_layer(state, geometry, RATES, STREAM_ONLY, 0, ids, rows, len(ids), clock, work) == 0
        check(state, geometry)
        yield [e for i, e in enumerate(experts) if work.lane[i] != 0]


@pytest.mark.parametrize("name, half_life", [("lru", None), ("decayed_frequency", 5.0)])
def test_victims_are_those_of_the_plain_implementation(name, half_life):
    rng = random.Random(3)
    geometry = make_geometry([24], [[10]])
    state = make_state(geometry, 9, eviction=name, half_life_steps=half_life or 1.0)
    plain = PlainCache(9, half_life)
    steps = [(t, rng.sample(range(24), rng.randint(1, 4))) for t in range(1, 400)]
    for (clock, experts), missed in zip(steps, run_plans(state, geometry, steps), strict=True):
        assert sorted(missed) == sorted(plain.step(experts, clock)), clock
        assert {int(e) for e in np.flatnonzero(state.resident)} == plain.resident


def test_decayed_frequency_is_the_decaying_sum():
    geometry = make_geometry([3, 3], [[10]] * 2)
    state = make_state(geometry, 4, eviction="decayed_frequency", half_life_steps=4)
    for clock in (0, 0, 3, 8):
        touch_expert(state, geometry, 1, clock)
    expected = 2 + 2 ** (3 / 8) + 2 ** (8 / 8)  # half life of 4 steps is 8 layer-steps
    assert state.score[1] == pytest.approx(expected)
    assert score_if_used(state, 1) == pytest.approx(expected + 2)


def test_growing_units_survive_many_half_lives():
    geometry = make_geometry([40], [[10]])
    state = make_state(geometry, 12, eviction="decayed_frequency", half_life_steps=0.5)
    rng = random.Random(1)
    clocks = np.cumsum([rng.choice((1, 1, 2, 60)) for _ in range(600)])
    steps = [(int(t), rng.sample(range(40), 3)) for t in clocks]
    for _ in run_plans(state, geometry, steps):
        assert 1.0 <= state.unit[0] < eviction.RESCALE_AT
    assert clocks[-1] > 2048  # the unit was rescaled several times


def test_after_a_very_long_pause_nothing_of_the_past_counts():
    geometry = make_geometry([8], [[10]])
    state = make_state(geometry, 4, eviction="decayed_frequency", half_life_steps=1)
    list(run_plans(state, geometry, [(1, [5]), (2, [6]), (3, [5])]))
    advance_clock(state, 10**15)
    check(state, geometry)
    assert not state.score.any() and state.unit[0] == 1.0


def test_the_clock_never_runs_backwards():
    state = make_state(make_geometry([2], [[10]]), 1)
    advance_clock(state, 7)
    with pytest.raises(ValueError, match="backwards"):
        advance_clock(state, 6)


def test_power_multiplies():
    assert [power(3.0, n) for n in range(5)] == [1, 3, 9, 27, 81]


def test_a_touch_moves_an_expert_behind_the_others():
    geometry = make_geometry([4], [[10]])
    state = make_state(geometry, 2)
    list(run_plans(state, geometry, [(1, [0]), (2, [1])]))
    touch_expert(state, geometry, 0, 3)  # a hit that no plan saw
    assert list(run_plans(state, geometry, [(4, [2])])) == [[2]]
    assert state.slot_of.tolist()[:2] == [0, -1]


def test_a_foretold_use_counts_once():
    geometry = make_geometry([4], [[10]])
    state = make_state(geometry, 2, eviction="decayed_frequency")
    for _ in range(3):
        count_hint(state, 0, 1)
    touch_expert(state, geometry, 1, 0)
    assert state.score[1] == 1.0
    touch_expert(state, geometry, 1, 0)
    assert state.score[1] == 2.0


def test_price_is_free_then_the_least_score_then_none():
    geometry = make_geometry([4], [[10]])
    state = make_state(geometry, 1)
    assert slot_price(state, 0) < 0
    list(run_plans(state, geometry, [(5, [0])]))
    assert slot_price(state, 0) == NO_PRICE  # its only slot belongs to the step
    eviction.release_step(state, geometry)
    assert slot_price(state, 0) == 5.0
