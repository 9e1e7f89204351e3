"""The live comparison of two policies on a played GPU; replayed tokens decide as a GPU's control thread does."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_cases import profile_for
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane.cuda_replay import replay_tokens
from trilane.cuda_words import Control
from trilane.layer_rates import rates_of_layers
from trilane.policy import empty_state
from trilane.random_store import StepShape, random_store
from trilane.token_graphs import TokenGraphs

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import bench_live
from benchmarks.cuda_identity import made_profile
from benchmarks.gpu_slots import check_slots, settle, use_policy
from benchmarks.peer_trace import synth_trace

TINY = bench_live.Cell((256, 256), 0.5, warm=3, tokens=3, rounds=2, format="q8_0", shape=(2, 32, 4))
PEER = replace(TINY, peer=True, goal=1.0, shape=(2, 6, 2))


def profile_of(cell):
    return profile_for(random_store(StepShape(*cell.size, cell.shape[1], cell.shape[2], cell.format)))


@pytest.mark.parametrize("cell", [TINY, PEER], ids=["recorded", "peer"])
def test_a_cell_has_all_its_rows_and_the_same_outputs(monkeypatch, capsys, cell):
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    turns, profile = bench_live.measure_cell(cell, 600.0, profile_of(cell))
    assert {name: len(found) for name, found in turns.items()} == {"default": 2, "plain": 2}
    bench_live.report("tiny", cell, turns)
    rows = {row["line"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    goals = [row["goal"] for row in rows.values() if row["goal"] is not None]
    assert goals == [cell.goal, cell.goal, 0.1, 0.1, 0] and len(rows) == 13
    assert rows["tiny: rounds whose last outputs differ between the policies"]["figure"] == 0
    assert all(np.isfinite(row["figure"]) for row in rows.values())
    raw = json.loads(bench_live.raw_line("tiny", cell, turns, profile))
    assert len(raw["rounds"]["plain"][1]["live_us"]) == cell.tokens and raw["profile"]


def test_a_part_without_time_makes_one_round(monkeypatch):
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    turns, _ = bench_live.measure_cell(PEER, 0.0, profile_of(PEER))
    assert [len(found) for found in turns.values()] == [1, 1]


def test_parts_share_the_time_and_one_that_fails_stops_none(monkeypatch, capsys, tmp_path):
    given = {}

    def run_part(name, limit_s, module, options):
        given[name] = limit_s
        if name == "small-50":
            return [], "Traceback\nWorkerError: no"
        line = {"line": f"{name}: x", "figure": 1.0, "goal": 0.9, "sense": "<=", "unit": ""}
        return [line, {"part": name, "rounds": {}}], ""

    monkeypatch.setattr(bench_live, "run_part", run_part)
    words = ["--parts", "small-25", "small-50", "large-25", "--limit", "70", "--json", str(tmp_path / "live.json")]
    assert bench_live.main(words) == 1
    text, found = capsys.readouterr().out, json.loads((tmp_path / "live.json").read_text())
    assert ": FAILED: WorkerError: no" in text and "part small-50: FAILED" in text and "NOT held" in text
    assert [row["line"] for row in found["rows"]] == ["small-25: x", "large-25: x"]
    assert list(found["problems"]) == ["small-50"] and len(found["parts"]) == 2
    assert given["small-25"] == pytest.approx(1.3 * 70 * 2 / 7) and given["large-25"] == pytest.approx(70, abs=1)


@pytest.mark.parametrize("policy", ["default", "plain"])
def test_replay_decides_as_the_control_thread_does(played, policy):
    store = random_store(StepShape(256, 512, 8, 2, "q8_0"), 2)
    config = bench_live.policies(0.4)[policy]
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"background": False})})
    scheduler = played(store, cache={"fraction": 0.4, "eviction": "decayed_frequency"})
    runner, ids = scheduler._runner, synth_trace(40, 2, 8, 2, zipf=1.5)
    graphs = TokenGraphs(scheduler, 2, np.ones(256, np.float32), layers=[0, 1], ahead=1)
    runner.rates = rates_of_layers(made_profile(store), runner)  # lanes of a GPU share no cores
    graphs.run(ids[:3])
    use_policy(runner, config)
    missing = []
    for token in ids:
        with scheduler.request() as request:
            graphs.run(token[None])
            settle(runner)
            while runner.threads.control[Control.USED] != runner.counts.on_device()[0]:
                time.sleep(1e-4)
        missing.append(sum(request.stats.lanes[lane].shards for lane in ("stream", "zero_copy", "cpu")))
    state = empty_state(config, runner.geometry, runner.num_slots)
    found = replay_tokens(ids, runner.geometry, state, runner.options, runner.rates[0])
    assert found.missing.sum(axis=1).tolist() == missing and 0 in missing[10:]
    assert (found.step_us > 0).all()
    check_slots(scheduler)
    graphs.close()
