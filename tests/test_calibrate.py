"""Calibration: one profile of all that this machine has, on any number of CPUs, and reasons for what it has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_cpus import FakeMachine

from trilane import calibrate as calibration
from trilane.calibrate import Probe, Skipped, calibrate, thread_counts
from trilane.cpu_kernels.arena import allocate_arena
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.host_device import suggest_team_size
from trilane.probes.contention import Contention, even_share
from trilane.probes.lane_rates import LaneTimes
from trilane.profile import FIXED_COSTS, load_profile

SMALL = 24 << 20  # bytes: a run is quick, and what it measures is the cache, which does not matter here


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(calibration, "probe_arena", lambda **_: allocate_arena(SMALL))


def test_a_calibration_knows_every_lane(small):
    told = []
    found = calibrate(quick=True, formats=("q8_0",), on_progress=lambda title, part: told.append(part))
    profile = found.profile
    assert profile.knows("q8_0") and not profile.knows("q4_k") and profile.quick
    assert profile.host_read and profile.pinned_to_device and profile.zero_copy
    assert set(profile.cpu_rows) == set(profile.zero_copy_experts) == set(profile.device_rows) == {"q8_0"}
    unknown = [name for name in FIXED_COSTS if getattr(profile, name) is None]
    assert unknown == ["miss_fix_us", "cpu_shard_us"]
    assert profile.parked_us and told == sorted(told) and told[0] == 0.0 and told[-1] < 1.0
    assert load_profile(profile.to_json()) == profile
    assert profile.machine == calibration.this_machine()
    assert found.total_s > 0 and found.compile_s >= 0


def test_what_cannot_be_measured_says_why_and_stays_unknown(small, monkeypatch):
    def refuse(session, previous):
        raise Skipped("no such thing here")

    probes = [p if p.name != "copies" else Probe("copies", p.title, refuse, p.fields) for p in calibration.PROBES]
    monkeypatch.setattr(calibration, "PROBES", probes[:3])
    profile = calibrate(quick=True, formats=("q8_0",)).profile
    assert profile.pinned_to_device is None and profile.skipped == {"copies": "no such thing here"}


def test_too_little_memory_is_a_reason_for_each_probe_that_needs_it(monkeypatch):
    monkeypatch.setattr(calibration, "probe_arena", lambda **_: allocate_arena(1 << 20))
    profile = calibrate(quick=True, formats=("q8_0",)).profile
    assert set(profile.skipped) == {"host_read", "experts", "copies", "in_place", "together", "steps"}
    assert "free some" in profile.skipped["experts"] and profile.parked_us


def make_session(formats, quick=True):
    budget = read_cpu_budget()
    return calibration.Session(quick, tuple(formats), budget, calibration._empty_profile(budget, quick))


def test_a_busy_machine_gets_no_pass_that_would_take_too_long(monkeypatch):
    passes = []
    probe = Probe("one", "one", lambda session, previous: passes.append(1), lambda session, found: {})
    monkeypatch.setattr(calibration, "PROBES", (probe,))
    monkeypatch.setattr(calibration, "FULL_S", -1.0)
    calibrate()
    assert len(passes) == 1
    monkeypatch.setattr(calibration, "FULL_S", 1e9)
    calibrate()
    assert len(passes) == 1 + calibration.PASSES


def test_experts_are_made_once_in_memory_of_their_own(small, monkeypatch):
    made = []
    make = calibration.make_expert
    monkeypatch.setattr(calibration, "make_expert", lambda name, size: made.append(name) or make(name, size))
    names = ("q4_k", "q8_0", "mxfp4")
    session = make_session(names)
    for _ in range(2):
        experts = [session.experts(name) for name in names]
        assert [one.format for one in experts] == list(names) and session.experts() is experts[0]
    assert made == list(names) and len({one.arena.address for one in experts}) == 3
    assert session.experts().arena is session.arena and min(one.count for one in experts) >= 2
    packed = experts[0].made.packed
    assert all(np.array_equal(session.arena.view(k * packed.nbytes, packed.nbytes), packed) for k in range(3))


@pytest.mark.parametrize("quick", [False, True])
def test_jobs_take_turns_so_that_neighbours_read_other_experts(small, quick):
    session = make_session(("q4_k", "q8_0", "mxfp4"), quick)
    keys, bench = session.lane_bench
    assert len(set(keys)) == len(keys) and {key[0] for key in keys} == {"cpu", "hit", "zero_copy"}
    neighbours = [one[1] != two[1] for one, two in pairwise(keys)]
    assert sum(neighbours) >= 0.8 * len(neighbours)
    found = bench.measure(2)
    assert [(one.lane, one.format, one.num_rows) for one in found] == [
        (lane, name, rows) for lane, name, _, rows in keys
    ]
    assert {len(one.us) for one in found} == {1 if quick else 2} and all(one.gb_s > 0 for one in found)
    session.stack.close()


def test_the_quick_mode_takes_small_experts_of_floats(small):
    """So that no format has more bytes to an expert than three times another's; rates are a byte's."""
    for quick, sizes in ((True, {"f32": 256, "f16": 256, "q8_0": 768}), (False, {"f32": 768, "f16": 768, "q8_0": 768})):
        session = make_session(sizes, quick)
        assert {name: session.experts(name).layout.intermediate for name in sizes} == sizes
    found = calibrate(quick=True, formats=("f32", "q8_0")).profile
    assert found.knows({"f32": 1.0, "q8_0": 1.0}) and set(found.device_rows) == {"f32", "q8_0"}


# ----------------------------------------------------------------------------------------- faults of the field
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("quota", "counts"), [(1, (1,)), (1.5, (1,)), (4, (1, 2, 3)), (0.25, (1,))])
def test_t09_teams_that_are_measured_fit_the_quota(tmp_path, version, quota, counts):
    machine = FakeMachine(tmp_path).cores(8)
    quota_us = int(quota * 100_000)
    machine.v1(quota_us) if version == "v1" else machine.v2(f"{quota_us} 100000")
    assert thread_counts(machine.budget(range(8)), quick=False) == counts
    assert max(thread_counts(machine.budget(range(8)), quick=True)) == counts[-1]


def test_t10_with_one_cpu_the_probes_neither_spin_nor_hang(tmp_path):
    """A whole calibration in a process that may use one CPU ends, and says what one CPU cannot show."""
    code = f"""
