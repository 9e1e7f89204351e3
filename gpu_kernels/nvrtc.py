"""NVIDIA's runtime compiler through its C interface: CUDA C++ text to a cubin, with our options and no others.

Works without a GPU and without CuPy, whose own compile step appends ``-ftz=true`` (it would flush denormals, and
the bits would no longer be those of the other lanes). The library comes from the ``nvidia-cuda-nvrtc`` wheel
(``nvidia-cuda-nvrtc-cu12`` for CUDA 12) or from a toolkit. The file knows nothing of kernels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class CompilerMissing(RuntimeError):
    """No NVRTC library was found."""


class CompileError(RuntimeError):
    """NVRTC refused a program; the text holds its log."""


def _wheel_libraries() -> Iterator[Path]:
    """Files of the wheels ``nvidia-cuda-nvrtc`` (cu13) and ``nvidia-cuda-nvrtc-cu12``, newest first."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for sub in ("cu13/lib", "cuda_nvrtc/lib"):
            yield from sorted(Path(folder, sub).glob("libnvrtc.so.*"), reverse=True)


@functools.cache
def _library() -> ctypes.CDLL:
    for candidate in (*map(str, _wheel_libraries()), *_SONAMES):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CompilerMissing(
        "CUDA's runtime compiler (libnvrtc) was not found, and the CUDA kernels are compiled on first use: "
        "pip install 'trilane[cuda13]' (or 'trilane[cuda12]' for a CUDA 12 driver)"
    )


def version() -> tuple[int, int]:
    """Major and minor version of the compiler, e.g. (13, 0)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _check(status: int, call: str) -> None:
    if status:
        text = _library().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise CompileError(f"{call} failed: {text(status).decode()}")


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    """The log or the cubin of a program."""
    library, size = _library(), ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(max(1, size.value))
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw[: size.value]


def compile_cubin(source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    """Compile one program.

    Parameters
    ----------
    source : str
        CUDA C++.
    headers : mapping of name to text
        What ``#include`` finds.
    options : sequence of str
        All options; nothing is added.

    Raises
    ------
    CompilerMissing, CompileError
    """
    library, program = _library(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"trilane.cu", len(headers), texts, names
    )
    _check(created, "nvrtcCreateProgram")
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), arguments):
            log = _fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompileError(f"the CUDA kernels do not compile with {' '.join(options)}:\n{log}")
        return _fetch(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
