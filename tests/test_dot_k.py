"""What is particular to the K-quants' row kernels: blocks in the extreme, bytes at the end of memory, signs."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import re
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest

from trilane.cpu_kernels import reference as ref
from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.isa import available_isas
from trilane.cpu_kernels.kernels import MODULES, rows_kernel

k_quants = pytest.mark.parametrize("name", ["q4_k", "q6_k"])
isas = pytest.mark.parametrize("isa", available_isas())


def one_half(value: float) -> np.ndarray:
    return np.array([value], np.float16).view(np.uint8)


def blocks(name: str, quants: int, scales: int, d: float, rows: int, num_blocks: int) -> np.ndarray:
    """Source rows whose bytes are all equal but for the float scales."""
    source = np.full((rows, num_blocks, FORMATS[name].block_nbytes), quants, np.uint8)
    if name == "q4_k":
        source[..., 4:16] = scales
        source[..., 0:2], source[..., 2:4] = one_half(d), one_half(-d)
    else:
        source[..., 192:208] = scales
        source[..., 208:210] = one_half(d)
    return source.reshape(rows, -1)


def dots(name: str, isa: str, source: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The kernel's results, (num_x, rows), from an output of NaN."""
    main, side = FORMATS[name].split(source)
    room = np.zeros(ref.records(x).nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    records = room[start : start + room.size - 64].view(ref.RECORD).reshape(len(x), -1)
    records[...] = ref.records(x)
    xs = np.array([row.ctypes.data for row in records], np.int64)
    out = np.full((len(x), len(source)), np.nan, np.float32)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(rows_kernel(name, isa))
    kernel(
        main.ctypes.data, side.ctypes.data, main.shape[1], side.shape[1], 0, len(source), x.shape[1],
        xs.ctypes.data, len(xs), out.ctypes.data, len(source),
    )  # fmt: skip
    return out


@k_quants
@isas
@pytest.mark.parametrize("quants", [0, 255])
@pytest.mark.parametrize("scales", [0, 63, 127, 128, 255])
def test_the_largest_sums_of_a_block_are_exact(name: str, isa: str, quants: int, scales: int) -> None:
    signs = np.array([1, -1, 0.5], np.float32)
    x = np.repeat(signs, 512).reshape(3, 512)
    source = blocks(name, quants, scales, 1.0, 5, 2)
    assert ref.same_bits(dots(name, isa, source, x), ref.dot_rows(name, source, x))


@k_quants
@isas
def test_a_single_block_of_minus_zero_is_plus_zero(name: str, isa: str) -> None:
    """A row of one block takes a shorter way, which must do what the accumulators would have done."""
    source = blocks(name, 0, 0, -1.0, 4, 1)
    got = dots(name, isa, source, np.ones((1, 256), np.float32))
    assert np.array_equal(got.view(np.uint32), np.zeros((1, 4), np.uint32))


@k_quants
@isas
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 9, 16, 17])
def test_blocks_go_round_the_eight_accumulators(name: str, isa: str, num_blocks: int) -> None:
    """Values that cancel in another order of additions."""
    rng = np.random.default_rng(num_blocks)
    source = np.concatenate([blocks(name, 255, 63, float(d), 1, num_blocks) for d in (1.0, -3.0, 7.0, 11.0, 0.125)])
    magnitudes = 10.0 ** rng.integers(-6, 6, num_blocks)
    x = np.repeat(magnitudes, 256)[None] * rng.standard_normal((2, num_blocks * 256))
    x = x.astype(np.float32)
    assert ref.same_bits(dots(name, isa, source, x), ref.dot_rows(name, source, x))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects a page by mprotect")
@k_quants
@isas
def test_no_byte_behind_the_planes_is_read(name: str, isa: str) -> None:
    """The planes end where a page ends that must not be touched; a read beyond would kill the process."""
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    source = np.random.default_rng(0).integers(0, 100, (6, 2 * FORMATS[name].block_nbytes), dtype=np.uint8)
    x = np.ones((1, 512), np.float32)
    planes, keep = [], []
    for plane in FORMATS[name].split(source):
        region = mmap.mmap(-1, 3 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(region, np.uint8)
        assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + 2 * page), page, 0) == 0
        end = 2 * page
        memory[end - plane.size : end] = plane.reshape(-1)
        planes.append(memory.ctypes.data + end - plane.size)
        keep.append(memory)
    main, side = FORMATS[name].split(source)
    records, out = ref.records(x), np.full(6, np.nan, np.float32)
    xs = np.array([records.ctypes.data], np.int64)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(rows_kernel(name, isa))
    kernel(*planes, main.shape[1], side.shape[1], 0, 6, 512, xs.ctypes.data, 1, out.ctypes.data, 6)
    assert ref.same_bits(out[None], ref.dot_rows(name, source, x))


@k_quants
def test_the_portable_kernel_compiles_for_other_processors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is generic: it assembles for 64-bit Arm and for an x86 of 2003."""
    monkeypatch.setenv("TRILANE_NO_CACHE", "1")
    code = importlib.import_module(f"trilane.cpu_kernels.{MODULES[name]}").make_rows("portable").inspect_llvm()
    assert "llvm.x86" not in code
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for triple, cpu in (("aarch64-unknown-linux-gnu", "generic"), ("x86_64-unknown-linux-gnu", "x86-64")):
        machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2)
        other = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
        other = re.sub(r"target triple = .*", f'target triple = "{triple}"', other)
        other = re.sub(r"target datalayout = .*", f'target datalayout = "{machine.target_data}"', other)
        module = llvm.parse_assembly(other)
        module.verify()
        assert len(machine.emit_assembly(module)) > 10_000
