"""The list of missed experts, and the fills that come of it."""

import numpy as np
from plan_cases import H200

from trilane.expert import make_geometry
from trilane.plan import make_options, make_work
from trilane.planner import learn_step, plan_background, plan_layer
from trilane.residency import drop_fill, land_fill
from trilane.state import NUM_WANTED, check, make_state
from trilane.wanted import best_wanted, drop_coming, drop_wanted, has_victim, list_coming, want_expert

GEOMETRY = make_geometry([32], [[1000] * 2])
ON_CPU = make_options(force="cpu", background=True, admit="score")


def state_with_scores(scores):
    state = make_state(GEOMETRY, 6, eviction="given")
    state.score[: len(scores)] = scores
    return state


def test_the_list_keeps_the_best():
    state = state_with_scores(range(32))
    for expert in (3, 3, *range(31, -1, -2), *range(0, 32, 2)):
        want_expert(state, expert)
    check(state, GEOMETRY)
    assert sorted(state.wanted.tolist()) == list(range(32 - NUM_WANTED, 32))
    assert state.wanted[best_wanted(state)] == 31
    drop_wanted(state, best_wanted(state))
    assert state.num_wanted[0] == NUM_WANTED - 1 and state.wanted[best_wanted(state)] == 30


def run_step(state, experts, clock, options=ON_CPU):
    work, ids = make_work(GEOMETRY), np.array(experts, np.int32)
    plan_layer(state, GEOMETRY, H200, options, 0, ids, np.ones(len(ids), np.int32), len(ids), clock, work)
    learn_step(state, GEOMETRY, options, 0, ids, len(ids))
    return work


def test_what_the_cpu_computed_is_filled_in_the_background():
    """CPU with a background fill: its expert hits from then on; without the option, CPU without one."""
    state, work = make_state(GEOMETRY, 6, eviction="decayed_frequency"), make_work(GEOMETRY)
    run_step(state, [4, 9], 1)
    assert sorted(state.wanted[:2].tolist()) == [4, 9]
    assert plan_background(state, GEOMETRY, ON_CPU, 3, work) == 3
    assert work.fill_shard[:3].tolist() == [8, 9, 18] and (work.fill_victim[:3] == -1).all()
    for k in range(3):
        end = land_fill if k < 2 else drop_fill
        assert end(state, GEOMETRY, int(work.fill_slot[k]), int(work.fill_shard[k]))
    check(state, GEOMETRY)
    hit = run_step(state, [4], 2)
    assert hit.counts[0] == 2
    state = make_state(GEOMETRY, 6)
    run_step(state, [4, 9], 1, make_options(force="cpu"))
    assert state.num_wanted[0] == 0


def test_a_fill_displaces_only_what_is_worth_less():
    state, work = make_state(GEOMETRY, 2, eviction="decayed_frequency"), make_work(GEOMETRY)
    for clock in (1, 2, 3):
        run_step(state, [0], clock, make_options(force="stream"))
    run_step(state, [1], 4)
    assert plan_background(state, GEOMETRY, ON_CPU, 4, work) == 0 and state.num_wanted[0] == 0
    for clock in (5, 6, 7, 8):
        run_step(state, [1], clock)
    assert plan_background(state, GEOMETRY, ON_CPU, 4, work) == 2
    assert sorted(work.fill_victim[:2].tolist()) == [0, 1]
    assert plan_background(state, GEOMETRY, ON_CPU, 4, work) == 0  # on its way already
    check(state, GEOMETRY)


def test_what_the_next_layer_will_use_is_fetched_ahead():
    """Expert 2 e + 1 of layer 1 always follows expert e of layer 0; a fill brings it before it is asked for."""
    geometry = make_geometry([16, 32], [[1000] * 2] * 2)
    state, work = make_state(geometry, 12, eviction="predicted"), make_work(geometry)
    rng, options, rows = np.random.default_rng(0), make_options(background=True, admit="score"), np.ones(4, np.int32)
    hits = []
    for clock in range(2, 2000, 2):
        ids = rng.choice(16, 2, replace=False).astype(np.int32)
        for layer, experts in ((0, ids), (1, (2 * ids + 1).astype(np.int32))):
            plan_layer(state, geometry, H200, options, layer, experts, rows, 2, clock + layer, work)
            hits.append(work.counts[0])
            learn_step(state, geometry, options, layer, experts, 2)
            for k in range(plan_background(state, geometry, options, 4, work)):
                assert land_fill(state, geometry, int(work.fill_slot[k]), int(work.fill_shard[k]))
        if clock % 100 == 2:
            check(state, geometry)
    late = np.array(hits[1000:]).reshape(-1, 2)
    assert late[:, 1].mean() > 2.7 > 1.5 > late[:, 0].mean()  # of 4 shards; layer 0 is uniform


