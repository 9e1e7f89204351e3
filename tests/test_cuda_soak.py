"""The soak and the faults on a played GPU, for a moment: what they count, and that they notice."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane.random_store import StepShape, random_store

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import cuda_faults, cuda_soak
from benchmarks.cuda_identity import made_profile


@pytest.fixture(scope="module")
def store():
    return random_store(StepShape(256, 256, 6, 2, "q8_0"), 1)


@pytest.fixture
def soaked(monkeypatch, store):
    """A scheduler on a played GPU with slots for three of six experts, and its inputs."""
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    monkeypatch.setattr(cuda_soak, "ALLOCATION_NBYTES", (1 << 10, 1 << 12))
    profile = made_profile(store)
    inputs = cuda_soak.make_inputs(store, 2, draws=4, profile=profile)
    with cuda_soak.open_soak(store, profile, slots=3, threads=1) as scheduler:
        yield scheduler, inputs


def test_a_short_soak_holds_and_counts(soaked):
    lines = []
    verdict = cuda_soak.run_soak(
        *soaked, 0.1, interval_s=0.0, tokens=2, ahead=2, report=lambda line, flush: lines.append(line)
    )
    assert verdict.startswith("no mismatch, no stall, no leak") and len(lines) >= 2
    assert "phases with" in lines[-1] and " 0 allocations" not in lines[-1]


def test_an_output_with_another_bit_ends_a_soak(soaked):
    scheduler, inputs = soaked
    inputs.wanted.view(np.uint32)[0, :, 5] ^= 1
    soak = cuda_soak.Soak(scheduler, inputs, ahead=1)
    with pytest.raises(AssertionError, match=r"token 0, layer 0, experts .* 1 elements differ"):
        soak.random_phase(1)
    soak.close()


def test_memory_that_does_not_come_back_is_a_leak():
    before, mib = cuda_soak.Memory(1 << 30, 1 << 30), 1 << 20
    assert cuda_soak.leaks(before, cuda_soak.Memory((1 << 30) - mib, (1 << 30) + mib)) == []
    found = cuda_soak.leaks(before, cuda_soak.Memory((1 << 30) - 100 * mib, (1 << 30) + 100 * mib))
    assert len(found) == 2 and "device memory" in found[0] and "grown" in found[1]


def test_every_fault_ends_as_it_must(monkeypatch, store):
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    monkeypatch.setattr(cuda_faults, "STALL_S", 0.3)
    lines = []
    small = [case._replace(host={"pin_limit": 8192}) if case.host else case for case in cuda_faults.CASES]
    small = [case._replace(driver={"free_slots": 2}) if "free_slots" in case.driver else case for case in small]
    failed = cuda_faults.run_cases(store, 2, small, threads=1, report=lambda line, flush: lines.append(line))
    assert failed == 0 and len(lines) == len(cuda_faults.CASES), lines
    wrong = cuda_faults.CASES[1]._replace(fault=cuda_faults.Fault.NONE)
    assert cuda_faults.run_cases(store, 2, [wrong], threads=1, report=lambda *a, **k: None) == 1
