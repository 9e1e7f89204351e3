"""Atomics, clocks, sleeps and futexes for nopython code: what threads without an interpreter need to meet.

The file knows no job and no team. Loads acquire, stores release, every read-modify-write is sequentially
consistent, so that "announce that I sleep, then look again" needs no extra fence on any machine.

Names that end in ``_at`` take an address (int64) instead of an array: passing an integer from Python
allocates nothing, and control code can keep addresses in its own tables. All work in compiled code only.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trilane.jit import compiled

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VOID, _ZERO = ir.VoidType(), ir.Constant(_I64, 0)
_WORD = types.int64
LINUX = sys.platform.startswith("linux")
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(MACHINE) if LINUX and sys.maxsize > 2**32 else None
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_PR_SET_TIMERSLACK, _PR_SET_NAME = 29, 15
WAKE_ALL = 0x7FFFFFFF
SLEEP_MARGIN_NS = 60_000  # the last part of a precise sleep is polled: a timer is late by about that much
_POLL_FIRST_NS, _POLL_MOST_NS = 20_000, 500_000


# ------------------------------------------------------------ atomics: one body, two ways to name the word
def _element(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    array = context.make_array(sig.args[0])(context, builder, value=args[0])
    return builder.gep(array.data, [args[1]])


def _load(builder: Any, pointer: Any, values: Any, bits: int) -> Any:
    return builder.load_atomic(pointer, "acquire", bits // 8)


def _store(builder: Any, pointer: Any, values: Any, bits: int) -> Any:
    builder.store_atomic(values[0], pointer, "release", bits // 8)
    return None


def _add(builder: Any, pointer: Any, values: Any, bits: int) -> Any:
    return builder.atomic_rmw("add", pointer, values[0], "seq_cst")


def _exchange(builder: Any, pointer: Any, values: Any, bits: int) -> Any:
    return builder.atomic_rmw("xchg", pointer, values[0], "seq_cst")


def _compare_exchange(builder: Any, pointer: Any, values: Any, bits: int) -> Any:
    pair = builder.cmpxchg(pointer, values[0], values[1], "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


def _result(context: Any, value: Any) -> Any:
    return context.get_dummy_value() if value is None else value


def _on_array(operation: Callable[..., Any], returns: bool, num_values: int) -> Any:
    def typed(array: Any, *values: Any) -> Any:
        dtype = array.dtype
        signature = (dtype if returns else types.void)(array, types.intp, *[dtype] * num_values)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = _element(context, builder, sig, args)
            return _result(context, operation(builder, pointer, args[2:], dtype.bitwidth))

        return signature, codegen

    return _with_arity(lambda typingctx, array, i, *values: typed(array, *values), "array, i", num_values)


def _on_address(operation: Callable[..., Any], returns: bool, num_values: int, word: Any = _WORD) -> Any:
    signature = (word if returns else types.void)(types.int64, *[word] * num_values)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(word.bitwidth).as_pointer())
        return _result(context, operation(builder, pointer, args[1:], word.bitwidth))

    return _with_arity(lambda typingctx, address, *values: (signature, codegen), "address", num_values)


def _with_arity(typer: Callable[..., Any], head: str, num_values: int) -> Any:
    """Numba reads an intrinsic's parameters from its signature, so each number of values has its own."""
    if head == "address":
        by_arity: list[Any] = [
            lambda typingctx, address: typer(typingctx, address),
            lambda typingctx, address, value: typer(typingctx, address, value),
            lambda typingctx, address, expected, value: typer(typingctx, address, expected, value),
        ]
    else:
        by_arity = [
            lambda typingctx, array, i: typer(typingctx, array, i),
            lambda typingctx, array, i, value: typer(typingctx, array, i, value),
            lambda typingctx, array, i, expected, value: typer(typingctx, array, i, expected, value),
        ]
    return intrinsic(by_arity[num_values])


atomic_load = _on_array(_load, True, 0)  # (array, i) -> value
atomic_store = _on_array(_store, False, 1)  # (array, i, value)
atomic_add = _on_array(_add, True, 1)  # (array, i, value) -> the value before, as the next two
atomic_exchange = _on_array(_exchange, True, 1)  # (array, i, value)
atomic_compare_exchange = _on_array(_compare_exchange, True, 2)  # (array, i, expected, value)

load_at = _on_address(_load, True, 0)  # the same on the int64 at an address
store_at = _on_address(_store, False, 1)
add_at = _on_address(_add, True, 1)
exchange_at = _on_address(_exchange, True, 1)
compare_exchange_at = _on_address(_compare_exchange, True, 2)

load32_at = _on_address(_load, True, 0, types.int32)  # and on an int32 (what a GPU's stream can wait for)
store32_at = _on_address(_store, False, 1, types.int32)
add32_at = _on_address(_add, True, 1, types.int32)


