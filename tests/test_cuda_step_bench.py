"""Steps by misses and lanes one by one on a played GPU: the hits and misses that are asked for happen."""

from __future__ import annotations

import numpy as np
import pytest
from expert_cases import profile_for
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane.cuda_step_bench import measure_cuda_steps
from trilane.random_store import StepShape, random_store
from trilane.step_bench import all_errors

SHAPE = StepShape(hidden=256, intermediate=256, num_experts=6, top_k=2, format="q8_0")


@pytest.fixture(scope="module")
def store():
    return random_store(SHAPE)


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)


def test_rows_have_the_misses_that_were_asked_for(played, store):
    rows = list(measure_cuda_steps(store, SHAPE, [0.5], misses=[0, 1], repeats=1, profile=profile_for(store)))
    assert [(row.slots, row.hits, row.misses) for row in rows] == [(0.5, 2, 0), (0.5, 1, 1)]
    for row in rows:
        assert row.lanes["hit"] == row.hits and sum(row.lanes.values()) == SHAPE.top_k
        assert row.p50_us <= row.p90_us <= row.p99_us and row.predicted_us > 0 and row.limit_us > 0
        assert len(row.errors) == 1
    assert all_errors(rows)[0] > 0


def test_misses_that_cannot_be_give_no_figure(played, store):
    (row,) = measure_cuda_steps(store, SHAPE, [1.0], misses=[1], repeats=1, profile=profile_for(store))
    assert np.isnan(row.p50_us) and row.to_dict()["p50_us"] is None and row.errors == ()
    assert np.isnan(all_errors([row])).all()
