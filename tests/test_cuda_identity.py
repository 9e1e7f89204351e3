"""The check of bits against the host device, on a played GPU: what it compares, and that it notices."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane.random_store import StepShape, random_store

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import cuda_identity
from benchmarks.gpu_slots import check_slots, slot_table


@pytest.fixture
def checked(monkeypatch):
    """A small store with its sequences and what the host gives for them, on a played GPU."""
    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", PlayedDriver)
    store = random_store(StepShape(256, 256, 4, 2, "q8_0"), 2)
    profile = cuda_identity.made_profile(store)
    sequences = cuda_identity.make_sequences(store, 1, top_k=2, tokens=1)
    return store, sequences, cuda_identity.host_outputs(store, sequences, profile), profile


def test_every_configuration_is_compared(checked):
    lines = []
    total = cuda_identity.check_identity(*checked, report=lambda line, flush: lines.append(line))
    assert total == 2 * 2 * len(cuda_identity.CONFIGS) * len(cuda_identity.LAYOUTS) and len(lines) == 12
    for lane in ("stream", "zero_copy", "cpu"):
        assert any(line.startswith(lane) and f"{lane} " in line.split("shards:")[1] for line in lines)


def test_one_other_bit_is_noticed_and_named(checked):
    store, sequences, wanted, profile = checked
    wanted[0][1].view(np.uint32)[0, 17] ^= 1
    with pytest.raises(AssertionError, match=r"cpu, slots in order, sequence 0, cold: step 1 .* first \[0, 17\]"):
        cuda_identity.check_identity(store, sequences, wanted, profile, ["cpu"], report=lambda *a, **k: None)


def test_a_slot_with_other_bytes_is_noticed(checked):
    store, sequences, _, profile = checked
    with cuda_identity.open_gpu(store, profile, "zero_copy", cuda_identity.LAYOUTS[0]) as scheduler:
        scheduler.forward(*sequences[0][0])
        num, checksum = check_slots(scheduler)
        assert num > 0 and checksum == check_slots(scheduler)[1]
        runner, byte = scheduler._runner, np.array([0xA5], np.uint8)
        slot = int(slot_table(runner).max())
        runner.driver.to_device(runner.device.slots + slot * runner.device.slot_nbytes + 5, byte.ctypes.data, 1, 0)
        with pytest.raises(AssertionError, match=f"slot {slot} does not hold"):
            check_slots(scheduler)
