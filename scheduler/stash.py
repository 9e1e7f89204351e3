"""One cheap argument for many arrays: a tuple of arrays kept in memory, reached by its address.

Numba unboxes an argument array by array, 0.3 us each, and a step has about a hundred. A :class:`Stash` unboxes
them once and keeps Numba's own form of the tuple; compiled code reads it back from the address. The arrays are
borrowed: the stash keeps the tuple, and with it the arrays, alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof
from numba.core import types
from numba.core.imputils import impl_ret_borrowed
from numba.core.types.containers import BaseTuple
from numba.extending import intrinsic

from trilane.jit import compiled

_WORD = 8


def _size_of(kind: Any) -> int:
    """Words that surely hold Numba's form of a tuple: its members are pointers, numbers and array structures."""
    if isinstance(kind, BaseTuple):
        return sum(_size_of(member) for member in kind)
    return 5 + 2 * kind.ndim if isinstance(kind, types.Array) else 2


def _borrowed(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value with arrays that own nothing: what unboxing lends them ends with the call that unboxed them."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        array.parent = ir.Constant(array.parent.type, None)
        return array._getvalue()
    if isinstance(kind, BaseTuple):
        for i, member in enumerate(kind):
            inner = _borrowed(context, builder, member, builder.extract_value(value, i))
            value = builder.insert_value(value, inner, i)
    return value


@intrinsic
def _keep(typingctx: Any, held: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[1], args[0].type.as_pointer())
        value = _borrowed(context, builder, signature.args[0], args[0])
        builder.store(value, pointer, align=_WORD)
        return context.get_dummy_value()

    return types.void(held, types.int64), codegen


@compiled
def _keep_at(held, address):
    _keep(held, address)


def reader(kind: Any) -> Any:
    """An intrinsic ``read(address)`` that gives the tuple of this type which is kept there."""

    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_value_type(kind).as_pointer())
            value = builder.load(pointer, align=_WORD)
            return impl_ret_borrowed(context, builder, signature.return_type, value)

        return kind(types.int64), codegen

    return read


class Stash:
    """A tuple of arrays and numbers in Numba's form, at ``address``.

    Parameters
    ----------
    held : NamedTuple
        What to keep; a later change of its arrays' contents is seen, another array needs another stash.
    """

    def __init__(self, held: Any) -> None:
        self.held = held
        self.kind = typeof(held)
        self._memory = np.zeros(_size_of(self.kind), np.int64)
        self.address = int(self._memory.ctypes.data)
        _keep_at(held, self.address)


def on_stashes(function: Callable[..., Any], *kinds: Any) -> Any:
    """``function`` of as many tuples as there are ``kinds``, as a compiled function of their addresses."""
    return _on_one(function, kinds[0]) if len(kinds) == 1 else _on_two(function, *kinds)


@functools.cache
def _on_one(function: Any, kind: Any) -> Any:
    read = reader(kind)

    @compiled(counted=False)
    def call(address):
        return function(read(address))

    return call


@functools.cache
def _on_two(function: Any, first: Any, second: Any) -> Any:
    read_first, read_second = reader(first), reader(second)

    @compiled(counted=False)
    def call(address, other):
        return function(read_first(address), read_second(other))

    return call
