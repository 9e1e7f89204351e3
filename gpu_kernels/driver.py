"""NVIDIA's driver through its C interface: memory, streams, modules, launches, graphs; no other library is needed.

:class:`Driver` is what the CUDA device needs of it, and nothing more, so that a machine without a GPU can play it.
The primary context is used, which CuPy and torch use too: their arrays and streams are valid here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trilane.gpu_kernels.driver_calls import Call, launch_all, launch_graph, make_table
from trilane.gpu_kernels.launch import Launch

PORTABLE, MAPPED = 1, 2  # of pinned memory
NON_BLOCKING = 1  # of streams: never waits for the legacy stream
WITHOUT_TIMING = 2  # of events
NOT_READY = 600
COMPUTE_MAJOR, COMPUTE_MINOR, MULTIPROCESSOR_SHARED = 75, 76, 81  # device attributes
MAX_DYNAMIC_SHARED, SHARED_CARVEOUT = 8, 9  # function attributes
CAPTURE_RELAXED = 2
DEFAULT_SHARED_NBYTES = 48 << 10
_REGISTERED: dict[int, tuple[int, int]] = {}  # by address: bytes that are pinned there, and for how many
_REGISTERED_LOCK = threading.Lock()
EARLY_START_ARCHITECTURE = 90  # from which a kernel can start before the one before it has ended


class DriverMissing(RuntimeError):
    """There is no driver, or it shows no GPU."""


class DriverError(RuntimeError):
    """The driver refused a call; the text names the call and the driver's reason."""


@dataclass(frozen=True)
class Encoded:
    """Kernel launches in order: int64 (launches, LAUNCH_WORDS) words, and the memory that these point to."""

    words: np.ndarray
    held: Any

    @classmethod
    def joined(cls, parts: Sequence[Encoded]) -> Encoded:
        """The launches of all parts, one behind the other."""
        return cls(np.concatenate([part.words for part in parts]), parts)

    def launch(self, table: np.ndarray, stream: int) -> int:
        """Put them on a stream; the driver's status."""
        return int(launch_all(table.ctypes.data, self.words.ctypes.data, len(self.words), stream))


def put_graph(driver: Driver, graph: int, stream: int, what: str) -> None:
    """Launch a graph on a stream; DriverError, which says ``what`` was not launched, where the driver refuses."""
    if status := launch_graph(driver.table.ctypes.data, graph, stream):
        raise DriverError(f"{what} was not launched: CUDA error {status}")


def launch_words(function: int, launch: Launch, pointers: int, early: bool = False) -> list[int]:
    """The arguments of cuLaunchKernel, the stream to be filled in when it is called; whether it may start early."""
    x, y = launch.grid
    return [function, x, y, 1, launch.threads, 1, 1, launch.shared_nbytes, 0, pointers, 0, int(early)]


class Driver(Protocol):
    """What the CUDA device needs of a driver. Addresses and handles are integers."""

    table: np.ndarray  # int64, by Call: functions for compiled code
    context: int
    multiprocessor_shared_nbytes: int  # shared memory of a multiprocessor

    def make_current(self) -> None: ...
    def describe(self) -> str: ...
    def name(self) -> str: ...
    def pci_address(self) -> str: ...
    def free_nbytes(self) -> int: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def allocate_mapped(self, nbytes: int) -> int: ...
    def free_mapped(self, address: int) -> None: ...
    def register(self, address: int, nbytes: int) -> str: ...
    def unregister(self, address: int) -> None: ...
    def make_stream(self, priority: int = 0) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def finished(self, stream: int) -> bool: ...
    def synchronize(self) -> None: ...
    def is_capturing(self, stream: int) -> bool: ...
    def order_after(self, stream: int, earlier: int) -> None: ...
    def make_event(self) -> int: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def event_done(self, event: int) -> bool: ...
    def destroy_event(self, event: int) -> None: ...
    def to_device(self, destination: int, source: int, nbytes: int, stream: int) -> None: ...
    def to_host(self, destination: int, source: int, nbytes: int, stream: int) -> None: ...
    def load_kernels(self, variant: Any) -> int: ...
    def encode(self, kernels: int, launches: Sequence[Launch], early: bool = True) -> Encoded: ...
    def make_graph(self, encoded: Encoded) -> int: ...
    def destroy_graph(self, graph: int) -> None: ...
    def close(self, streams: Sequence[int] = ()) -> None: ...


def _load() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverMissing(
            f"device 'cuda': NVIDIA's driver library was not found ({error}); install the NVIDIA driver, in a "
            "container pass the GPU through (docker run --gpus all), or use device='host'"
        ) from None


