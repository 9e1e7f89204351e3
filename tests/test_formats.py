"""The format table against the gguf package, bit for bit, and the split into planes."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cpu_kernels.formats import BLOCK, FORMATS, Format, e8m0_half, format_of

NAMES = list(FORMATS)
EXPECTED_SIZES = {  # block size, block bytes, activation, main and side bytes per 256
    "f32": (1, 4, "f32", 1024, 0),
    "f16": (1, 2, "f32", 512, 0),
    "bf16": (1, 2, "f32", 512, 0),
    "q8_0": (32, 34, "int8", 256, 16),
    "q4_k": (256, 144, "int8", 144, 0),
    "q6_k": (256, 210, "int8", 208, 2),
    "mxfp4": (32, 17, "int8", 128, 8),
}
HALF_FIELDS = {"q8_0": [0], "q4_k": [0, 2], "q6_k": [208]}  # where a block has f16 scales


def reference_dequantize(fmt: Format, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[fmt.name.upper()])
    return np.asarray(values, np.float32).reshape(len(blocks), fmt.block_size)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Every bit equal, but one NaN is as good as another (their payload depends on the vector width)."""
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def random_blocks(fmt: Format, num_blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, fmt.block_nbytes), np.uint8)


def check_dequantize(fmt: Format, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        got = fmt.dequantize(blocks)
    assert got.dtype == np.float32 and got.shape == (len(blocks), fmt.block_size)
    assert_same_bits(got, reference_dequantize(fmt, blocks))
    return got


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    fmt = FORMATS[name]
    sizes = (fmt.block_size, fmt.block_nbytes, fmt.activation, fmt.main_nbytes, fmt.side_nbytes)
    assert fmt.name == name and sizes == EXPECTED_SIZES[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] == sizes[:2]


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_random_bytes(name):
    check_dequantize(FORMATS[name], random_blocks(FORMATS[name], 400))


@pytest.mark.parametrize("name", HALF_FIELDS)
@pytest.mark.parametrize("half", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0x7D01])
def test_dequantize_odd_scales(name, half):
    """Zeros, subnormals, the largest, infinities, quiet and signalling NaN as the scale of a block."""
    fmt = FORMATS[name]
    blocks = random_blocks(fmt, 20, seed=half)
    for field in HALF_FIELDS[name]:
        blocks[:, field : field + 2] = np.array([half], "<u2").view(np.uint8)
    check_dequantize(fmt, blocks)


def test_dequantize_every_16_bit_float():
    bits = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    check_dequantize(FORMATS["f16"], bits)
    check_dequantize(FORMATS["bf16"], bits)


def test_dequantize_every_e8m0_exponent_and_code():
    blocks = np.empty((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 0x11
    values = check_dequantize(FORMATS["mxfp4"], blocks)
    assert np.isfinite(values[:253]).all()
    assert e8m0_half(np.array([0, 1, 2, 127, 128, 255], np.uint8)).tolist() == [
        2.0**-128, 2.0**-127, 2.0**-126, 0.5, 1.0, 2.0**127,
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), steps=st.integers(1, 6), seed=st.integers(0, 99))
def test_split_and_join(name, rows, steps, seed):
    fmt = FORMATS[name]
    columns = steps * fmt.column_multiple
    source = np.random.default_rng(seed).integers(0, 256, (rows, fmt.row_source_nbytes(columns)), np.uint8)
    main, side = fmt.split(source)
    assert main.shape == (rows, fmt.row_main_nbytes(columns))
    assert side.shape == (rows, fmt.row_side_nbytes(columns))
    assert main.shape[1] + side.shape[1] == source.shape[1]
    assert np.array_equal(fmt.join(main, side), source)
    assert fmt.main_stride(columns) % 16 == 0 and fmt.side_stride(columns) == side.shape[1]


def test_split_puts_the_bytes_where_the_kernels_look():
    q8 = random_blocks(FORMATS["q8_0"], 8).reshape(1, -1)
    main, side = FORMATS["q8_0"].split(q8)
    assert np.array_equal(main.reshape(8, 32), q8.reshape(8, 34)[:, 2:])
    assert np.array_equal(side.reshape(8, 2), q8.reshape(8, 34)[:, :2])
    q6 = random_blocks(FORMATS["q6_k"], 1)
    main, side = FORMATS["q6_k"].split(q6)
    assert np.array_equal(main, q6[:, :208]) and np.array_equal(side, q6[:, 208:])
    mx = random_blocks(FORMATS["mxfp4"], 8).reshape(1, -1)
    main, side = FORMATS["mxfp4"].split(mx)
    assert np.array_equal(main.reshape(8, 16), mx.reshape(8, 17)[:, 1:])
    assert np.array_equal(side[0], mx.reshape(8, 17)[:, 0])


def test_split_into_given_planes_of_any_stride():
    fmt = FORMATS["q8_0"]
    source = random_blocks(fmt, 6).reshape(2, -1)
    main, side = np.zeros((2, 128), np.uint8)[:, :96], np.zeros((2, 6), np.uint8)
    got = fmt.split(source, main, side)
    assert got[0] is main and got[1] is side
    assert np.array_equal(fmt.join(main, side), source)


def test_split_refuses_half_a_block():
    with pytest.raises(ValueError, match="33 bytes is no whole number of q8_0 blocks of 34"):
        FORMATS["q8_0"].split(np.zeros((1, 33), np.uint8))


def test_dequantize_rows():
    fmt = FORMATS["mxfp4"]
    source = random_blocks(fmt, 6).reshape(2, -1)
    values = fmt.dequantize_rows(source)
    assert values.shape == (2, 96)
    assert np.array_equal(values, fmt.dequantize(source.reshape(6, 17)).reshape(2, 96))


@pytest.mark.parametrize("name", NAMES)
def test_columns_rule(name):
    fmt = FORMATS[name]
    fmt.check_columns(BLOCK * 3)
    for columns in (2880, 704, 1408, 640):
        if fmt.block_size < BLOCK:
            fmt.check_columns(columns)
    for columns in (0, -32, 16, 33, 257):
        with pytest.raises(ValueError, match=f"K={columns}.*{name}.*multiple of {fmt.column_multiple}"):
            fmt.check_columns(columns)


def test_columns_error_names_the_formats_that_work():
    with pytest.raises(ValueError, match="q4_k: K must be .* 256; use one of f32, f16, bf16, q8_0, mxfp4$"):
        FORMATS["q4_k"].check_columns(2880)
    with pytest.raises(ValueError, match="no format takes such rows"):
        FORMATS["f32"].check_columns(100)


def test_format_of():
    assert format_of("Q4_K") is FORMATS["q4_k"]
    assert len({f for f in FORMATS.values()}) == len(FORMATS)
    with pytest.raises(ValueError, match="unknown weight format 'q4k'.*f32, f16.*did you mean 'q4_k'"):
        format_of("q4k")
    with pytest.raises(ValueError, match="unknown weight format 'zzz'.*mxfp4$"):
        format_of("zzz")


def test_table_is_read_only():
    with pytest.raises(TypeError):
        FORMATS["new"] = FORMATS["f32"]  # type: ignore[index]


def test_import_needs_no_numba():
    code = "import sys, trilane.cpu_kernels.layout; assert 'numba' not in sys.modules; print('ok')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "ok\n"
