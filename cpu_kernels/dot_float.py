"""Rows of float weights (f32, f16, bf16) times float32 activations.

The contract, per 256-block: 32 accumulators from +0, lane k mod 32, ``acc = fma(w, x, acc)``, k ascending,
then the xor tree 16, 8, 4, 2, 1. Weights widen to float32 exactly. The accumulators of a row are four
vectors of eight lanes, two of sixteen with AVX-512; a block is 512 or 1024 bytes and 512 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES
from trilane.cpu_kernels.emit import F32X4, Emitter, V, Vec, emitted
from trilane.cpu_kernels.rows import BLOCK4_ARGS
from trilane.cpu_kernels.rows import make_rows as make_row_loop
from trilane.cpu_kernels.sub_blocks import fold_doubles, fold_halves

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
    """``block4`` for weights of ``nbytes`` bytes; see :data:`trilane.cpu_kernels.rows.BLOCK4_ARGS`.

    A loop over groups of 32 weights, all four rows in each turn, so that four streams are read side by side.
    """
    lanes = 16 if isa == "avx512" else 8
    vectors = 32 // lanes

    @emitted(F32X4, *BLOCK4_ARGS, isa=isa)
    def block4(e: Emitter, *args: V) -> V:
        mains, record, num_groups = args[:4], args[8], args[9] >> 5

        def turn(k: V, acc: list[V]) -> list[V]:
            x = [e.load(Vec("f32", lanes), record + (k << 7) + 4 * lanes * i) for i in range(vectors)]
            at = [main + k * (32 * nbytes) + nbytes * lanes * i for main in mains for i in range(vectors)]
            return [e.fma(widen(e, a, lanes), b, c) for a, b, c in zip(at, x * 4, acc, strict=True)]

        acc = _loop(e, num_groups, [Vec("f32", lanes)] * 4 * vectors, turn)
        return _tree4([_fold(acc[vectors * r : vectors * (r + 1)]) for r in range(4)])

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
    k.add_incoming(ir.Constant(count.ir.type, 0), before)
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
