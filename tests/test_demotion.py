"""Hits that the CPU computes after all: only where lanes share cores, only for a shorter step, and slots stay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_profile import make_profile
from numba import config
from plan_cases import RATES, plan_once
from test_split import brute_force
from trace_cases import random_tokens

from trilane import Config
from trilane.cost import STEP_US, Loads, make_rates, step_us
from trilane.expert import CPU, HIT, ZERO_COPY, make_geometry
from trilane.machines import profile_machine
from trilane.plan import make_options
from trilane.profile import Curve
from trilane.replay import Replay

SHARED = RATES.map(lambda rates: rates._replace(num_cores=2.0))
# A device of one thread that takes twice as long for a byte as the CPU lane, which has both cores.
SLOW_HITS = make_rates(
    step_fix_us=10, hit_us_per_byte=2.0, stream_us_per_byte=3.0, zero_copy_us_per_byte=3.0, cpu_us_per_byte=1.0,
    num_cores=2, hit_cores=1, link_cores=1, cpu_cores=2,
)  # fmt: skip


def plan_with(rates, whole, *, lanes=("stream", "zero_copy", "cpu"), rows=None):
    """Plan a step of experts of two shards, those in ``whole`` in slots; lanes (experts, 2), state, work."""
    geometry = make_geometry([6], [[40, 40]])
    resident = [2 * i + j for i, is_there in enumerate(whole) if is_there for j in range(2)]
    rows = [1] * len(whole) if rows is None else rows
    options = make_options(lanes, slack_runs=0)
    state, work = plan_once(geometry, rates, options, range(len(whole)), rows, resident=resident, num_slots=12)
    return work.lane[: 2 * len(whole)].reshape(-1, 2).copy(), state, work


@settings(max_examples=80, deadline=None)
@given(SHARED, st.lists(st.booleans(), min_size=1, max_size=3), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_a_step_is_never_longer_than_with_every_hit_on_the_device(rates, whole, rows):
    lanes, state, work = plan_with(rates, whole, rows=rows[: len(whole)])
    missing = [[not is_there] * 2 for is_there in whole]
    best = brute_force(make_geometry([6], [[40, 40]]), rates, missing, rows, (1, 2, 3))
    demoted = [is_there and (lanes[i] != HIT).any() for i, is_there in enumerate(whole)]
    if any(demoted):
        assert work.predicted_us[STEP_US] < best
    for i, is_demoted in enumerate(demoted):
        if is_demoted:  # all of the expert, by lanes that need no slot
            assert np.isin(lanes[i], (ZERO_COPY, CPU)).all() and (work.slot[2 * i : 2 * i + 2] == -1).all()
    for i, is_there in enumerate(whole):
        assert not is_there or (state.slot_of[2 * i : 2 * i + 2] >= 0).all()


def test_hits_that_cost_more_than_misses_are_computed_by_the_cpu_as_far_as_that_is_quicker():
    lanes, _, work = plan_with(SLOW_HITS, [True] * 4)
    alone = step_us(SLOW_HITS, Loads(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 8, 320.0, 320.0))
    on_device = step_us(SLOW_HITS, Loads(320.0, 320.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0, 0.0))
    assert work.predicted_us[STEP_US] == pytest.approx(alone) and alone < 0.6 * on_device
    assert (lanes == HIT).all(axis=1).sum() == 2 and (lanes == CPU).all(axis=1).sum() == 2


@pytest.mark.parametrize(
    ("changes", "lanes"),
    [
        ({"num_cores": 0.0}, ("stream", "zero_copy", "cpu")),  # a GPU, or lanes that are played
        ({}, ("stream", "zero_copy")),
        ({"hit_us_per_byte": 0.2}, ("stream", "zero_copy", "cpu")),
        ({"cpu_us_per_byte": np.inf}, ("stream", "zero_copy", "cpu")),
    ],
)
def test_hits_stay_where_the_device_has_cores_of_its_own_or_the_cpu_may_not_or_cannot_help(changes, lanes):
    found, _, work = plan_with(SLOW_HITS._replace(**changes), [True] * 4, lanes=lanes)
    assert (found == HIT).all() and work.counts[HIT] == 8


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
@pytest.mark.parametrize("hit_gb_s", [6.0, 10.0, 14.0, 18.0, 22.0])
def test_two_cores_are_used_as_well_as_by_the_best_single_lane(tmp_path, hit_gb_s):
    """Two CPUs that are the device, the link and the CPU lane at once: a hit may cost what a miss costs, or more."""
    profile = make_profile(device_experts={"q4_k": hit_gb_s}, cpu_experts={"q4_k": Curve((1.0, 2.0), (18.0, 20.0))})
    replay = Replay(random_tokens(60), profile_machine(profile, tmp_path / "two.json", "q4_k"), expert_nbytes=9_000_000)
    for slots in (6, 12, 24):
        result = replay.run("x", Config(), slots)
        assert result.mean_us <= 1.01 * result.single_lane_us[result.best_single_lane]
