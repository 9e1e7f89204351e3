"""Profiles: round trip, refusal of what is foreign, and the rates that follow from measured figures."""

import json
import math

import numpy as np
import pytest

from trilane.cost import Loads, step_us
from trilane.errors import ProfileError
from trilane.profile import (
    Curve,
    Machine,
    MachineProfile,
    fit_copies,
    host_profile,
    load_profile,
    machine_differences,
    play,
)

DMA = Curve((65536, 262144, 1 << 20, 1 << 21, 1 << 22, 1 << 28), (13, 33, 47, 51, 53, 54.6))


def a_profile(**changes):
    values = dict(
        machine=Machine(cpu="a cpu", cores_allowed=16, gpu="a gpu"),
        pinned_to_device=DMA,
        zero_copy=Curve((1, 2, 4, 8), (41, 45, 48, 49)),
        zero_copy_nbytes=2.65e6,
        cpu_experts={"q4_k": Curve((1, 14), (11.4, 90.0))},
        cpu_rows={"q4_k": Curve((1,), (40.0,))},
        device_experts={"q4_k": 3400.0},
        device_rows={"q4_k": 9000.0},
        both_gb_s=125.0,
        cpu_fix_us=10.0,
    )
    return MachineProfile(**{**values, **changes})


def test_json_round_trip():
    profile = a_profile(
        played=("cpu",), zero_copy_on_device=True, cpu_cores=None, quick=True, skipped={"together": "one CPU"},
        zero_copy_experts={"q4_k": Curve((1,), (9.0,))}, alone_gb_s={"hit": 9.0}, together_gb_s={"hit": 6.0},
        hit_slowdown=0.4, handover_us=0.6,
    )  # fmt: skip
    assert load_profile(profile.to_json()) == profile
    assert load_profile(MachineProfile().to_json()) == MachineProfile()


