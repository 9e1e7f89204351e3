"""Driver calls from compiled code: a table of function addresses, and the calls through it.

A thread without an interpreter gets the address of the table and calls by place. CUDA's driver fills a table
(driver.py), and so does whatever plays one. The file knows signatures, and not what a call is for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from trilane.jit import compiled

_I32, _I64 = ir.IntType(32), ir.IntType(64)
LAUNCH_ARGUMENTS = 11  # of cuLaunchKernel
LAUNCH_WORDS = LAUNCH_ARGUMENTS + 1  # and whether it may start before the kernel before it has ended
STREAM, SHARED, PARAMETERS, EXTRA = 8, 7, 9, 10  # places of arguments
EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come to the copies
SUCCESS = 0


class Call(IntEnum):
    """Places in the table; all functions take integers and pointers and return an int32 status, 0 for success."""

    SET_CONTEXT = 0  # (context)
    COPY_TO_DEVICE = 1  # (destination, source, nbytes, stream)
    WRITE_VALUE = 2  # (stream, address, value, flags)
    LAUNCH_KERNEL = 3  # (function, grid x 3, block x 3, shared bytes, stream, parameters, extra)
    LAUNCH_GRAPH = 4  # (graph, stream)
    LAUNCH_EARLY = 5  # (CUlaunchConfig*, function, parameters, extra)
    COPY_TO_HOST = 6  # (destination, source, nbytes, stream)
    COPY_BATCH = 7  # (destinations, sources, sizes, count, attributes, their first copies, 1, failed copy, stream)
    SIZE = 8


def _call(builder: Any, table: Any, place: Any, args: Any) -> Any:
    """Call the function in a place of the table; integers narrower than a register travel in whole ones."""
    cell = builder.inttoptr(builder.add(table, builder.shl(place, ir.Constant(_I64, 3))), _I64.as_pointer())
    kind = ir.FunctionType(_I32, [_I64] * len(args))
    return builder.sext(builder.call(builder.inttoptr(builder.load(cell), kind.as_pointer()), args), _I64)


@intrinsic
def _call_four(typingctx: Any, table: Any, place: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, args[0], args[1], args[2:])

    return types.int64(*[types.int64] * 6), codegen


def _launch_values(builder: Any, block: Any, stream: Any) -> list[Any]:
    words = builder.inttoptr(block, _I64.as_pointer())
    values = [builder.load(builder.gep(words, [ir.Constant(_I32, k)])) for k in range(LAUNCH_ARGUMENTS)]
    values[STREAM] = stream
    return values


@intrinsic
def _call_launch(typingctx: Any, table: Any, block: Any, stream: Any) -> Any:
    """cuLaunchKernel with its arguments from a block of words, and this stream."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _launch_values(builder, args[1], args[2])
        return _call(builder, args[0], ir.Constant(_I64, int(Call.LAUNCH_KERNEL)), values)

    return types.int64(*[types.int64] * 3), codegen


@intrinsic
def _word(typingctx: Any, block: Any, index: Any) -> Any:
    """A word of a block or a table, by its place there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load(builder.gep(words, [args[1]]))

    return types.int64(types.int64, types.int64), codegen


def _put_words(builder: Any, values: list[Any]) -> Any:
    """Words on the stack; their address."""
    place = cgutils.alloca_once(builder, _I64, size=len(values))
    for k, value in enumerate(values):
        builder.store(value, builder.gep(place, [ir.Constant(_I32, k)]))
    return builder.ptrtoint(place, _I64)


def _paired(builder: Any, low: Any, high: Any) -> Any:
    """Two 32-bit fields of a struct as one word."""
    return builder.or_(builder.and_(low, ir.Constant(_I64, 0xFFFFFFFF)), builder.shl(high, ir.Constant(_I64, 32)))


@intrinsic
def _call_launch_early(typingctx: Any, table: Any, block: Any, stream: Any) -> Any:
    """cuLaunchKernelEx with the same arguments: the kernel may start early, and waits for the one before itself."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, zero, one = _launch_values(builder, args[1], args[2]), ir.Constant(_I64, 0), ir.Constant(_I64, 1)
        attribute = _put_words(builder, [ir.Constant(_I64, EARLY_START), one] + [zero] * 7)
        sizes = [_paired(builder, values[k], values[k + 1]) for k in (1, 3, 5)]
        config = _put_words(builder, [*sizes, values[SHARED], values[STREAM], attribute, one])
        passed = [config, values[0], values[PARAMETERS], values[EXTRA]]
        return _call(builder, args[0], ir.Constant(_I64, int(Call.LAUNCH_EARLY)), passed)

    return types.int64(*[types.int64] * 3), codegen