def test_the_coming_layer_pays_for_no_fill_of_its_own():
    geometry = make_geometry([8, 8], [[1000]] * 2)
    state = make_state(geometry, 1, eviction="given")
    work, one = make_work(geometry), np.ones(1, np.int32)
    plan_layer(state, geometry, H200, make_options(force="stream"), 1, one, one, 1, 1, work)
    plan_layer(state, geometry, H200, make_options(force="cpu"), 0, one, one, 1, 2, work)
    assert has_victim(state, geometry, 1, 1.0) and not has_victim(state, geometry, 1, 0.0)
    state = make_state(geometry, 1, eviction="predicted")
    for clock, layer, lane in ((1, 0, "cpu"), (2, 1, "stream"), (3, 0, "cpu")):
        options = make_options(force=lane)
        plan_layer(state, geometry, H200, options, layer, one, one, 1, clock, work)
        learn_step(state, geometry, options, layer, one, 1)
    assert not has_victim(state, geometry, 1, 1e9) and has_victim(state, geometry, 0, 1e9)
    state.coming[:3], state.num_coming[0] = [4, 5, 6], 3
    drop_coming(state)
    assert state.coming[: state.num_coming[0]].tolist() == [5, 6]


def test_what_is_to_come_is_looked_for_in_the_layers_that_fills_can_serve():
    geometry, rows = make_geometry([8] * 6, [[1000]] * 6), np.ones(2, np.int32)
    options = make_options(force="cpu", background=True, admit="score", coming_from=2, coming_layers=3)
    state, work = make_state(geometry, 4, eviction="predicted"), make_work(geometry)
    for clock in range(1, 19):
        layer = (clock - 1) % 6
        ids = np.array([layer, 7], np.int32)
        plan_layer(state, geometry, H200, options, layer, ids, rows, 2, clock, work)
        learn_step(state, geometry, options, layer, ids, 2)
        assert state.num_coming[0] == 0  # who begins the fills asks
    list_coming(state, geometry, options, 5)
    coming = sorted((int(e) // 8, int(e) % 8) for e in state.coming[: state.num_coming[0]])  # after layer 5
    assert coming == [(k, e) for k in (1, 2, 3) for e in (k, 7)]
    check(state, geometry)
    list_coming(state, geometry, options._replace(coming_from=6), 5)
    assert state.num_coming[0] == 0


def test_a_fill_that_must_be_sure_of_its_use():
    """Only what is foretold at the asked rate is filled, and nothing merely because it was missed of late."""
    geometry, rows = make_geometry([8] * 2, [[1000]] * 2), np.ones(1, np.int32)
    state, work = make_state(geometry, 2, eviction="predicted"), make_work(geometry)
    options = make_options(force="cpu", background=True, admit="score")
    rng = np.random.default_rng(0)
    for clock in range(1, 41):  # layer 1: expert 1 in every pass, and any other
        layer = (clock - 1) % 2
        ids = np.array([0] if layer == 0 else [1, rng.integers(2, 8)], np.int32)
        plan_layer(state, geometry, H200, options, layer, ids, np.ones(2, np.int32), len(ids), clock, work)
        learn_step(state, geometry, options, layer, ids, len(ids))
    plan_layer(state, geometry, H200, options, 0, np.zeros(1, np.int32), rows, 1, 41, work)
    learn_step(state, geometry, options, 0, np.zeros(1, np.int32), 1)
    found = {}
    for least in (0, 192):
        list_coming(state, geometry, options._replace(least_rate=least), 0)
        found[least] = {int(e) - 8 for e in state.coming[: state.num_coming[0]]}
    assert found[192] == {1} and found[0] > {1}
    sure = options._replace(least_rate=192)
    assert plan_background(state, geometry, sure, 4, work) == 1 and work.fill_shard[0] == 9
    assert state.num_wanted[0] > 0 and plan_background(state, geometry, sure, 4, work) == 0
