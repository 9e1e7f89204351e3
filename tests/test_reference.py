"""The oracle itself: its fma against exact arithmetic, its exp and gates against float64, its dots against
dequantised weights, and its rules for degenerate input."""

from __future__ import annotations

import math
from fractions import Fraction

import gguf
import numpy as np
import pytest

from trilane.cpu_kernels import reference as ref

GGUF_TYPES = {"q4_k": "Q4_K", "q6_k": "Q6_K", "q8_0": "Q8_0", "mxfp4": "MXFP4"}
BLOCK_SIZES = {"q4_k": (256, 144), "q6_k": (256, 210), "q8_0": (32, 34), "mxfp4": (32, 17)}


def random_source(name: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks whose scales are ordinary numbers."""
    size, nbytes = BLOCK_SIZES[name]
    raw = rng.integers(0, 256, (rows, k // size, nbytes), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.01, (rows, k // size, 2)).astype(np.float16).view(np.uint8)
    if name == "mxfp4":
        raw[..., 0] = rng.integers(115, 125, raw.shape[:2])
    elif name == "q6_k":
        raw[..., 208:] = scale[..., :2]
    else:
        raw[..., : 4 if name == "q4_k" else 2] = scale[..., : 4 if name == "q4_k" else 2]
    return raw.reshape(rows, -1)


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to an exact value, ties to even, by comparing neighbours exactly."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 3000)).astype(np.float32)
    scale = np.exp2(rng.integers(-60, 60, 3000)).astype(np.float32)
    c = (-(a * b) * rng.choice([1, 1 + 2.0**-22, scale[7], 2.0**-24, 2.0**24], 3000)).astype(np.float32)
    # halfway cases that a second rounding would get wrong: 1 + 2^-24 and a little more or less
    a[:2], b[:2], c[:2] = 1 + 2.0**-12, 2.0**-24, (1, -1)
    a[2:4], b[2:4], c[2:4] = 2.0**-24, (1 + 2.0**-23, 1 - 2.0**-24), 1
    got = ref.fma(a, b, c)
    for i in range(3000):
        want = nearest_float32(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i])))
        assert got[i] == want, (a[i], b[i], c[i])


def test_fma_denormals_signs_and_non_finite() -> None:
    tiny = np.float32(2.0**-149)
    a = np.array([tiny, -tiny, tiny, np.inf, np.inf, 3e38, -0.0, np.nan], np.float32)
    b = np.array([0.5, 0.25, 1.5, 0.0, 2.0, 3e38, 1.0, 1.0], np.float32)
    c = np.array([tiny, 0.0, 0.0, 1.0, -np.inf, 0.0, -0.0, 1.0], np.float32)
    want = np.array([2 * tiny, -0.0, 2 * tiny, np.nan, np.nan, np.inf, -0.0, np.nan], np.float32)
    assert ref.same_bits(ref.fma(a, b, c), want)


def test_exp_is_close_and_clamped() -> None:
    x = np.linspace(-87, 88, 200_001).astype(np.float32)
    true = np.exp(x.astype(np.float64))
    ulp = np.spacing(true.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(ref.exp(x) - true) / ulp) < 1.2
    ends = ref.exp(np.array([-np.inf, -1e9, -87, 88, 1e9, np.inf, np.nan], np.float32))
    assert ref.same_bits(ends[[0, 1, 6]], ends[[2, 2, 2]]) and ref.same_bits(ends[[4, 5]], ends[[3, 3]])


@pytest.mark.parametrize("kind", range(5))
def test_gates_agree_with_float64(kind: int) -> None:
    rng = np.random.default_rng(kind)
    g, u = (rng.standard_normal((2, 4000)) * 6).astype(np.float32)
    x, y, limit, alpha = g.astype(np.float64), u.astype(np.float64), 7.0, 1.702
    if kind in (ref.SILU_GLU_CLAMPED, ref.SWIGLU_OAI):
        x, y = np.minimum(x, limit), np.clip(y, -limit, limit)
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    true = {
        ref.SILU_GLU: x / (1 + np.exp(-x)) * y,
        ref.GELU_TANH_GLU: tanh * y,
        ref.SILU_GLU_CLAMPED: x / (1 + np.exp(-x)) * y,
        ref.SWIGLU_OAI: (y + 1) * x / (1 + np.exp(-alpha * x)),
        ref.RELU2: np.maximum(y, 0) ** 2,
    }[kind]
    got = ref.gate(kind, g, u, alpha, limit)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", range(5))
def test_gates_keep_nan(kind: int) -> None:
    nan, one = np.full(3, np.nan, np.float32), np.ones(3, np.float32)
    assert np.isnan(ref.gate(kind, one, nan, 1.702, 7.0)).all()
    assert kind == ref.RELU2 or np.isnan(ref.gate(kind, nan, one, 1.702, 7.0)).all()


def test_quantize_degenerate_blocks() -> None:
    x = np.zeros((6, 256), np.float32)
    x[1, 3], x[2, 3], x[3, 3] = 2.0**-101, 2.0**-100, -2.0
    x[4, 9], x[5, 9] = np.nan, -np.inf
    a = ref.quantize(x)
    assert a.bad[:, 0].tolist() == [False] * 4 + [True] * 2
    assert (a.d[:, 0] != 0).tolist() == [False, False, True, True, False, False]
    assert a.q[2, 0, 3] == 127 and a.q[3, 0, 3] == -127
    assert not a.q[[0, 1, 4, 5]].any()


def test_records_hold_sums_of_a_ragged_row() -> None:
    x = np.random.default_rng(0).standard_normal((2, 288)).astype(np.float32)
    r = ref.records(x)
    assert r.shape == (2, 2) and r.dtype.itemsize == 320
    q = r["q"].astype(int)
    assert (r["bs32"] == q.reshape(2, 2, 8, 32).sum(-1)).all()
    assert (r["bs16"] == q.reshape(2, 2, 16, 16).sum(-1)).all()
    assert not q[:, 1, 32:].any()


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_integer_dots_equal_dequantized_weights(name: str) -> None:
    rng = np.random.default_rng(5)
    k = 512 if name.endswith("_k") else 608
    w = random_source(name, 7, k, rng)
    x = rng.standard_normal((3, k)).astype(np.float32)
    dense = gguf.quants.dequantize(w, gguf.GGMLQuantizationType[GGUF_TYPES[name]]).astype(np.float64)
    a = ref.quantize(x)
    xq = (a.q * a.d[..., None].astype(np.float64)).reshape(3, -1)[:, :k]
    size = np.abs(xq) @ np.abs(dense).T
    assert (np.abs(ref.dot_rows(name, w, x) - xq @ dense.T) / size).max() < 5e-7


@pytest.mark.parametrize("name, kind", [("f32", np.float32), ("f16", np.float16), ("bf16", np.uint16)])
def test_float_dots_equal_float64(name: str, kind: type) -> None:
    rng = np.random.default_rng(6)
    w = rng.standard_normal((5, 2880)).astype(np.float32)
    stored = (w.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else w.astype(kind)
    dense = (stored.astype(np.uint32) << 16).view(np.float32) if name == "bf16" else stored
    x = rng.standard_normal((2, 2880)).astype(np.float32)
    true = x.astype(np.float64) @ dense.astype(np.float64).T
    np.testing.assert_allclose(ref.dot_rows(name, stored, x), true, rtol=1e-4, atol=1e-4)


def test_blocks_are_summed_in_eight_accumulators() -> None:
    v = np.float32([[1e8, 1, 1, 1, 1, 1, 1, 1, 1, -1e8, 3]])
    acc = np.float32([1e8, 1, 1, 1, 1, 1, 1, 1])
    for b in range(8, 11):
        acc[b % 8] += v[0, b]
    first = acc[:4] + acc[4:]
    second = first[:2] + first[2:]
    assert ref.sum_blocks(v)[0] == second[0] + second[1]
    assert ref.same_bits(ref.sum_blocks(np.float32([[-0.0]])), np.float32([0.0]))


def test_expert_shards_add_up_and_bad_rows_are_nan() -> None:
    rng = np.random.default_rng(7)
    gate, up = random_source("q8_0", 320, 256, rng), random_source("mxfp4", 320, 256, rng)
    down = random_source("q8_0", 256, 320, rng)
    biases = [rng.standard_normal(n).astype(np.float32) for n in (320, 320, 256)]
    x = rng.standard_normal((3, 256)).astype(np.float32)
    x[1, 5] = np.inf
    weights = ("q8_0", gate), ("mxfp4", up), ("q8_0", down)
    r = ref.reference_expert(x, *weights, ref.SWIGLU_OAI, 1.702, 7.0, *biases)
    assert r.v.shape == (3, 2, 256) and np.isnan(r.v[1]).all() and np.isnan(r.out[1]).all()
    assert np.isfinite(r.v[[0, 2]]).all()
    assert ref.same_bits(r.out, ref.sum_blocks(r.v.transpose(0, 2, 1)) + biases[2])


def test_combine_runs_in_rank_order_and_skips() -> None:
    rng = np.random.default_rng(8)
    w, outs = rng.random((2, 3)).astype(np.float32), rng.standard_normal((2, 3, 4)).astype(np.float32)
    skip = np.array([[False, True, False], [False, False, False]])
    y = ref.fma(w[0, 2], outs[0, 2], ref.fma(w[0, 0], outs[0, 0], np.zeros(4, np.float32)))
    assert ref.same_bits(ref.reference_combine(w, outs, skip)[0], y)
    outs[1, 1, 0] = np.nan
    assert ref.reference_combine(w, outs)[1, 0].view(np.uint32) == 0x7FC00000


@pytest.mark.parametrize("kind", range(5))
def test_expert_is_near_float64_on_dequantized_weights(kind: int) -> None:
    """The difference is that of 8-bit activations."""
    rng = np.random.default_rng(kind)
    hidden, neurons = 256, 288
    sources = [random_source("q8_0", r, k, rng) for r, k in ((neurons, hidden),) * 2 + ((hidden, neurons),)]
    gate, up, down = (gguf.quants.dequantize(w, gguf.GGMLQuantizationType.Q8_0) for w in sources)
    x = rng.standard_normal((4, hidden)).astype(np.float32)
    g, u = x.astype(np.float64) @ gate.T, x.astype(np.float64) @ up.T
    h = ref.gate(kind, g.astype(np.float32), u.astype(np.float32), 1.702, 7.0).astype(np.float64)
    true = h @ down.T
    weights = [("q8_0", w) for w in sources]
    out = ref.reference_expert(x, None if kind == ref.RELU2 else weights[0], *weights[1:], kind, 1.702, 7.0).out
    assert np.linalg.norm(out - true) / np.linalg.norm(true) < 0.025