@intrinsic
def _call_batch(
    typingctx: Any, table: Any, destinations: Any, sources: Any, sizes: Any, count: Any, stream: Any
) -> Any:
    """cuMemcpyBatchAsync with one CUmemcpyAttributes for all copies: the order, no hints of places, no flags."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
        attributes = _put_words(builder, [ir.Constant(_I64, STREAM_ORDER), zero, zero])
        first, failed = _put_words(builder, [zero]), _put_words(builder, [zero])
        passed = [*args[1:5], attributes, first, one, failed, args[5]]
        return _call(builder, args[0], ir.Constant(_I64, int(Call.COPY_BATCH)), passed)

    return types.int64(*[types.int64] * 6), codegen


@compiled
def set_context(table, context):
    """Make the context current for the calling thread; the status."""
    return _call_four(table, Call.SET_CONTEXT, context, 0, 0, 0)


@compiled
def copy_to_device(table, destination, source, nbytes, stream):
    """Put a copy from host memory on a stream; the status. From pageable memory it returns when that is read."""
    return _call_four(table, Call.COPY_TO_DEVICE, destination, source, nbytes, stream)


@compiled
def has_batches(table):
    """Whether the driver takes several copies in one call: NVIDIA's does from CUDA 12.8 on."""
    return _word(table, Call.COPY_BATCH) != 0


@compiled
def copy_batch(table, destinations, sources, sizes, count, stream):
    """Put ``count`` copies from pinned memory on a stream, in no order among themselves; the status.

    ``destinations``, ``sources`` and ``sizes`` are addresses of int64 arrays. Copies of one call run behind each other
    without the pause that there is between two calls.
    """
    return _call_batch(table, destinations, sources, sizes, count, stream)


@compiled
def copy_ring(table, place, device, host, room, at, nbytes, count, stream):
    """Put copies on a stream, between device memory and one part of ``room`` bytes of host memory after the other.

    ``place`` is COPY_TO_DEVICE or COPY_TO_HOST. Where the next part would start, or minus the driver's status.
    """
    for _ in range(count):
        if at + nbytes > room:
            at = 0
        if place == Call.COPY_TO_DEVICE:
            status = _call_four(table, place, device, host + at, nbytes, stream)
        else:
            status = _call_four(table, place, host + at, device, nbytes, stream)
        if status != SUCCESS:
            return -status
        at += nbytes
    return at


@compiled
def write_value(table, stream, address, value):
    """Let the stream write a uint32 when what is before it is done; the status."""
    return _call_four(table, Call.WRITE_VALUE, stream, address, value, 0)


@compiled
def launch_graph(table, graph, stream):
    """Launch an instantiated graph; the status."""
    return _call_four(table, Call.LAUNCH_GRAPH, graph, stream, 0, 0)


@compiled
def launch_all(table, blocks, num_blocks, stream):
    """Launch kernels in order from blocks of LAUNCH_WORDS words; the first status that is not 0, else 0."""
    for k in range(num_blocks):
        block = blocks + 8 * LAUNCH_WORDS * k
        if _word(block, LAUNCH_ARGUMENTS) != 0:  # it may start early
            status = _call_launch_early(table, block, stream)
        else:
            status = _call_launch(table, block, stream)
        if status != SUCCESS:
            return status
    return 0


def compile_calls() -> None:
    """Compile what Python calls, so that no step waits for a compiler."""
    word = types.int64
    launch_all.compile((word,) * 4)
    launch_graph.compile((word,) * 3)


def make_table(addresses: dict[Call, int]) -> np.ndarray:
    """An int64 table with these functions; what is missing is 0 and must not be called."""
    table = np.zeros(Call.SIZE, np.int64)
    for place, address in addresses.items():
        table[place] = address
    return table