import json, os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
from trilane import calibrate as c
from trilane.cpu_kernels.arena import allocate_arena
c.probe_arena = lambda **_: allocate_arena({SMALL})
print(c.calibrate(quick=True, formats=("q8_0",)).profile.to_json())"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    profile = load_profile(result.stdout)
    assert profile.cpu_experts["q8_0"].x == (1.0,) and profile.num_cores == 1.0
    assert profile.handover_us is None and profile.parked_us
    assert "one CPU" in profile.skipped["together"] and profile.both_gb_s is None


def test_t12_team_sizes_are_measured_past_the_knee_and_the_team_stays_at_it(tmp_path):
    budget = FakeMachine(tmp_path).cores(32).budget(range(32))
    assert thread_counts(budget, quick=False) == (1, 2, 4, 8, 16, 29, 31)
    assert thread_counts(budget, quick=True) == (1, 15, 29, 31)
    assert suggest_team_size(budget)[0] == 29
    count, reasons = suggest_team_size(budget, knee=28)
    assert count == 28 and "28 threads are as fast" in reasons[-1]
    assert suggest_team_size(budget, knee=31)[0] == 29


def test_t15_the_better_of_two_passes_counts():
    good = LaneTimes("cpu", "q4_k", 2, 1, 1_000_000, (1, 5), (110.0, 510.0))
    poisoned = replace(good, us=(9000.0, 700.0))
    assert poisoned.best(good) == good == good.best(None)
    assert good.gb_s == pytest.approx(10.0) and good.fix_us == pytest.approx(10.0)
    assert poisoned.gb_s <= 2 * 5e6 / 700e3  # a slope below zero is no rate
    alone = replace(good, num_experts=(5,), us=(510.0,))
    assert alone.gb_s == pytest.approx(5e6 / 510e3) and alone.fix_us == 0.0


