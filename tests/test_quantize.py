"""Quantisers: byte identity with the gguf package, and the error of the K-quants against libgguf's."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import libgguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.quantize import LARGEST_WEIGHT, quantize_blocks, quantize_matrix

SIMPLE = ["f32", "f16", "bf16", "q8_0", "mxfp4"]
K_QUANTS = ["q4_k", "q6_k"]
SHAPE = (48, 1024)


def to_bf16(values):
    return quantize_matrix(values, FORMATS["bf16"]).view(np.uint16)


def gguf_bytes(values, name):
    with np.errstate(all="ignore"):
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(values), -1)


def simple_data():
    """Rows of every size of weight, with zeros, -0, exact ties of Q8_0 and MXFP4, and powers of two."""
    rng = np.random.default_rng(1)
    values = rng.standard_t(2, (64, 256)) * 10.0 ** rng.uniform(-30, 3, (64, 1))
    values[0], values[1] = 0.0, -0.0
    values[2, :40] = 0.0
    values[3] = rng.integers(-24, 25, 256) / 2
    values[4] = rng.integers(-127, 128, 256) + 0.5
    values[5] = 2.0 ** rng.integers(-9, 9, 256)
    values[6] = -(2.0 ** rng.integers(-9, 9, 256))
    return values.astype(np.float32)


@pytest.mark.parametrize("name", SIMPLE)
def test_same_bytes_as_gguf(name):
    values = simple_data()
    assert np.array_equal(quantize_matrix(values, FORMATS[name]), gguf_bytes(values, name))


def test_mxfp4_exponent_just_below_powers_of_two():
    """log2 in float32 rounds up to the next integer here, and gguf's exponent with it."""
    exponent = np.arange(3, 253, dtype=np.uint32)[:, None]
    largest = ((exponent << 23) - np.arange(-4, 64, dtype=np.int64)).astype(np.uint32).view(np.float32)
    values = np.zeros((largest.size, 32), np.float32)
    values[:, 7] = largest.ravel()
    assert np.array_equal(quantize_matrix(values, FORMATS["mxfp4"]), gguf_bytes(values, "mxfp4"))


