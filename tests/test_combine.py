"""The combine and publish kernels by themselves: the written order, and rounding to f16 and bf16 bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from expert_cases import assert_same_bits, narrow, widen
from hypothesis import given
from hypothesis import strategies as st

from trilane.cpu_kernels import reference
from trilane.cpu_kernels.activation import HIDDEN_BF16, HIDDEN_F16, HIDDEN_F32
from trilane.cpu_kernels.combine import combine_rows
from trilane.cpu_kernels.host_workspace import aligned
from trilane.cpu_kernels.publish import publish_rows
from trilane.cpu_kernels.words import Combine, Publish

ELEMENTS = {np.dtype(np.float32): HIDDEN_F32, np.dtype(np.float16): HIDDEN_F16, np.dtype(np.uint16): HIDDEN_BF16}
TYPES = list(ELEMENTS)


def poisoned(shape, dtype):
    return np.full(shape, np.float32("nan").view(np.uint32) if dtype != np.float16 else 0x7E55).astype(dtype)


def combine(parts, ids, positions, weights, out, bias=None, bad=None, first=0, last=None):
    """Run the kernel on parts (positions, shards, hidden)."""
    tokens, top_k = ids.shape
    bad = np.zeros(tokens, np.int64) if bad is None else bad
    block = np.zeros(Combine.SIZE, np.int64)
    block[Combine.PARTS] = parts.ctypes.data
    block[Combine.NUM_SHARDS], block[Combine.HIDDEN] = parts.shape[1:]
    block[Combine.TOP_K] = top_k
    block[Combine.IDS], block[Combine.POSITION] = ids.ctypes.data, positions.ctypes.data
    block[Combine.WEIGHTS], block[Combine.BAD] = weights.ctypes.data, bad.ctypes.data
    if bias is not None:
        block[Combine.DOWN_BIAS], block[Combine.DOWN_BIAS_STRIDE] = bias.ctypes.data, bias.strides[0]
    block[Combine.OUT], block[Combine.OUT_STRIDE] = out.ctypes.data, out.strides[0]
    block[Combine.ELEMENT], block[Combine.NUM_ROWS] = ELEMENTS[out.dtype], tokens
    combine_rows(block.ctypes.data, first, tokens if last is None else last)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 7, 8, 9, 12, 17])
def test_against_the_reference(shards, dtype, with_bias):
    rng = np.random.default_rng(shards)
    tokens, top_k, hidden, experts = 5, 3, 96, 4
    ids = rng.integers(0, experts, (tokens, top_k))
    ids[1, 0] = ids[2] = -1
    positions = rng.permutation(tokens * top_k).astype(np.int32).reshape(ids.shape)
    positions[ids < 0] = -1
    parts = (rng.standard_normal((tokens * top_k, shards, hidden)) * 10.0 ** rng.integers(-6, 4)).astype(np.float32)
    weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    bias = rng.standard_normal((experts, hidden)).astype(np.float32) if with_bias else None
    outs = reference.sum_blocks(parts.transpose(0, 2, 1))[positions]
    if with_bias:
        outs = outs + bias[ids]
    wanted = reference.reference_combine(weights, outs, ids < 0)
    out = poisoned((tokens, hidden), dtype)
    combine(parts, ids, positions, weights, out, bias)
    assert_same_bits(out, narrow(wanted, dtype))
    assert not out[2].any()


def test_rows_outside_of_the_range_are_not_written():
    parts = np.ones((6, 1, 32), np.float32)
    ids, positions = np.zeros((6, 1), np.int64), np.arange(6, dtype=np.int32).reshape(6, 1)
    out = np.full((6, 64), 9, np.float32)[:, :32]
    combine(parts, ids, positions, np.ones((6, 1), np.float32), out, first=2, last=4)
    assert out[:, 0].tolist() == [9, 9, 1, 1, 9, 9] and (out.base[:, 32:] == 9).all()


def test_bad_rows_and_nan():
    parts = np.ones((4, 1, 32), np.float32)
    parts[1, 0, 3] = np.uint32(0xFFC00007).view(np.float32)
    ids, positions = np.zeros((4, 1), np.int64), np.arange(4, dtype=np.int32).reshape(4, 1)
    positions[3] = -1
    for dtype, nan in zip(TYPES, (0x7FC00000, 0x7E00, 0x7FC0), strict=True):
        out = poisoned((4, 32), dtype)
        combine(parts, ids, positions, np.ones((4, 1), np.float32), out, bad=np.array([1, 0, 0, 1]))
        bits = out.view({2: np.uint16, 4: np.uint32}[dtype.itemsize])
        assert (bits[0] == nan).all() and bits[1, 3] == nan and (bits == nan).sum() == 33
        assert not bits[3].any()  # routed to nobody, so not even its NaN matters


def round_through_combine(values, dtype):
    """Each value (a multiple of 32 of them) as the only expert's part, with weight 1."""
    parts = values.reshape(-1, 1, 32)
    rows = len(parts)
    ids, positions = np.zeros((rows, 1), np.int64), np.arange(rows, dtype=np.int32).reshape(rows, 1)
    out = poisoned((rows, 32), dtype)
    combine(parts, ids, positions, np.ones((rows, 1), np.float32), out)
    return out.ravel()