@pytest.mark.parametrize(
    "change, what",
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": None}, "schema None"),
        ({"wibble": 1}, "wibble"),
        ({"both_gb_s": -1}, "both_gb_s"),
        ({"both_gb_s": "fast"}, "fast"),
        ({"cpu_fix_us": True}, "True"),
        ({"zero_copy": {"x": [1], "z": [1]}}, "rising"),
        ({"zero_copy": {"x": [2, 1], "y": [1, 1]}}, "rising"),
        ({"zero_copy": {"x": [1], "y": [0]}}, "above 0"),
        ({"machine": {"brand": 1}}, "brand"),
        ({"hit_slowdown": 1.0}, "below 1"),
        ({"alone_gb_s": {"hit": "fast"}}, "fast"),
        ({"cpu_experts": 3}, "does not fit"),
        ({"zero_copy": 3}, "does not fit"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_reason(change, what):
    values = json.loads(a_profile().to_json())
    with pytest.raises(ProfileError, match=what):
        load_profile(json.dumps({**values, **change}))


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ProfileError, match="measure it again"):
        load_profile(text)


def test_rates_follow_the_measured_figures():
    r = a_profile().rates("q4_k", shard_nbytes=900_000, threads=14)
    assert r.stream_us_per_byte == pytest.approx(1e-3 / 54.6)
    assert 2 < r.run_fix_us < 5  # the measured copies' fixed cost
    assert r.cpu_us_per_byte == pytest.approx(1e-3 / 90)
    assert r.cpu_row_us_per_byte == pytest.approx(1e-3 / 40)
    assert r.both_us_per_byte == pytest.approx(1e-3 / 125)
    assert r.cpu_fix_us == 10 and r.step_fix_us == 0
    assert r.zero_copy_us_per_byte[0] == pytest.approx(1e-3 / 41)
    assert r.zero_copy_us_per_byte[-1] == pytest.approx(1e-3 / 49)


def test_more_in_flight_never_takes_less_time():
    steep = a_profile(zero_copy=Curve((1, 2, 3), (10, 50, 51)), zero_copy_nbytes=None)
    r = steep.rates("q4_k", shard_nbytes=1000, threads=1)
    times = r.zero_copy_us_per_byte * np.arange(1, len(r.zero_copy_us_per_byte) + 1)
    assert (np.diff(times) >= -1e-12).all()


def test_an_unmeasured_lane_is_never_free():
    r = MachineProfile().rates("q4_k", shard_nbytes=1000, threads=2)
    for loads in (
        Loads(0, 0, 1, 9, 9, 0, 0, 0, 0, 0, 0),
        Loads(0, 0, 0, 0, 0, 1, 9, 9, 0, 0, 0),
        Loads(0, 0, 0, 0, 0, 0, 0, 0, 1, 9, 9),
        Loads(9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    ):
        assert step_us(r, loads) == math.inf


def test_a_single_measured_size_has_no_fixed_cost():
    assert fit_copies(Curve((1e6,), (50.0,))) == (pytest.approx(2e-5), 0.0)


def test_lanes_of_a_host_device_share_its_cores_until_they_are_played():
    host = host_profile(
        num_cores=2,
        copy_gb_s=8,
        zero_copy_gb_s=9,
        device_experts={"f32": 10.0},
        cpu_experts={"f32": Curve((1, 2), (10, 18))},
        both_gb_s=20.0,
        step_fix_us=5.0,
    )
    r = host.rates("f32", shard_nbytes=1000, threads=2)
    assert (r.num_cores, r.hit_cores, r.link_cores, r.cpu_cores) == (2, 1, 1, 2)
    assert r.zero_copy_on_device == 1 and r.both_us_per_byte == pytest.approx(5e-5)
    acted = play(host, link_gb_s=25, link_fix_us=10, zero_copy_gb_s=20, hit_gb_s=100, cpu_gb_s=60)
    r = acted.rates("f32", shard_nbytes=1000, threads=2)
    assert (r.hit_cores, r.link_cores, r.cpu_cores, r.both_us_per_byte) == (0, 0, 0, 0)
    assert r.run_fix_us == 10 and r.stream_us_per_byte == pytest.approx(4e-5)
    assert acted.played == ("hit", "link", "zero_copy", "cpu")
    assert play(host) == host
    assert play(host, link_fix_us=3).rates("f32", shard_nbytes=1, threads=1).stream_us_per_byte == 1e-3 / 8
    assert play(MachineProfile(), link_fix_us=3).pinned_to_device is None


def test_another_machine_is_told_by_what_differs():
    mine = Machine(cpu="a", cores_allowed=4)
    assert machine_differences(mine, mine) == ()
    assert machine_differences(mine, Machine(cpu="a", cores_allowed=8)) == ("cores_allowed was 4 and is 8",)


def test_memory_may_differ_by_little():
    mine = Machine(memory_nbytes=1000)
    assert machine_differences(mine, Machine(memory_nbytes=1010)) == ()
    assert len(machine_differences(mine, Machine(memory_nbytes=1100))) == 1
    assert len(machine_differences(mine, Machine())) == 1


def test_the_knee_is_the_least_that_is_nearly_the_best():
    assert Curve((1, 8, 14, 28, 32), (10, 60, 90, 100, 97)).knee() == 28
    assert Curve((1, 2, 4), (10, 9.7, 10.1)).knee() == 1
    profile = a_profile(cpu_experts={"a": Curve((1, 2), (1, 2)), "b": Curve((1, 2), (2, 2)), "c": Curve((4,), (1,))})
    assert profile.knee() == 2
    assert a_profile(cpu_experts={"c": Curve((4,), (1,))}).knee() is None  # one point shows no knee


def test_bytes_in_several_formats_add_up():
    profile = a_profile(
        cpu_experts={"q4_k": Curve((1,), (10.0,)), "f32": Curve((1,), (40.0,))},
        device_experts={"q4_k": 20.0, "f32": 20.0},
        zero_copy_experts={"f32": Curve((1,), (5.0,))},
        zero_copy=Curve((1,), (50.0,)),
    )
    assert profile.knows({"q4_k": 3, "f32": 1}) and not profile.knows("q8_0") and not profile.knows({"q4_k": 1, "a": 1})
    r = profile.rates({"q4_k": 3e6, "f32": 1e6}, shard_nbytes=1000, threads=1)
    assert r.cpu_us_per_byte == pytest.approx((0.75 / 10 + 0.25 / 40) * 1e-3)
    assert r.zero_copy_us_per_byte[0] == pytest.approx((0.75 / 50 + 0.25 / 5) * 1e-3)
    assert r.hit_us_per_byte == pytest.approx(1e-3 / 20)


def test_a_tail_is_the_device_time_of_a_shard_and_what_is_beyond():
    r = a_profile(stream_tail_us=3.0).rates("q4_k", shard_nbytes=3_400_000, threads=1)
    assert r.stream_tail_us == pytest.approx(4.0)  # 1 us of it for the shard, at 3400 GB/s
    assert a_profile(device_experts={}).rates("q4_k", shard_nbytes=1, threads=1).stream_tail_us == 0


def test_lanes_that_are_played_have_neither_contention_nor_fixed_costs_of_their_own():
    profile = a_profile(hit_slowdown=0.4, link_slowdown=0.3, hit_fix_us=5.0, stream_fix_us=6.0, zero_copy_fix_us=7.0)
    r = profile.rates("q4_k", shard_nbytes=1000, threads=1)
    assert (r.hit_slowdown, r.link_slowdown) == (0.4, 0.3)
    r = play(profile, link_gb_s=1.0, zero_copy_gb_s=1.0).rates("q4_k", shard_nbytes=1000, threads=1)
    assert (r.hit_slowdown, r.link_slowdown, r.stream_fix_us, r.zero_copy_fix_us, r.hit_fix_us) == (0.4, 0, 0, 0, 5.0)
    r = play(profile, hit_gb_s=1.0, cpu_gb_s=1.0).rates("q4_k", shard_nbytes=1000, threads=1)
    assert (r.hit_slowdown, r.link_slowdown, r.hit_fix_us, r.cpu_fix_us) == (0, 0, 0, 0)
