"""The target operations of the vector language mean the same on every instruction set: NumPy's exact result."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numba
import numpy as np
import pytest

from trilane.cpu_kernels import simd
from trilane.cpu_kernels.emit import Emitter, V, Vec, emitted, i64
from trilane.cpu_kernels.isa import ISAS, available_isas, best_isa, check_isa
from trilane.cpu_kernels.kernels import MODULES, rows_kernel
from trilane.jit import native

widths = pytest.mark.parametrize("nbytes", [16, 32])
isas = pytest.mark.parametrize("isa", available_isas())


@functools.cache
def operation(name: str, isa: str, nbytes: int) -> Any:
    """``f(a, b, out)`` over addresses: the emitter's operation ``name`` on vectors of ``nbytes``."""
    elem = {"madd": Vec("i16", nbytes // 2), "half_to_float": Vec("i16", nbytes // 2)}
    t = elem.get(name, Vec("i8", nbytes))
    num_args = 1 if name == "half_to_float" else 2

    @emitted(None, i64, i64, i64, isa=isa)
    def apply(e: Emitter, a: V, b: V, out: V) -> None:
        e.store(out, getattr(e, name)(*[e.load(t, address) for address in (a, b)][:num_args]))

    def run(a, b, out):
        apply(a, b, out)

    return native(numba.void(numba.int64, numba.int64, numba.int64))(run)


def apply(name: str, isa: str, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    operation(name, isa, a.nbytes).ctypes(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    return out


def samples(nbytes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of byte vectors: random ones and all extremes."""
    rng = np.random.default_rng(nbytes)
    pairs = [tuple(rng.integers(0, 256, (2, nbytes), dtype=np.uint8)) for _ in range(100)]
    edges = [np.full(nbytes, byte, np.uint8) for byte in (0, 1, 127, 128, 255)]
    return pairs + [(a, b) for a in edges for b in edges]


@isas
@widths
def test_maddubs(isa: str, nbytes: int) -> None:
    for a, b in samples(nbytes):
        got = apply("maddubs", isa, a, b, np.zeros(nbytes // 2, np.int16))
        sums = (a.astype(int) * b.view(np.int8)).reshape(-1, 2).sum(1)
        assert np.array_equal(got, np.clip(sums, -32768, 32767))


@isas
@widths
def test_madd(isa: str, nbytes: int) -> None:
    for a, b in samples(nbytes):
        got = apply("madd", isa, a, b, np.zeros(nbytes // 4, np.int32))
        sums = (a.view(np.int16).astype(np.int64) * b.view(np.int16)).reshape(-1, 2).sum(1)
        assert np.array_equal(got, sums.astype(np.int32))


@isas
@widths
def test_shuffle_bytes(isa: str, nbytes: int) -> None:
    for a, b in samples(nbytes):
        got = apply("shuffle_bytes", isa, a, b, np.zeros(nbytes, np.uint8))
        picked = np.take_along_axis(a.reshape(-1, 16), (b & 15).reshape(-1, 16).astype(int), 1)
        assert np.array_equal(got, np.where(b < 128, picked.reshape(-1), 0))


@isas
@widths
def test_sign_bytes(isa: str, nbytes: int) -> None:
    for a, b in samples(nbytes):
        got = apply("sign_bytes", isa, a, b, np.zeros(nbytes, np.int8))
        assert np.array_equal(got, a.view(np.int8) * np.sign(b.view(np.int8)))


@isas
def test_half_to_float_of_all_halves(isa: str) -> None:
    halves = np.arange(65536, dtype=np.uint16)
    want = halves.view(np.float16).astype(np.float32)
    for start in range(0, 65536, 8):
        a = halves[start : start + 8]
        got = apply("half_to_float", isa, a, a, np.zeros(8, np.float32))
        expected = want[start : start + 8]
        same = got.view(np.uint32) == expected.view(np.uint32)
        assert (same | (np.isnan(got) & np.isnan(expected))).all()


def test_call_rows_passes_eleven_arguments() -> None:
    seen: list[tuple[int, ...]] = []
    callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(lambda *args: seen.append(args))
    address = ctypes.cast(callback, ctypes.c_void_p).value

    def call(function):
        simd.call_rows(function, 1, -2, 3, 4, 5, 6, 7, 8, 9, 10, 2**62)

    native(numba.void(numba.int64))(call).ctypes(address)
    assert seen == [(1, -2, 3, 4, 5, 6, 7, 8, 9, 10, 2**62)]


def test_best_isa_comes_first_and_portable_is_always_there() -> None:
    assert best_isa() == available_isas()[0] and available_isas()[-1] == "portable"
    assert set(available_isas()) <= set(ISAS)


def test_unknown_instruction_sets_and_formats_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'sse' is unknown; choose one of avx512, avx2, portable"):
        check_isa("sse")
    monkeypatch.setattr("trilane.cpu_kernels.isa.available_isas", lambda: ("portable",))
    with pytest.raises(ValueError, match="'avx512' is not available.*choose one of portable"):
        check_isa("avx512")
    with pytest.raises(ValueError, match="did you mean 'q4_k'"):
        rows_kernel("q4_kk", "portable")


def test_every_format_has_a_module() -> None:
    from trilane.cpu_kernels.formats import FORMATS

    assert set(MODULES) == set(FORMATS)
