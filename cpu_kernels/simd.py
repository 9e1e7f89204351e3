"""Vector intrinsics for compiled functions: loads, stores, arithmetic, sums, and calls through addresses.

Addresses are int64 (an ndarray's ``ctypes.data`` is uint64 inside compiled code, and uint64 + int64 would be
a float: convert first). What depends on the instruction set is a factory, ``maddubs(isa)``, for use in the
factories of the kernels. Larger pieces are better written with :func:`trilane.cpu_kernels.emit.emitted`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from trilane.cpu_kernels.emit import (
    F32X4,
    F32X8,
    F32X16,
    I8X8,
    I8X16,
    I8X32,
    I8X64,
    I16X8,
    I16X16,
    I16X32,
    I32X4,
    I32X8,
    I32X16,
    Emitter,
    V,
    Vec,
    emitted,
    f32,
    i32,
    i64,
)

__all__ = [
    "F32X4", "F32X8", "F32X16", "I8X8", "I8X16", "I8X32", "I8X64", "I16X8", "I16X16", "I16X32",
    "I32X4", "I32X8", "I32X16", "Emitter", "V", "Vec", "bf16_to_float", "call_rows", "const", "emitted",
    "f32", "fma", "half_to_float", "i32", "i64", "lane", "ld4f", "ld4i", "ld8f", "ld8h", "ld8i", "ld16b",
    "ld16f", "ld16h", "ld32b", "ld64b", "ldf", "ldi32", "ldi64", "madd16", "maddubs", "noinline", "prefetch",
    "pshufb", "psignb", "sext", "shift", "shuffle", "shuffle2", "splat", "st4f", "st8b", "st8f", "stf",
    "sti32", "sti64", "sum4_4i", "sum4_8i", "sum4_16i", "to_float", "tree8", "trunc", "vadd", "vand", "vfma",
    "view", "vmax", "vmin", "vmul", "vneg", "vor", "vsub", "vxor", "zero", "zext",
]  # fmt: skip


# ---- memory
def _load(t: Any) -> Any:
    return emitted(t, i64)(lambda e, address: e.load(t, address))


def _store(t: Any) -> Any:
    return emitted(None, i64, t)(lambda e, address, value: e.store(address, value))


ld16b, ld32b, ld64b = _load(I8X16), _load(I8X32), _load(I8X64)
ld8h, ld16h = _load(I16X8), _load(I16X16)
ld4i, ld8i = _load(I32X4), _load(I32X8)
ld4f, ld8f, ld16f = _load(F32X4), _load(F32X8), _load(F32X16)
ldf, ldi32, ldi64 = _load(f32), _load(i32), _load(i64)
stf, sti32, sti64 = _store(f32), _store(i32), _store(i64)
st4f, st8f, st8b = _store(F32X4), _store(F32X8), _store(I8X8)


@emitted(None, i64)
def prefetch(e: Emitter, address: V) -> None:
    """Ask for the cache line at ``address``; never faults."""
    e.prefetch(address)


# ---- lane by lane, on two vectors of one type
def _elementwise(name: str, fn: Callable[..., V], num_args: int = 2) -> Any:
    """An intrinsic that takes any vector type (integer lanes wrap)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(builder)
        return fn(emitter, *(V(emitter, a) for a in args)).ir

    def unary(typingctx: Any, a: Any) -> Any:
        return (a(a), codegen) if isinstance(a, Vec) else None

    def binary(typingctx: Any, a: Any, b: Any) -> Any:
        return (a(a, b), codegen) if isinstance(a, Vec) and a == b else None

    def ternary(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return (a(a, b, c), codegen) if isinstance(a, Vec) and a == b == c else None

    typer = (unary, binary, ternary)[num_args - 1]
    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


vadd = _elementwise("vadd", lambda e, a, b: a + b)
vsub = _elementwise("vsub", lambda e, a, b: a - b)
vmul = _elementwise("vmul", lambda e, a, b: a * b)
vand = _elementwise("vand", lambda e, a, b: a & b)
vor = _elementwise("vor", lambda e, a, b: a | b)
vxor = _elementwise("vxor", lambda e, a, b: a ^ b)
vneg = _elementwise("vneg", lambda e, a: -a, 1)
vfma = _elementwise("vfma", lambda e, a, b, c: e.fma(a, b, c), 3)
vmin = _elementwise("vmin", lambda e, a, b: e.select(a.compare("<", b), a, b))
vmax = _elementwise("vmax", lambda e, a, b: e.select(a.compare(">", b), a, b))


@emitted(f32, f32, f32, f32)
def fma(e: Emitter, a: V, b: V, c: V) -> V:
    """``a * b + c`` of scalars, rounded once."""
    return e.fma(a, b, c)


# ---- factories: types, lanes and counts are fixed when the kernel is made
@functools.cache
def splat(t: Vec) -> Any:
    """``f(scalar) -> t``, the scalar in every lane."""
    scalar = {"f32": types.float32, "i32": types.int32, "i16": types.int16, "i8": types.int8}[t.elem]
    return emitted(t, scalar)(lambda e, x: e.splat(x, t.n))


@functools.cache
def zero(t: Vec) -> Any:
    """``f() -> t`` of zeros."""
    return emitted(t)(lambda e: e.const(t, 0))


def const(t: Vec, values: Sequence[float]) -> Any:
    """``f() -> t`` with these lanes."""
    return emitted(t)(lambda e: e.const(t, values))


def shuffle(source: Vec, lanes: Sequence[int]) -> Any:
    """``f(source) -> vector`` of the named lanes."""
    return emitted(Vec(source.elem, len(lanes)), source)(lambda e, a: a.shuffle(lanes))


def shuffle2(source: Vec, lanes: Sequence[int]) -> Any:
    """``f(a, b) -> vector`` of lanes of two vectors (those of ``b`` are numbered on from ``a``'s)."""
    return emitted(Vec(source.elem, len(lanes)), source, source)(lambda e, a, b: a.shuffle(lanes, b))


def lane(t: Vec, k: int) -> Any:
    """``f(t) -> scalar``, lane k of an f32 or i32 vector."""
    return emitted({"f32": f32, "i32": i32}[t.elem], t)(lambda e, a: a.lane(k))


def view(source: Vec, to: Vec) -> Any:
    """``f(source) -> to``, the same bits."""
    return emitted(to, source)(lambda e, a: a.view(to))


def sext(source: Vec, to: Vec) -> Any:
    return emitted(to, source)(lambda e, a: a.sext(to))


def zext(source: Vec, to: Vec) -> Any:
    return emitted(to, source)(lambda e, a: a.zext(to))


def trunc(source: Vec, to: Vec) -> Any:
    return emitted(to, source)(lambda e, a: a.trunc(to))


def to_float(source: Vec) -> Any:
    """``f(source) -> f32 vector``: signed integers, rounded to nearest even."""
    to = Vec("f32", source.n)
    return emitted(to, source)(lambda e, a: a.to_float(to))


def shift(t: Vec, left: int | Sequence[int] = 0, right: int | Sequence[int] = 0) -> Any:
    """``f(t) -> t``: logical shift of each lane by constant counts, left then right."""

    def fn(e: Emitter, a: V) -> V:
        a = a << left if left else a
        return a >> right if right else a

    return emitted(t, t)(fn)


# ---- factories of operations that have an instruction of their own on some CPUs
@functools.cache
def maddubs(isa: str, nbytes: int = 32) -> Any:
    """``f(u8, s8) -> i16``: products of bytes, neighbours added with saturation."""
    t = Vec("i8", nbytes)
    return emitted(Vec("i16", nbytes // 2), t, t, isa=isa)(lambda e, u, s: e.maddubs(u, s))


@functools.cache
def madd16(isa: str, nbytes: int = 32) -> Any:
    """``f(i16, i16) -> i32``: products of words, neighbours added."""
    t = Vec("i16", nbytes // 2)
    return emitted(Vec("i32", nbytes // 4), t, t, isa=isa)(lambda e, a, b: e.madd(a, b))


@functools.cache
def pshufb(isa: str, nbytes: int = 32) -> Any:
    """``f(table, index)``: look up bytes within each 16."""
    t = Vec("i8", nbytes)
    return emitted(t, t, t, isa=isa)(lambda e, table, index: e.shuffle_bytes(table, index))


@functools.cache
def psignb(isa: str, nbytes: int = 32) -> Any:
    """``f(x, sign)``: x, -x or 0 by the sign of each byte."""
    t = Vec("i8", nbytes)
    return emitted(t, t, t, isa=isa)(lambda e, x, sign: e.sign_bytes(x, sign))


@functools.cache
def half_to_float(isa: str, n: int = 8) -> Any:
    """``f(i16 lanes that hold f16) -> f32``, exact."""
    return emitted(Vec("f32", n), Vec("i16", n), isa=isa)(lambda e, a: e.half_to_float(a))


@emitted(F32X8, I16X8)
def bf16_to_float(e: Emitter, bits: V) -> V:
    """bf16 given as i16 lanes -> f32, exact."""
    return (bits.zext(I32X8) << 16).view(F32X8)


# ---- sums
def _sum4(t: Vec) -> Any:
    return emitted(I32X4, t, t, t, t)(lambda e, *rows: e.sum4(rows))


sum4_4i, sum4_8i, sum4_16i = _sum4(I32X4), _sum4(I32X8), _sum4(I32X16)


@emitted(F32X4, *[F32X4] * 8)
def tree8(e: Emitter, *acc: V) -> V:
    """The contract's tree over eight accumulators: (0+4, 1+5, 2+6, 3+7), (0+2, 1+3), (0+1)."""
    four = [acc[k] + acc[k + 4] for k in range(4)]
    return (four[0] + four[2]) + (four[1] + four[3])


# ---- functions
@emitted(None)
def noinline(e: Emitter) -> None:
    """Keep the function that is being compiled out of its callers (it keeps its own register allocation)."""
    e.builder.function.attributes.add("noinline")


@emitted(None, *[i64] * 12)
def call_rows(e: Emitter, address: V, *args: V) -> None:
    """Call the row kernel at ``address`` with its eleven int64 arguments."""
    fn_type = ir.FunctionType(ir.VoidType(), [a.ir.type for a in args])
    e.builder.call(e.builder.inttoptr(address.ir, fn_type.as_pointer()), [a.ir for a in args])
