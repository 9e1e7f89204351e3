"""Blocks of eight sub-blocks of 32 weights, each with a scale of its own (Q8_0, MXFP4): what they share.

The contract: ``p_j = d_j * float(I_j)`` for sub-block j of a 256-block (I_j exact int32, missing ones +0),
then the tree (0+4, 1+5, 2+6, 3+7), (0+2, 1+3), (0+1) over p, then ``v_b = tree * d_x``. A whole block is
computed row after row, eight sub-blocks in the lanes of a vector; the short block at the end of a row
sub-block after sub-block, four rows in the lanes, so that not a byte behind its end is read.

A format brings its integer dots and its scales; this file knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from trilane.cpu_kernels.activation import BS32, D
from trilane.cpu_kernels.emit import F32X4, F32X8, I32X4, I32X8, Emitter, V, Vec, emitted, f32, i64
from trilane.cpu_kernels.rows import BLOCK4_ARGS
from trilane.jit import compiled

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which sub-block each lane of a whole block's vectors stands for: in this order the tree crosses the middle
of a vector only once, at its end."""

# Lanes of (a, b) that are added. Each first half is a blend, which is cheaper than a shuffle; numbers go per
# 128 bits. This takes less work than the instructions for horizontal sums.
_HALVES = [0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]
_DOUBLES = [0, 1, 10, 11, 4, 5, 14, 15], [2, 3, 8, 9, 6, 7, 12, 13]
_PAIRS = [0, 9, 2, 11, 4, 13, 6, 15], [1, 8, 3, 10, 5, 12, 7, 14]


def _folded(a: V, b: V, lanes: tuple[list[int], list[int]], add_as: Vec | None = None) -> V:
    first, second = a.shuffle(lanes[0], b), a.shuffle(lanes[1], b)
    return first.view(add_as) + second.view(add_as) if add_as else first + second


def fold_halves(a: V, b: V) -> V:
    """8 lanes each -> [low half of a + its high half, the same of b]."""
    return _folded(a, b, _HALVES)


def fold_doubles(a: V, b: V, add_as: Vec | None = None) -> V:
    """Per 128 bits [a0 a1 a2 a3], [b0 ...] -> [a0 + a2, a1 + a3, b0 + b2, b1 + b3], added as ``add_as``."""
    return _folded(a, b, _DOUBLES, add_as)


def fold_pairs(a: V, b: V) -> V:
    """Per 128 bits [a0 a1 a2 a3], [b0 ...] -> [a0 + a1, b0 + b1, a2 + a3, b2 + b3]."""
    return _folded(a, b, _PAIRS)


def fold8(s: Sequence[V]) -> V:
    """Sums of eight ``<8 x i32>``, one for each sub-block -> ``<8 x i32>`` in :data:`ORDER`."""
    twos = [fold_doubles(s[j], s[j + 4]) for j in range(4)]
    return fold_halves(fold_pairs(twos[0], twos[2]), fold_pairs(twos[1], twos[3]))


def tree4(rows: Sequence[V]) -> V:
    """The contract's tree over four ``<8 x f32>`` in :data:`ORDER` -> ``<4 x f32>``, one lane a row."""
    a, b, c, d = rows
    twos = fold_pairs(fold_doubles(a, c), fold_doubles(b, d))
    return twos.shuffle(range(4)) + twos.shuffle(range(4, 8))


def gather(e: Emitter, t: Vec, addresses: Sequence[V]) -> V:
    """A vector of scalars from several addresses."""
    value = ir.Constant(t.llvm, ir.Undefined)
    for k, address in enumerate(addresses):
        pointer = e.pointer(address, t.llvm.element)
        index = ir.Constant(ir.IntType(32), k)
        value = e.builder.insert_element(value, e.builder.load(pointer, align=1), index)
    return V(e, value)