# ----------------------------------------------------------------------------------------------- contention
def test_contention_is_what_a_lane_loses_while_the_cpu_lane_runs():
    nbytes = {"hit": 2_000_000, "zero_copy": 1_000_000, "cpu": 8_000_000}
    found = Contention(nbytes, dict.fromkeys(nbytes, 100.0), {"hit": 150.0, "zero_copy": 80.0, "cpu": 125.0})
    assert found.slowdown("hit") == pytest.approx(50 / 125)  # it went on after the CPU lane had ended
    assert found.slowdown("zero_copy") == 0.0
    assert replace(found, together_us={**found.together_us, "hit": 120.0}).slowdown("hit") == pytest.approx(1 / 6)
    assert found.joint_gb_s() == pytest.approx(2e6 / 150e3 + 1e6 / 80e3 + 8e6 / 125e3)
    assert replace(found, together_us=found.alone_us).joint_gb_s() is None
    assert found.alone_gb_s["hit"] == 20.0
    better = found.best(replace(found, alone_us=dict.fromkeys(nbytes, 90.0), together_us=dict.fromkeys(nbytes, 130.0)))
    assert better.alone_us["cpu"] == 90.0 and better.together_us == {"hit": 130.0, "zero_copy": 80.0, "cpu": 125.0}


def test_experts_are_shared_by_rates():
    share = even_share({"hit": 10.0, "zero_copy": 1.0, "cpu": 29.0}, 16)
    assert (share.hit, share.zero_copy, share.cpu, share.stream) == (4, 1, 12, 0)


# -------------------------------------------------------------------------------------------------- command
def test_command_saves_prints_and_shows_what_it_measured(tmp_path: Path):
    """One calibration in a process of its own, printed both ways."""
    file = tmp_path / "mine.json"
    code = f"""
from pathlib import Path
from typer.testing import CliRunner
from trilane import calibrate as c
from trilane.cli import app
from trilane.cpu_kernels.arena import allocate_arena
c.probe_arena = lambda **_: allocate_arena({SMALL})
c.calibrate.__kwdefaults__["formats"] = ("q8_0",)
one = CliRunner().invoke(app, ["probe", "--quick", "--json", "--output", {str(file)!r}])
assert one.exit_code == 0, one.output
print(one.stdout)
print("=====")
two = CliRunner().invoke(app, ["probe", "--quick"])
assert two.exit_code == 0, two.output
print(two.stdout)"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    as_json, _, text = result.stdout.partition("=====")
    found = json.loads(as_json)
    assert found["file"] == str(file) and load_profile(file.read_text()) == load_profile(json.dumps(found["profile"]))
    assert {"machine", "seconds", "total_s", "compile_s", "profile"} <= set(found)
    for wanted in ("experts, GB/s", "q8_0", "copies of 64 KiB", "against reading alone", "fixed costs", "saved to"):
        assert wanted in text, wanted
    (saved,) = (tmp_path / "trilane" / "profiles").glob("*.json")
    assert load_profile(saved.read_text()).knows("q8_0")
    assert read_cpu_budget().num_concurrent == load_profile(saved.read_text()).num_cores


@pytest.mark.parametrize("name", ["", "/", "."])
def test_a_profile_is_saved_to_a_file(name):
    from test_cli import run

    assert "it is no regular file; give the name of a file" in run("probe", "-o", name, expect=1).stderr


def test_command_fails_in_one_line_where_the_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    from trilane import cli

    class Found:
        from made_profile import make_profile

        profile, seconds, compile_s, total_s = make_profile(), {}, 0.0, 0.0

    monkeypatch.setattr(calibration, "calibrate", lambda **_: Found)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(sys, "argv", ["trilane", "probe", "--output", str(tmp_path / "file" / "p.json")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1 and "Traceback" not in capsys.readouterr().err
