"""Records: what compiled code reads from an address is what the tuple holds, and nothing is lost or counted wrong."""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import config, types

from trilane.jit import compiled
from trilane.records import record
from trilane.stash import Stash, on_stashes

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@record
class Inner(NamedTuple):
    """A record within another."""

    table: np.ndarray
    on: bool


@record
class Outer(NamedTuple):
    """A field of every kind, arrays of several types, ranks and layouts."""

    number: int
    small: np.ndarray
    inner: Inner
    rate: float
    off: bool
    half: np.ndarray
    out: np.ndarray


class Pair(NamedTuple):
    """An ordinary tuple, as compiled code makes them."""

    left: Any
    right: Any


@compiled
def _pair_of(outer):
    return Pair(outer.inner.table, outer.small)


@compiled(counted=False)
def read_all(outer, scale):
    """Something of every field into ``out``; the number is returned."""
    pair = _pair_of(outer)
    outer.out[0] = pair.right[3] * scale
    outer.out[1] = pair.left[1, 2] + outer.inner.table.shape[1]
    outer.out[2] = outer.rate
    outer.out[3] = 2 * outer.inner.on + outer.off
    outer.out[4] = outer.half[1] + outer.half.strides[0]
    outer.out[5] = outer.small.size
    if scale < 0:
        raise ValueError("the scale is negative")
    return outer.number


def make_outer(number: int = -7) -> Outer:
    table = np.arange(12.0).reshape(3, 4)
    half = np.arange(6, dtype=np.int32)[1::2]
    return Outer(number, np.arange(9, dtype=np.int16), Inner(table, True), -0.125, False, half, np.zeros(6))


EXPECTED = [6.0, 6.0 + 4, -0.125, 2.0, 3 + 8, 9.0]


def test_a_record_from_python_and_from_an_address():
    outer = make_outer()
    assert read_all(outer, 2) == -7
    assert outer.out.tolist() == EXPECTED
    outer.out[:] = 0
    stash = Stash(outer)

    @compiled
    def read_twice(held):
        return read_all(held, 2)

    assert on_stashes(read_twice, stash.kind)(stash.address) == -7
    assert outer.out.tolist() == EXPECTED


def test_calls_keep_nothing_and_lose_nothing():
    """Not where they return, nor where they fail."""
    outer = make_outer()

    def call(times):
        for scale in [2, -2] * times:
            try:
                read_all(outer, scale)
            except ValueError:
                assert scale < 0
        gc.collect()
        return sys.getallocatedblocks(), [sys.getrefcount(field) for field in outer if isinstance(field, np.ndarray)]

    call(100)
    blocks, counts = call(100)
    blocks_after, counts_after = call(1000)
    assert counts_after == counts
    assert blocks_after < blocks + 500  # of 2000 calls


@pytest.mark.parametrize("value", [np.float32(1), np.int32(1), 1j, "text", None, (1, 2)], ids=repr)
def test_what_a_record_cannot_hold_is_refused(value):
    outer = make_outer()._replace(rate=value)
    with pytest.raises(TypeError, match="field rate of Outer is .*: a record may hold arrays, int64, float64"):
        Stash(outer)


def test_numbers_of_numpy_are_numbers():
    outer = make_outer()
    plain = Stash(outer._replace(rate=2.5))
    assert np.array_equal(Stash(outer._replace(rate=np.float64(2.5)))._words, plain._words)


def test_an_unknown_field_is_a_compile_error():
    @compiled
    def read(outer):
        return outer.missing

    with pytest.raises(Exception, match="Unknown attribute 'missing'"):
        read(make_outer())


def test_types_tell_records_apart():
    """By class and by the types of the fields."""
    kind = Stash(make_outer()).kind
    other = Stash(make_outer()._replace(small=np.zeros(3))).kind
    assert kind == Stash(make_outer(3)).kind and kind != other and kind.name != other.name
    assert kind.place_of("rate") == (1 + 4 + 6 + 1, types.float64)