@intrinsic
def fence(typingctx: Any) -> Any:
    """A full fence: no load or store moves across it."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this thread spins: about 40 to 140 cycles on x86, a hint on ARM."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if MACHINE == "x86_64":
            _call(builder, "llvm.x86.sse2.pause", _VOID, [], [])
        elif MACHINE == "aarch64":
            _call(builder, "llvm.aarch64.hint", _VOID, [_I32], [ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


# ------------------------------------------------------------------------------ the C library, by name
def _call(builder: Any, name: str, result: Any, kinds: list[Any], args: list[Any]) -> Any:
    """A call of a C function; one with more arguments than ``kinds`` is variadic (syscall, prctl)."""
    kind = ir.FunctionType(result, kinds, var_arg=len(args) > len(kinds))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _timespec(builder: Any, duration_ns: Any) -> Any:
    """A ``struct timespec`` on the stack; the address as int64."""
    spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
    words = builder.bitcast(spec, _I64.as_pointer())
    billion = ir.Constant(_I64, 1_000_000_000)
    builder.store(builder.sdiv(duration_ns, billion), words)
    builder.store(builder.srem(duration_ns, billion), builder.gep(words, [ir.Constant(_I32, 1)]))
    return builder.ptrtoint(words, _I64)


def _clock(clock_id: int) -> Any:
    @intrinsic
    def read_ns(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            spec = _timespec(builder, _ZERO)
            _call(builder, "clock_gettime", _I32, [_I32, _I64], [ir.Constant(_I32, clock_id), spec])
            words = builder.inttoptr(spec, _I64.as_pointer())
            seconds, rest = builder.load(words), builder.load(builder.gep(words, [ir.Constant(_I32, 1)]))
            return builder.add(builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), rest)

        return types.int64(), codegen

    return read_ns


mono_ns = _clock(time.CLOCK_MONOTONIC)  # the same clock as time.monotonic_ns(); 25 to 60 ns a call
thread_cpu_ns = _clock(time.CLOCK_THREAD_CPUTIME_ID)


@intrinsic
def sleep_ns(typingctx: Any, duration_ns: Any) -> Any:
    """Sleep about ``duration_ns``; a signal or nothing to sleep for ends it early."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "nanosleep", _I32, [_I64, _I64], [_timespec(builder, args[0]), _ZERO])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def thread_yield(typingctx: Any) -> Any:
    """Let another runnable thread have the core; returns at once where there is none."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "sched_yield", _I32, [], [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _prctl(typingctx: Any, option: Any, value: Any) -> Any:
    """prctl(2) for the calling thread; 0 where the system has none."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not LINUX:
            return _ZERO
        values = [builder.trunc(args[0], _I32), args[1], _ZERO, _ZERO, _ZERO]
        done = _call(builder, "prctl", _I32, [_I32], values)
        return builder.sext(done, _I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _futex(typingctx: Any, address: Any, operation: Any, value: Any, timeout_ns: Any) -> Any:
    """futex(2) on the int32 at ``address``; a negative timeout waits for ever."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address, operation, value, timeout = args
        for_ever = builder.icmp_signed("<", timeout, _ZERO)
        spec = builder.select(for_ever, _ZERO, _timespec(builder, timeout))
        values = [ir.Constant(_I64, FUTEX_SYSCALL), address, operation, value, spec, _ZERO, _ZERO]
        return _call(builder, "syscall", _I64, [_I64], values)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@compiled
def set_timer_slack_ns(slack_ns):
    """Let timers of the calling thread be late by at most ``slack_ns`` (Linux gives 50,000 by default)."""
    return _prctl(_PR_SET_TIMERSLACK, slack_ns)


@compiled
def set_thread_name(name_address):
    """Name the calling thread for the system's tools: at most 15 bytes and a zero byte at the address."""
    return _prctl(_PR_SET_NAME, name_address)


# --------------------------------------------------------------------------------------------- wait and wake
@compiled
def poll_wait(address, expected, timeout_ns):
    """What :func:`futex_wait` is where the system has no futex: sleeps of 20 us that grow to 500 us."""
    begin = mono_ns()
    nap = _POLL_FIRST_NS
    while (load32_at(address) ^ expected) & 0xFFFFFFFF == 0:
        if timeout_ns >= 0 and mono_ns() - begin >= timeout_ns:
            return
        sleep_ns(nap)
        nap = min(2 * nap, _POLL_MOST_NS)


@compiled
def _linux_wait(address, expected, timeout_ns):
    _futex(address, _FUTEX_WAIT_PRIVATE, expected & 0xFFFFFFFF, timeout_ns)


@compiled
def _linux_wake(address, num_threads):
    return _futex(address, _FUTEX_WAKE_PRIVATE, num_threads, -1)


@compiled
def _no_wake(address, num_threads):
    return 0


#: futex_wait(address, expected, timeout_ns): sleep while the low half of the word at ``address`` equals that
#: of ``expected`` (little-endian machines); may return early, so look again. A negative timeout: none.
futex_wait = _linux_wait if FUTEX_SYSCALL else poll_wait
#: futex_wake(address, num_threads): wake so many of those that sleep on ``address``; how many it woke.
futex_wake = _linux_wake if FUTEX_SYSCALL else _no_wake


@compiled
def sleep_until_ns(deadline_ns):
    """Sleep until ``mono_ns()`` reaches the deadline; how late it was, in ns.

    All but the last 60 us sleep; the rest yields and polls, so that the end is met within about a microsecond
    when a core is free. A thread that does this often calls ``set_timer_slack_ns(1)`` first.
    """
    remaining = deadline_ns - mono_ns()
    while remaining > SLEEP_MARGIN_NS:
        sleep_ns(remaining - SLEEP_MARGIN_NS)
        remaining = deadline_ns - mono_ns()
    while remaining > 0:
        thread_yield()
        pause()
        remaining = deadline_ns - mono_ns()
    return -remaining
