"""ggml's dot products for the processor, to compare with, where a library that exports them can be found.

Looked for in the path given, in ``$TRILANE_GGML`` (a library or its folder), then in installed packages whose
wheels ship it; ``pip install libggml-python`` brings one for x86 Linux. trilane itself needs none of it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from trilane.cpu_kernels.rows import ROWS_SIGNATURE
from trilane.cpu_kernels.simd import Emitter, V, emitted, i64, ldi64
from trilane.jit import native

PACKAGES = ("libggml", "pywhispercpp", "llama_cpp")
_SUBFOLDERS = (".", "lib", "lib64", "..")
_DOTS = {  # our name: the dot product, what makes its activation, weights in a block of it and their bytes
    "q4_k": ("ggml_vec_dot_q4_K_q8_K", "quantize_row_q8_K", 256, 292),
    "q6_k": ("ggml_vec_dot_q6_K_q8_K", "quantize_row_q8_K", 256, 292),
    "q8_0": ("ggml_vec_dot_q8_0_q8_0", "quantize_row_q8_0", 32, 34),
    "mxfp4": ("ggml_vec_dot_mxfp4_q8_0", "quantize_row_q8_0", 32, 34),
    "bf16": ("ggml_vec_dot_bf16", "ggml_cpu_fp32_to_bf16", 1, 2),
    "f16": ("ggml_vec_dot_f16", "ggml_cpu_fp32_to_fp16", 1, 2),
}


@dataclass(frozen=True)
class Ggml:
    """A loaded library and where it came from."""

    path: Path
    library: Any

    def dot(self, format_name: str) -> int | None:
        """Address of the dot product for a format; None if the library has none."""
        names = _DOTS.get(format_name)
        function = getattr(self.library, names[0], None) if names else None
        return None if function is None else ctypes.cast(function, ctypes.c_void_p).value

    def activation(self, format_name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """``x`` (K,) as the dot product wants it, as bytes."""
        _, quantize, block, nbytes = _DOTS[format_name]
        x = np.ascontiguousarray(x, np.float32)
        out = np.zeros(len(x) // block * nbytes, np.uint8)
        pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        getattr(self.library, quantize)(*pointers, ctypes.c_int64(len(x)))
        return out


def find_ggml(path: str | Path | None = None) -> Ggml | None:
    """Load the first library found that exports the dot products; None if there is none.

    Parameters
    ----------
    path : path, optional
        A library, or a folder with ``libggml-cpu``; nothing else is tried then.
    """
    for library in _libraries(path):
        try:
            for base in sorted(library.parent.glob("libggml-base*.so*"))[:1]:
                ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL)
            loaded = ctypes.CDLL(str(library))
            loaded.ggml_cpu_init()  # fills the tables that f16 conversions look up
        except (OSError, AttributeError):
            continue
        return Ggml(library, loaded)
    return None


def _libraries(path: str | Path | None) -> Iterator[Path]:
    for place in _places(path):
        yield from [place] if place.is_file() else sorted(place.glob("libggml-cpu*.so*"))


def _places(path: str | Path | None) -> Iterator[Path]:
    named = path or os.environ.get("TRILANE_GGML")
    if named:
        yield Path(named)
        return
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            home = Path(spec.origin).parent
            yield from (home / folder for folder in _SUBFOLDERS)
            yield home.parent / f"{package}.libs"


@emitted(None, *[i64] * 5)
def _vec_dot(e: Emitter, function: V, num_columns: V, out: V, w: V, x: V) -> None:
    """``void f(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc)``"""
    int32, int64 = ir.IntType(32), ir.IntType(64)
    fn_type = ir.FunctionType(ir.VoidType(), [int32, int64, int64, int64, int64, int64, int64, int32])
    zero, one = ir.Constant(int64, 0), ir.Constant(int32, 1)
    pointer = e.builder.inttoptr(function.ir, fn_type.as_pointer())
    n = e.builder.trunc(num_columns.ir, int32)
    e.builder.call(pointer, [n, out.ir, zero, w.ir, zero, x.ir, zero, one])


def ggml_rows_kernel() -> int:
    """Address of a loop over rows with the row kernels' signature, one activation.

    ``side`` is the address of the dot product: ggml's weights have no side plane.
    """
    return int(_compiled_rows().address)


@functools.cache
def _compiled_rows() -> Any:
    @native(ROWS_SIGNATURE)
    def rows(w, side, w_stride, side_stride, r0, r1, num_columns, xs, num_x, out, out_stride):
        x = ldi64(xs)
        for r in range(r0, r1):
            _vec_dot(side, num_columns, out + 4 * r, w + r * w_stride, x)

    return rows
