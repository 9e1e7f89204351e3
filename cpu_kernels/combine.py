"""Combine: the shards' parts of each routed expert to one hidden row per token, in the written order.

Per expert, 8 accumulators from +0 take the parts, shard b into accumulator b mod 8, b ascending; then the tree
and the down bias. Per token, ``y = fma(w_k, out_k, y)`` over its experts in rank order. NaN becomes 0x7fc00000
(0x7e00 in f16, 0x7fc0 in bf16), and a token whose hidden row was not finite gets NaN everywhere.

Reads 4 * positions * shards * hidden bytes, all from the caches; about 12 flops for each 4 bytes.
"""

from __future__ import annotations

import functools
from typing import Any

from trilane.cpu_kernels.activation import HIDDEN_BF16, HIDDEN_F32
from trilane.cpu_kernels.emit import F32X8, I16X8, I32X8, Emitter, V, emitted, f32, i64
from trilane.cpu_kernels.float_env import TASK_SIGNATURE
from trilane.cpu_kernels.words import Combine, load_f32, load_i32, word
from trilane.jit import compiled, native

LANES = 8
_ABS, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


# ------------------------------------------------------------------------------------------- eight columns at once
@emitted(F32X8)
def zeros(e: Emitter) -> V:
    return e.const(F32X8, 0.0)


@emitted(F32X8)
def nans(e: Emitter) -> V:
    return e.const(I32X8, _NAN).view(F32X8)


@emitted(F32X8, i64)
def load8(e: Emitter, address: V) -> V:
    return e.load(F32X8, address)


@emitted(F32X8, F32X8, F32X8)
def add8(e: Emitter, a: V, b: V) -> V:
    return a + b


@emitted(F32X8, f32, F32X8, F32X8)
def fma8(e: Emitter, weight: V, a: V, b: V) -> V:
    return e.fma(e.splat(weight, LANES), a, b)


def _is_nan(magnitude: V) -> V:
    return magnitude.compare(">", _INFINITY)


@emitted(None, i64, F32X8)
def store_as_f32(e: Emitter, address: V, y: V) -> None:
    bits = y.view(I32X8)
    e.store(address, e.select(_is_nan(bits & _ABS), e.const(I32X8, _NAN), bits))


@emitted(None, i64, F32X8)
def store_as_bf16(e: Emitter, address: V, y: V) -> None:
    """Rounded to nearest even."""
    bits = y.view(I32X8)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = e.select(_is_nan(bits & _ABS), e.const(I32X8, _NAN >> 16), rounded)
    e.store(address, rounded.trunc(I16X8))


@emitted(None, i64, F32X8)
def store_as_f16(e: Emitter, address: V, y: V) -> None:
    """Rounded to nearest even, in integers, so that it needs no half-precision instructions.

    A result below 2^-14 is rounded by adding 0.5, whose last bit weighs 2^-24, the smallest half.
    """
    bits = y.view(I32X8)
    magnitude = bits & _ABS
    rebased = magnitude - 0x38000000
    normal = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13
    small = (magnitude.view(F32X8) + 0.5).view(I32X8) - 0x3F000000
    half = e.select(magnitude.compare("<", 0x38800000), small, normal)
    half = e.select(magnitude.compare(">=", 0x47800000), e.const(I32X8, 0x7C00), half)
    half = half | ((bits >> 16) & 0x8000)
    half = e.select(_is_nan(magnitude), e.const(I32X8, 0x7E00), half)
    e.store(address, half.trunc(I16X8))


# ------------------------------------------------------------------------------------------------------- one expert
@compiled(inline=True)
def _accumulate(part, stride, num_shards, index):
    """Accumulator ``index``: +0, then its shards in order (adding +0 to an empty one changes nothing)."""
    total = zeros()
    for shard in range(index, num_shards, 8):
        total = add8(total, load8(part + shard * stride))
    return total


@compiled(inline=True)
def _sum_shards(part, stride, n):
    """The tree over the eight accumulators for eight columns."""
    if n <= 4:
        even = add8(_accumulate(part, stride, n, 0), _accumulate(part, stride, n, 2))
        return add8(even, add8(_accumulate(part, stride, n, 1), _accumulate(part, stride, n, 3)))
    a0 = add8(_accumulate(part, stride, n, 0), _accumulate(part, stride, n, 4))
    a1 = add8(_accumulate(part, stride, n, 1), _accumulate(part, stride, n, 5))
    a2 = add8(_accumulate(part, stride, n, 2), _accumulate(part, stride, n, 6))
    a3 = add8(_accumulate(part, stride, n, 3), _accumulate(part, stride, n, 7))
    return add8(add8(a0, a2), add8(a1, a3))


@compiled
def _combine_columns(block, token, column):
    """Eight columns of one token."""
    num_shards, hidden = word(block, Combine.NUM_SHARDS), word(block, Combine.HIDDEN)
    top_k, bias = word(block, Combine.TOP_K), word(block, Combine.DOWN_BIAS)
    bad = word(word(block, Combine.BAD), token) != 0
    y = zeros()
    for entry in range(token * top_k, (token + 1) * top_k):
        position = load_i32(word(block, Combine.POSITION) + 4 * entry)
        if position < 0:
            continue
        part = word(block, Combine.PARTS) + 4 * (position * num_shards * hidden + column)
        out = _sum_shards(part, 4 * hidden, num_shards)
        if bias != 0:
            expert = word(word(block, Combine.IDS), entry)
            out = add8(out, load8(bias + expert * word(block, Combine.DOWN_BIAS_STRIDE) + 4 * column))
        y = nans() if bad else fma8(load_f32(word(block, Combine.WEIGHTS) + 4 * entry), out, y)
    return y


@compiled
def combine_rows(block, first, last):
    """Tokens ``first`` to ``last``."""
    element = word(block, Combine.ELEMENT)
    for token in range(first, last):
        out = word(block, Combine.OUT) + token * word(block, Combine.OUT_STRIDE)
        for column in range(0, word(block, Combine.HIDDEN), LANES):
            y = _combine_columns(block, token, column)
            if element == HIDDEN_F32:
                store_as_f32(out + 4 * column, y)
            elif element == HIDDEN_BF16:
                store_as_bf16(out + 2 * column, y)
            else:
                store_as_f16(out + 2 * column, y)


@functools.cache
def combine_task() -> Any:
    @native(TASK_SIGNATURE)
    def combine(block, task, worker):
        rows = word(block, Combine.ROWS_PER_TASK)
        combine_rows(block, task * rows, min((task + 1) * rows, word(block, Combine.NUM_ROWS)))
        return 0

    return combine