def f32_around_halves():
    """Every half, the middles between halves, and the float on either side of each."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:].astype(np.float64) + halves[:-1]) / 2
    points = np.concatenate([halves, middles.astype(np.float32), [65519.9, 65520, 65535, 65536, 1e30, np.inf]])
    bits = points.astype(np.float32).view(np.int32)
    around = np.concatenate([bits, bits + 1, np.maximum(bits - 1, 0)]).astype(np.int32)
    both = np.concatenate([around, around | np.int32(-(2**31))]).view(np.float32)
    return np.resize(both, -(-len(both) // 32) * 32)


def test_rounding_to_half_is_to_nearest_even_everywhere():
    values = f32_around_halves()
    values[values == 0] = 0  # a sum from +0 has no -0
    with np.errstate(all="ignore"):
        wanted = np.where(np.isnan(values), np.float16("nan"), values.astype(np.float16))
    nan = np.isnan(values)
    actual = round_through_combine(values, np.dtype(np.float16))
    np.testing.assert_array_equal(actual.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])
    assert (actual.view(np.uint16)[nan] == 0x7E00).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32), st.sampled_from(TYPES))
def test_rounding_of_any_float(bits, dtype):
    values = np.array(bits, np.uint32).view(np.float32)
    values[values == 0] = 0
    wanted = narrow(np.where(np.isnan(values), reference.NAN, values), dtype)
    assert_same_bits(round_through_combine(values, dtype)[None], wanted[None])


# ------------------------------------------------------------------------------------------------- publish
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [32, 96, 256, 288, 704, 1024])
def test_publish_against_the_reference(hidden, dtype):
    """float32 records with zeros past the end, int8 records, and the rows that are not finite."""
    rng = np.random.default_rng(hidden)
    rows = narrow(rng.standard_normal((5, hidden)).astype(np.float32), dtype)
    spoilt = rows.view(np.uint16 if dtype.itemsize == 2 else np.uint32)
    spoilt[3, -1] = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0xFC00, np.dtype(np.uint16): 0x7F81}[dtype]
    blocks = -(-hidden // 256)
    floats, int8 = aligned(5 * blocks * 256, np.float32), aligned(5 * blocks * 320, np.uint8)
    floats[:], int8[:] = np.nan, 255
    bad = np.full(5, 7, np.int64)
    block = np.zeros(Publish.SIZE, np.int64)
    block[Publish.INPUT], block[Publish.INPUT_STRIDE] = rows.ctypes.data, rows.strides[0]
    block[Publish.ELEMENT], block[Publish.HIDDEN] = ELEMENTS[dtype], hidden
    block[Publish.FLOATS], block[Publish.FLOATS_STRIDE] = floats.ctypes.data, 1024 * blocks
    block[Publish.INT8], block[Publish.INT8_STRIDE] = int8.ctypes.data, 320 * blocks
    block[Publish.BAD] = bad.ctypes.data
    publish_rows(block.ctypes.data, 0, 5)
    assert bad.tolist() == [0, 0, 0, 1, 0]
    wide = widen(rows)
    padded = np.pad(wide, ((0, 0), (0, 256 * blocks - hidden)))
    np.testing.assert_array_equal(floats.reshape(5, -1).view(np.uint32), padded.view(np.uint32))
    wanted = reference.records(wide).view(np.uint8).reshape(5, -1, 320)
    np.testing.assert_array_equal(int8.reshape(5, -1, 320)[..., :312], wanted[..., :312])
