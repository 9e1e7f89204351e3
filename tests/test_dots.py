"""Row kernels, bit for bit against the reference: all formats, instruction sets, numbers of rows, lengths."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cpu_kernels import activation as act
from trilane.cpu_kernels import reference as ref
from trilane.cpu_kernels.formats import FORMATS, format_of
from trilane.cpu_kernels.isa import ISAS, available_isas
from trilane.cpu_kernels.kernels import rows_kernel

ROWS = (1, 2, 3, 7, 64)
LENGTHS = (32, 64, 224, 256, 288, 640, 704, 1408, 2048, 2304, 2880)
SLACK = 64  # bytes behind a plane that a kernel may read
POISON = 0xFF  # NaN in every float type, the largest exponent, -1

available = pytest.mark.parametrize("isa", available_isas())
every_format = pytest.mark.parametrize("name", FORMATS)


@functools.cache
def kernel(name: str, isa: str) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(rows_kernel(name, isa))


def lengths_of(name: str) -> list[int]:
    return [k for k in LENGTHS if not name.endswith("_k") or k % 256 == 0]


def rng_of(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def aligned(nbytes: int) -> np.ndarray:
    """``nbytes`` at a multiple of 64 between poisoned bytes."""
    raw = np.full(nbytes + 64 + SLACK, POISON, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def random_source(name: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Source bytes of ordinary weights."""
    fmt = format_of(name)
    if fmt.block_size == 1:
        values = rng.standard_normal((rows * k, 1)).astype(np.float32)
        return fmt.quantize(values).reshape(rows, -1)
    raw = rng.integers(0, 256, (rows * k // fmt.block_size, fmt.block_nbytes), dtype=np.uint8)
    scales = rng.uniform(-0.01, 0.01, (len(raw), 2)).astype(np.float16).view(np.uint8)
    where = {"q8_0": slice(0, 2), "q4_k": slice(0, 4), "q6_k": slice(208, 210)}
    if name == "mxfp4":
        raw[:, 0] = rng.integers(110, 130, len(raw))
    else:
        raw[:, where[name]] = scales[:, : where[name].stop - where[name].start]
    return raw.reshape(rows, -1)


def any_source(name: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Any bytes: infinite, NaN and denormal scales and weights, -128."""
    fmt = format_of(name)
    return rng.integers(0, 256, (rows, k // fmt.block_size * fmt.block_nbytes), dtype=np.uint8)


def full_source(name: str, rows: int, k: int, byte: int) -> np.ndarray:
    """All quants at one extreme, with ordinary scales: the largest sums."""
    source = random_source(name, rows, k, rng_of(name, byte))
    blocks = source.reshape(-1, format_of(name).block_nbytes)
    blocks[:, {"q8_0": slice(2, 34), "q4_k": slice(4, 144), "q6_k": slice(0, 192), "mxfp4": slice(1, 17)}[name]] = byte
    if name == "q6_k":
        blocks[:, 192:208] = 0x80 if byte == 0 else 0x7F
    return source


def planes(name: str, source: np.ndarray) -> tuple[np.ndarray, int, np.ndarray, int]:
    """(main, stride, side, stride); rows padded to 16 bytes with poison."""
    main, side = format_of(name).split(source)
    rows, nbytes = main.shape
    stride = -(-nbytes // 16) * 16
    main_plane, side_plane = aligned(rows * stride), aligned(side.size)
    main_plane.reshape(rows, stride)[:, :nbytes] = main
    side_plane[:] = side.ravel()
    return main_plane, stride, side_plane, side.size // rows


def activations(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(records, their addresses)."""
    kind = format_of(name).activation
    write = act.quantize_row if kind == "int8" else act.copy_row_f32
    nbytes = act.row_nbytes(kind, x.shape[1])
    buffer = aligned(nbytes * len(x))
    addresses = buffer.ctypes.data + nbytes * np.arange(len(x))
    for row, address in zip(x, addresses, strict=True):
        write(row.ctypes.data, len(row), int(address))
    return buffer, addresses.astype(np.int64)


def run(name: str, isa: str, source: np.ndarray, x: np.ndarray, r0: int = 0, r1: int | None = None) -> np.ndarray:
    """What the kernel writes to an output of NaN: (num_x, rows)."""
    rows = len(source)
    main, main_stride, side, side_stride = planes(name, source)
    buffer, addresses = activations(name, x)
    out = np.full((len(x), rows), np.nan, np.float32)
    kernel(name, isa)(
        main.ctypes.data, side.ctypes.data, main_stride, side_stride, r0, rows if r1 is None else r1,
        x.shape[1], addresses.ctypes.data, len(x), out.ctypes.data, rows,
    )  # fmt: skip
    return out


def assert_equals_reference(name: str, isa: str, source: np.ndarray, x: np.ndarray) -> None:
    assert ref.same_bits(run(name, isa, source, x), ref.dot_rows(name, source, x))


@available
@every_format
@pytest.mark.parametrize("make", [random_source, any_source])
def test_rows_and_lengths(name: str, isa: str, make: Callable[..., np.ndarray]) -> None:
    for k in lengths_of(name):
        for rows in ROWS:
            rng = rng_of(name, k, rows)
            x = rng.standard_normal((1 + rows % 3, k)).astype(np.float32)
            assert_equals_reference(name, isa, make(name, rows, k, rng), x)


@available
@every_format
def test_many_activations_share_the_rows(name: str, isa: str) -> None:
    rng = rng_of(name)
    x = rng.standard_normal((64, 512)).astype(np.float32)
    assert_equals_reference(name, isa, random_source(name, 9, 512, rng), x)


@available
@every_format
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-30, 1e30, 3e38])
def test_scales_of_x(name: str, isa: str, scale: float) -> None:
    rng = rng_of(name, scale)
    x = (rng.uniform(-1, 1, (2, 768)) * scale).astype(np.float32)
    x[1, :256] = 0
    for make in (random_source, any_source):
        assert_equals_reference(name, isa, make(name, 7, 768, rng), x)


@available
@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.activation == "int8"])
@pytest.mark.parametrize("byte", [0x00, 0x77, 0x7F, 0x80, 0xFF])
def test_largest_integer_sums(name: str, isa: str, byte: int) -> None:
    signs = np.where(np.arange(512) % 3 == 0, -1, 1)
    x = np.stack([np.ones(512), -np.ones(512), signs]).astype(np.float32)
    assert_equals_reference(name, isa, full_source(name, 5, 512, byte), x)