def test_mxfp4_of_denormals_is_small():
    """Below 2**-125 the exponent stays at its smallest instead of wrapping round to a huge one."""
    values = np.full((1, 32), 1e-40, np.float32)
    fmt = FORMATS["mxfp4"]
    assert abs(fmt.dequantize_rows(quantize_matrix(values, fmt))).max() < 2.0**-125


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_16_bit_floats_round_to_nearest_even(name):
    """Every 16-bit float, the midpoints between neighbours and their neighbours."""
    fmt = FORMATS[name]
    stored = fmt.dequantize(np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)).ravel()
    finite = np.unique(stored[np.isfinite(stored)])
    middle = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    for values in (finite, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, -np.inf)):
        values = np.resize(values.astype(np.float32), (-(-values.size // 32), 32))
        got = quantize_matrix(values, fmt)
        assert np.array_equal(got, gguf_bytes(values, name))
        # Nearest: no neighbour is nearer (ties are covered by the comparison above).
        error = np.abs(fmt.dequantize_rows(got).astype(np.float64) - values)
        place = np.searchsorted(finite, values)
        for near in (np.maximum(place - 1, 0), np.minimum(place, finite.size - 1)):
            assert (error <= np.abs(finite[near].astype(np.float64) - values)).all()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_nan_and_infinity_are_kept(name):
    fmt = FORMATS[name]
    bits = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001], np.uint32)
    values = np.zeros((1, 32), np.float32)
    values[0, :5], values[0, 5:7], values[0, 7] = bits.view(np.float32), [np.inf, -np.inf], 3.4e38
    back = fmt.dequantize_rows(quantize_matrix(values, fmt))[0]
    assert np.isnan(back[:5]).all() and back[5] == np.inf and back[6] == -np.inf
    assert back[7] == (np.float32(3.4e38) if name == "f32" else np.inf) or name == "bf16"


def test_same_type_is_copied_bit_by_bit():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    assert np.array_equal(quantize_matrix(bits, FORMATS["bf16"]).view(np.uint16), bits)
    assert np.array_equal(quantize_matrix(bits.view(np.float16), FORMATS["f16"]).view(np.uint16), bits)


def weights(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(SHAPE)
    outlier_columns = np.where(rng.random(SHAPE[1]) < 0.005, 20.0, 1.0)
    made = {
        "gauss": normal,
        "gauss_small": 0.02 * normal,
        "laplace": 0.02 * rng.laplace(size=SHAPE),
        "student_t3": 0.02 * rng.standard_t(3, SHAPE),
        "student_t2": 0.02 * rng.standard_t(2, SHAPE),
        "outlier_columns": 0.02 * normal * outlier_columns * rng.lognormal(0, 0.5, (SHAPE[0], 1)),
        "uniform": rng.uniform(-1, 1, SHAPE),
        "positive": np.abs(normal),
        "above": normal + 3,
        "below": normal - 3,
        "tiny": 1e-5 * normal,
        "sparse": normal * (rng.random(SHAPE) < 0.1),
        "on_a_grid": rng.integers(-7, 8, SHAPE) / 8,
    }
    return made[kind].astype(np.float32)


KINDS = (
    "gauss gauss_small laplace student_t3 student_t2 outlier_columns uniform positive above below tiny sparse on_a_grid"
).split()


def rmse(values, source, fmt):
    return float(np.sqrt(np.mean((fmt.dequantize_rows(source).astype(np.float64) - values) ** 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", K_QUANTS)
def test_error_against_libgguf(name, kind):
    """Measured: Q4_K 0.97 to 0.996 of its RMSE (0.76 on sparse and tiny weights), Q6_K 0.96 to 0.992 (0.02 on
    tiny ones, which it rounds to zero). The promise is 1.05."""
    fmt, values = FORMATS[name], weights(kind)
    theirs = libgguf.quantize_rows(values, gguf.GGMLQuantizationType[name.upper()])
    ours = quantize_matrix(values, fmt)
    assert rmse(values, ours, fmt) < rmse(values, theirs.reshape(ours.shape), fmt)


@pytest.mark.parametrize(("name", "bound"), [("q4_k", 0.0708), ("q6_k", 0.0175)])
def test_error_of_gaussian_weights(name, bound):
    values = weights("gauss")
    assert rmse(values, quantize_matrix(values, FORMATS[name]), FORMATS[name]) < bound


DIGEST = """
import hashlib, numpy as np
from trilane.cpu_kernels.formats import FORMATS
values = np.random.default_rng(5).standard_t(3, (3, 256)).astype(np.float32)
values[2, :64] = 0.5
for name in ("q4_k", "q6_k"):
    print(hashlib.sha256(FORMATS[name].quantize(values).tobytes()).hexdigest())
"""


def test_compiled_equals_plain_python():
    def digest(**environment):
        command = [sys.executable, "-W", "error", "-c", DIGEST]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout

    assert digest(NUMBA_DISABLE_JIT="1") == digest()


@pytest.mark.parametrize("name", K_QUANTS)
def test_zeros_give_zeros(name):
    fmt = FORMATS[name]
    for zero in (0.0, -0.0):
        source = quantize_matrix(np.full((2, 256), zero, np.float32), fmt)
        assert not fmt.dequantize_rows(source).any()


@pytest.mark.parametrize("name", K_QUANTS)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.37, -2e-5, 6e4, -1e6])
def test_constant_rows(name, value):
    fmt = FORMATS[name]
    values = np.full((1, 512), value, np.float32)
    assert np.allclose(fmt.dequantize_rows(quantize_matrix(values, fmt)), value, rtol=0.02)


@pytest.mark.parametrize("name", K_QUANTS)
def test_one_weight_alone(name):
    fmt = FORMATS[name]
    values = np.zeros((256, 256), np.float32)
    np.fill_diagonal(values, np.where(np.arange(256) % 2, 1.5, -1.5))
    assert np.allclose(fmt.dequantize_rows(quantize_matrix(values, fmt)), values, atol=2e-3)


@pytest.mark.parametrize("name", K_QUANTS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), power=st.integers(-30, 5), spread=st.floats(0, 6), shift=st.floats(-4, 4))
def test_any_finite_block_stays_near(name, seed, power, spread, shift):
    """No block goes astray: finite bytes, and an error bounded by the range of the block."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat(10.0 ** (-spread * rng.random(8)), 32)
    values = ((rng.standard_normal((3, 256)) + shift) * sizes * 10.0**power).astype(np.float32)
    fmt = FORMATS[name]
    back = fmt.dequantize_rows(quantize_matrix(values, fmt))
    assert np.isfinite(back).all()
    span = np.maximum(values.max(1), 0) - np.minimum(values.min(1), 0)
    bound = {"q4_k": 0.06, "q6_k": 0.035}[name]
    smallest = {"q4_k": 15, "q6_k": 32}[name] * 2.0**-24
    assert (np.abs(back.astype(np.float64) - values).max(1) <= bound * span + smallest).all()


@pytest.mark.parametrize("name", list(FORMATS))
def test_parts_and_threads_give_the_same_bytes(name):
    """Chunks of rows from several threads, into slices of one output, and block by block."""
    fmt, values = FORMATS[name], weights("student_t3")
    whole = quantize_matrix(values, fmt)
    out = np.zeros_like(whole)
    parts = [slice(i, min(i + 13, len(values))) for i in range(0, len(values), 13)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: quantize_matrix(values[part], fmt, out[part]), parts))
    assert np.array_equal(out, whole)
    blocks = values[:2].reshape(-1, fmt.block_size)
    assert np.array_equal(fmt.quantize(blocks).reshape(2, -1), whole[:2])


@pytest.mark.parametrize("name", ["q8_0", "q6_k", "f32", "f16", "bf16"])
def test_half_and_bfloat_input_is_read_exactly(name):
    fmt, values = FORMATS[name], weights("laplace")
    half = values.astype(np.float16)
    assert np.array_equal(quantize_matrix(half, fmt), quantize_matrix(half.astype(np.float32), fmt))
    bits = to_bf16(values)
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(quantize_matrix(bits, fmt), quantize_matrix(floats, fmt))


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "bf16"])
def test_any_strides(name):
    fmt, values = FORMATS[name], weights("gauss")
    transposed = np.asfortranarray(values)
    out = np.zeros((2 * len(values), fmt.row_source_nbytes(SHAPE[1]) + 5), np.uint8)[::2, 5:]
    assert quantize_matrix(transposed, fmt, out) is out
    assert np.array_equal(out, quantize_matrix(values, fmt))


def test_rows_larger_than_a_chunk_and_no_rows():
    fmt = FORMATS["q8_0"]
    values = np.ones((2, 1 << 17), np.float32)
    assert np.allclose(fmt.dequantize_rows(quantize_matrix(values, fmt)), 1, rtol=1e-3)
    assert quantize_matrix(np.empty((0, 256), np.float32), FORMATS["q4_k"]).shape == (0, 144)


def test_wrong_row_length():
    with pytest.raises(ValueError, match="K=2880 .*q4_k.*multiple of 256; use one of f32, f16, bf16, q8_0, mxfp4"):
        quantize_matrix(np.zeros((1, 2880), np.float32), FORMATS["q4_k"])
    with pytest.raises(ValueError, match="K=100 .*q8_0.*multiple of 32; no format"):
        quantize_matrix(np.zeros((1, 100), np.float32), FORMATS["q8_0"])


@pytest.mark.parametrize("values", [np.zeros((1, 256)), np.zeros((1, 256), np.int16), [[1.0] * 256], None])
def test_wrong_types(values):
    with pytest.raises(TypeError, match="float32, float16 or uint16"):
        quantize_matrix(values, FORMATS["q8_0"])


def test_wrong_shapes():
    fmt, values = FORMATS["q8_0"], np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"\(rows, K\), not of shape \(64,\)"):
        quantize_matrix(values[0], fmt)
    with pytest.raises(ValueError, match=r"out has shape \(2, 64\).*\(2, 68\)"):
        quantize_matrix(values, fmt, np.zeros((2, 64), np.uint8))
    with pytest.raises(TypeError, match="out must be uint8"):
        quantize_matrix(values, fmt, np.zeros((2, 68), np.int8))
    with pytest.raises(ValueError, match="blocks of q8_0 have 32 weights, not 64"):
        quantize_blocks(values, fmt)


@pytest.mark.parametrize("name", list(LARGEST_WEIGHT))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_cannot_be_stored_are_named(name, bad):
    values = np.zeros((300, 512), np.float32)
    values[260, 77] = bad
    with pytest.raises(ValueError, match=rf"weight \[260, 77\] is {bad}: {name} needs finite weights"):
        quantize_matrix(values, FORMATS[name])


@pytest.mark.parametrize("name", list(LARGEST_WEIGHT))
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_weights_are_stored_and_larger_ones_refused(name, sign):
    fmt, rng = FORMATS[name], np.random.default_rng(3)
    limit = np.float32(LARGEST_WEIGHT[name])
    values = rng.uniform(-0.9, 0.9, (4, 512)).astype(np.float32) * limit
    values[:, ::50] = sign * limit
    with np.errstate(over="ignore"):
        assert np.isfinite(fmt.dequantize_rows(quantize_matrix(values, fmt))).all()
    values[1, 3] = -1.01 * limit
    with pytest.raises(ValueError, match=rf"weight \[1, 3\].*{name}"):
        quantize_matrix(values, fmt)
