"""`trilane bench step --device cuda` and `trilane bench lanes`: on a played GPU, without one, with wrong options."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from expert_cases import profile_for
from played_driver import PlayedDriver
from typer.testing import CliRunner

import trilane.cuda_runner
import trilane.gpu_kernels.driver
from trilane.cli import app
from trilane.errors import DeviceError
from trilane.gpu_kernels.driver import DriverMissing
from trilane.lane_bench import LaneRow, pinned_gains
from trilane.random_store import StepShape, random_store

SMALL = ["--hidden", "256", "--intermediate", "256", "--experts", "6", "--layers", "1", "-f", "q8_0"]


def use_driver(monkeypatch, made):
    for module in (trilane.cuda_runner, trilane.gpu_kernels.driver):
        monkeypatch.setattr(module, "CudaDriver", made)


@pytest.fixture
def played(monkeypatch, tmp_path):
    """A played GPU; the options that name a made-up profile."""
    use_driver(monkeypatch, PlayedDriver)
    path = tmp_path / "profile.json"
    path.write_text(profile_for(random_store(StepShape(256, 256, 2, 1, "q8_0"))).to_json())
    return ["--profile", str(path)]


@pytest.fixture
def no_gpu(monkeypatch):
    def missing():
        raise DriverMissing("device 'cuda': NVIDIA's driver library was not found; use device='host'")

    use_driver(monkeypatch, missing)


def bench(*words):
    return CliRunner().invoke(app, ["bench", *words])


def test_steps_as_json(played):
    words = ["--device", "cuda", "--top-k", "2", "--misses", "1", "--slots", "0.5", "--repeats", "2", "--json"]
    result = bench("step", *SMALL, *words, *played)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["machine"]["gpu"] == "a played GPU" and found["shape"]["num_layers"] == 1
    (row,) = found["rows"]
    assert (row["slots"], row["hits"], row["misses"]) == (0.5, 1, 1)
    assert {"p50_us", "p90_us", "p99_us", "predicted_us", "limit_us", "error", "p90_error"} <= set(row)
    assert found["median_error"] >= 0 and found["p90_error"] >= found["median_error"]


def test_lanes_of_both_devices_as_a_table(played):
    result = bench("lanes", *SMALL, "--hits", "1", "--misses", "1", "--slots", "0.5", "--repeats", "1", *played)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "a played GPU" in lines[0] and "missed GB/s" in lines[1]
    for words in (("cuda", "pinned", "zero_copy"), ("cuda", "pageable", "cpu"), ("host", "host", "stream")):
        assert any(line.split()[:3] == list(words) for line in lines), words
    assert any(line.startswith("cpu: pageable takes") for line in lines)


def test_without_a_gpu_the_error_is_clear(no_gpu, capsys):
    result = bench("step", *SMALL, "--top-k", "2", "--device", "cuda")
    assert isinstance(result.exception, DeviceError) and "use device='host'" in str(result.exception)
    result = bench("lanes", *SMALL, "--device", "cuda", "--hits", "1", "--misses", "1")
    assert isinstance(result.exception, DeviceError)


def test_a_user_without_a_gpu_sees_one_line():
    code = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; from trilane.cli import main; main()"
    words = ["bench", "step", *SMALL, "--top-k", "2", "--device", "cuda"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("trilane: device 'cuda'") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["step", "--device", "rocm"], "'rocm' is no device to choose here: use host or cuda"),
        (["step", "--slots", "0.5"], "is for --device cuda"),
        (["step", "--device", "cuda", "--played"], "host device only"),
        (["step", "--device", "cuda", "--slots", "1.5"], "'1.5' must be a number from 0 to 1: give one such as 0.25"),
        (["lanes", "--device", "tpu"], "'tpu' is no device to choose here: use host, cuda or both"),
        (["lanes", "--hits", "9", "--misses", "9"], "18 of 32 experts"),
        (["lanes", "--intermediate", "100"], "100 must be a multiple of 256 for q4_k: give 256"),
        (["step", "--hidden", "33", "-f", "q8_0"], "33 must be a multiple of 32 for q8_0: give 64"),
        (["lanes", "--format", "q5"], "q5"),
    ],
)
def test_wrong_options_are_usage_errors(words, text):
    result = bench(*words)
    assert result.exit_code == 2 and text in " ".join(result.output.replace("│", " ").split())


def test_gains_are_of_lanes_that_have_both():
    def row(memory, lane, us):
        return LaneRow("cuda", memory, lane, 1, 1, us, us, 1.0, {})

    rows = [row("pinned", "cpu", 10.0), row("pinned", "zero_copy", 8.0), row("pageable", "cpu", 15.0)]
    assert pinned_gains([*rows, row("pageable", "stream", float("nan"))]) == {"cpu": 1.5}
