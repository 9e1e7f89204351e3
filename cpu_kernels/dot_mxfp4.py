"""MXFP4 rows times int8 activations: 32 weights of 4 bits (E2M1) share a power of two (E8M0).

Main plane: 128 bytes a block, 16 for each sub-block of 32 (low nibble = weight i, high = weight i + 16); side
plane: 8 exponents. A weight is ``k * 2^(e - 128)`` with k the doubled value 0 1 2 3 4 6 8 12 or its negative.
The contract: ``I_j = sum k * x`` exactly in int32, ``p_j = 2^(e_j - 128) * float(I_j)`` (denormal factors are
kept), the tree over p, times ``d_x``.

The kernels multiply by k + 12, which is unsigned, and take ``12 * sum x`` off again; the sums of x are in the
activation record. Eight products of at most 24 * 127 fit into 16 bits. 136 bytes and 512 operations a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trilane.cpu_kernels.emit import I8X8, I8X16, I8X32, I16X16, I32X8, Emitter, V, Vec
from trilane.cpu_kernels.rows import make_rows as make_row_loop
from trilane.cpu_kernels.simd_float import smax
from trilane.cpu_kernels.sub_blocks import ORDER, fold8, fold_doubles, fold_pairs, gather, make_block4

MAIN_NBYTES, SIDE_NBYTES = 128, 8
OFFSET = 12
_VALUES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def _unsigned_values(e: Emitter, nibbles: V) -> V:
    """k + 12 of nibbles in 0..15."""
    if e.isa != "portable":
        return e.shuffle_bytes(e.const(I8X32, [k + OFFSET for k in _VALUES] * 2), nibbles)
    m = nibbles & 7  # |k| = m + max(m - 4, 0) + 2 max(m - 6, 0): no table look-up in generic code
    above4, above6 = (_saturating_sub(e, m, limit) for limit in (4, 6))
    k = m + above4 + (above6 << 1)
    return e.select(nibbles.compare(">", 7), -k, k) + OFFSET


def _saturating_sub(e: Emitter, a: V, limit: int) -> V:
    return e.call("llvm.usub.sat.v32i8", a.ir.type, a, e.const(I8X32, limit))


_FIRST_HALVES, _SECOND_HALVES = [*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]


def _products(e: Emitter, main: V, x: V) -> V:
    """Two sub-blocks, one in each half of the result: with VNNI sums of 8 products in <8 x i32>, else of 4 in
    <16 x i16>."""
    w, a, b = e.load(I8X32, main), e.load(I8X32, x), e.load(I8X32, x + 32)
    x_low, x_high = a.shuffle(_FIRST_HALVES, b), a.shuffle(_SECOND_HALVES, b)
    low, high = _unsigned_values(e, w & 15), _unsigned_values(e, w >> 4)
    if e.isa == "avx512":
        return e.dot_bytes(e.dot_bytes(e.const(I32X8, 0), low, x_low), high, x_high)
    return e.maddubs(low, x_low) + e.maddubs(high, x_high)


def _row_dots(e: Emitter, main: V, record: V) -> V:
    if e.isa == "portable":
        return fold8([_sub_dots(e, main + 16 * j, record + 32 * j) for j in range(8)])
    s = [_products(e, main + 16 * j, record + 32 * j) for j in (0, 2, 4, 6)]
    if e.isa == "avx512":
        return fold_pairs(fold_doubles(s[0], s[2]), fold_doubles(s[1], s[3]))
    words = [fold_doubles(s[k].view(I32X8), s[k + 2].view(I32X8), I16X16) for k in (0, 1)]  # two still fit
    return fold_pairs(*(e.madd(w, e.const(I16X16, 1)) for w in words))


def _sub_dots(e: Emitter, main: V, x: V) -> V:
    """One sub-block; lanes add up to its dot."""
    w = e.load(I8X16, main)
    nibbles = (w & 15).shuffle(range(32), w >> 4)
    values = _unsigned_values(e, nibbles)
    a = e.load(I8X32, x)
    if e.isa == "avx512":
        return e.dot_bytes(e.const(I32X8, 0), values, a)
    if e.isa == "avx2":
        return e.madd(e.maddubs(values, a), e.const(I16X16, 1))
    products = values.zext(Vec("i16", 32)) * a.sext(Vec("i16", 32))
    return e.madd(products.shuffle(range(16)) + products.shuffle(range(16, 32)), e.const(I16X16, 1))


def _power_of_two(e: Emitter, exponents: V) -> V:
    """2^(e - 128) from int32 exponents, made of its bits: denormal for 0 and 1, no infinity for 255."""
    normal = (exponents << 23) - (1 << 23)
    denormal = (exponents << 21) + (1 << 21)  # the larger one for 0 and 1 alone
    return smax(normal, denormal).view(Vec("f32", exponents.ir.type.count))


def _row_scales(e: Emitter, side: V) -> V:
    return _power_of_two(e, e.load(I8X8, side).shuffle(ORDER).zext(I32X8))


def _sub_scales(e: Emitter, sides: Sequence[V]) -> V:
    return _power_of_two(e, gather(e, Vec("i8", 4), sides).zext(Vec("i32", 4)))


def make_rows(isa: str) -> Any:
    """The row kernel of this format for one instruction set; see :func:`.rows.make_rows`."""
    block4 = make_block4(isa, _row_dots, _row_scales, _sub_dots, _sub_scales, OFFSET, 16, 1)
    return make_row_loop(__name__, block4, MAIN_NBYTES, SIDE_NBYTES)
