"""What past passes foretell, against a plain implementation, and what a boost does to scores and heaps."""

import random

import numpy as np
import pytest

from trilane.cost import make_rates
from trilane.expert import make_geometry
from trilane.neighbours import CHANCE, FADE, FINE, ONE, rate_near
from trilane.plan import make_options, make_work
from trilane.planner import learn_step, plan_layer
from trilane.state import MOST_FOLLOWED, NUM_NEAR, NUM_PAST, RAISED, check, make_state

RATES = make_rates(stream_us_per_byte=1.0, zero_copy_us_per_byte=1.0, cpu_us_per_byte=1.0)
OPTIONS = make_options(admit="score", background=True)


class PlainPast:
    """Passes as lists of sets by layer, the one under way last; likeness beside each of the past ones."""

    def __init__(self, layers):
        self.layers, self.passes, self.alike, self.layer = layers, [[set() for _ in range(layers)]], [], 0

    def step(self, layer, experts, is_new):
        experts = set(experts) if len(experts) <= MOST_FOLLOWED else set()
        if is_new:
            self.alike = [0, *self.alike][-(NUM_PAST - 1) :]
            self.passes = [*self.passes, [set() for _ in range(self.layers)]][-NUM_PAST:]
        self.layer = layer
        for k in range(len(self.alike)):
            self.alike[k] += ONE * len(experts & self.passes[k][layer]) - (self.alike[k] >> FADE)
        self.passes[-1][layer] = experts
        self.nearest = sorted((-alike, place) for place, alike in enumerate(self.alike) if alike)[:NUM_NEAR]
        weight = [(-alike >> FINE) ** 4 for alike, _ in self.nearest]
        total = sum(weight) + ((len(experts) * ONE << FADE) // CHANCE >> FINE) ** 4
        self.rates = [one * ONE // total for one in weight] if experts else []

    def rate(self, layer, id_, passes):
        found = 0
        for rate, (_, place) in zip(self.rates, self.nearest, strict=False):
            if passes == 0 or place + passes < len(self.passes) - 1:
                found += rate * (id_ in self.passes[place + passes][layer])
        return found


def run_steps(geometry, state, steps):
    """Plan and learn (layer, clock, experts), checking the state after each."""
    work, rows = make_work(geometry), np.ones(64, np.int32)
    for layer, clock, experts in steps:
        ids = np.array(list(experts), np.int32)
        plan_layer(state, geometry, RATES, OPTIONS, layer, ids, rows, len(ids), clock, work)
        learn_step(state, geometry, OPTIONS, layer, ids, len(ids))
        check(state, geometry)
        yield


def kinds_of_tokens(passes, layers, seed=0, kinds=5, experts=40):
    """Routing of tokens of a few kinds, each with its own experts and a bit of noise."""
    rng = random.Random(seed)
    own = [[rng.sample(range(experts), 4) for _ in range(layers)] for _ in range(kinds)]
    for number in range(passes):
        kind = own[rng.randrange(kinds)]
        for layer in range(layers):
            yield layer, number * layers + layer + 1, {*kind[layer][:3], rng.randrange(experts)}


def test_rates_and_boosts_are_those_of_the_plain_implementation():
    geometry = make_geometry([40] * 3, [[10]] * 3)
    state, plain = make_state(geometry, 30, eviction="predicted", half_life_steps=4), PlainPast(3)
    steps = list(kinds_of_tokens(NUM_PAST + 30, 3))
    steps[50] = (*steps[50][:2], set(range(MOST_FOLLOWED + 1)))  # too many to say anything
    for (layer, clock, experts), _ in zip(steps, run_steps(geometry, state, steps), strict=True):
        plain.step(layer, experts, is_new=layer == 0 and clock > 1)
        boosts = [plain.rate(layer, id_, 1) for id_ in range(40)]
        first = int(geometry.first_expert[layer])
        found = state.boost[first : first + 40].tolist()
        if len({alike for alike, _ in plain.nearest}) == len(plain.nearest) == NUM_NEAR:  # else ties lie otherwise
            assert found == boosts, clock
            assert [rate_near(state, (layer + 1) % 3, id_, 0) for id_ in range(40)] == [
                plain.rate((layer + 1) % 3, id_, 0) for id_ in range(40)
            ]
            passes = 2 if layer == 2 else 1  # the next plan's layer, and its use after that
            assert (state.ahead_layer[0], state.ahead_passes[0]) == ((layer + 1) % 3, passes)
            assert state.ahead.tolist() == [plain.rate((layer + 1) % 3, id_, passes) for id_ in range(40)]
        assert sorted(state.near_rate[: state.num_near[0]]) == sorted(plain.rates)
        assert ((state.flags[first : first + 40] & RAISED) > 0).tolist() == [boost > 0 for boost in found]


def test_what_comes_is_foretold_once_the_first_layers_are_known():
    geometry = make_geometry([40] * 3, [[10]] * 3)
    state, known = make_state(geometry, 30, eviction="predicted"), []
    steps = list(kinds_of_tokens(120, 3))
    for place, _ in enumerate(run_steps(geometry, state, steps)):
        layer = steps[place][0]
        if place > 100 and layer < 2:
            coming = [rate_near(state, layer + 1, id_, 0) for id_ in range(40)]
            known.append(len(set(np.argsort(coming)[-3:].tolist()) & steps[place + 1][2]) / 3)
    assert np.mean(known) > 0.85


def test_routing_without_a_pattern_foretells_little():
    geometry, rng = make_geometry([64] * 2, [[10]] * 2), random.Random(1)
    state, most = make_state(geometry, 40, eviction="predicted"), []
    steps = [(clock % 2, clock + 1, rng.sample(range(64), 4)) for clock in range(800)]
    for _ in run_steps(geometry, state, steps):
        most.append(int(state.near_rate[: state.num_near[0]].sum()))
    assert np.mean(most[400:]) < 0.75 * ONE


def test_a_score_is_use_of_late_and_what_is_foretold():
    geometry = make_geometry([8], [[10]])
    state = make_state(geometry, 4, eviction="predicted", half_life_steps=8, prediction=2.0)
    for _ in run_steps(geometry, state, [(0, clock, [clock % 2, 6 + clock % 2]) for clock in range(1, 400)]):
        pass
    of_use = sum(0.5 ** (age / 8) for age in range(0, 400, 2))
    certain = 2 / (1 - 2 ** (-1 / 8)) * state.boost[398 % 2] / ONE
    now, before = 399 % 2, 398 % 2
    assert state.boost[before] > 0.9 * ONE and state.boost[now] == 0
    assert state.score[now] / state.unit[0] == pytest.approx(of_use)
    assert state.score[before] / state.unit[0] == pytest.approx(of_use * 0.5 ** (1 / 8) + certain, rel=0.02)


def test_what_is_foretold_is_worth_more_than_what_was_just_used():
    """Two pairs take turns, which frequency and recency read the wrong way round."""
    geometry = make_geometry([6], [[10]])
    state = make_state(geometry, 2, eviction="predicted")
    steps = [(0, clock, [0, 1] if clock % 2 else [2, 3]) for clock in range(1, 60)]
    for clock, _ in enumerate(run_steps(geometry, state, steps), 1):
        if clock > 30:
            used, others = ([0, 1], [2, 3]) if clock % 2 else ([2, 3], [0, 1])
            assert state.score[others].min() > state.score[used].max()


def test_steps_that_were_not_seen_leave_a_gap_and_begin_no_pass_too_many():
    """On a GPU, steps without misses are not told of: layers are missing, and the clock says what else is."""
    geometry = make_geometry([8] * 4, [[10]] * 4)
    state = make_state(geometry, 4, eviction="predicted")
    rows = []
    for _ in run_steps(geometry, state, [(0, 1, [1]), (2, 3, [2]), (3, 8, [3]), (3, 12, [4]), (1, 14, [5])]):
        rows.append(int(state.row[0]))
    assert rows == [rows[0], rows[0], rows[0] + 1, rows[0] + 2, rows[0] + 3]
    assert state.past[:, 0, rows[0]].tolist() == [2, 0, 4, 0]


def test_a_plan_weighs_alike_with_and_without_the_tally_of_the_step_before():
    """Where layers are left out the tally is of another one, and the rates are asked for one by one."""
    geometry, rng = make_geometry([40] * 3, [[10]] * 3), random.Random(4)
    steps = [one for one in kinds_of_tokens(90, 3) if rng.random() < 0.8]
    states = [make_state(geometry, 30, eviction="predicted") for _ in range(2)]
    runs, tallied = [run_steps(geometry, state, steps) for state in states], 0
    for place in range(len(steps)):
        tallied += int(states[0].ahead_layer[0]) == steps[place][0]
        states[1].ahead_layer[0] = -1
        for run in runs:
            next(run)
        assert states[0].slot_of.tolist() == states[1].slot_of.tolist()
        assert states[0].score.tolist() == states[1].score.tolist()
    assert 50 < tallied < len(steps)


def test_large_steps_neither_teach_nor_predict():
    geometry = make_geometry([64], [[10]])
    state = make_state(geometry, 32, eviction="predicted")
    for _ in run_steps(geometry, state, [(0, 1, [0]), (0, 2, range(40))]):
        pass
    assert not state.past[0, :, state.row[0]].any() and state.num_near[0] == 0 and not state.boost.any()


def test_boosts_survive_the_rescaling_of_units_and_long_breaks():
    geometry = make_geometry([8], [[10]])
    state = make_state(geometry, 4, eviction="predicted", half_life_steps=0.05)
    for _ in run_steps(geometry, state, [(0, clock, [clock % 3, 3 + clock % 2]) for clock in range(1, 200)]):
        pass
    assert state.boost.any()
    for _ in run_steps(geometry, state, [(0, 10_000_000, [1])]):
        pass
    assert (state.score >= 0).all() and np.isfinite(state.score).all()


def test_state_of_a_key_is_small():
    """At most 64 bytes for an expert key, besides 4 for each of its shards."""
    geometry = make_geometry([256] * 4, [[10] * 3] * 4)
    state = make_state(geometry, 100, eviction="predicted")
    of_keys = [v for v in state if isinstance(v, np.ndarray) and len(v) == 1024 and v.ndim]
    assert sum(v.nbytes for v in of_keys) + state.past.nbytes + geometry.layer_of.nbytes <= 64 * 1024


def test_only_prediction_remembers_passes():
    geometry = make_geometry([300], [[10]])
    for eviction, passes in (("lru", 0), ("decayed_frequency", 0), ("predicted", NUM_PAST)):
        state = make_state(geometry, 40, eviction=eviction)
        assert state.past.shape == (1, 10, passes)
        for _ in run_steps(geometry, state, [(0, clock, [290 + clock % 2, 280]) for clock in range(1, 80)]):
            pass
    assert state.boost[[280, 290, 291]].astype(bool).sum() >= 2 and state.boost.astype(bool).sum() <= 3
