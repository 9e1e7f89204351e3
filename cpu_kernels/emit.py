"""A small language to write vector code in LLVM IR from Python, for Numba functions to call.

Vector code is written as a plain Python function over :class:`V` values (operators, ``shuffle``, ``view``)
with an :class:`Emitter` as its first parameter; :func:`emitted` makes an intrinsic of it that compiled
functions call. Python loops in it unroll. Everything is generic LLVM IR and runs on any CPU, but for the
emitter's target operations (``maddubs``, ``madd``, ``shuffle_bytes``, ``sign_bytes``, ``half_to_float``):
these take the instruction of their instruction set ("avx2", "avx512") or have its exact meaning in generic IR
("portable").

This file knows no format and no kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from trilane.cpu_kernels.vectors import (
    ELEMENTS,
    F32X4,
    F32X8,
    F32X16,
    I8X8,
    I8X16,
    I8X32,
    I8X64,
    I16X4,
    I16X8,
    I16X16,
    I16X32,
    I32X4,
    I32X8,
    I32X16,
    Vec,
    constant,
    f32,
    i32,
    i64,
    llvm_type,
)

__all__ = [
    "F32X4", "F32X8", "F32X16", "I8X8", "I8X16", "I8X32", "I8X64", "I16X4", "I16X8", "I16X16", "I16X32",
    "I32X4", "I32X8", "I32X16", "Emitter", "V", "Vec", "emitted", "f32", "i32", "i64",
]  # fmt: skip

_I32 = ELEMENTS["i32"]


def _is_float(t: ir.Type) -> bool:
    return isinstance(getattr(t, "element", t), ir.FloatType)


class V:
    """A scalar or vector value under construction; operators emit LLVM IR.

    Integers wrap; shifts are logical; a number as second operand is repeated over the lanes.
    """

    __slots__ = ("emitter", "ir")

    def __init__(self, emitter: Emitter, value: Any) -> None:
        self.emitter, self.ir = emitter, value

    def _binary(self, other: Any, on_ints: str, on_floats: str = "") -> V:
        name = on_floats if _is_float(self.ir.type) else on_ints
        b = other.ir if isinstance(other, V) else constant(self.ir.type, other)
        return V(self.emitter, getattr(self.emitter.builder, name)(self.ir, b))

    def __add__(self, other: Any) -> V:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Any) -> V:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Any) -> V:
        return self._binary(other, "mul", "fmul")

    def __and__(self, other: Any) -> V:
        return self._binary(other, "and_")

    def __or__(self, other: Any) -> V:
        return self._binary(other, "or_")

    def __xor__(self, other: Any) -> V:
        return self._binary(other, "xor")

    def __lshift__(self, count: Any) -> V:
        return self._binary(count, "shl")

    def __rshift__(self, count: Any) -> V:
        return self._binary(count, "lshr")

    def __neg__(self) -> V:
        builder = self.emitter.builder
        return V(self.emitter, builder.fneg(self.ir) if _is_float(self.ir.type) else builder.neg(self.ir))

    def _cast(self, op: str, t: Any) -> V:
        return V(self.emitter, getattr(self.emitter.builder, op)(self.ir, llvm_type(t)))

    def view(self, t: Vec) -> V:
        """The same bits as another type."""
        return self._cast("bitcast", t)

    def zext(self, t: Vec) -> V:
        return self._cast("zext", t)

    def sext(self, t: Vec) -> V:
        return self._cast("sext", t)

    def trunc(self, t: Vec) -> V:
        return self._cast("trunc", t)

    def to_float(self, t: Vec) -> V:
        """Signed integers to f32, rounded to nearest even."""
        return self._cast("sitofp", t)

    def shuffle(self, lanes: Sequence[int], other: V | None = None) -> V:
        """Lanes of this vector, then (numbered on) of ``other``, in the order given."""
        second = other.ir if other else ir.Constant(self.ir.type, ir.Undefined)
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
        return V(self.emitter, self.emitter.builder.shuffle_vector(self.ir, second, mask))

    def fold(self, n: int) -> V:
        """Halves added onto each other until ``n`` lanes are left."""
        total = self
        while (count := total.ir.type.count) > n:
            total = total.shuffle(range(count // 2)) + total.shuffle(range(count // 2, count))
        return total

    def lane(self, k: int) -> V:
        return V(self.emitter, self.emitter.builder.extract_element(self.ir, ir.Constant(_I32, k)))

    def compare(self, op: str, other: Any) -> V:
        """Signed integer comparison, lane by lane; the result is for :meth:`Emitter.select`."""
        b = other.ir if isinstance(other, V) else constant(self.ir.type, other)
        return V(self.emitter, self.emitter.builder.icmp_signed(op, self.ir, b))


class Emitter:
    """Emits vector code into one function, for one instruction set."""

    def __init__(self, builder: ir.IRBuilder, isa: str = "portable") -> None:
        self.builder, self.isa = builder, isa

    def call(self, name: str, t: ir.Type, *args: V) -> V:
        """Call an LLVM intrinsic (or C function) by name."""
        fn_type = ir.FunctionType(t, [a.ir.type for a in args])
        fn = cgutils.get_or_insert_function(self.builder.module, fn_type, name)
        return V(self, self.builder.call(fn, [a.ir for a in args]))

    def const(self, t: Vec, value: Any) -> V:
        return V(self, constant(llvm_type(t), value))

    def pointer(self, address: V, t: ir.Type) -> Any:
        return self.builder.inttoptr(address.ir, t.as_pointer())

    def load(self, t: Any, address: V, align: int = 1) -> V:
        """Read a scalar or vector from an address that is a multiple of ``align`` bytes."""
        return V(self, self.builder.load(self.pointer(address, llvm_type(t)), align=align))

    def store(self, address: V, value: V, align: int = 1) -> None:
        self.builder.store(value.ir, self.pointer(address, value.ir.type), align=align)

    def splat(self, scalar: V, n: int) -> V:
        t = ir.VectorType(scalar.ir.type, n)
        one = self.builder.insert_element(ir.Constant(t, ir.Undefined), scalar.ir, ir.Constant(_I32, 0))
        return V(self, one).shuffle([0] * n)

    def gather(self, t: Vec, addresses: Sequence[V]) -> V:
        """A vector of scalars at as many addresses."""
        value = ir.Constant(t.llvm, ir.Undefined)
        for k, address in enumerate(addresses):
            scalar = self.builder.load(self.pointer(address, t.llvm.element), align=1)
            value = self.builder.insert_element(value, scalar, ir.Constant(_I32, k))
        return V(self, value)

    def select(self, condition: V, yes: V, no: V) -> V:
        return V(self, self.builder.select(condition.ir, yes.ir, no.ir))

    def fma(self, a: V, b: V, c: V) -> V:
        """``a * b + c``, rounded once."""
        t = a.ir.type
        name = f"llvm.fma.v{t.count}f32" if isinstance(t, ir.VectorType) else "llvm.fma.f32"
        return self.call(name, t, a, b, c)

    # ---- exact integer sums
    def sum4(self, rows: Sequence[V]) -> V:
        """Four equal integer vectors -> ``<4 x i32>`` whose lane r is the sum of vector r's lanes.

        Whole vectors are interleaved and added, the halves only at the end; x86 has instructions for
        horizontal sums, but they take longer.
        """
        a, b, c, d = rows
        n = a.ir.type.count
        ab, cd = self._add_halves(a, b, [0, n, 1, n + 1]), self._add_halves(c, d, [0, n, 1, n + 1])
        return self._add_halves(ab, cd, [0, 1, n, n + 1]).fold(4)

    @staticmethod
    def _add_halves(a: V, b: V, low: Sequence[int]) -> V:
        """In each four lanes, the low halves of ``a`` and ``b``, in the order given, plus the high halves."""
        lanes = [four + lane for four in range(0, a.ir.type.count, 4) for lane in low]
        return a.shuffle(lanes, b) + a.shuffle([lane + 2 for lane in lanes], b)

    # ---- operations with an instruction of their own
    def _x86(self, by_bits: dict[int, str], t: ir.Type, *args: V) -> V | None:
        """Call the instruction for the width of the first argument, unless this is portable code."""
        first = args[0].ir.type
        name = by_bits.get(first.count * first.element.width)
        return self.call(name, t, *args) if self.isa != "portable" and name else None

    def maddubs(self, u: V, s: V) -> V:
        """Unsigned bytes times signed bytes, neighbours added with saturation -> i16 lanes."""
        n = u.ir.type.count
        half = Vec("i16", n // 2)
        names = {128: "llvm.x86.ssse3.pmadd.ub.sw.128", 256: "llvm.x86.avx2.pmadd.ub.sw",
                 512: "llvm.x86.avx512.pmaddubs.w.512"}  # fmt: skip
        if done := self._x86(names, half.llvm, u, s):
            return done
        products = u.zext(Vec("i16", n)) * s.sext(Vec("i16", n))
        even, odd = products.shuffle(range(0, n, 2)), products.shuffle(range(1, n, 2))
        return self.call(f"llvm.sadd.sat.v{n // 2}i16", half.llvm, even, odd)

    def madd(self, a: V, b: V) -> V:
        """Signed i16 lanes multiplied, neighbours added -> i32 lanes."""
        n = a.ir.type.count
        names = {128: "llvm.x86.sse2.pmadd.wd", 256: "llvm.x86.avx2.pmadd.wd",
                 512: "llvm.x86.avx512.pmaddw.d.512"}  # fmt: skip
        if done := self._x86(names, Vec("i32", n // 2).llvm, a, b):
            return done
        products = a.sext(Vec("i32", n)) * b.sext(Vec("i32", n))
        return products.shuffle(range(0, n, 2)) + products.shuffle(range(1, n, 2))

    def shuffle_bytes(self, table: V, index: V) -> V:
        """In each 16 bytes: lane k = table[index[k] & 15], 0 where the index has its top bit set."""
        names = {128: "llvm.x86.ssse3.pshuf.b.128", 256: "llvm.x86.avx2.pshuf.b",
                 512: "llvm.x86.avx512.pshuf.b.512"}  # fmt: skip
        if done := self._x86(names, table.ir.type, table, index):
            return done
        n = table.ir.type.count
        zero = V(self, constant(table.ir.type, 0))
        result = zero
        for k in range(16):
            entry = table.shuffle([i // 16 * 16 + k for i in range(n)])
            result = self.select((index & 15).compare("==", k), entry, result)
        return self.select(index.compare("<", 0), zero, result)

    def sign_bytes(self, x: V, sign: V) -> V:
        """x, -x or 0 as the signed byte ``sign`` is positive, negative or 0 (-128 stays -128)."""
        names = {128: "llvm.x86.ssse3.psign.b.128", 256: "llvm.x86.avx2.psign.b"}
        if done := self._x86(names, x.ir.type, x, sign):
            return done
        zero = V(self, constant(x.ir.type, 0))
        signed = self.select(sign.compare("<", 0), -x, x)
        return self.select(sign.compare("==", 0), zero, signed)

    def half_to_float(self, bits: V) -> V:
        """f16 given as i16 lanes -> f32, exact (also for subnormals, whatever the denormal flags say)."""
        n = bits.ir.type.count
        if self.isa != "portable" or self.builder.module.triple.startswith(("aarch64", "arm64")):
            return bits.view(Vec("f16", n))._cast("fpext", Vec("f32", n))
        wide = bits.zext(Vec("i32", n))
        magnitude = wide & 0x7FFF
        normal = (magnitude << 13) + (112 << 23)
        special = (magnitude << 13) | 0x7F800000  # infinity and NaN
        small = (magnitude.to_float(Vec("f32", n)) * 2.0**-24).view(Vec("i32", n))
        value = self.select(magnitude.compare("<", 0x400), small, normal)
        value = self.select(magnitude.compare(">=", 0x7C00), special, value)
        return (value | ((wide & 0x8000) << 16)).view(Vec("f32", n))

    def dot_bytes(self, total: V, u: V, s: V) -> V:
        """i32 lanes of ``total`` plus four products unsigned x signed byte each (AVX-512 VNNI)."""
        return self._vnni("vpdpbusd", total, u, s)

    def dot_words(self, total: V, a: V, b: V) -> V:
        """i32 lanes of ``total`` plus two products of i16 each (AVX-512 VNNI)."""
        return self._vnni("vpdpwssd", total, a, b)

    def pack_words(self, a: V, b: V) -> V:
        """``<16 x i32>`` twice, saturated to i16: per 128 bits four of ``a``, then four of ``b`` (AVX-512)."""
        return self.call("llvm.x86.avx512.packssdw.512", I16X32.llvm, a, b)

    def _vnni(self, op: str, total: V, a: V, b: V) -> V:
        t = total.ir.type
        lanes = Vec("i32", t.count)  # LLVM before 22 wants i32 lanes; later ones upgrade the call
        return self.call(f"llvm.x86.avx512.{op}.{32 * t.count}", t, total, a.view(lanes), b.view(lanes))


def emitted(result: Any, *arg_types: Any, isa: str = "portable") -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of ``fn(emitter, *args) -> V or None`` with fixed Numba types.

    Parameters
    ----------
    result : Numba type or Vec, or None for no result
    *arg_types : Numba types (``i64``, ``i32``, ``f32``) or Vec
    isa : str
        What the emitter's target operations may use; see :mod:`trilane.cpu_kernels.isa`.
    """
    returns = types.void if result is None else result
    names = ["typingctx", *(f"a{k}" for k in range(len(arg_types)))]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]

    def decorate(fn: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emitter = Emitter(builder, isa)
            value = fn(emitter, *(V(emitter, a) for a in args))
            return context.get_dummy_value() if value is None else value.ir

        def typer(typingctx: Any, *args: Any) -> Any:
            return returns(*arg_types), codegen

        typer.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typer.__name__ = typer.__qualname__ = fn.__name__
        return intrinsic(typer)

    return decorate
