"""The loop over rows that every dot product shares: four distant rows at a time, and the order of a row.

A format brings ``block4``, an intrinsic that gives the value ``v_b`` of one 256-block of four rows at once.
The loop around it takes row i of each quarter of the rows (a core's memory unit follows four streams well,
one stream badly), reads a row's bytes from memory once for all activations, and sums as the contract says:
eight accumulators from +0, ``acc[b % 8] += v_b``, then the tree. It knows no format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from trilane.cpu_kernels.emit import F32X4, Emitter, V, emitted, i64
from trilane.cpu_kernels.simd import noinline
from trilane.jit import compiled, native

ROWS_SIGNATURE = types.void(*[types.int64] * 11)
RECORD_NBYTES = 320

BLOCK4_ARGS = (i64,) * 10
"""Arguments of ``block4``: main addresses of four rows, their side addresses, the activation record, and the
number of weights in the block (256, or less at the end of a row)."""


@emitted(i64)
def _accumulators(e: Emitter) -> V:
    """Address of eight ``<4 x f32>`` on the stack: in memory they need no rotation through registers."""
    slot = cgutils.alloca_once(e.builder, ir.ArrayType(F32X4.llvm, 8))
    slot.align = 64
    return V(e, e.builder.ptrtoint(slot, ir.IntType(64)))


@emitted(None, i64)
def _clear(e: Emitter, acc: V) -> None:
    for k in range(8):
        e.store(acc + 16 * k, e.const(F32X4, 0.0), align=16)


@emitted(None, i64, i64, F32X4)
def _accumulate(e: Emitter, acc: V, b: V, value: V) -> None:
    address = acc + ((b & 7) << 4)
    e.store(address, e.load(F32X4, address, align=16) + value, align=16)


@emitted(F32X4, i64)
def _tree(e: Emitter, acc: V) -> V:
    a = [e.load(F32X4, acc + 16 * k, align=16) for k in range(8)]
    four = [a[k] + a[k + 4] for k in range(4)]
    return (four[0] + four[2]) + (four[1] + four[3])


@emitted(F32X4, F32X4)
def _only(e: Emitter, value: V) -> V:
    """What the accumulators make of a row of one block: -0 becomes +0, all else stays."""
    return value + e.const(F32X4, 0.0)


@emitted(None, F32X4, *[i64] * 5)
def _store4(e: Emitter, value: V, out: V, a: V, b: V, c: V, d: V) -> None:
    for k, row in enumerate((a, b, c, d)):
        e.store(out + (row << 2), value.lane(k), align=4)


def make_rows(
    module: str,
    block4: Callable[..., Any],
    main_nbytes: int,
    side_nbytes: int,
    record_nbytes: int = RECORD_NBYTES,
) -> Any:
    """Compile the row kernel of a format.

    Parameters
    ----------
    module : str
        The format's module (its ``__name__``): the cache watches its source and what it imports.
    block4 : intrinsic
        See :data:`BLOCK4_ARGS`; returns ``<4 x f32>``.
    main_nbytes, side_nbytes, record_nbytes : int
        Bytes from one 256-block to the next in the main plane, the side plane and the activation.

    Returns
    -------
    A native function ``(w, side, w_stride, side_stride, r0, r1, K, xs, num_x, out, out_stride)`` of int64:
    result of row r for activation i goes to ``out + 4 * (i * out_stride + r)``, f32. ``w`` and ``side`` are
    the addresses of row 0, ``xs`` that of ``num_x`` addresses of activations. It reads nothing outside
    rows r0 to r1 - 1 but what ``block4`` reads behind the end of a short block.
    """

    @compiled(inline=True)
    def dot4(wa, wb, wc, wd, sa, sb, sc, sd, x, num_columns, acc):
        _clear(acc)
        b = 0
        while num_columns > 0:
            cols = min(num_columns, 256)
            _accumulate(acc, b, block4(wa, wb, wc, wd, sa, sb, sc, sd, x, cols))
            wa += main_nbytes
            wb += main_nbytes
            wc += main_nbytes
            wd += main_nbytes
            sa += side_nbytes
            sb += side_nbytes
            sc += side_nbytes
            sd += side_nbytes
            x += record_nbytes
            num_columns -= 256
            b += 1
        return _tree(acc)

    def rows(w, side, w_stride, side_stride, r0, r1, K, xs, num_x, out, out_stride):
        noinline()
        acc = _accumulators()
        quarter = (r1 - r0) >> 2
        last = r1 - 1
        step = quarter
        a = r0
        for i in range((r1 - r0 + 3) >> 2):
            if i == quarter:  # one to three rows are left: the same code on the last row repeated
                a, step = r0 + 4 * quarter, 1
            b, c, d = min(a + step, last), min(a + 2 * step, last), min(a + 3 * step, last)
            wa, wb, wc, wd = w + a * w_stride, w + b * w_stride, w + c * w_stride, w + d * w_stride
            sa, sb = side + a * side_stride, side + b * side_stride
            sc, sd = side + c * side_stride, side + d * side_stride
            o = out
            for n in range(num_x):
                x = _address(xs + 8 * n)
                if K <= 256:
                    value = _only(block4(wa, wb, wc, wd, sa, sb, sc, sd, x, K))
                else:
                    value = dot4(wa, wb, wc, wd, sa, sb, sc, sd, x, K, acc)
                _store4(value, o, a, b, c, d)
                o += 4 * out_stride
            a += 1

    rows.__module__ = module
    return native(ROWS_SIGNATURE)(rows)


@emitted(i64, i64)
def _address(e: Emitter, pointer: V) -> V:
    return e.load(i64, pointer, align=8)
