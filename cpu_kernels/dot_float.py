"""Rows of float weights (f32, f16, bf16) times float32 activations.

The contract, per 256-block: 32 accumulators from +0, lane k mod 32, ``acc = fma(w, x, acc)``, k ascending,
then the xor tree 16, 8, 4, 2, 1. Weights widen to float32 exactly. The accumulators of a row are four
vectors of eight lanes, two of sixteen with AVX-512; a block is 512 or 1024 bytes and 512 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES
from trilane.cpu_kernels.emit import F32X4, F32X8, Emitter, V, Vec, emitted, i64
from trilane.cpu_kernels.rows import BLOCK4_ARGS
from trilane.cpu_kernels.rows import make_rows as make_row_loop
from trilane.cpu_kernels.sub_blocks import fold_doubles, fold_halves
from trilane.jit import compiled

Widen = Callable[[Emitter, V, int], V]


def _f32(e: Emitter, address: V, lanes: int) -> V:
    return e.load(Vec("f32", lanes), address)


def _f16(e: Emitter, address: V, lanes: int) -> V:
    return e.half_to_float(e.load(Vec("i16", lanes), address))


def _bf16(e: Emitter, address: V, lanes: int) -> V:
    bits = e.load(Vec("i16", lanes), address).zext(Vec("i32", lanes))
    return (bits << 16).view(Vec("f32", lanes))


def _fold(acc: list[V]) -> V:
    """32 accumulators to 8 lanes: the steps 16 and 8 of the xor tree."""
    while len(acc) > 1:
        half = len(acc) // 2
        acc = [a + b for a, b in zip(acc[:half], acc[half:], strict=True)]
    lanes = acc[0].ir.type.count
    return acc[0] if lanes == 8 else acc[0].shuffle(range(8)) + acc[0].shuffle(range(8, 16))


def _tree4(rows: Sequence[V]) -> V:
    """The steps 4, 2 and 1 of the xor tree of four rows -> ``<4 x f32>``."""
    fours = fold_doubles(fold_halves(rows[0], rows[1]), fold_halves(rows[2], rows[3]))
    return fours.shuffle([0, 4, 2, 6]) + fours.shuffle([1, 5, 3, 7])


def _make_block4(isa: str, widen: Widen, nbytes: int) -> Any:
    """``block4`` for weights of ``nbytes`` bytes; see :data:`trilane.cpu_kernels.rows.BLOCK4_ARGS`."""
    lanes = 16 if isa == "avx512" else 8
    vectors = 32 // lanes
    zeros = [Vec("f32", lanes)] * vectors

    def step(e: Emitter, main: V, record: V, acc: list[V]) -> list[V]:
        """32 more weights of one row."""
        w = [widen(e, main + nbytes * lanes * k, lanes) for k in range(vectors)]
        x = [e.load(zeros[0], record + 4 * lanes * k) for k in range(vectors)]
        return [e.fma(*operands) for operands in zip(w, x, acc, strict=True)]

    @emitted(F32X4, *BLOCK4_ARGS, isa=isa)
    def whole(e: Emitter, *args: V) -> V:
        record, rows = args[8], []
        for main in args[:4]:
            acc = [e.const(t, 0.0) for t in zeros]
            for k in range(8):
                acc = step(e, main + 32 * nbytes * k, record + 128 * k, acc)
            rows.append(_fold(acc))
        return _tree4(rows)

    @emitted(F32X8, i64, i64, i64, isa=isa)
    def part(e: Emitter, main: V, record: V, num_columns: V) -> V:
        """One row of a short block: a loop over its groups of 32."""
        return _fold(
            _loop(
                e,
                num_columns >> 5,
                zeros,
                lambda k, acc: step(e, main + k * (32 * nbytes), record + (k << 7), acc),
            )
        )

    @emitted(F32X4, F32X8, F32X8, F32X8, F32X8)
    def join(e: Emitter, *rows: V) -> V:
        return _tree4(rows)

    @compiled(inline=True)
    def block4(wa, wb, wc, wd, sa, sb, sc, sd, record, num_columns):  # type: ignore[no-untyped-def]
        if num_columns == 256:
            value = whole(wa, wb, wc, wd, sa, sb, sc, sd, record, num_columns)
        else:
            value = join(
                part(wa, record, num_columns), part(wb, record, num_columns),
                part(wc, record, num_columns), part(wd, record, num_columns),
            )  # fmt: skip
        return value

    return block4


def _loop(e: Emitter, count: V, types: list[Vec], body: Callable[[V, list[V]], list[V]]) -> list[V]:
    """Run ``body(k, values)`` for k = 0 .. count - 1 over values that start as zeros."""
    builder = e.builder
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(count.ir.type)
    values = [builder.phi(t.llvm) for t in types]
    k.add_incoming(e.const(i64, 0).ir, before)
    for value, t in zip(values, types, strict=True):
        value.add_incoming(e.const(t, 0.0).ir, before)
    builder.cbranch(builder.icmp_signed("<", k, count.ir), inside, after)
    builder.position_at_end(inside)
    results = body(V(e, k), [V(e, v) for v in values])
    k.add_incoming((V(e, k) + 1).ir, builder.block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result.ir, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return [V(e, v) for v in values]


def _make_rows(isa: str, widen: Widen, nbytes: int) -> Any:
    block4 = _make_block4(isa, widen, nbytes)
    return make_row_loop(__name__, block4, 256 * nbytes, 0, F32_BLOCK_NBYTES)


def make_rows_f32(isa: str) -> Any:
    """The row kernel of f32 for one instruction set; see :func:`.rows.make_rows`."""
    return _make_rows(isa, _f32, 4)


def make_rows_f16(isa: str) -> Any:
    """The row kernel of f16 for one instruction set."""
    return _make_rows(isa, _f16, 2)


def make_rows_bf16(isa: str) -> Any:
    """The row kernel of bf16 for one instruction set."""
    return _make_rows(isa, _bf16, 2)
