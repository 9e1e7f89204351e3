"""What followers foretell, against a plain implementation, and what a boost does to scores and heaps."""

import random

import numpy as np
import pytest

from trilane.cost import make_rates
from trilane.expert import make_geometry
from trilane.followers import GAIN, ONE, REPLACED_BELOW, SHIFT, pass_turn
from trilane.plan import make_options, make_work
from trilane.planner import learn_step, plan_layer
from trilane.state import MOST_FOLLOWED, NUM_FOLLOWERS, RAISED, check, make_state

RATES = make_rates(stream_us_per_byte=1.0, zero_copy_us_per_byte=1.0, cpu_us_per_byte=1.0)
OPTIONS = make_options(admit="score")


class PlainFollowers:
    """One layer's followers in lists of [id, rate]; a boost is recomputed from them."""

    def __init__(self, num_experts):
        self.rows = [[[None, 0] for _ in range(NUM_FOLLOWERS)] for _ in range(num_experts)]
        self.last = []

    def step(self, experts, clock):
        for k, before in enumerate(self.last):
            row, candidate = self.rows[before], experts[(pass_turn(clock) + k) % len(experts)]
            for entry in row:
                if entry[1]:
                    rate = entry[1] - -(-entry[1] // (1 << SHIFT)) + GAIN * (entry[0] in experts)
                    entry[1] = min(rate, ONE - 1)
            least = min(row, key=lambda entry: entry[1])
            known = any(entry[0] == candidate for entry in row if entry[1])
            if not known and least[1] <= REPLACED_BELOW:
                least[:] = [candidate, GAIN]
        self.last = list(experts) if len(experts) <= MOST_FOLLOWED else []

    def boosts(self, num_experts):
        sums = [0] * num_experts
        for before in self.last:
            for follower, rate in self.rows[before]:
                if rate:
                    sums[follower] += rate
        return sums


def run_steps(geometry, state, steps, layer=0):
    work, rows = make_work(geometry), np.ones(64, np.int32)
    for clock, experts in steps:
        ids = np.array(experts, np.int32)
        plan_layer(state, geometry, RATES, OPTIONS, layer, ids, rows, len(ids), clock, work)
        learn_step(state, geometry, OPTIONS, layer, ids, len(ids))
        check(state, geometry)
        assert not state.tally.any()
        yield


def test_rates_and_boosts_are_those_of_the_plain_implementation():
    rng = random.Random(5)
    geometry = make_geometry([24], [[10]])
    state, plain = make_state(geometry, 9, eviction="predicted", half_life_steps=4), PlainFollowers(24)
    habits = [rng.sample(range(24), 6) for _ in range(24)]
    experts, steps = rng.sample(range(24), 3), []
    for clock in range(1, 500):
        liked = [e for before in experts for e in habits[before]]
        experts = list(dict.fromkeys(rng.choices(liked, k=3) + rng.sample(range(24), 1)))
        steps.append((clock, experts if clock % 50 else rng.sample(range(24), 20)))
    for (clock, experts), _ in zip(steps, run_steps(geometry, state, steps), strict=True):
        plain.step(experts, clock)
        wanted = plain.boosts(24)
        assert state.boost.tolist() == wanted, clock
        assert ((state.flags & RAISED) > 0).tolist() == [boost > 0 for boost in wanted]


def test_a_score_is_use_of_late_and_what_is_foretold():
    geometry = make_geometry([8], [[10]])
    state = make_state(geometry, 4, eviction="predicted", half_life_steps=8, prediction=2.0)
    for _ in run_steps(geometry, state, [(clock, [clock % 2, 6 + clock % 2]) for clock in range(1, 400)]):
        pass
    of_use = sum(0.5 ** (age / 8) for age in range(0, 400, 2))
    certain = 2 / (1 - 2 ** (-1 / 8)) * 241 / ONE  # both experts of the step before foretell it
    now, before = 399 % 2, 398 % 2
    assert state.score[now] / state.unit[0] == pytest.approx(of_use)
    assert state.score[before] / state.unit[0] == pytest.approx(of_use * 0.5 ** (1 / 8) + certain, rel=0.02)


def test_what_is_foretold_is_worth_more_than_what_was_just_used():
    """Two pairs take turns, which frequency and recency read the wrong way round."""
    geometry = make_geometry([6], [[10]])
    state = make_state(geometry, 2, eviction="predicted")
    for clock, _ in enumerate(run_steps(geometry, state, [(c, [0, 1] if c % 2 else [2, 3]) for c in range(1, 60)]), 1):
        if clock > 30:
            used, others = ([0, 1], [2, 3]) if clock % 2 else ([2, 3], [0, 1])
            assert state.score[others].min() > state.score[used].max()


def test_a_layer_that_was_left_out_teaches_nothing():
    geometry = make_geometry([8, 8], [[10]] * 2)
    state = make_state(geometry, 4, eviction="predicted")
    for _ in run_steps(geometry, state, [(1, [0, 1]), (4, [2, 3])]):
        pass
    assert not state.follow_rate.any()
    for _ in run_steps(geometry, state, [(6, [4, 5])]):
        pass
    assert state.follow_rate[[2, 3]].any(axis=1).all() and not state.follow_rate[[0, 1]].any()


def test_large_steps_neither_teach_nor_predict():
    geometry = make_geometry([64], [[10]])
    state = make_state(geometry, 32, eviction="predicted")
    for _ in run_steps(geometry, state, [(1, [0]), (2, range(40)), (3, [1])]):
        pass
    assert state.num_last[0] == 1 and not state.follow_rate[1:40].any()


def test_boosts_survive_the_rescaling_of_units_and_long_breaks():
    geometry = make_geometry([8], [[10]])
    state = make_state(geometry, 4, eviction="predicted", half_life_steps=0.05)
    for _ in run_steps(geometry, state, [(clock, [clock % 3, 3 + clock % 2]) for clock in range(1, 200)]):
        pass
    assert state.boost.any()
    for _ in run_steps(geometry, state, [(10_000_000, [1])]):
        pass
    assert state.boost[[0, 2, 3, 4]].sum() == 0 or (state.score[:5] >= 0).all()


def test_state_of_a_key_is_small():
    """At most 64 bytes for an expert key, besides 4 for each of its shards."""
    geometry = make_geometry([256] * 4, [[10] * 3] * 4)
    state = make_state(geometry, 100, eviction="predicted")
    of_keys = [v for v in state if isinstance(v, np.ndarray) and len(v) == 1024 and v.ndim]
    assert sum(v.nbytes for v in of_keys) + geometry.layer_of.nbytes <= 64 * 1024


def test_layers_of_many_experts_have_wide_ids():
    geometry = make_geometry([300], [[10]])
    state = make_state(geometry, 40, eviction="predicted")
    assert state.follower.dtype == np.uint16 and state.follower.shape[1] < NUM_FOLLOWERS
    for _ in run_steps(geometry, state, [(clock, [290 + clock % 2, 280]) for clock in range(1, 80)]):
        pass
    assert state.boost[[280, 290, 291]].all() and state.boost.astype(bool).sum() == 3