@available
@every_format
def test_bad_blocks_count_as_zero_or_give_nan(name: str, isa: str) -> None:
    """int8 records of such blocks are zeros (the caller knows the flag); floats pass through."""
    rng = rng_of(name)
    x = rng.standard_normal((3, 768)).astype(np.float32)
    x[0, 300], x[1, 0], x[2, 767] = np.nan, np.inf, -np.inf
    assert_equals_reference(name, isa, random_source(name, 6, 768, rng), x)


@available
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "mxfp4"])
def test_denormal_products_are_kept(name: str, isa: str) -> None:
    rng = rng_of(name)
    if name == "mxfp4":
        source = random_source(name, 6, 512, rng).reshape(-1, 17)
        source[:, 0] = rng.integers(0, 3, len(source))
        source = source.reshape(6, -1)
    else:
        source = format_of(name).quantize(rng.uniform(-6e-8, 6e-8, (6 * 512, 1)).astype(np.float32)).reshape(6, -1)
    x = (rng.uniform(-1, 1, (2, 512)) * (1 if name == "mxfp4" else 1e-34)).astype(np.float32)
    want = ref.dot_rows(name, source, x)
    assert (np.abs(want[want != 0]) < 1e-36).any()
    assert ref.same_bits(run(name, isa, source, x), want)


@available
@every_format
def test_only_the_rows_asked_for_are_written(name: str, isa: str) -> None:
    rng = rng_of(name)
    source, x = random_source(name, 23, 256, rng), rng.standard_normal((2, 256)).astype(np.float32)
    want = ref.dot_rows(name, source, x)
    for r0, r1 in ((0, 1), (3, 3), (5, 12), (20, 23), (0, 23)):
        got = run(name, isa, source, x, r0, r1)
        assert ref.same_bits(got[:, r0:r1], want[:, r0:r1])
        assert np.isnan(got[:, :r0]).all() and np.isnan(got[:, r1:]).all()


def before_a_guard(data: np.ndarray) -> np.ndarray:
    """A copy that ends SLACK bytes before memory that may not be touched."""
    page = mmap.PAGESIZE
    usable = -(-(data.size + SLACK) // page) * page
    region = mmap.mmap(-1, usable + page)
    view = np.frombuffer(region, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(view.ctypes.data + usable), ctypes.c_size_t(page), 0) == 0
    start = (usable - SLACK - data.size) // 16 * 16
    copy = view[start : start + data.size]
    copy[:] = data.ravel()
    return copy


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs linux: mprotect")
@available
@every_format
def test_nothing_far_behind_a_plane_is_read(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An access behind the slack would end the process."""
    make_planes = planes

    def guarded(name: str, source: np.ndarray) -> tuple[np.ndarray, int, np.ndarray, int]:
        main, main_stride, side, side_stride = make_planes(name, source)
        return before_a_guard(main), main_stride, before_a_guard(side), side_stride

    monkeypatch.setitem(globals(), "planes", guarded)
    for k in lengths_of(name):
        for rows in (1, 5):
            rng = rng_of(name, k, rows)
            x = rng.standard_normal((1, k)).astype(np.float32)
            assert_equals_reference(name, isa, random_source(name, rows, k, rng), x)


@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from(available_isas()),
    st.integers(1, 12),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_any_shape(name: str, isa: str, rows: int, groups: int, num_x: int, wild: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = 256 * (1 + groups % 4) if name.endswith("_k") else 32 * groups
    x = (rng.standard_normal((num_x, k)) * 10.0 ** rng.integers(-20, 20)).astype(np.float32)
    assert_equals_reference(name, isa, (any_source if wild else random_source)(name, rows, k, rng), x)


def test_every_format_has_a_kernel_for_every_instruction_set_here() -> None:
    assert set(available_isas()) <= set(ISAS) and "portable" in available_isas()
    addresses = [rows_kernel(name, isa) for name in FORMATS for isa in available_isas()]
    assert len(set(addresses)) == len(addresses)
