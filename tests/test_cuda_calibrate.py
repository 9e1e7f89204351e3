"""A GPU's profile on a played GPU: every field is there or says why not, and schedulers take what is saved."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from cuda_backends import gpu_missing
from expert_cases import random_store
from made_profile import make_profile
from played_driver import PlayedDriver
from typer.testing import CliRunner

import trilane.cuda_runner
import trilane.cuda_steps
from trilane import (
    DeviceError,
    ExpertScheduler,
    ProbeError,
    ProfileError,
    cuda_bench,
    cuda_beside,
    cuda_calibrate,
    cuda_copies,
    cuda_errors,
    cuda_probe,
    cuda_step_probe,
    gpu_pause,
)
from trilane.calibrate import this_machine
from trilane.cli import app
from trilane.cuda_calibrate import calibrate_gpu
from trilane.gpu_kernels import pinned_reader
from trilane.gpu_kernels.cuda_device import array_at
from trilane.gpu_kernels.driver import DriverError, DriverMissing
from trilane.gpu_pause import make_pause
from trilane.profile import COPY_CURVES, FIXED_COSTS, Curve, load_profile
from trilane.profile_cache import find_profile, profile_path, save_profile
from trilane.random_store import StepShape


@pytest.fixture
def played(monkeypatch):
    """A played GPU, and sizes for which it takes a second; the drivers that were made."""
    made = []

    def make():
        made.append(PlayedDriver())
        return made[-1]

    for module in (trilane.cuda_runner, cuda_errors.gpu_driver):
        monkeypatch.setattr(module, "CudaDriver", make)
    small = {
        cuda_bench: dict(SHAPE=StepShape(256, 256), STORE_NBYTES=1, QUICK_STORE_NBYTES=1, MOST_STORE_NBYTES=1,
                         LEAST_EXPERTS=6, IN_FLIGHT=(1, 2), QUICK_IN_FLIGHT=(1,), QUICK_BLOCKS=(1, 2)),
        cuda_calibrate: dict(FULL_S=1e9, QUICK_S=1e9),
        cuda_probe: dict(MAX_EXPERTS=2, BATCH_ROWS=2),
        cuda_copies: dict(COPY_NBYTES=(16 << 10, 64 << 10), HOST_NBYTES=256 << 10, SAMPLES=1, LEAST_COPIES=2,
                          MOST_COPIES=2),
        pinned_reader: dict(LAUNCHES=1, SAMPLES=1, BLOCKS=(1, 2)),
        cuda_beside: dict(BESIDE_S=1e-3, READING=(1, 1, 1), MOST_PARTS=4),
        cuda_step_probe: dict(STEPS=1, SAMPLES=1, ENOUGH_S=0.0),
    }  # fmt: skip
    for module, values in small.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    yield made
    for driver in made:
        assert not driver.blocks and not driver.registered and not driver.streams


def open_gpu_scheduler(store, **sections):
    sections.setdefault("cpu", {"threads": 1})
    return ExpertScheduler(store, config={"cache": {"fraction": 0.5}, **sections}, device="cuda")


def gpu_machine():
    return replace(this_machine(), gpu="a played GPU")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# ---------------------------------------------------------------------------------------------- measuring
def test_a_gpus_profile_has_every_lane(played):
    told = []
    found = calibrate_gpu(formats=("q8_0", "f16"), on_progress=lambda title, part: told.append(part))
    profile = found.profile
    assert profile.machine == gpu_machine() and not profile.quick
    assert profile.knows("q8_0") and profile.knows("f16") and not profile.knows("q4_k")
    for name in (*COPY_CURVES, "zero_copy", "hit_step_us"):
        assert getattr(profile, name) is not None, name
    assert profile.zero_copy.x == tuple(map(float, cuda_bench.IN_FLIGHT))
    assert set(profile.zero_copy_blocks) == {"1", "2"} and profile.zero_copy_nbytes == 3 * 256 * 256 / 32 * 34
    assert profile.hit_step_us.x == (1.0, 2.0)
    assert set(profile.zero_copy_experts) == {"q8_0", "f16"} and profile.round_trip_us is not None
    assert set(profile.alone_gb_s) == set(profile.together_gb_s) == {"stream", "zero_copy", "cpu"}
    assert profile.both_gb_s and 0 <= profile.link_slowdown < 1 and 0 <= profile.cpu_slowdown < 1
    unknown = {name for name in FIXED_COSTS if getattr(profile, name) is None}
    assert unknown == {"hit_fix_us", "stream_tail_us", "cpu_shard_us"}
    assert set(profile.skipped) == {"link"} and "neither NVML" in profile.skipped["link"]
    assert load_profile(profile.to_json()) == profile
    assert told == sorted(told) and told[0] == 0.0 and told[-1] < 1.0
    assert found.compile_s > 0 and set(found.seconds) >= {"start", "copies", "steps", "together", "experts in f16"}


def test_formats_that_do_not_fit_into_the_time_say_so(played, monkeypatch):
    monkeypatch.setattr(cuda_calibrate, "QUICK_S", -1.0)
    profile = calibrate_gpu(quick=True, formats=("f16", "q8_0")).profile
    assert profile.knows("q8_0") and not profile.knows("f16") and profile.quick
    assert "should end within" in profile.skipped["experts in f16"]


def test_memory_that_cannot_be_pinned_is_a_reason(played, monkeypatch):
    def make():
        played.append(PlayedDriver(pin_nbytes=0))
        return played[-1]

    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", make)
    profile = calibrate_gpu(quick=True, formats=("q8_0",)).profile
    assert set(profile.skipped) == {"copies", "link", "in_place", "together"}
    assert "out of memory" in profile.skipped["copies"] and profile.pinned_to_device is None


def test_too_little_memory_is_an_error_that_says_why(played, monkeypatch):
    monkeypatch.setattr(cuda_bench, "available_nbytes", lambda: 1 << 20)
    with pytest.raises(ProbeError, match="nothing could be measured on a played GPU: .*steps: .*free some"):
        calibrate_gpu(quick=True, formats=("q8_0",))


def test_a_probe_that_the_driver_refuses_is_a_reason(played, monkeypatch):
    def refuse(bench):
        raise DriverError("cuMemAlloc_v2: out of memory")

    monkeypatch.setattr(cuda_calibrate, "BASE_PROBES", (cuda_bench.GpuProbe("copies", "copies", refuse),
                                                        cuda_bench.BASE_PROBES[3]))  # fmt: skip
    profile = calibrate_gpu(quick=True, formats=("q8_0",)).profile
    assert profile.knows("q8_0") and "out of memory" in profile.skipped["copies"]


def test_the_reading_kernel_reads_what_is_there():
    driver, words = PlayedDriver(), np.arange(1 << 12, dtype=np.uint32)
    address = driver.allocate_mapped(words.nbytes)
    array_at(address, np.uint32, words.shape)[...] = words
    reader = pinned_reader.PinnedReader(driver, address, words.nbytes, 4096)
    reading = pinned_reader.PieceReading(reader, 3, 2, 1)
    assert reading.run() > 0 and reading.nbytes == 3 * 4096
    parts = [words[(int(piece) - address) // 4 :][:1024] for piece in reading.pieces]
    assert reading.checksum() == int(np.bitwise_xor.reduce(np.concatenate(parts)))
    reading.close()
    reader.close()
    driver.free_mapped(address)
    assert not driver.blocks


@pytest.mark.gpu
def test_on_a_gpu():
    if gpu_missing():
        pytest.skip(gpu_missing())
    profile = calibrate_gpu(quick=True, formats=("q4_k", "q8_0")).profile
    assert profile.knows("q4_k") and set(profile.skipped) <= {"link", "experts in q8_0"}
    assert profile.machine.gpu and profile.pinned_to_device.y[-1] > 0.5 and profile.hit_step_us.y[0] > 1
    most = profile.machine.link_max_generation
    assert most is None or 1 <= profile.link_generation <= most
    assert profile.zero_copy.y[-1] > 0.5 and min(profile.together_gb_s.values()) > 0


# ---------------------------------------------------------------------------------------------- schedulers
def test_a_saved_profile_that_knows_the_store_is_taken(played, own_cache, caplog):
    caplog.set_level(logging.INFO, "trilane")
    path = save_profile(make_profile(machine=gpu_machine()))
    assert path == profile_path(gpu_machine()) != profile_path(this_machine())
    with open_gpu_scheduler(random_store("q8_0", hidden=256)) as scheduler:
        assert scheduler.profile == make_profile(machine=gpu_machine())
    assert str(path) in caplog.text and "measuring" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device_experts": {"q4_k": 1.0}}, "has no rates for layer 0 in q8_0"),
        ({"cpu_experts": {"q8_0": Curve((2.0, 4.0), (1.0, 2.0))}}, "for 2 to 4 threads, and there are 1"),
        ({"machine": "other driver"}, "driver was '1' and is None"),
    ],
)
def test_any_other_is_measured_again_or_refused(played, own_cache, caplog, monkeypatch, changes, text):
    caplog.set_level(logging.INFO, "trilane")
    machine = gpu_machine()
    if "machine" in changes:
        changes = {"machine": replace(machine, driver="1")}
    if "device_experts" not in changes:  # measuring once is enough
        measured = make_profile(machine=machine)
        monkeypatch.setattr(trilane.cuda_steps, "calibrate_cuda", lambda runner: measured)
    saved = save_profile(make_profile(**{"machine": machine, **changes})).read_text()
    store = random_store("q8_0", hidden=256, experts=4)
    with pytest.raises(ProfileError, match="profile.missing is 'refuse'"):
        open_gpu_scheduler(store, profile={"missing": "refuse"})
    with open_gpu_scheduler(store) as scheduler:
        assert scheduler.profile.machine == machine and scheduler.profile.knows("q8_0")
        scheduler.forward(0, np.ones((1, 256), np.float32), [[0, 1]], [[0.5, 0.5]])
    assert text in caplog.text and "measuring the GPU's lanes" in caplog.text
    assert profile_path(machine).read_text() == saved  # what knows one store only is not saved


def test_the_host_devices_profile_is_no_gpus(played, own_cache, tmp_path):
    file = save_profile(make_profile(), tmp_path / "host.json")
    store = random_store("q8_0", hidden=256)
    with pytest.raises(ProfileError, match="gpu was None and is 'a played GPU'"):
        open_gpu_scheduler(store, profile={"path": str(file)})
    save_profile(make_profile(machine=gpu_machine()))
    assert find_profile(this_machine())[0] is None


# ------------------------------------------------------------------------------------------------- command
class Found:
    """A host calibration that takes no time."""

    seconds, compile_s, total_s = {"experts": 1.0}, 0.0, 1.0

    def __init__(self):
        self.profile = make_profile()


@pytest.fixture
def quick_parts(monkeypatch, own_cache):
    import trilane.calibrate

    asked = []
    monkeypatch.setattr(trilane.calibrate, "calibrate", lambda **options: asked.append(options) or Found())
    monkeypatch.setattr(cuda_calibrate, "calibrate_gpu", lambda **_: small_calibration())
    return asked


@functools.cache
def small_calibration():
    """One for all commands, made where the played GPU is."""
    return calibrate_gpu(quick=True, formats=("q8_0",))


def probe(*words):
    result = CliRunner().invoke(app, ["probe", "--quick", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_measures_host_and_gpu_and_saves_two_profiles(played, quick_parts, tmp_path):
    text = probe()
    for wanted in ("pinned to GPU", "blocks a piece", "1 expert, all in slots", "round trip", "a played GPU, driver",
                   "not measured: link", "lanes all together", "q8_0"):  # fmt: skip
        assert wanted in text, wanted
    assert text.count("saved to") == 2 and quick_parts[0]["most_s"] is not None
    assert find_profile(this_machine())[0] == make_profile()
    assert find_profile(gpu_machine())[0].knows("q8_0")
    found = json.loads(probe("--json", "-o", str(tmp_path / "mine.json")))
    assert found["file"] == str(tmp_path / "mine.json") and found["profile"]["machine"]["gpu"] is None
    assert found["cuda"]["file"] == str(tmp_path / "mine-cuda.json") and "skipped" in found["cuda"]["profile"]
    assert load_profile((tmp_path / "mine-cuda.json").read_text()).machine == gpu_machine()


def test_one_device_alone(played, quick_parts, tmp_path):
    assert "cuda" not in json.loads(probe("--json", "--device", "host")) and quick_parts[0]["most_s"] is None
    found = json.loads(probe("--json", "--device", "cuda", "-o", str(tmp_path / "mine.json")))
    assert found["profile"]["machine"]["gpu"] == "a played GPU" and len(quick_parts) == 1
    assert found["file"] == str(tmp_path / "mine.json")
    assert CliRunner().invoke(app, ["probe", "--device", "tpu"]).exit_code == 2


def test_without_a_gpu_only_the_host_is_measured(quick_parts, monkeypatch):
    def missing():
        raise DriverMissing("device 'cuda': NVIDIA's driver library was not found")

    monkeypatch.setattr(cuda_errors.gpu_driver, "CudaDriver", missing)
    assert "cuda" not in json.loads(probe("--json")) and "not measured" not in probe()
    result = CliRunner().invoke(app, ["probe", "--device", "cuda"])
    assert isinstance(result.exception, DeviceError)


def test_a_gpu_that_fails_leaves_the_hosts_profile(played, quick_parts, monkeypatch):
    def fails(**_):
        raise DeviceError("device 'cuda': out of memory")

    monkeypatch.setattr(cuda_calibrate, "calibrate_gpu", fails)
    assert "not measured: cuda: device 'cuda': out of memory" in probe()
    assert find_profile(this_machine())[0] is not None


@pytest.mark.parametrize("pool, fraction, wanted", [("shared", 0.5, 2), ("layer", 0.5, 2), ("shared", 0.75, 0)])
def test_streamed_steps_find_nothing_in_slots(played, monkeypatch, pool, fraction, wanted):
    monkeypatch.setattr(cuda_step_probe, "STEPS", 2)
    monkeypatch.setattr(cuda_step_probe, "SLOW_US", 1e9)
    store = random_store(layers=2, experts=4, formats="q8_0", hidden=256, intermediate=256)
    with open_gpu_scheduler(store, cache={"fraction": fraction, "pool": pool}) as scheduler:
        runner = scheduler._runner
        hits, us = [], cuda_step_probe.StepProbe.us

        def counted(probe, experts):
            with scheduler.request() as request:
                times = [us(probe, experts) for _ in range(3)]
            hits.append(request.stats.lanes["hit"].shards + request.stats.lanes["zero_copy"].shards)
            return times[-1]

        monkeypatch.setattr(cuda_step_probe.StepProbe, "us", counted)
        assert len(cuda_step_probe.lane_us(runner, [0, 1], (1, 2, 3), "stream", fills=True)) == wanted
        assert hits == [0] * wanted


@pytest.mark.parametrize(
    "pool, fraction, most, layers, counts", [("layer", 0.5, 2, 4, 2), ("layer", 0.5, 4, 1, 1), ("shared", 0.5, 4, 2, 2)]
)
def test_hits_are_measured_on_as_many_layers_as_have_slots(played, monkeypatch, pool, fraction, most, layers, counts):
    """Four layers of four experts: half of each layer's own, or four of two layers."""
    monkeypatch.setattr(cuda_step_probe, "STEPS", 4)
    monkeypatch.setattr(cuda_step_probe, "SLOW_US", 1e9)
    store = random_store(layers=4, experts=4, formats="q8_0", hidden=256, intermediate=256)
    with open_gpu_scheduler(store, cache={"fraction": fraction, "pool": pool}) as scheduler:
        runner = scheduler._runner
        assert len(cuda_step_probe.layers_with_room(runner, range(4), most)) == layers
        us, missed = cuda_step_probe.StepProbe.us, []

        def counted(probe, experts):
            assert len(set(probe.turn)) == layers
            with scheduler.request() as request:
                times = us(probe, experts)
            missed.append(sum(request.stats.lanes[lane].shards for lane in ("stream", "zero_copy", "cpu")))
            return times

        monkeypatch.setattr(cuda_step_probe.StepProbe, "us", counted)
        assert len(cuda_step_probe.hit_us(runner, range(4), (1, most))) == counts
        assert missed == [0] * counts


