"""The lanes measured through the real step: every rate is there, and played lanes keep what was chosen."""

import math
from collections.abc import Iterator

import pytest

from trilane.config import Config
from trilane.engine import ExpertScheduler
from trilane.errors import ProfileError
from trilane.lane_probe import Sample, _fit, layout_label, rates_of_layers
from trilane.profile import MachineProfile, load_profile
from trilane.step_bench import StepShape, limit_us, random_store

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


def test_probing_leaves_no_trace(own):
    stats = own.stats()
    assert stats.steps == 0 and stats.hit_rate is None and own.explain(0) is None
    assert (own._runner.state.owner == -1).all()


def test_a_profile_names_its_machine_and_survives_json(own):
    profile = own.profile
    assert profile.machine.version and profile.machine.cores_allowed
    assert load_profile(profile.to_json()) == profile


def test_a_given_profile_is_not_measured_again(store, own):
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


def test_without_slots_there_is_no_stream_rate(store):
    with ExpertScheduler(store, config=Config(cache={"slots": 0})) as scheduler:
        assert scheduler._runner.rates[0].stream_us_per_byte == math.inf
        assert "cache" in scheduler.stats().inactive


def test_fit_takes_a_line_or_the_mean_rate():
    line = _fit([Sample(n * 1e6, 7 + n * 100.0, 0) for n in (1, 2, 4)])
    assert line.fix_us == pytest.approx(7) and line.gb_s == pytest.approx(10)
    falling = _fit([Sample(1e6, 100.0, 0), Sample(2e6, 50.0, 0)])
    assert falling.fix_us == 0 and falling.gb_s == pytest.approx(20)


def test_labels_name_mixed_formats(store):
    assert layout_label(store.layers[0]) == "q8_0"


def test_limit_counts_shared_cores(own):
    rates = own._runner.rates[0]
    alone = limit_us(rates._replace(num_cores=0.0), 0, 1 << 20)
    assert 0 < alone <= limit_us(rates, 0, 1 << 20)
    assert rates_of_layers(own.profile, own._runner)[0].num_cores > 0
