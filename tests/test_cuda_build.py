"""The CUDA sources compile for every architecture, and what was compiled is found again and never mistaken."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_cases import make_store

from trilane.cpu_kernels.formats import FORMATS
from trilane.gpu_kernels import build, kernels, launch, nvrtc, words
from trilane.gpu_kernels.build import ARCHITECTURES, Variant, variant_of

# Three formats a program: each format is compiled for the oldest and for other architectures.
VARIANTS = {
    75: Variant("q4_k", "q6_k", "bf16"), 80: Variant("q8_0", "mxfp4", "f32"), 86: Variant("f16", "q4_k", "q8_0"),
    89: Variant("none", "f32", "mxfp4"), 90: Variant("q4_k", "q4_k", "q4_k"), 100: Variant("mxfp4", "f16", "q6_k"),
    120: Variant("q6_k", "bf16", "q4_k"),
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile(architecture, tmp_path):
    made = build.cubin(VARIANTS[architecture], architecture, tmp_path)
    assert made[:4] == b"\x7fELF"
    for kernel in build.KERNELS:
        assert f".text.{kernel}\0".encode() in made
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == made and kept.suffix == ".cubin"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_reading_kernel_compiles(architecture, tmp_path):
    for program in (build.READER, build.PAUSE):
        made = build.cubin(program, architecture, tmp_path)
        assert made[:4] == b"\x7fELF" and f".text.{program.kernels[0]}\0".encode() in made
    assert build.cubin_name(build.READER, architecture) != build.cubin_name(VARIANTS[architecture], architecture)


def test_every_format_is_compiled_somewhere():
    assert {name for v in VARIANTS.values() for name in (v.gate, v.up, v.down)} == {*FORMATS, build.NO_GATE}
    assert tuple(VARIANTS) == ARCHITECTURES


def test_the_options_keep_the_bits():
    options = build.options_for(Variant("q4_k", "q4_k", "q4_k"), 90)
    assert {"--fmad=false", "--ftz=false", "--prec-div=true"} <= set(options)
    assert not any("fast" in option for option in options)


def test_a_cached_cubin_is_not_compiled_again(tmp_path, monkeypatch):
    variant = Variant("q8_0", "q8_0", "q8_0")
    name = build.cubin_name(variant, 90)
    (tmp_path / name).write_bytes(b"kept")
    assert build.cubin(variant, 90, tmp_path) == b"kept"
    others = {build.cubin_name(variant, 80), build.cubin_name(Variant("q8_0", "q8_0", "f16"), 90)}
    monkeypatch.setattr(build, "sources", lambda: {"words.cuh": "edited"})
    others.add(build.cubin_name(variant, 90))
    assert len(others | {name}) == 4


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compile_variant", lambda variant, architecture: b"made")
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert build.cubin(Variant("f16", "f16", "f16"), 90, in_the_way) == b"made"


def test_half_a_file_is_never_seen(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "compile_variant", lambda variant, architecture: b"made")
    monkeypatch.setattr(os, "fsync", full)
    assert build.cubin(Variant("f16", "f16", "f16"), 90, tmp_path) == b"made"
    assert list(tmp_path.iterdir()) == []


def test_errors_name_the_cause(monkeypatch):
    with pytest.raises(nvrtc.CompileError, match="no_such_word"):
        nvrtc.compile_cubin("no_such_word", {}, ("--gpu-architecture=sm_90",))
    with pytest.raises(ValueError, match="q4_x.*did you mean"):
        Variant("q4_x", "q4_k", "q4_k")
    monkeypatch.setattr(nvrtc, "_wheel_libraries", lambda: iter(()))
    monkeypatch.setattr(nvrtc, "_SONAMES", ("libno-such-library.so",))
    with pytest.raises(nvrtc.CompilerMissing, match="trilane\\[cuda13\\]"):
        nvrtc._library.__wrapped__()


def test_the_structs_are_the_same_on_both_sides():
    """Sizes are checked where the header is compiled; here, that no field is padded away or forgotten."""
    header = words.c_header()
    for name, kind in words.TYPES.items():
        assert f"static_assert(sizeof({name}) == {kind.itemsize}" in header
        for field in kind.names:
            assert f" {field}" in header
    assert words.ITEM_NBYTES == words.HEADER_NBYTES == 64


@pytest.mark.parametrize("formats", ["q4_k", "q6_k", "q8_0", "mxfp4", "f32", "f16", "bf16", "q4_k+q6_k"])
@pytest.mark.parametrize("hidden", [256, 2048, 7168])
def test_tiles_fit_and_divide_their_chunk(formats, hidden):
    layout = make_store(formats, "silu_glu", hidden, 256, experts=1).layers[0].layout
    tiles = launch.tiles_of(layout)
    assert words.UP_CHUNK % tiles.up == 0 and tiles.up >= 2 and tiles.down % 32 == 0
    assert tiles.shared_nbytes <= (launch.WHOLE_NBYTES if tiles.whole else launch.STAGE_NBYTES) or tiles.up == 2
    assert tiles.shared_nbytes % 16 == 0 and variant_of(layout).down in FORMATS


@pytest.mark.parametrize(("multiprocessor", "whole"), [(64, 58), (100, 58), (164, 58), (228, 71)])
def test_a_block_takes_what_leaves_room_for_as_many_as_run_beside_each_other(multiprocessor, whole):
    """KiB, of compute capability 7.5, 8.6 and 8.9, 8.0, and 9.0 and 10.0."""
    assert launch.whole_nbytes(multiprocessor << 10) == whole << 10


def test_a_launch_is_data():
    layout = make_store("q4_k", "silu_glu", 2048, 768, experts=1).layers[0].layout
    layer = words.layer_words(layout, layer=0, num_experts=128, gate_kind=0)
    step = np.zeros((), words.TYPES["Step"])
    step["num_rows"] = 1
    progress = words.progress_words(4096, 24)
    made = launch.plan_launch(layout, layer, step, progress, 24, 64, 128)
    records = 8 * words.SPREAD_RECORD_NBYTES  # of a row of 2048
    assert made.grid == (launch.PLAN_ITEMS * 16 + 1, 1) and made.threads == 256
    assert made.shared_nbytes == records + 16 * 2 * 1152 + 128 * 144
    assert launch.hit_launch(layout, layer, step, progress, 24).grid == (24 * 16, 1)
    assert launch.publish_launch(layer, step).shared_nbytes == 128 * launch.GROUPING_NBYTES
    step["num_rows"] = 2
    assert launch.plan_launch(layout, layer, step, progress, 48, 64, 128).grid == (48 * 16 + 1, 1)


class FakeDriver:
    """CuPy's driver module as far as `prepare` needs it."""

    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1, 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self):
        self.settings = {}

    def funcGetAttribute(self, attribute, function):  # noqa: N802
        assert attribute == 1
        return 6000

    def funcSetAttribute(self, function, attribute, value):  # noqa: N802
        self.settings[function, attribute] = value


def test_shared_memory_is_asked_for_and_a_gpu_with_too_little_is_refused():
    made = object.__new__(kernels.Kernels)
    made.variant, made._driver, made._most_shared_nbytes = Variant("f32", "f32", "f32"), FakeDriver(), 65536
    made._functions = {"experts_hit": SimpleNamespace(ptr=77)}
    made.prepare(launch.Launch("experts_hit", (1, 1), 256, launch.STAGE_NBYTES, ()))
    assert made._driver.settings == {}
    made.prepare(launch.Launch("experts_hit", (1, 1), 256, 50000, ()))
    assert made._driver.settings == {(77, 8): 50000, (77, 9): 100}
    with pytest.raises(ValueError, match="need 66000 bytes of shared memory.*65536"):
        made.prepare(launch.Launch("experts_hit", (1, 1), 256, 60000, ()))