class CudaDriver:
    """The driver of one GPU, its primary context current on the calling thread.

    Parameters
    ----------
    index : int
        Which of the visible GPUs.

    Raises
    ------
    DriverMissing, DriverError
    """

    def __init__(self, index: int = 0) -> None:
        self._library = _load()
        self._library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        self._device = self._open(index)
        self.context = self._out("cuDevicePrimaryCtxRetain", self._device)
        self.make_current()
        names = {
            Call.SET_CONTEXT: "cuCtxSetCurrent", Call.COPY_TO_DEVICE: "cuMemcpyHtoDAsync_v2",
            Call.WRITE_VALUE: "cuStreamWriteValue32_v2", Call.LAUNCH_KERNEL: "cuLaunchKernel",
            Call.LAUNCH_GRAPH: "cuGraphLaunch", Call.LAUNCH_EARLY: "cuLaunchKernelEx",
            Call.COPY_TO_HOST: "cuMemcpyDtoHAsync_v2",
        }  # fmt: skip
        self.table = make_table({place: self._address(name) for place, name in names.items()})
        if hasattr(self._library, "cuMemcpyBatchAsync"):
            self.table[Call.COPY_BATCH] = self._address("cuMemcpyBatchAsync")
        self.starts_early = self.architecture >= EARLY_START_ARCHITECTURE
        self.multiprocessor_shared_nbytes = self._attribute(MULTIPROCESSOR_SHARED)
        self._modules: list[int] = []
        self._functions: dict[tuple[int, str], int] = {}

    def _open(self, index: int) -> int:
        status, count = self._library.cuInit(0), ctypes.c_int()
        if status == 0:
            self._check(self._library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        if not 0 <= index < count.value:
            why = self._text(status) if status else f"it shows {count.value} GPUs"
            raise DriverMissing(
                f"device 'cuda': GPU {index} cannot be used: {why}; check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
                "use device='host'"
            )
        device = ctypes.c_int()
        self._check(self._library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        return device.value

    # --------------------------------------------------------------------------------------------- calls
    def _text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {status})"

    def _check(self, status: int, name: str) -> None:
        if status:
            raise DriverError(f"{name}: {self._text(status)}")

    def _do(self, name: str, *args: Any) -> None:
        """Call a driver function with integers (64 bits) or ready ctypes values."""
        passed = [ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args]
        self._check(getattr(self._library, name)(*passed), name)

    def _out(self, name: str, *args: Any) -> int:
        """The same for a function that returns a handle or an address through its first argument."""
        value = ctypes.c_uint64()
        self._do(name, ctypes.byref(value), *args)
        return value.value

    def _address(self, name: str) -> int:
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self._do("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    def make_current(self) -> None:
        """Make the context current on the calling thread."""
        self._do("cuCtxSetCurrent", self.context)

    def name(self) -> str:
        """The GPU's name."""
        name = ctypes.create_string_buffer(256)
        self._do("cuDeviceGetName", name, ctypes.c_int(256), ctypes.c_int(self._device))
        return name.value.decode()

    def describe(self) -> str:
        """The GPU's name and compute capability."""
        major, minor = self._attribute(COMPUTE_MAJOR), self._attribute(COMPUTE_MINOR)
        return f"{self.name()} (compute capability {major}.{minor})"

    def pci_address(self) -> str:
        """Where the GPU is on the PCI bus: domain:bus:device.function, hexadecimal."""
        address = ctypes.create_string_buffer(32)
        self._do("cuDeviceGetPCIBusId", address, ctypes.c_int(32), ctypes.c_int(self._device))
        return address.value.decode().lower()

    # -------------------------------------------------------------------------------------------- memory
    def free_nbytes(self) -> int:
        """Device memory that is free now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory."""
        address = self._out("cuMemAlloc_v2", max(1, nbytes))
        self._do("cuMemsetD8_v2", address, ctypes.c_ubyte(0), max(1, nbytes))
        return address

    def free(self, address: int) -> None:
        self._do("cuMemFree_v2", address)

    def allocate_mapped(self, nbytes: int) -> int:
        """Zeroed pinned host memory that the device sees at the same address."""
        address = self._out("cuMemHostAlloc", max(1, nbytes), ctypes.c_uint(PORTABLE | MAPPED))
        ctypes.memset(address, 0, max(1, nbytes))
        return address

    def free_mapped(self, address: int) -> None:
        self._do("cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> str:
        """Pin host memory; an empty text, or the driver's reason.

        What another one has pinned is shared: a process can register memory once, and has one store for several
        schedulers.
        """
        with _REGISTERED_LOCK:
            size, count = _REGISTERED.get(address, (nbytes, 0))
            if count == 0:
                status = self._library.cuMemHostRegister_v2(
                    ctypes.c_uint64(address), ctypes.c_uint64(nbytes), ctypes.c_uint(PORTABLE | MAPPED)
                )
                if status:
                    return self._text(status)
            elif size < nbytes:
                return f"{size} of {nbytes} bytes at this place are pinned for another scheduler"
            _REGISTERED[address] = size, count + 1
        return ""

    def unregister(self, address: int) -> None:
        """Give a registration back; the last who has it ends it."""
        with _REGISTERED_LOCK:
            size, count = _REGISTERED.pop(address, (0, 1))
            if count > 1:
                _REGISTERED[address] = size, count - 1
                return
            self._do("cuMemHostUnregister", address)

    # ------------------------------------------------------------------------------------------- streams
    def make_stream(self, priority: int = 0) -> int:
        """A stream of its own; a lower number runs first."""
        return self._out("cuStreamCreateWithPriority", ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority))

    def destroy_stream(self, stream: int) -> None:
        self._do("cuStreamDestroy_v2", stream)

    def finished(self, stream: int) -> bool:
        """Whether all that was put on a stream is done."""
        mode = ctypes.c_int(CAPTURE_RELAXED)  # a capture of this thread may forbid to ask about other streams
        self._do("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        status = self._library.cuStreamQuery(ctypes.c_uint64(stream))
        self._do("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if status != NOT_READY:
            self._check(status, "cuStreamQuery")
        return status != NOT_READY

    def synchronize(self) -> None:
        """Wait until the GPU has done all that is on any stream of the context."""
        self._do("cuCtxSynchronize")

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream records a graph now."""
        value = ctypes.c_int()
        self._do("cuStreamIsCapturing", stream, ctypes.byref(value))
        return value.value != 0

    def order_after(self, stream: int, earlier: int) -> None:
        """What comes on ``stream`` from now on waits for what is on ``earlier`` now."""
        event = self.make_event()
        try:
            self.record_event(event, earlier)
            self.wait_event(stream, event)
        finally:
            self.destroy_event(event)

    def make_event(self) -> int:
        """An event; until it is recorded it counts as done."""
        return self._out("cuEventCreate", ctypes.c_uint(WITHOUT_TIMING))

    def record_event(self, event: int, stream: int) -> None:
        """The event is done when all that is on the stream now is done."""
        self._do("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """What comes on ``stream`` from now on waits for the event as it was recorded last."""
        self._do("cuStreamWaitEvent", stream, event, ctypes.c_uint(0))

    def event_done(self, event: int) -> bool:
        """Whether what the event was recorded for is done."""
        status = self._library.cuEventQuery(ctypes.c_uint64(event))
        if status != NOT_READY:
            self._check(status, "cuEventQuery")
        return status != NOT_READY

    def destroy_event(self, event: int) -> None:
        self._do("cuEventDestroy_v2", event)

    def to_device(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._do("cuMemcpyHtoDAsync_v2", destination, source, nbytes, stream)

    def to_host(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._do("cuMemcpyDtoHAsync_v2", destination, source, nbytes, stream)

    # ------------------------------------------------------------------------------------------- kernels
    @property
    def architecture(self) -> int:
        """10 * major + minor of the compute capability."""
        return 10 * self._attribute(COMPUTE_MAJOR) + self._attribute(COMPUTE_MINOR)

    def load_kernels(self, variant: Any) -> int:
        """Load the kernels of a variant or program (build.py); a number for :meth:`encode`. At once, not lazily."""
        from trilane.gpu_kernels.build import cubin

        module = self._out("cuModuleLoadData", ctypes.c_char_p(cubin(variant, self.architecture)))
        for name in variant.kernels:
            function = self._out("cuModuleGetFunction", module, ctypes.c_char_p(name.encode()))
            self._do("cuFuncSetAttribute", function, ctypes.c_int(SHARED_CARVEOUT), ctypes.c_int(100))  # one for all
            self._functions[module, name] = function
        self._modules.append(module)
        return module

    def encode(self, kernels: int, launches: Sequence[Launch], early: bool = True) -> Encoded:
        """Launches as the words that :func:`.driver_calls.launch_all` takes; their arguments stay as they are now.

        ``early``: kernels may start before the one before them has ended, where the GPU can do that.
        """
        rows, held = [], []
        for launch in launches:
            function = self._functions[kernels, launch.kernel]
            if launch.shared_nbytes > DEFAULT_SHARED_NBYTES:
                shared = ctypes.c_int(launch.shared_nbytes)
                self._do("cuFuncSetAttribute", function, ctypes.c_int(MAX_DYNAMIC_SHARED), shared)
            values = [np.array(argument) for argument in launch.arguments]
            pointers = np.array([value.ctypes.data for value in values], np.uint64)
            rows.append(launch_words(function, launch, int(pointers.ctypes.data), early and self.starts_early))
            held.append((pointers, values))
        return Encoded(np.array(rows, np.int64), held)

    def make_graph(self, encoded: Encoded) -> int:
        """Instantiate a graph that launches encoded kernels in order."""
        stream = self.make_stream()
        try:
            self._do("cuStreamBeginCapture_v2", stream, ctypes.c_int(CAPTURE_RELAXED))
            status = encoded.launch(self.table, stream)
            graph = ctypes.c_uint64()
            self._do("cuStreamEndCapture", stream, ctypes.byref(graph))
            self._check(status, "cuLaunchKernel")
            made = self._out("cuGraphInstantiateWithFlags", graph.value, ctypes.c_uint64(0))
            self._do("cuGraphDestroy", graph.value)
        finally:
            self.destroy_stream(stream)
        return made

    def destroy_graph(self, graph: int) -> None:
        self._do("cuGraphExecDestroy", graph)

    def close(self, streams: Sequence[int] = ()) -> None:
        """Give modules, streams and the context back; memory that was not freed goes with the process."""
        for stream in streams:
            self.destroy_stream(stream)
        for module in self._modules:
            self._do("cuModuleUnload", module)
        self._modules = []
        self._library.cuDevicePrimaryCtxRelease_v2(self._device)
