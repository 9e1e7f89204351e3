"""Small intrinsics that compiled functions call by themselves; kernels emit theirs with :func:`.emit.emitted`.

Addresses are int64 (an ndarray's ``ctypes.data`` is uint64 inside compiled code, and uint64 + int64 would be
a float: convert first).
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from trilane.cpu_kernels.emit import I32X8, Emitter, V, Vec, emitted, i64

__all__ = ["I32X8", "Emitter", "V", "call_rows", "emitted", "i64", "ldi64", "noinline", "vadd", "zero"]


@emitted(i64, i64)
def ldi64(e: Emitter, address: V) -> V:
    """The int64 at an address of any alignment."""
    return e.load(i64, address)


@intrinsic
def vadd(typingctx: Any, a: Any, b: Any) -> Any:
    """Sum of two vectors of one type, lane by lane; integers wrap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emitter = Emitter(builder)
        return (V(emitter, args[0]) + V(emitter, args[1])).ir

    return (a(a, b), codegen) if isinstance(a, Vec) and a == b else None


@functools.cache
def zero(t: Vec) -> Any:
    """``f() -> t`` of zeros."""
    return emitted(t)(lambda e: e.const(t, 0))


@emitted(None)
def noinline(e: Emitter) -> None:
    """Keep the function that is being compiled out of its callers (it keeps its own register allocation)."""
    e.builder.function.attributes.add("noinline")


@emitted(None, *[i64] * 12)
def call_rows(e: Emitter, address: V, *args: V) -> None:
    """Call the row kernel at ``address`` with its eleven int64 arguments."""
    fn_type = ir.FunctionType(ir.VoidType(), [a.ir.type for a in args])
    e.builder.call(e.builder.inttoptr(address.ir, fn_type.as_pointer()), [a.ir for a in args])
