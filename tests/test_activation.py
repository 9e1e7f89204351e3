"""Activation records, bit for bit against the reference: ragged rows, degenerate and non-finite blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cpu_kernels import activation as act
from trilane.cpu_kernels import reference as ref

LENGTHS = (32, 64, 96, 224, 256, 288, 640, 704, 1408, 2048, 2880)


def poisoned(nbytes: int, byte: int = 0xA5) -> np.ndarray:
    """A buffer at a multiple of 64, full of garbage."""
    raw = np.full(nbytes + 64, byte, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def quantized(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Records of one row, and the flag; the bytes behind them must stay as they are."""
    nbytes = act.row_nbytes("int8", len(x))
    buffer = poisoned(nbytes + 64)
    bad = act.quantize_row(x.ctypes.data, len(x), buffer.ctypes.data)
    assert (buffer[nbytes:] == 0xA5).all()
    return buffer[:nbytes].view(ref.RECORD), bad


def assert_records(x: np.ndarray) -> None:
    got, bad = quantized(x)
    want = ref.records(x[None])[0]
    for name in ref.RECORD.names:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert got["d"].tobytes() == want["d"].tobytes()
    assert bad == int(want["bad"].any())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-37, 1e30, 3e38])
def test_records_equal_the_reference(length: int, scale: float) -> None:
    rng = np.random.default_rng(length)
    assert_records((rng.uniform(-1, 1, length) * scale).astype(np.float32))


@given(st.integers(1, 24), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_records_of_any_bits_equal_the_reference(groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 32 * groups, dtype=np.uint32)
    if seed % 3:  # mostly without NaN and infinities
        bits &= np.uint32(0xBFFFFFFF)
    assert_records(bits.view(np.float32))


def test_ties_round_to_even() -> None:
    x = np.zeros(256, np.float32)
    x[:8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]
    assert quantized(x)[0]["q"][0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert_records(x)


@pytest.mark.parametrize("edge", [2.0**-100, 2.0**-100 * (1 - 2.0**-24), 2.0**-149, 0.0])
@pytest.mark.parametrize("length", [32, 256, 288])
def test_tiny_blocks_count_as_zero_below_2_to_the_minus_100(edge: float, length: int) -> None:
    x = np.zeros(length, np.float32)
    x[-1], x[-2] = edge, -edge
    assert_records(x)
    assert bool(quantized(x)[0]["d"][-1]) == (edge == 2.0**-100)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 31, 300, 607])
def test_non_finite_elements_flag_their_block_alone(value: float, at: int) -> None:
    x = np.random.default_rng(at).standard_normal(608).astype(np.float32)
    x[at] = value
    assert_records(x)
    records, bad = quantized(x)
    assert bad == 1 and records["bad"].tolist() == [int(at // 256 == b) for b in range(3)]


@pytest.mark.parametrize("length", LENGTHS)
def test_float_records_are_a_padded_copy(length: int) -> None:
    x = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    nbytes = act.row_nbytes("f32", length)
    buffer = poisoned(nbytes + 64)
    assert act.copy_row_f32(x.ctypes.data, length, buffer.ctypes.data) == 0
    got = buffer[:nbytes].view(np.float32)
    assert got[:length].tobytes() == x.tobytes() and not got[length:].view(np.uint32).any()
    assert (buffer[nbytes:] == 0xA5).all()
    for value in (np.nan, np.inf, -np.inf):
        x[length - 1] = value
        assert act.copy_row_f32(x.ctypes.data, length, buffer.ctypes.data) == 1


def test_hidden_states_widen_exactly() -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    out = np.full(2**16, np.nan, np.float32)
    cases = (
        (act.HIDDEN_F16, bits, bits.view(np.float16).astype(np.float32)),
        (act.HIDDEN_BF16, bits, (bits.astype(np.uint32) << 16).view(np.float32)),
        (act.HIDDEN_F32, ref.exp(bits.astype(np.float32)), ref.exp(bits.astype(np.float32))),
    )
    for element, x, want in cases:
        act.load_hidden(element, x.ctypes.data, 2**16, out.ctypes.data)
        assert ref.same_bits(out, want)
