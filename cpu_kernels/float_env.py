"""The float mode of a thread: round to nearest, denormals kept, whatever the host process has switched on.

A library that was built with fast-math sets flush-to-zero when it is loaded, and threads inherit the mode of
the thread that starts them; results would then depend on who called. The mode lives in one register of each
thread: MXCSR on x86, FPCR on ARM. Elsewhere the functions do nothing.

A compiler does not know that this register matters and may move float operations across a write to it. Set
the mode only around a call that it cannot look into: :func:`call_exactly` (an indirect call) in compiled code
or :func:`exact_floats` in Python, around calls of compiled functions. Never in the function that computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trilane.cpu_kernels.atomics import MACHINE
from trilane.jit import compiled

#: The form of every task: ``int64 fn(int64 arg, int64 task, int64 worker)``.
TASK_SIGNATURE = types.int64(types.int64, types.int64, types.int64)
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VOID = ir.VoidType()
#: The register's value in exact mode: no exception traps, round to nearest, no flush.
EXACT = {"x86_64": 0x1F80, "aarch64": 0}.get(MACHINE, 0)
#: Flush-to-zero and denormals-are-zero; on ARM FZ, and FZ16 for half precision.
FLUSH = {"x86_64": 0x8040, "aarch64": 1 << 24 | 1 << 19}.get(MACHINE, 0)
#: The rounding mode's bits; zero is round to nearest.
ROUNDING = {"x86_64": 0x6000, "aarch64": 3 << 22}.get(MACHINE, 0)


def _mxcsr(builder: Any, name: str, value: Any) -> Any:
    """Store MXCSR to, or load it from, a word on the stack; the word's value afterwards."""
    word = cgutils.alloca_once(builder, _I32)
    builder.store(value, word)
    kind = ir.FunctionType(_VOID, [_I8.as_pointer()])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(function, [builder.bitcast(word, _I8.as_pointer())])
    return builder.load(word)


def _fpcr(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def emit_read(builder: Any, machine: str = MACHINE) -> Any:
    """LLVM code that reads the register of ``machine``, as an int64 value."""
    if machine == "x86_64":
        return builder.zext(_mxcsr(builder, "llvm.x86.sse.stmxcsr", ir.Constant(_I32, 0)), _I64)
    if machine == "aarch64":
        return _fpcr(builder, "llvm.aarch64.get.fpcr", _I64, [])
    return ir.Constant(_I64, 0)


def emit_write(builder: Any, value: Any, machine: str = MACHINE) -> None:
    """LLVM code that writes the int64 ``value`` to the register of ``machine``."""
    if machine == "x86_64":
        _mxcsr(builder, "llvm.x86.sse.ldmxcsr", builder.trunc(value, _I32))
    elif machine == "aarch64":
        _fpcr(builder, "llvm.aarch64.set.fpcr", _VOID, [value])


@intrinsic
def read_float_mode(typingctx: Any) -> Any:
    """The calling thread's register, as int64 (compiled code only)."""
    return types.int64(), lambda context, builder, sig, args: emit_read(builder)


@intrinsic
def write_float_mode(typingctx: Any, value: Any) -> Any:
    """Set the calling thread's register (compiled code only)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_write(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call_task(typingctx: Any, address: Any, arg: Any, task: Any, worker: Any) -> Any:
    """Call ``int64 fn(int64 arg, int64 task, int64 worker)`` at ``address``: the form of every task."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64, _I64])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@compiled
def float_mode():
    """The calling thread's float control register."""
    return read_float_mode()


@compiled
def set_float_mode(value):
    """Set the calling thread's float control register; the value before."""
    before = read_float_mode()
    write_float_mode(value)
    return before


@compiled
def call_exactly(address, arg, task, worker):
    """Call a task in exact mode on the calling thread, then give the caller's mode back.

    The call is indirect, so nothing of it can be moved out of the two writes.
    """
    before = read_float_mode()
    write_float_mode(EXACT)
    code = call_task(address, arg, task, worker)
    write_float_mode(before)
    return code


def is_exact(mode: int) -> bool:
    """Whether a register's value means round to nearest with denormals kept."""
    return mode & (FLUSH | ROUNDING) == 0


@contextmanager
def exact_floats() -> Iterator[None]:
    """Exact mode for the calling thread inside the ``with`` block; the mode before is restored at its end.

    Examples
    --------
    >>> with exact_floats():
    ...     is_exact(float_mode())
    True
    """
    before = set_float_mode(EXACT)
    try:
        yield
    finally:
        set_float_mode(before)
