"""Where the CUDA kernels run in tests: on the processor through the C++ shim, or on a GPU through CuPy.

Both give the same few things: memory that kernels see, memory that host and kernels see, and a way to launch.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from trilane.gpu_kernels import build
from trilane.gpu_kernels.words import c_header

SHIM = Path(__file__).parent / "cuda_shim"
POISON = 0xFF  # as floats NaN, as integers -1
_FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-sanitize=all", "-fno-exceptions", "-fno-rtti", "-w"]
_ZIG = [sys.executable, "-m", "ziglang", "c++", "-nostdlib++"]  # it would compile a C++ library first


def compiler() -> list[str]:
    """A C++ compiler of this machine, else the one that the ziglang package brings."""
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    return _ZIG


def has_fma() -> bool:
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def build_folder() -> Path:
    """A folder that goes when the interpreter does, with the generated header in it."""
    folder = tempfile.TemporaryDirectory(prefix="cuda-shim-")
    build_folder.keep = folder
    Path(folder.name, "words.cuh").write_text(c_header())
    return Path(folder.name)


@functools.cache
def shim_library(variant: build.Variant | build.Program) -> ctypes.CDLL:
    folder = build_folder()
    source = "kernels.cpp" if isinstance(variant, build.Variant) else f"{variant.kernels[0]}.cpp"
    path = folder / f"{source}{'-'.join(define.rpartition('=')[2] for define in variant.defines)}.so"
    kernels = Path(build.__file__).parent
    machine = ["-mfma"] if has_fma() else []
    command = [*compiler(), *_FLAGS, "-fPIC", "-shared", *machine, *variant.defines]
    command += [f"-I{SHIM}", f"-I{kernels}", f"-I{folder}", str(SHIM / source), "-o", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(path))


def as_bytes(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


class Memory:
    """Bytes with an address. ``set`` writes the first of them, ``get`` is what kernels left there."""

    def __init__(self, array):
        self.array = array
        self.address = array.ctypes.data

    def get(self):
        return self.array

    def set(self, array):
        flat = as_bytes(array)
        self.array[: len(flat)] = flat


def aligned(nbytes, fill):
    """Fresh bytes at a multiple of 256."""
    raw = np.full(nbytes + 256, fill, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


class Shim:
    """The processor: device and mapped memory are the same."""

    multiprocessor_shared_nbytes = 228 << 10

    def __init__(self, variant):
        self.library = shim_library(variant)

    def mapped(self, nbytes, fill=POISON):
        return Memory(aligned(max(nbytes, 64), fill))

    device = mapped

    def launch(self, launch):
        passed = [a.ctypes.data if isinstance(a, np.ndarray) else int(a) for a in launch.arguments]
        kinds = [ctypes.c_int if isinstance(a, np.int32) else ctypes.c_void_p for a in launch.arguments]
        run = getattr(self.library, f"run_{launch.kernel}")
        run.argtypes = [ctypes.c_uint32] * 3 + kinds
        stuck = run(*launch.grid, launch.threads, *passed)
        assert stuck == 0, f"{launch.kernel}: no thread of block {stuck - 1} can move"

    def launch_chain(self, launches, seed, host, window=24):
        """Kernels that may overlap, as programmatic launches do; blocks take turns at random, ``host`` is called."""
        self.library.begin_chain()
        for launch in launches:
            self.launch(launch)
        call = ctypes.CFUNCTYPE(None)(host)
        run = self.library.run_chain
        run.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.CFUNCTYPE(None)]
        stuck = run(seed, window, call)
        assert stuck == 0, f"a chain of {len(launches)} kernels: no thread of block {stuck - 1} can move"

    def synchronize(self):
        pass


class DeviceMemory:
    def __init__(self, nbytes, fill):
        import cupy

        self.device = cupy.full(nbytes, fill, cupy.uint8)
        self.address = self.device.data.ptr

    def get(self):
        return self.device.get()

    def set(self, array):
        flat = as_bytes(array)
        self.device[: len(flat)].set(flat)


class Gpu:
    """A GPU: device memory, pinned memory, and a stream of its own."""

    def __init__(self, variant):
        import cupy

        from trilane.gpu_kernels.kernels import Kernels

        self.cupy = cupy
        self.kernels = Kernels(variant)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        attributes = cupy.cuda.Device().attributes
        self.multiprocessor_shared_nbytes = int(attributes["MaxSharedMemoryPerMultiprocessor"])
        self.kept = []

    def device(self, nbytes, fill=POISON):
        return DeviceMemory(max(nbytes, 64), fill)

    def mapped(self, nbytes, fill=POISON):
        nbytes = max(nbytes, 64)
        pinned = self.cupy.cuda.PinnedMemory(nbytes, 2)
        self.kept.append(pinned)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pinned.ptr))
        array[:] = fill
        return Memory(array)

    def launch(self, launch):
        self.cupy.cuda.runtime.deviceSynchronize()  # the arrays above are set on another stream
        self.kernels.prepare(launch)
        self.kernels.launch(launch, self.stream)
        self.stream.synchronize()

    def synchronize(self):
        self.stream.synchronize()


@functools.cache
def gpu_missing() -> str:
    """Why no GPU can be used, empty if one can."""
    try:
        import cupy

        return "" if cupy.cuda.is_available() else "needs a GPU: the driver shows none"
    except Exception as error:
        return f"needs a GPU: {type(error).__name__}: {error}"
