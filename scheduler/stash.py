"""One cheap argument for many arrays: a record kept in memory, reached by its address.

Python hands a record over array by array, 0.3 us each, and a step has about a hundred. A :class:`Stash` writes it out
once (see records.py); compiled code gets the address. The arrays are borrowed: the stash keeps the record, and with it
the arrays, alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from numba import typeof

from trilane.jit import compiled
from trilane.records import record_at, record_words


class Stash:
    """A record in the form of compiled code, at ``address``.

    Parameters
    ----------
    held : record
        What to keep; a later change of its arrays' contents is seen, another array needs another stash.
    """

    def __init__(self, held: Any) -> None:
        self.held = held
        self._words = record_words(held)
        self.address = int(self._words.ctypes.data)

    @functools.cached_property
    def kind(self) -> Any:
        """The record's type, by which functions are compiled; to tell it takes longer than all the rest."""
        return typeof(self.held)


def stash_each(records: Sequence[Any]) -> list[Stash]:
    """A stash for each record; one that stands there several times has one stash."""
    stashes = {id(one): Stash(one) for one in records}
    return [stashes[id(one)] for one in records]


def on_stashes(function: Callable[..., Any], *kinds: Any) -> Any:
    """``function`` of as many records as there are ``kinds``, as a compiled function of their addresses."""
    return _on_one(function, kinds[0]) if len(kinds) == 1 else _on_two(function, *kinds)


@functools.cache
def _on_one(function: Any, kind: Any) -> Any:
    read = record_at(kind)

    @compiled(counted=False)
    def call(address):
        return function(read(address))

    return call


@functools.cache
def _on_two(function: Any, first: Any, second: Any) -> Any:
    read_first, read_second = record_at(first), record_at(second)

    @compiled(counted=False)
    def call(address, other):
        return function(read_first(address), read_second(other))

    return call
