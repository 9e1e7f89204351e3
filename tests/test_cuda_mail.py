"""A single row's records on the host, from what publish tells of each eight elements."""

from __future__ import annotations

import numpy as np
import pytest

from trilane.cpu_kernels import activation as act
from trilane.cpu_kernels.reference import BLOCK
from trilane.cuda_mail import sum_of_bytes, take_told
from trilane.cuda_words import Control, Place, Wire
from trilane.gpu_kernels.words import TOLD_BAD, TOLD_NBYTES

CLOCK = 0x1_8000_0007  # the GPU has its low half


def record_of(x):
    """Its records, as quantize_row writes them, and room for those that are taken."""
    blocks = -(-len(x) // BLOCK)
    record = np.zeros(blocks * act.RECORD_NBYTES, np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    act.quantize_row(x.ctypes.data, len(x), record.ctypes.data)
    return record, np.full_like(record, 0xCD)


def tell(record, told, num_blocks=None):
    """What the GPU's threads leave: eight elements, the block's scale, the clock."""
    rows = record.reshape(-1, act.RECORD_NBYTES)
    pieces = told.view(np.uint32).reshape(len(rows), 32, 4)
    for block in range(len(rows))[:num_blocks]:
        pieces[block, :, :2] = rows[block, :BLOCK].view(np.uint32).reshape(32, 2)
        bad = rows[block, act.BAD]
        pieces[block, :, 2] = TOLD_BAD if bad else rows[block, act.D : act.D + 4].view(np.uint32)[0]
        pieces[block, :, 3] = CLOCK & 0xFFFFFFFF


def wire_of(told):
    places, control = np.zeros(Place.SIZE, np.int64), np.zeros(max(Control) + 1, np.int64)
    places[Place.TOLD], places[Place.CONTROL] = told.ctypes.data, control.ctypes.data
    control[Control.CLOCK] = CLOCK
    unused = np.zeros(1, np.int64)
    return Wire(
        places, control, unused, unused, np.zeros((4, 1), np.int64), np.zeros((3, 1), np.int64), np.zeros(1, np.int8)
    )


def rows_of():
    rng = np.random.default_rng(0)
    usual = rng.standard_normal(2048)
    zero_block, odd = usual.copy(), rng.standard_normal(96)
    zero_block[256:512] = 0
    yield from (usual, zero_block, odd, np.zeros(256), np.full(256, 1e-40), np.full(256, 3e38), -127 * np.ones(256))
    for value in (np.nan, np.inf, -np.inf):
        spoiled = usual.copy()
        spoiled[700] = value
        yield spoiled


@pytest.mark.parametrize("x", list(rows_of()))
def test_records_are_those_of_the_rule(x):
    record, taken = record_of(x)
    told = np.zeros(len(record) // act.RECORD_NBYTES * TOLD_NBYTES, np.uint8)
    tell(record, told)
    assert take_told(wire_of(told), taken.ctypes.data, len(x))
    used = [slice(at, at + act.BAD + 4) for at in range(0, len(record), act.RECORD_NBYTES)]
    assert all((taken[one] == record[one]).all() for one in used)


@pytest.mark.parametrize("told_blocks", [0, 1])
def test_what_is_never_told_is_waited_for_until_nothing_will_run_any_more(told_blocks):
    record, taken = record_of(np.random.default_rng(1).standard_normal(512))
    told = np.zeros(2 * TOLD_NBYTES, np.uint8)
    tell(record, told, told_blocks)
    wire = wire_of(told)
    wire.control[Control.STOP] = 1
    assert not take_told(wire, taken.ctypes.data, 512)
    assert (taken[act.RECORD_NBYTES :] == 0xCD).all()


@pytest.mark.parametrize("values", [[-128] * 8, [127] * 8, [-127, 0, 1, 127, -1, 5, 64, -64]])
def test_eight_bytes_are_summed_with_their_signs(values):
    assert sum_of_bytes(np.array(values, np.int8).view(np.int64)[0]) == sum(values)
