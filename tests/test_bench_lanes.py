"""The benchmarks of our lanes on a trace, on a played GPU: they run, they count, and fail loudly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from expert_cases import profile_for
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane.random_store import StepShape, random_store

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import trace_lanes
from benchmarks.joint_rate import measure_joint_rate
from benchmarks.peer_trace import load_trace, sweep_trace, synth_trace

SHAPE = StepShape(hidden=256, intermediate=256, num_experts=4, top_k=2, format="q8_0")


@pytest.fixture
def played(monkeypatch):
    made = []

    def make(**options):
        made.append(PlayedDriver(**options))
        return made[-1]

    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", make)
    return made


def make_run(tokens=4, warm=1):
    trace = synth_trace(tokens, 1, SHAPE.num_experts, SHAPE.top_k)
    store = random_store(SHAPE)
    return trace_lanes.Run(store, trace, warm, 0.5, ahead=2, profile=profile_for(store))


def test_every_part_gives_the_same_bits_and_counts_its_lane(played):
    run = make_run()
    found = dict(trace_lanes.measure_all(run, trace_lanes.PARTS))
    assert not [row["error"] for row in found.values() if "error" in row]
    assert len({row["checksum"] for row in found.values()}) == 1
    for lane in ("stream", "zero_copy", "cpu"):
        assert found[lane]["shards"][lane] > 0 and found[lane]["missed_nbytes"] > 0
    assert found["resident"]["missed_nbytes"] == 0 and found["resident"]["shards"]["hit"] == SHAPE.top_k
    assert all(row["tokens"] == 3 and row["p50"] <= row["p90"] for row in found.values())
    assert not any(driver.blocks for driver in played)


def test_what_cannot_be_resident_is_an_error_of_its_part(played, monkeypatch):
    monkeypatch.setitem(trace_lanes.PARTS, "resident", ("cpu", "always", True))  # that lane fills nothing
    ((name, row),) = trace_lanes.measure_all(make_run(), ["resident"])
    assert "still miss" in row["error"]


def test_joint_rate_counts_both_lanes():
    driver = PlayedDriver()
    rate = measure_joint_rate(driver, 1, seconds=0.02, most_nbytes=24 << 20)
    assert min(rate) > 0 and rate.both == rate.cpu_together + rate.link_together
    assert not driver.blocks and not driver.registered and not driver.streams


def test_traces(tmp_path):
    trace = synth_trace(40, 3, 16, 4)
    assert trace.shape == (40, 3, 4) and all(len(set(ids)) == 4 for ids in trace.reshape(-1, 4).tolist())
    assert set(sweep_trace(2, 10, 4)[:, 1].ravel().tolist()) == set(range(10))
    np.save(tmp_path / "trace.npy", trace)
    assert (load_trace(tmp_path / "trace.npy", 2, 16, 4) == trace[:, :2]).all()
    with pytest.raises(ValueError, match="does not fit"):
        load_trace(tmp_path / "trace.npy", 4, 16, 4)