def test_what_the_lanes_lose_beside_each_other_is_the_middle_of_some_rounds(played, monkeypatch):
    """Each loss by itself: the round in which the CPU lane loses as usual need not be one in which copies do."""
    lost, rates = iter((0.58, 0.12, 0.16, 0.15, 0.3)), iter((0.9, 0.95, 0.5, 0.8, 0.7))
    part = 1e-9 * cuda_beside.COPIES * 4096
    store = random_store(layers=1, experts=4, formats="q8_0", hidden=256, intermediate=256)
    with open_gpu_scheduler(store) as scheduler:
        runner = scheduler._runner
        monkeypatch.setattr(
            cuda_beside.Beside,
            "run",
            lambda self, *_: cuda_beside.Together(10.0, 1.0, next(lost), [next(rates) / part]),
        )
        copies = cuda_copies.CopyProbe(runner)
        copies.most = 4096
        monkeypatch.setattr(copies, "rate", lambda nbytes: 1.0)
        found = cuda_beside.measure_beside(runner, copies, [0], 1, int(store.layers[0].layout.expert_nbytes))
        copies.close()
    assert found == {"both_gb_s": pytest.approx(10.8), "link_slowdown": pytest.approx(0.2), "cpu_slowdown": 0.16}


def test_pauses_before_steps_do_not_count(played, monkeypatch):
    """Each step has one; how long it is comes off the steps' time, whatever that was asked for."""
    monkeypatch.setattr(cuda_step_probe, "STEPS", 2)
    monkeypatch.setattr(cuda_step_probe, "SLOW_US", 1e9)
    run = cuda_step_probe.StepGraph.run

    def told(graph):
        run(graph)
        return 30.0 + 12.0 * (len(graph._encoded.words) == 5 * len(graph.steps))  # and not four launches a step

    store = random_store(layers=1, experts=4, formats="q8_0", hidden=256, intermediate=256)
    with open_gpu_scheduler(store) as scheduler:
        runner = scheduler._runner
        pause, calls = make_pause(runner.driver, runner.device.work_stream, 10.0), runner.driver.calls
        before = calls["pause_cycles"]
        monkeypatch.setattr(cuda_step_probe.StepGraph, "run", told)
        probe = cuda_step_probe.StepProbe(runner, [0], 1, pause=pause)
        assert (probe.pause_us, probe.us(4)) == (12.0, 30.0) and calls["pause_cycles"] > before
        probe.close()


def test_a_pause_takes_about_as_long_as_asked_for(played, monkeypatch):
    """In cycles, of which a known number is timed."""
    store = random_store(layers=1, experts=4, formats="q8_0", hidden=256, intermediate=256)
    with open_gpu_scheduler(store) as scheduler:
        where = scheduler._runner.driver, scheduler._runner.device.work_stream
        assert gpu_pause._time_us(*where, make_pause(*where, 1e4)) > 0
        monkeypatch.setattr(gpu_pause, "_time_us", lambda *_: 500.0)
        cycles = where[0].launches[len(where[0].launches)][1].arguments
        make_pause(*where, 50.0)
        assert where[0].launches[len(where[0].launches)][1].arguments == (gpu_pause.PAUSE_CYCLES // 10,) != cycles
