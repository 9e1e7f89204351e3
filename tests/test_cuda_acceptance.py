"""The table of acceptance lines on a played GPU: parts run and print rows; and how rows are judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from expert_cases import profile_for
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane.random_store import StepShape, random_store

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import cuda_acceptance, joint_rate

SHAPE = {"hidden": 256, "intermediate": 256, "num_experts": 4, "top_k": 2, "format": "q8_0"}


@pytest.fixture
def rows(monkeypatch, capsys):
    """Runs a part on a small store; its rows by their first words."""
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)

    def run(part, fraction, **options):
        with cuda_acceptance.open_steps(SHAPE, 1, fraction=fraction) as steps:
            part(steps, tokens=1, **options)
        found = map(json.loads, capsys.readouterr().out.splitlines())
        return {row["line"]: row for row in found}

    return run


def test_resident_steps_need_no_control_thread(rows):
    found = rows(cuda_acceptance.resident, 1.0)
    judged = [row for row in found.values() if row["unit"] == "" and row["goal"] == 0]
    assert len(judged) == 2 and all(row["figure"] == 0 for row in judged)


def test_lanes_and_overlap_print_their_lines(rows):
    found = rows(cuda_acceptance.lanes, 0.5, counts=(1, 2))
    assert [line.split(":")[0] for line in found][:2] == ["all hits", "zero_copy"]
    assert any(line.startswith("streaming 2 experts over copies") for line in found)
    assert "control overhead of a layer with misses (in place)" in found
    found = rows(cuda_acceptance.no_fill, 0.0, counts=(1, 2))
    assert {"a step that names no expert", "in place, no fill: us before the first expert"} <= set(found)
    beyond = rows(cuda_acceptance.together, 0.5)
    assert len(beyond) == 4 and all(line.startswith("1 hits and 1 misses") for line in beyond)


def test_lanes_together_are_held_against_two_rates(rows, monkeypatch):
    """Of memory, and of the probe, which is played here, too."""
    from trilane import cuda_beside

    monkeypatch.setattr(joint_rate, "measure_joint_rate", lambda *_, **__: joint_rate.JointRate(9.0, 5.0, 8.0, 4.0))
    for name, value in dict(BESIDE_S=1e-3, READING=(1, 1, 1), MOST_PARTS=4).items():
        monkeypatch.setattr(cuda_beside, name, value)
    found = rows(cuda_acceptance.joint, 0.5)
    judged = {line.split(" (")[0].split(":")[0]: row for line, row in found.items() if row["goal"] == 0.9}
    assert list(judged) == ["lanes together, 2 misses split", "the same over the probe of all lanes together"]
    assert all(row["figure"] > 0 for row in judged.values())


def test_predictions_are_judged(monkeypatch, capsys):
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    profile = profile_for(random_store(StepShape(256, 256, 2, 1, "q8_0")))
    cuda_acceptance.predicted(SHAPE | {"top_k": 1}, 1, (0.5,), repeats=1, profile=profile)
    found = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [row["goal"] for row in found] == [None, None, 0.10, 0.20]
    assert 0 <= found[2]["figure"] <= found[3]["figure"]


def test_prefill_copies_what_is_missing_once(monkeypatch, capsys):
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    cuda_acceptance.prefill(SHAPE, rows=9, residents=(0.5,), repeats=1)
    found = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [row["goal"] for row in found] == [1.2, 1.2, 0] and found[2]["figure"] == 0
    assert "9 rows, 50% resident" in found[0]["line"] and found[0]["figure"] > 0


def test_rows_are_judged_by_their_goal():
    line = {"line": "x", "figure": 0.94, "goal": 0.95, "sense": ">=", "unit": ""}
    assert cuda_acceptance.verdict(line) == "NOT held" and cuda_acceptance.verdict(line | {"figure": 0.95}) == "held"
    assert cuda_acceptance.verdict(line | {"sense": "<="}) == "held" and not cuda_acceptance.verdict(
        line | {"goal": None}
    )
    assert "NOT held" in cuda_acceptance.table_line(line)
    assert cuda_acceptance.verdict(line | {"figure": float("nan")}) == "NOT held"


def test_a_line_through_times():
    assert cuda_acceptance.line_of((1, 2, 4), (15.0, 20.0, 30.0)) == (pytest.approx(10.0), pytest.approx(5.0))
