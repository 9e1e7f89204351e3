"""Float vector operations on top of :mod:`.emit`: compares, division, rounding, our exponential.

All of it is generic LLVM IR: one source for every CPU, and the same bits. A plain Python function over
:class:`~.emit.V` values, to be called while vector code is emitted.

This file knows no gate, no format and no kernel.
"""

from __future__ import annotations

from typing import Any

from trilane.cpu_kernels.emit import F32X8, I32X8, V, Vec
from trilane.cpu_kernels.vectors import constant

LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_COEFFICIENTS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip


def _operand(a: V, other: Any) -> Any:
    return other.ir if isinstance(other, V) else constant(a.ir.type, other)


def divide(a: V, b: Any) -> V:
    """IEEE division."""
    return V(a.emitter, a.emitter.builder.fdiv(a.ir, _operand(a, b)))


def compare(op: str, a: V, b: Any) -> V:
    """Ordered comparison of floats, lane by lane: false where either is NaN."""
    return V(a.emitter, a.emitter.builder.fcmp_ordered(op, a.ir, _operand(a, b)))


def _unary(name: str, a: V) -> V:
    t = a.ir.type
    return a.emitter.call(f"llvm.{name}.v{t.count}f32", t, a)


def rint(a: V) -> V:
    """To the nearest whole number, ties to even."""
    return _unary("rint", a)


def to_int(a: V, t: Vec) -> V:
    """Whole floats, in range, to signed integers."""
    return a._cast("fptosi", t)


def smax(a: V, b: V) -> V:
    """The larger of signed integer lanes."""
    t = a.ir.type
    return a.emitter.call(f"llvm.smax.v{t.count}i{t.element.width}", t, a, b)


def magnitude_bits(a: V, t: Vec) -> V:
    """|a| as integers: they order like the magnitudes, and are >= 0x7f800000 for infinities and NaN."""
    return a.view(t) & 0x7FFFFFFF


def clamp(a: V, low: Any, high: Any) -> V:
    """``x < low ? low : x``, then ``x > high ? high : x``: NaN stays NaN."""
    return clamp_high(_choose("<", a, low), high)


def clamp_high(a: V, high: Any) -> V:
    """``x > high ? high : x``: NaN stays NaN."""
    return _choose(">", a, high)


def _choose(op: str, a: V, bound: Any) -> V:
    b = bound if isinstance(bound, V) else V(a.emitter, constant(a.ir.type, bound))
    return a.emitter.select(compare(op, a, b), b, a)


def exp(x: V) -> V:
    """The contract's exponential of 8 floats; see :func:`trilane.cpu_kernels.reference_dots.exp`.

    NaN counts as -87, so that the conversion to an integer is always defined.
    """
    e = x.emitter
    low, high = e.const(F32X8, -87.0), e.const(F32X8, 88.0)
    x = e.select(compare(">", x, low), x, low)
    x = e.select(compare("<", x, high), x, high)
    n = rint(x * LOG2_E)
    r = e.fma(n, e.const(F32X8, -LN2_HIGH), x)
    r = e.fma(n, e.const(F32X8, -LN2_LOW), r)
    p = e.const(F32X8, EXP_COEFFICIENTS[0])
    for c in EXP_COEFFICIENTS[1:]:
        p = e.fma(p, r, e.const(F32X8, c))
    p = e.fma(p, r * r, r) + 1.0
    return p * ((to_int(n, I32X8) + 127) << 23).view(F32X8)
