"""Vector types for Numba: ``Vec(elem, n)`` is the LLVM vector ``<n x elem>``, kept in registers.

Also the constants of such types. What is computed with them is in :mod:`trilane.cpu_kernels.emit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import register_model

ELEMENTS = {
    "i8": ir.IntType(8), "i16": ir.IntType(16), "i32": ir.IntType(32), "i64": ir.IntType(64),
    "f32": ir.FloatType(), "f16": ir.HalfType(),
}  # fmt: skip
SCALARS = {
    types.int64: ELEMENTS["i64"], types.int32: ELEMENTS["i32"], types.int16: ELEMENTS["i16"],
    types.int8: ELEMENTS["i8"], types.float32: ELEMENTS["f32"],
}  # fmt: skip
i64, i32, f32 = types.int64, types.int32, types.float32


class Vec(types.Type):
    """The type of ``<n x elem>``; ``elem`` is one of i8 i16 i32 i64 f16 f32."""

    def __init__(self, elem: str, n: int) -> None:
        self.elem, self.n = elem, n
        super().__init__(name=f"simd<{n} x {elem}>")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(ELEMENTS[self.elem], self.n)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


I8X8, I8X16, I8X32, I8X64 = (Vec("i8", n) for n in (8, 16, 32, 64))
I16X4, I16X8, I16X16, I16X32 = (Vec("i16", n) for n in (4, 8, 16, 32))
I32X4, I32X8, I32X16 = (Vec("i32", n) for n in (4, 8, 16))
F32X4, F32X8, F32X16 = (Vec("f32", n) for n in (4, 8, 16))


def llvm_type(t: Any) -> Any:
    return t.llvm if isinstance(t, Vec) else SCALARS[t]


def _number(t: ir.Type, value: Any) -> ir.Constant:
    """A scalar constant; integers wrap round to the signed range, as LLVM's text form wants them."""
    if not isinstance(t, ir.IntType):
        return ir.Constant(t, float(value))
    half = 1 << (t.width - 1)
    return ir.Constant(t, (int(value) + half) % (2 * half) - half)


def constant(t: ir.Type, value: Any) -> ir.Constant:
    """A scalar or vector constant; one number is repeated over all lanes."""
    if not isinstance(t, ir.VectorType):
        return _number(t, value)
    values = value if isinstance(value, Sequence) else [value] * t.count
    assert len(values) == t.count, (t, values)
    return ir.Constant(t, [_number(t.element, v) for v in values])
