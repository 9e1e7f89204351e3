"""Activations as the row kernels read them: int8 records of 256 elements, or float32 padded to such blocks.

int8 record, 320 bytes a block: q int8[256] @0, sums of each 32 int16[8] @256, sums of each 16 int16[16] @272,
d float32 @304, bad int32 @308. float32 record: 1024 bytes a block. Elements past the end of a row are zeros.
A row is quantised once, on the device that holds it; every lane gets these bytes. The rule of a block::

    amax = max |x|, d = amax / 127, q = rint_even(x * (127 / amax)), all in float32 with IEEE division
    amax < 2^-100: d = 0, q = 0        a non-finite element: d = 0, q = 0, bad = 1

All functions take addresses and lengths as int64; a length K is a multiple of 32. Reading 4 K bytes and
writing 1.25 K, a row of 2048 takes about half a microsecond. Nothing here knows weights or gates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trilane.cpu_kernels import simd_float as sf
from trilane.cpu_kernels.emit import (
    F32X8,
    I8X16,
    I8X32,
    I16X8,
    I32X8,
    Emitter,
    V,
    Vec,
    emitted,
    f32,
    i32,
    i64,
)
from trilane.cpu_kernels.reference import BLOCK, RECORD
from trilane.jit import compiled

HIDDEN_F32, HIDDEN_F16, HIDDEN_BF16 = range(3)  # element types of hidden states (bf16 as uint16 bits)

RECORD_NBYTES = RECORD.itemsize
F32_BLOCK_NBYTES = 4 * BLOCK
BS32, BS16, D, BAD = (RECORD.fields[name][1] for name in ("bs32", "bs16", "d", "bad"))  # type: ignore[index]

_TINY_BITS = 27 << 23  # 2^-100
_INFINITY_BITS = 0x7F800000


def row_nbytes(activation: str, length: int) -> int:
    """Bytes of the records of a row of ``length`` elements; ``activation`` is "int8" or "f32"."""
    return -(-length // BLOCK) * (RECORD_NBYTES if activation == "int8" else F32_BLOCK_NBYTES)


# ------------------------------------------------------------------------------------- pieces of 32 elements
@emitted(I32X8)
def _no_magnitude(e: Emitter) -> V:
    return e.const(I32X8, 0)


@emitted(I32X8, I32X8, i64)
def _magnitude32(e: Emitter, largest: V, x: V) -> V:
    """The largest |x|, as bits, in each of 8 lanes, over the 32 floats at ``x`` as well."""
    for k in range(4):
        largest = sf.smax(largest, sf.magnitude_bits(e.load(F32X8, x + 32 * k), I32X8))
    return largest


@emitted(I32X8, I32X8, i64, i64)
def _copy32(e: Emitter, largest: V, x: V, out: V) -> V:
    for k in range(4):
        piece = e.load(F32X8, x + 32 * k)
        e.store(out + 32 * k, piece)
        largest = sf.smax(largest, sf.magnitude_bits(piece, I32X8))
    return largest


@emitted(i32, I32X8)
def _largest(e: Emitter, lanes: V) -> V:
    for half in (4, 2, 1):
        lanes = sf.smax(lanes.shuffle(range(half)), lanes.shuffle(range(half, 2 * half)))
    return lanes.lane(0)


@emitted(f32, i32)
def _as_float(e: Emitter, bits: V) -> V:
    return V(e, e.builder.bitcast(bits.ir, e.const(F32X8, 0).lane(0).ir.type))


def _quantizer(num_groups: int) -> Any:
    """Quantise 1 or 2 groups of 32 floats and write their bytes and sums."""

    @emitted(None, i64, f32, i64, i64, i64)
    def quantize_groups(e: Emitter, x: V, inv: V, q: V, bs32: V, bs16: V) -> None:
        scale, sums = e.splat(inv, 8), [e.const(I32X8, 0)] * 4
        for g in range(num_groups):
            ints = [sf.to_int(sf.rint(e.load(F32X8, x + 128 * g + 32 * k) * scale), I32X8) for k in range(4)]
            low, high = (ints[k].shuffle(range(16), ints[k + 1]) for k in (0, 2))
            e.store(q + 32 * g, low.shuffle(range(32), high).trunc(I8X32))
            sums[2 * g : 2 * g + 2] = ints[0] + ints[1], ints[2] + ints[3]
        sixteens = e.sum4(sums)
        lanes = range(2 * num_groups)
        pairs = sixteens.shuffle([0, 2][:num_groups]) + sixteens.shuffle([1, 3][:num_groups])
        e.store(bs16, sixteens.shuffle(lanes).trunc(Vec("i16", 2 * num_groups)))
        e.store(bs32, pairs.trunc(Vec("i16", num_groups)))

    return quantize_groups


_quantize32, _quantize64 = _quantizer(1), _quantizer(2)


@emitted(None, i64, f32, i32)
def _write_scale(e: Emitter, record: V, d: V, bad: V) -> None:
    e.store(record + D, d)
    e.store(record + BAD, bad)


@emitted(None, i64)
def _clear_sums_and_quants(e: Emitter, record: V) -> None:
    for offset in range(0, D - 16, 32):
        e.store(record + offset, e.const(I8X32, 0))
    e.store(record + (D - 16), e.const(I8X16, 0))


@emitted(None, i64)
def _clear32(e: Emitter, out: V) -> None:
    for k in range(4):
        e.store(out + 32 * k, e.const(F32X8, 0.0))


# ---------------------------------------------------------------------------------------------------- rows
@compiled(inline=True)
def _quantize_block(x, length, record):  # type: ignore[no-untyped-def]
    lanes = _no_magnitude()
    for k in range(0, length, 32):
        lanes = _magnitude32(lanes, x + 4 * k)
    bits = _largest(lanes)
    bad = bits >= np.int32(_INFINITY_BITS)
    dead = bad or bits < np.int32(_TINY_BITS)
    if dead or length < BLOCK:
        _clear_sums_and_quants(record)
    if dead:
        _write_scale(record, np.float32(0), np.int32(bad))
        return np.int64(bad)
    amax = _as_float(bits)
    inv = np.float32(127) / amax
    _write_scale(record, amax / np.float32(127), np.int32(0))
    k = 0
    while k + 64 <= length:
        _quantize64(x + 4 * k, inv, record + k, record + BS32 + k // 16, record + BS16 + k // 8)
        k += 64
    if k < length:
        _quantize32(x + 4 * k, inv, record + k, record + BS32 + k // 16, record + BS16 + k // 8)
    return np.int64(0)


@compiled
def quantize_row(x, length, record):  # type: ignore[no-untyped-def]
    """Write the int8 records of ``length`` floats at ``x``; 1 if any of them is not finite, else 0."""
    bad = np.int64(0)
    for k in range(0, length, BLOCK):
        bad |= _quantize_block(x + 4 * k, min(BLOCK, length - k), record + k // BLOCK * RECORD_NBYTES)
    return bad


@compiled
def copy_row_f32(x, length, record):  # type: ignore[no-untyped-def]
    """Copy ``length`` floats into float32 records; 1 if any of them is not finite, else 0."""
    lanes = _no_magnitude()
    for k in range(0, length, 32):
        lanes = _copy32(lanes, x + 4 * k, record + 4 * k)
    for k in range(length, (length + BLOCK - 1) // BLOCK * BLOCK, 32):
        _clear32(record + 4 * k)
    return np.int64(_largest(lanes) >= np.int32(_INFINITY_BITS))


# ------------------------------------------------------------------------------------------- hidden states
@emitted(None, i64, i64)
def _load8_f16(e: Emitter, x: V, out: V) -> None:
    e.store(out, e.half_to_float(e.load(I16X8, x)))


@emitted(None, i64, i64)
def _load8_bf16(e: Emitter, x: V, out: V) -> None:
    e.store(out, (e.load(I16X8, x).zext(I32X8) << 16).view(F32X8))


@emitted(None, i64, i64)
def _load8_f32(e: Emitter, x: V, out: V) -> None:
    e.store(out, e.load(F32X8, x))


@compiled
def load_hidden(element, x, length, out):  # type: ignore[no-untyped-def]
    """Widen ``length`` elements (HIDDEN_F32, HIDDEN_F16, HIDDEN_BF16) at ``x`` to floats at ``out``."""
    if element == HIDDEN_F16:
        for k in range(0, length, 8):
            _load8_f16(x + 2 * k, out + 4 * k)
    elif element == HIDDEN_BF16:
        for k in range(0, length, 8):
            _load8_bf16(x + 2 * k, out + 4 * k)
    else:
        for k in range(0, length, 8):
            _load8_f32(x + 4 * k, out + 4 * k)
