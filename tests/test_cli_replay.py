"""`trilane replay` and `trilane record` as users run them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import config
from test_cli import run, run_here
from test_record import program

from trilane.commands import replay
from trilane.commands.options import machine_option
from trilane.errors import TraceError
from trilane.traces.trace_file import read_trace

TRACE = str(Path(__file__).parent.parent / "benchmarks" / "data" / "gptoss20b_160conv.trace")
needs_compiled = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@pytest.fixture
def npz(tmp_path):
    rng = np.random.default_rng(1)
    ids = np.array([[rng.choice(8, 2, False) for _ in range(3)] for _ in range(40)], np.uint8)
    np.savez(tmp_path / "ids.npz", ids=ids, n_experts=np.int64(8), w255=np.full(ids.shape, 9, np.uint8))
    return tmp_path / "ids.npz"


@needs_compiled
def test_replay_compares_policies(npz, tmp_path):
    for name, text in (("lru", "cache: {eviction: lru}"), ("cpu", "policy: {force: cpu}")):
        (tmp_path / f"{name}.yaml").write_text(text)
    policies = [part for name in ("lru", "cpu") for part in ("--policy", str(tmp_path / f"{name}.yaml"))]
    common = ["replay", str(npz), "--expert-bytes", "3MB", "--shards", "3", "--slots", "2", *policies]
    shown = run(*common).stdout
    for text in ("lru", "cpu", "hit rate", "p99", "against best single lane", "rtx3090-ddr4", "modelled"):
        assert text in shown
    found = json.loads(run(*common, "--json", "--machine", "h200-host", "--gap-us", "5", "--tokens", "30").stdout)
    assert found["machine"]["name"] == "h200-host" and found["machine"]["gap_us"] == 5
    assert found["trace"]["expert_nbytes"] == [3_000_000] * 3
    lru, cpu = found["policies"]
    assert (lru["name"], cpu["name"], lru["passes"]) == ("lru", "cpu", 30)
    assert cpu["hit_rate"] == 0 and cpu["fills"] == 0 < lru["fills"]
    assert lru["p50_us"] <= lru["p99_us"] and set(lru["single_lane_us"]) == {"stream", "zero_copy", "cpu"}
    assert lru["num_slots"] == 2 * 3 * 3


@needs_compiled
def test_a_program_is_recorded_and_its_plans_verify(tmp_path):
    path = tmp_path / "run.trace"
    shown = run("record", str(path), "--", sys.executable, "-c", program(1)).stdout
    assert "ready" in shown and "live stretches" in shown and "(their plans can be verified)" in shown
    assert "all are identical" in run("replay", str(path), "--verify").stdout
    found = json.loads(run("replay", str(path), "--verify", "--json").stdout)
    assert found["baselines"] == 1 and found["plans"] > 30 and found["differences"] == []
    assert "layer-steps" in run("record", str(path), "--show").stdout
    assert run("replay", str(path), "--slots", "2").stdout


def test_import_keeps_what_is_said(npz, tmp_path):
    path = tmp_path / "a.trace"
    said = ["--model", "small", "--expert-bytes", "1000", "--shards", "2", "--source", "dice", "--licence", "CC0-1.0"]
    shown = run("record", str(path), "--import", str(npz), *said).stdout
    for text in ("small", "dice", "CC0-1.0", "120 of 3 layers", "hit rate of LRU"):
        assert text in shown
    trace = read_trace(path)
    assert trace.meta.shard_nbytes == ((500, 500),) * 3 and trace.weights is not None
    run("record", str(path), "--import", str(npz), *said, "--no-weights")
    found = json.loads(run("record", str(path), "--show", "--json").stdout)
    assert found["passes"] == 80 and found["schema"] == 1
    error = run("record", str(path), "--import", str(npz), expect=1).stderr
    assert "another model" in error and "record to another file" in error


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["replay", "/nowhere.trace"], 1, "No such file or directory: check the name"),
        (["replay", "--slots", "1", "--vram", "1GiB"], 2, "give one of --slots"),
        (["replay", "--vram", "4G"], 2, "'4G' must be a number of bytes"),
        (["replay", "--machine", "mine"], 1, "machine 'mine': unknown"),
        (["replay", "--policy", "/nowhere.yaml"], 1, "does not exist"),
        (["replay", "--shards", "9999"], 1, "cannot be 9999 shards"),
        (["replay", "--verify"], 1, "holds no live run"),
        (["replay", "--batch", "500"], 1, "use a smaller batch"),
        (["replay", "--slots", "-1"], 2, "'-1' must be a whole number, 0 or more: give one such as 8"),
        (["replay", "--slots-total", "many"], 2, "'many' must be a whole number, 0 or more: give one such as 192"),
        (["replay", "--tokens", "0"], 2, "'0' must be a whole number, 1 or more: give one such as 1000"),
        (["replay", "--batch", "1" + 20 * "0"], 2, "must be a whole number, at most 2147483647: give one such as 4"),
        (["replay", "--gap-us", "nan"], 2, "'nan' must be a number from 0 to 1e+09: give one such as 60"),
        (["replay", "--vram", "16"], 2, "'16' is 16 bytes, too few for a memory: write the unit, such as 16GiB"),
        (["replay", "--vram", 30 * "9"], 2, "is more than any memory has: give a size such as 16GiB"),
        (["replay", "--expert-bytes", "0"], 1, "an expert of 0 bytes has nothing to move: give its size"),
        (["bench", "lanes", "--slots", "1.5"], 2, "'1.5' must be a number from 0 to 1: give one such as 0.25"),
        (
            ["bench", "step", "--cpu-gb-s", "0"],
            2,
            "'0' must be a number above 0 and at most 1e+09: give one such as 60",
        ),
        (["replay", "--machine", ""], 1, "machine '': unknown; use h200-host"),
        (["record", "/tmp"], 2, "give one of"),
        (["record", "x.trace", "--show", "--", "true"], 2, "give one of"),
        (["record", "x.trace", "--show", "--model", "m"], 2, "describe an imported trace"),
        (["record", "/nowhere/x.trace", "--show"], 1, "No such file"),
        (["record", "x.trace", "--", "/no/such/program"], 1, "it cannot be run"),
        (["record", "x.trace", "--", "false"], 1, "nothing was recorded"),
    ],
)
def test_mistakes_are_answered_in_a_line(args, code, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = run_here(*args, expect=code)
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


@needs_compiled
def test_the_machine_is_named_by_default_and_this_one_is_its_profile(npz, tmp_path, monkeypatch):
    common = ["replay", str(npz), "--expert-bytes", "3MB", "--slots", "2", "--no-single-lanes"]
    assert "rtx3090-ddr4 (the default; see --machine)" in run(*common).stdout
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = run(*common, "--machine", "this", expect=1).stderr
    assert "machine 'this'" in shown and "trilane probe" in shown


@needs_compiled
def test_a_saved_profile_is_this_machine(npz, tmp_path, monkeypatch):
    from made_profile import make_profile

    from trilane.calibrate import this_machine
    from trilane.profile_cache import profile_path, save_profile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved = save_profile(make_profile())
    assert saved == profile_path(this_machine())
    found = machine_option("this", None, 7.0)
    assert found.name == saved.stem and found.gap_us == 7 and found.format == "q4_k"


@pytest.mark.parametrize(
    ("args", "text", "code"),
    [
        (["replay", "nowhere.trace"], "nowhere.trace: No such file or directory: check the name", 1),
        (["replay", "{npz}", "--expert-bytes", "3MB", "--vram", "8kB"], "not one slot of 3000000 bytes fits", 2),
        (["replay", "{npz}", "--expert-bytes", "3MB", "--machine", "{text}"], "text.json: ", 1),
        (["replay", "{npz}", "--expert-bytes", "3MB", "--machine", "text"], "text: ", 1),  # a file of no usual name
        (["replay", "{empty}"], "empty: it is empty (0 bytes)", 1),
        (["record", "{none}/a.trace", "--", "true"], "its folder does not exist", 1),
        (["record", "{text}", "--", "true"], "it is no trace file", 1),
    ],
)
def test_what_a_newcomer_gets_wrong_is_answered_before_anything_runs(npz, tmp_path, monkeypatch, args, text, code):
    (tmp_path / "text.json").write_text("no profile, no trace")
    (tmp_path / "text").write_text("no profile")
    (tmp_path / "empty").write_bytes(b"")
    names = {"npz": npz, "text": tmp_path / "text.json", "none": tmp_path / "none", "empty": tmp_path / "empty"}
    monkeypatch.chdir(tmp_path)
    shown = run_here(*(arg.format(**names) for arg in args), expect=code).stderr
    assert text in " ".join(shown.replace("\u2502", " ").split())


@needs_compiled
@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--slots", "9"], "--slots 9 is more than the model needs: slots for all 24 experts, 8 a layer, are used"),
        (["--slots-total", "25"], "--slots-total 25 is more than the model needs: slots for all 24 experts, are used"),
        (["--vram", "1GiB"], "--vram 1GiB is more than the model needs: slots for every expert, are used"),
        (["--slots", "8"], ""),
    ],
)
def test_more_slots_than_experts_are_told(npz, args, text):
    common = ["replay", str(npz), "--expert-bytes", "3MB", "--tokens", "5", "--no-single-lanes", "--json"]
    done = run(*common, *args)
    assert json.loads(done.stdout)["policies"][0]["num_slots"] == 24
    assert done.stderr == (f"trilane: {text}\n" if text else "")


def test_a_trace_is_not_added_to_itself(npz, tmp_path):
    path = tmp_path / "a.trace"
    run("record", str(path), "--import", str(npz), "--expert-bytes", "1000")
    before = path.read_bytes()
    shown = run("record", str(path), "--import", str(path), expect=2).stderr
    assert "is the file that it would be added to" in " ".join(shown.replace("│", " ").split())
    assert path.read_bytes() == before


def test_an_import_that_does_not_fit_names_the_file_and_leaves_none(npz, tmp_path):
    command = ["from trilane.cli import main; main()", "record", "big.trace", "--import", TRACE]
    limited = ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", sys.executable, "-c", *command]
    done = subprocess.run(limited, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.startswith("trilane: big.trace: File too large: the limit")
    assert not (tmp_path / "big.trace").exists()


def test_all_that_is_wrong_in_all_policies_is_told(tmp_path):
    (tmp_path / "a.yaml").write_text("cache: {slotz: 1}")
    (tmp_path / "b.yaml").write_text("policy: {lanes: []}")
    shown = run("replay", "--policy", str(tmp_path / "a.yaml"), "--policy", str(tmp_path / "b.yaml"), expect=1).stderr
    assert (
        "2 problems" in shown and "a.yaml:1: cache.slotz: is no option" in shown and "b.yaml:1: policy.lanes" in shown
    )


def test_a_trace_of_which_nothing_is_left_is_an_error(npz, tmp_path):
    path = tmp_path / "a.trace"
    run("record", str(path), "--import", str(npz), "--expert-bytes", "1000")
    path.write_bytes(path.read_bytes()[:-10])  # the only block of events
    assert "it holds no whole layer-step" in run("replay", str(path), expect=1).stderr


@needs_compiled
@pytest.mark.parametrize("lanes", [[], ["--no-single-lanes"]])
def test_replay_shows_what_a_policy_is_judged_by(npz, lanes):
    common = ["replay", str(npz), "--expert-bytes", "3MB", "--shards", "3", "--slots", "2", *lanes]
    shown = run(*common, "--references", "--more-vram", "9MB").stdout
    for text in ("ratio rule", "static hot list", "clairvoyant", "9MB more VRAM (27 slots) buys"):
        assert text in shown
    assert bool(re.search(r"stream alone, us +[\d,]+( +-){3}", shown)) != bool(lanes)  # of policies alone
    found = json.loads(run(*common, "--references", "--more-vram", "9MB", "--json").stdout)
    assert [one["name"] for one in found["policies"]] == ["default", "ratio rule", "static hot list", "clairvoyant"]
    assert found["more_vram"][0]["num_slots"] == 27 and found["more_vram"][0]["gain"] > 0


def test_nothing_compared_is_nothing_verified(monkeypatch):
    """As in a recording that was cut short behind its first snapshot."""
    monkeypatch.setattr("trilane.verify.verify", lambda trace: SimpleNamespace(plans=0, baselines=1, differences=()))
    with pytest.raises(TraceError, match="nothing to verify"):
        replay._verify(None, False)


@needs_compiled
def test_a_chart_is_drawn_or_refused_before_anything_runs(npz, tmp_path):
    common = ["replay", str(npz), "--expert-bytes", "3MB", "--shards", "3", "--no-single-lanes", "--chart"]
    assert ".pdf" in run(*common, str(tmp_path / "a.txt"), expect=2).stderr
    assert "folder" in run(*common, str(tmp_path / "no" / "a.png"), expect=2).stderr
    if importlib.util.find_spec("matplotlib") is None:
        assert "matplotlib" in run(*common, str(tmp_path / "a.png"), expect=2).stderr
        return
    run(*common, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.glob(".*"))) == 0
