"""Fixed costs measured through the real step, and the rates of a store's layers that follow from a profile."""

import logging
import math
from collections.abc import Iterator

import numpy as np
import pytest
from made_profile import make_profile

from trilane.config import Config
from trilane.engine import ExpertScheduler
from trilane.errors import ProfileError
from trilane.lane_probe import Sample, fixed_costs, measure_fixed_costs
from trilane.layer_rates import layer_formats, rates_of_layers
from trilane.profile import Curve, MachineProfile
from trilane.step_bench import StepShape, limit_us, random_store
from trilane.store import ExpertStore

SHAPE = StepShape(hidden=256, intermediate=512, num_experts=16, top_k=4, format="q8_0")
PLAYED = {"link_gb_s": 1.0, "link_fix_us": 5.0, "zero_copy_gb_s": 0.5, "hit_gb_s": 2.0, "cpu_gb_s": 0.25}


@pytest.fixture(scope="module")
def store():
    return random_store(SHAPE)


@pytest.fixture
def own(store) -> Iterator[ExpertScheduler]:
    with ExpertScheduler(store, config=Config(cache={"fraction": 0.5})) as scheduler:
        yield scheduler


def test_every_lane_has_a_rate(own):
    rates = own._runner.rates[0]
    for name in ("hit_us_per_byte", "stream_us_per_byte", "cpu_us_per_byte", "step_fix_us"):
        assert 0 < getattr(rates, name) < math.inf, name
    assert (rates.zero_copy_us_per_byte > 0).all()


def test_fixed_costs_are_finite_and_probing_leaves_no_trace(own):
    costs = measure_fixed_costs(own._runner, own.profile)
    wanted = {"step_fix_us", "cpu_fix_us", "zero_copy_fix_us", "stream_fix_us", "stream_tail_us", "hit_fix_us"}
    assert set(costs) == wanted and all(0 <= us < 1e6 for us in costs.values())
    stats = own.stats()
    assert stats.steps == 0 and stats.hit_rate is None and own.explain(0) is None
    assert (own._runner.state.owner == -1).all()


def test_without_slots_only_lanes_that_need_none_are_probed(store):
    with ExpertScheduler(store, config=Config(cache={"slots": 0})) as scheduler:
        costs = measure_fixed_costs(scheduler._runner, scheduler.profile)
        assert set(costs) == {"step_fix_us", "cpu_fix_us", "zero_copy_fix_us"}
        assert "cache" in scheduler.stats().inactive


def test_the_cheapest_hand_over_is_the_steps_cost():
    samples = {
        "cpu": [Sample(1e6, 7.0, 30.0), Sample(2e6, 9.0, 32.0)],
        "stream": [Sample(1e6, -3.0, 50.0)],
        "hit": [Sample(1e6, 1.0, 20.0)],
    }
    costs = fixed_costs(samples)
    assert costs == {
        "step_fix_us": 20.0, "cpu_fix_us": 8.0 + 11.0, "stream_fix_us": 0.0, "stream_tail_us": 30.0, "hit_fix_us": 1.0,
    }  # fmt: skip


def test_a_given_profile_is_taken_as_it_is(store, own):
    with ExpertScheduler(store, profile=own.profile, config=Config(cache={"fraction": 0.5})) as scheduler:
        assert scheduler.profile is own.profile


def test_a_profile_without_the_format_is_refused(store):
    with pytest.raises(ProfileError, match="q8_0"):
        ExpertScheduler(store, profile=MachineProfile())


def test_played_rates_are_the_chosen_ones(store):
    with ExpertScheduler(store, config=Config(cache={"fraction": 0.5}, host_device=PLAYED)) as scheduler:
        rates = scheduler._runner.rates[0]
        assert rates.stream_us_per_byte == pytest.approx(1e-3 / PLAYED["link_gb_s"])
        assert rates.hit_us_per_byte == pytest.approx(1e-3 / PLAYED["hit_gb_s"])
        assert rates.cpu_us_per_byte == pytest.approx(1e-3 / PLAYED["cpu_gb_s"])
        assert (rates.hit_cores, rates.link_cores, rates.cpu_cores) == (0, 0, 0)
        assert set(scheduler.stats().played) == set(PLAYED)


def test_a_lane_cannot_be_played_faster_than_it_is(store, caplog):
    config = Config(cache={"fraction": 0.5}, host_device={"hit_gb_s": 1e6, "zero_copy_gb_s": 1e6})
    with caplog.at_level(logging.WARNING, "trilane"), ExpertScheduler(store, config=config) as scheduler:
        own = scheduler.profile
        rates = scheduler._runner.rates[0]
        assert rates.hit_us_per_byte == pytest.approx(1e-3 / own.device_experts["q8_0"])
        assert rates.zero_copy_us_per_byte[0] == pytest.approx(1e-3 / own.zero_copy.at(1))
    assert "can only act slower" in caplog.text


def test_t12_workers_are_no_more_than_the_knee_of_this_machine(store):
    flat = {"q8_0": Curve((1.0, 2.0, 4.0), (20.0, 20.5, 20.2))}
    config = Config(cache={"fraction": 0.5})
    with ExpertScheduler(store, profile=make_profile(cpu_experts=flat), config=config) as scheduler:
        assert scheduler._runner.device.num_threads == 1
    fixed = Config(cache={"fraction": 0.5}, cpu={"threads": 2})
    with ExpertScheduler(store, profile=make_profile(cpu_experts=flat), config=fixed) as scheduler:
        assert scheduler._runner.device.num_threads == 2  # who gives a number gets it


def test_rates_of_mixed_experts_add_up_what_bytes_take():
    rng = np.random.default_rng(0)
    layer = {name: rng.standard_normal((2, 256, 256), np.float32) for name in ("gate", "up", "down")}
    mixed = ExpertStore.from_arrays([layer], formats={"gate": "q4_k", "up": "q4_k", "down": "f32"})
    formats = layer_formats(mixed.layers[0])
    assert formats == {"q4_k": 2 * 256 * 144.0, "f32": 256 * 1024.0}
    profile = make_profile(device_experts={"q4_k": 10.0, "f32": 40.0})
    with ExpertScheduler(mixed, profile=profile) as scheduler:
        us = rates_of_layers(profile, scheduler._runner)[0].hit_us_per_byte * sum(formats.values())
    assert us == pytest.approx(formats["q4_k"] / 10e3 + formats["f32"] / 40e3)


def test_limit_counts_shared_cores(own):
    rates = own._runner.rates[0]
    alone = limit_us(rates._replace(num_cores=0.0), 0, 1 << 20)
    assert 0 < alone <= limit_us(rates, 0, 1 << 20)
    assert rates_of_layers(own.profile, own._runner)[0].num_cores > 0
