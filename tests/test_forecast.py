"""What a step would take, asked before it is made: the plan's own figure, and nothing changes."""

import math

import numpy as np
import pytest
from expert_cases import random_routing, random_store
from numba import config
from plan_cases import H200
from test_engine import assert_unchanged, snapshot

from trilane import ArrayError, ArrayTypeError, ClosedError, RoutingError
from trilane.cost import STEP_US
from trilane.expert import make_geometry
from trilane.forecast import Forecast, ask, make_trial, predict_step
from trilane.plan import make_options, make_work
from trilane.planner import learn_step, plan_layer
from trilane.state import check, make_state

needs_compiled = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
GEOMETRY = make_geometry([64, 48], [[900_000, 900_000, 400_000], [900_000, 900_000]])
OPTIONS = make_options(admit="score", background=True)


def predict(state, options, layer, ids, geometry=GEOMETRY):
    """us of the step, from a trial of its own."""
    if not config.DISABLE_JIT:
        forecast = Forecast(state, geometry, options)
        forecast.ask(layer, ids)
        return forecast.predict_us(H200)
    trial = make_trial(state, geometry, options, ids.size)
    ask(trial, state, layer, ids)
    return predict_step(trial, H200)


def draw(rng, layer, rows, top_k=4):
    """Router ids (rows, top_k), a quarter of the experts far more often than the others."""
    num = int(np.diff(GEOMETRY.first_expert)[layer])
    keys = rng.gumbel(size=(rows, num)) + 3.0 * (np.arange(num) < num // 4)
    return np.argsort(-keys, axis=1)[:, :top_k]


def plan(state, work, options, layer, ids, clock):
    experts, rows = np.unique(ids[ids >= 0], return_counts=True)
    arrays = experts.astype(np.int32), rows.astype(np.int32), len(experts)
    plan_layer(state, GEOMETRY, H200, options, layer, *arrays, clock, work)
    learn_step(state, GEOMETRY, options, layer, arrays[0], len(experts))


def bits_of(state):
    return [part.tobytes() if isinstance(part, np.ndarray) else part for part in state]


@pytest.mark.parametrize("pool, eviction", [("shared", "predicted"), ("layer", "lru"), ("shared", "decayed_frequency")])
def test_the_forecast_is_the_plans_and_changes_nothing(pool, eviction):
    rng, work = np.random.default_rng(1), make_work(GEOMETRY)
    state = make_state(GEOMETRY, 90, pool=pool, eviction=eviction)
    for clock in range(1, 8 if config.DISABLE_JIT else 120):
        layer = clock % 2
        ids = draw(rng, layer, int(rng.integers(1, 6)))
        before = bits_of(state)
        us = predict(state, OPTIONS, layer, ids)
        assert bits_of(state) == before
        plan(state, work, OPTIONS, layer, ids, clock)
        assert us == work.predicted_us[STEP_US]
    check(state, GEOMETRY)


def test_more_rows_never_cost_less_and_shared_experts_cost_little():
    """T35: what each further row of a speculative step costs can be asked for, and draws the union's price."""
    rng, work = np.random.default_rng(2), make_work(GEOMETRY)
    state = make_state(GEOMETRY, 120, eviction="predicted")
    rises = []
    for clock in range(1, 6 if config.DISABLE_JIT else 100):
        layer, ids = clock % 2, draw(rng, clock % 2, 4)
        us = [predict(state, OPTIONS, layer, ids[:rows]) for rows in range(1, 5)]
        slack = OPTIONS.slack_runs * H200.run_fix_us  # what a plan may lose to fetch what is used again
        assert (np.diff(us) >= -slack).all(), (clock, us)
        rises.append(us[3] / us[0])
        same = [predict(state, OPTIONS, layer, np.repeat(ids[:1], rows, axis=0)) for rows in (1, 4)]
        assert same[0] <= same[1] <= 1.2 * same[0]  # four rows of the same experts: one reading of their weights
        plan(state, work, OPTIONS, layer, ids[:1], clock)
    assert np.mean(rises) > 1.5  # four rows of their own are no bargain, and the caller can see it


def test_ids_that_name_no_expert_cost_nothing():
    state = make_state(GEOMETRY, 30)
    ids = np.array([[3, 5], [-1, 64]])
    assert predict(state, OPTIONS, 0, ids) == predict(state, OPTIONS, 0, ids[:1])


def test_steps_of_several_waves_take_all_of_them_and_some_never_end():
    options, ids = make_options(force="stream"), np.array([[0, 1, 2]])
    few, enough = (predict(make_state(GEOMETRY, slots), options, 0, ids) for slots in (2, 9))
    assert few >= enough + 4 * H200.step_fix_us  # five waves
    assert predict(make_state(GEOMETRY, 0), options, 0, ids) == math.inf


# ---------------------------------------------------------------------------------------------- schedulers
def planned_us(scheduler, layer):
    return dict(scheduler.explain(layer).plan.predicted_us)["step"]


@needs_compiled
def test_a_scheduler_says_what_its_next_plan_will(scheduler_of):
    store = random_store("q8_0", layers=2, experts=6, hidden=256, intermediate=544)
    scheduler, rng = (
        scheduler_of(store, cache={"fraction": 0.4}, policy={"background": False}),
        np.random.default_rng(3),
    )
    for step in range(12):
        x = rng.standard_normal((4, 256)).astype(np.float32)
        ids, weights = random_routing(rng, 4, 2, 6)
        before, layer = snapshot(scheduler), step % 2
        us = [scheduler.predict_us(layer, ids[:rows]) for rows in range(1, 5)]
        assert us == sorted(us) and us[0] > 0
        assert_unchanged(before, scheduler)
        ticket = scheduler.submit(layer, x, ids, weights)
        assert planned_us(scheduler, layer) == us[3]
        assert scheduler.predict_us(1 - layer, ids.tolist()) > 0  # also while a step is under way
        scheduler.wait(ticket)
    scheduler._runner.reset()
    assert scheduler.predict_us(0, ids) > 0  # of the state that it has now
    assert scheduler.predict_us(0, np.zeros((0, 2), np.int64)) == 0.0


@needs_compiled
def test_wrong_questions_are_refused(scheduler_of, monkeypatch):
    scheduler = scheduler_of(random_store("q8_0", layers=1, experts=6, hidden=256, intermediate=256))
    for ids, error in (([[7]], RoutingError), ([[-2]], RoutingError), ([[0.5]], ArrayTypeError), ([1, 2], ArrayError)):
        with pytest.raises(error, match="topk_ids"):
            scheduler.predict_us(0, ids)
    with pytest.raises(RoutingError, match="layer"):
        scheduler.predict_us(1, [[0]])
    monkeypatch.setattr(scheduler._runner, "max_rows", lambda top_k: 2)
    with pytest.raises(ArrayError, match="one step takes 2"):
        scheduler.predict_us(0, [[0]] * 3)
    scheduler.close()
    with pytest.raises(ClosedError):
        scheduler.predict_us(0, [[0]])


@needs_compiled
def test_a_gpu_says_it_too(played):
    store = random_store("q8_0", layers=1, experts=6, hidden=256, intermediate=512)
    scheduler = played(store, cache={"fraction": 0.4}, policy={"force": "zero_copy", "admit": "always"})
    x, weights = np.ones((1, 256), np.float32), np.array([[0.5, 0.25]], np.float32)
    for ids in ([[0, 1]], [[2, 3]], [[4, 5]]):
        before = bits_of(scheduler._runner.state)
        us = [scheduler.predict_us(0, ids * rows) for rows in (1, 2)]
        assert bits_of(scheduler._runner.state) == before and us[0] <= us[1]
        scheduler.forward(0, x, np.array(ids), weights)
        assert planned_us(scheduler, 0) == us[0]
