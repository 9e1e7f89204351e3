"""The gates, bit for bit against the reference, on ordinary, extreme and non-finite values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cpu_kernels import activation as act
from trilane.cpu_kernels import reference as ref
from trilane.cpu_kernels.gate import GATES, activate, finish_hidden

Bias = np.ndarray | None
ALPHA, LIMIT = 1.702, 7.0
EXTREMES = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, 7.0, -7.0, 7.0000005, 86.9, 87.1, -87.1, 88.1, -88.1]
    + [200, -200, 1e19, -1e19, 3e38, -3e38, np.inf, -np.inf, np.nan],
    np.float32,
)


def run(kind: int, g: np.ndarray, u: np.ndarray, gb: Bias, ub: Bias) -> np.ndarray:
    h = np.full(len(u), np.nan, np.float32)
    biases = [0 if b is None else b.ctypes.data for b in (gb, ub)]
    activate(kind, ALPHA, LIMIT, len(u), g.ctypes.data, u.ctypes.data, *biases, h.ctypes.data)
    return h


def expected(kind: int, g: np.ndarray, u: np.ndarray, gb: Bias, ub: Bias) -> np.ndarray:
    with np.errstate(all="ignore"):
        g, u = (v if b is None else v + b for v, b in ((g, gb), (u, ub)))
    return ref.gate(kind, g, u, ALPHA, LIMIT)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("n", [32, 64, 256])
def test_gates_equal_the_reference(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    g, u, gb, ub = (rng.standard_normal((4, n)) * 8).astype(np.float32)
    for biases in ((None, None), (gb, ub), (gb, None), (None, ub)):
        got = run(GATES[name], g, u, *biases)
        assert ref.same_bits(got, expected(GATES[name], g, u, *biases))


@pytest.mark.parametrize("name", GATES)
def test_extremes_equal_the_reference(name: str) -> None:
    g, u = (np.ascontiguousarray(m.ravel()) for m in np.meshgrid(EXTREMES, EXTREMES))
    g, u = (np.concatenate([v, v[: -len(v) % 32]]) for v in (g, u))
    assert ref.same_bits(run(GATES[name], g, u, None, None), expected(GATES[name], g, u, None, None))


@given(st.sampled_from(sorted(GATES)), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_any_bits_equal_the_reference(name: str, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, (4, 256), dtype=np.uint32)
    g, u, gb, ub = bits.view(np.float32)
    assert ref.same_bits(run(GATES[name], g, u, gb, ub), expected(GATES[name], g, u, gb, ub))


def test_h_may_replace_g() -> None:
    rng = np.random.default_rng(3)
    g, u = (rng.standard_normal((2, 64)) * 3).astype(np.float32)
    want = run(ref.SILU_GLU, g, u, None, None)
    activate(ref.SILU_GLU, 1.0, 0.0, 64, g.ctypes.data, u.ctypes.data, 0, 0, g.ctypes.data)
    assert ref.same_bits(g, want)


@pytest.mark.parametrize("n", [32, 224, 256])
def test_finish_hidden_writes_the_down_record(n: int) -> None:
    h = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    record = np.full(act.F32_BLOCK_NBYTES, 0xA5, np.uint8)
    assert finish_hidden(h.ctypes.data, n, record.ctypes.data, True) == 0
    got, want = record[: act.RECORD_NBYTES].view(ref.RECORD)[0], ref.records(h[None])[0, 0]
    assert all((got[field] == want[field]).all() for field in ref.RECORD.names)
    assert finish_hidden(h.ctypes.data, n, record.ctypes.data, False) == 0
    assert ref.same_bits(record.view(np.float32), np.pad(h, (0, 256 - n)))
    h[n // 2] = np.inf
    assert finish_hidden(h.ctypes.data, n, record.ctypes.data, True) == 1
    assert finish_hidden(h.ctypes.data, n, record.ctypes.data, False) == 1
