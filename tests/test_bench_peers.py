"""The comparison with peers: what it prints when all is there, and when a side fails."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import bench_peers

TIMES = {"p90": 2.0, "p99": 3.0, "mean": 1.0, "wall": 1.0}
SHARDS = {"hit": 12.0, "stream": 0.0, "zero_copy": 6.0, "cpu": 6.0}


def ours(p50=90.0):
    split = {"p50": p50, "missed_nbytes": 12e6, "shards": SHARDS, "plan_us": 1.5, **TIMES}
    joint = {"cpu_alone": 100.0, "link_alone": 55.0, "cpu_together": 80.0, "link_together": 40.0, "both": 120.0}
    return {"joint": joint, "split": split, "resident": {**split, "p50": 14.0, "missed_nbytes": 0.0}}


def theirs():
    row = {"miss": 4.0, "fetch": 1.0, "cpu": 3.0, **TIMES}
    return {"offload": {"p50": 200.0, **row}, "hybrid": {"p50": 120.0, **row}, "all hits": {"p50": 22.0, **row}}


def test_ratios_and_the_limit():
    found = bench_peers.ratios(ours(), theirs())
    assert found == {
        "split / FreeToken hybrid": 0.75,
        "split / FreeToken default": 0.45,
        "resident / FreeToken all hits": pytest.approx(14 / 22),
    }
    assert bench_peers.limit_of(ours()) == (pytest.approx(100.0), pytest.approx(0.8))
    text = "\n".join(bench_peers.table(ours(), theirs(), {}))
    assert (
        "0.750   goal 0.7: NOT held" in text and "0.450   goal 0.5: held" in text and "0.800   goal 1.3: held" in text
    )


def test_a_side_that_failed_is_named_and_the_rest_is_there():
    text = "\n".join(
        bench_peers.table(ours() | {"cpu": {"error": "WorkerError: no"}}, {}, {"FreeToken": "ended with 1"})
    )
    assert "FreeToken: FAILED: ended with 1" in text and "ours, cpu" in text and "FAILED: WorkerError: no" in text
    assert "90.0" in text and "FreeToken hybrid" not in text
    assert bench_peers.limit_of({"split": {"error": "x"}}) is None


def test_processes_that_fail_or_hang_are_told():
    _, problem = bench_peers.run_process([sys.executable, "-c", "print('a row'); raise ValueError('no wheels')"], 30)
    assert problem == "ended with 1: ValueError: no wheels"
    text, problem = bench_peers.run_process(
        [sys.executable, "-c", "import time; print('a row', flush=True); time.sleep(60)"], 2
    )
    assert text == "a row\n" and "more than 2 s" in problem
    assert bench_peers.run_process(["no such program"], 5)[1]


def test_without_a_gpu_both_sides_are_said_to_fail(tmp_path, capsys):
    """As on a machine without a GPU, torch or FreeToken, whatever of these the machine has."""
    words = ["--layers", "1", "--experts", "8", "--hidden", "256", "--inter", "256", "--top-k", "2", "--slots", "8",
             "--tokens", "2", "--warm", "1", "--json", str(tmp_path / "found.json"), "--wheels", str(tmp_path),
             "--python", "no such interpreter", "--limit", "60"]  # fmt: skip
    assert bench_peers.main(words) == 1
    text = capsys.readouterr().out
    assert "FreeToken: FAILED" in text and "holds no wheels" in text
    assert re.search(r"ours, resident +FAILED: DeviceError: device .cuda.", text)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratios"] == {} and found["problems"]["FreeToken"]