@emitted(i64)
def _slots(e: Emitter) -> V:
    """Address of eight ``<4 x f32>`` on the stack: p_j of four rows each."""
    slot = cgutils.alloca_once(e.builder, ir.ArrayType(F32X4.llvm, 8))
    slot.align = 64
    return V(e, e.builder.ptrtoint(slot, ir.IntType(64)))


@emitted(None, i64)
def _clear(e: Emitter, slots: V) -> None:
    for j in range(8):
        e.store(slots + 16 * j, e.const(F32X4, 0.0), align=16)


@emitted(F32X4, i64, i64)
def _finish(e: Emitter, slots: V, record: V) -> V:
    p = [e.load(F32X4, slots + 16 * j, align=16) for j in range(8)]
    four = [p[j] + p[j + 4] for j in range(4)]
    return ((four[0] + four[2]) + (four[1] + four[3])) * e.splat(e.load(f32, record + D), 4)


def sums_of_x(e: Emitter, record: V) -> V:
    """The activation's sums of each 32, as ``<8 x i32>`` in :data:`ORDER`."""
    return e.load(Vec("i16", 8), record + BS32).shuffle(ORDER).sext(I32X8)


def make_block4(
    isa: str,
    row_dots: Callable[[Emitter, V, V], V],
    row_scales: Callable[[Emitter, V], V],
    sub_dots: Callable[[Emitter, V, V], V],
    sub_scales: Callable[[Emitter, Sequence[V]], V],
    offset: int,
    sub_nbytes: int,
    scale_nbytes: int,
) -> Any:
    """``block4`` of a format; see :data:`trilane.cpu_kernels.rows.BLOCK4_ARGS`.

    Parameters
    ----------
    row_dots : ``(e, main, record) -> <8 x i32>``, dots of the sub-blocks with (w + offset), in :data:`ORDER`
    row_scales : ``(e, side) -> <8 x f32>``, in :data:`ORDER`
    sub_dots : ``(e, main, x) -> <8 x i32>`` whose lanes add up to the dot of one sub-block with (w + offset)
    sub_scales : ``(e, four addresses) -> <4 x f32>``
    offset : what the dots have added to each weight, to make it unsigned
    sub_nbytes, scale_nbytes : size of a sub-block in the main and in the side plane
    """

    @emitted(F32X4, *BLOCK4_ARGS, isa=isa)
    def whole(e: Emitter, *args: V) -> V:
        mains, sides, record = args[:4], args[4:8], args[8]
        surplus = sums_of_x(e, record) * offset if offset else None
        products = []
        for main, side in zip(mains, sides, strict=True):
            dots = row_dots(e, main, record)
            dots = dots if surplus is None else dots - surplus
            products.append(dots.to_float(F32X8) * row_scales(e, side))
        return tree4(products) * e.splat(e.load(f32, record + D), 4)

    @emitted(None, i64, i64, *BLOCK4_ARGS[:9], isa=isa)
    def one(e: Emitter, slots: V, j: V, *args: V) -> None:
        mains, sides, record = args[:4], args[4:8], args[8]
        dots = e.sum4([sub_dots(e, main + j * sub_nbytes, record + (j << 5)) for main in mains])
        if offset:
            x_sum = e.splat(e.load(types.int16, record + BS32 + (j << 1)), 4)
            dots = dots - x_sum.sext(I32X4) * offset
        scales = sub_scales(e, [side + j * scale_nbytes for side in sides])
        e.store(slots + (j << 4), dots.to_float(F32X4) * scales, align=16)

    @compiled(inline=True)
    def block4(wa, wb, wc, wd, sa, sb, sc, sd, record, num_columns):  # type: ignore[no-untyped-def]
        if num_columns == 256:
            value = whole(wa, wb, wc, wd, sa, sb, sc, sd, record, num_columns)
        else:
            slots = _slots()
            _clear(slots)
            for j in range(num_columns >> 5):
                one(slots, j, wa, wb, wc, wd, sa, sb, sc, sd, record)
            value = _finish(slots, record)
        return value

    return block4
