"""Events of a GPU: places in a stream, and the time between two of them by the GPU's own clock.

Where another driver than NVIDIA's is played, the host's clock does it: an event then waits for its stream.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

from trilane.gpu_kernels.driver import CudaDriver, Driver, DriverError

BLOCKING_SYNC = 1  # who waits for an event sleeps
NAP_S = 10e-6


class Events(Protocol):
    """Places in streams."""

    def record(self, stream: int) -> Any:
        """A new event behind what is on a stream now."""

    def wait(self, event: Any) -> None:
        """Until the GPU is there."""

    def us(self, begin: Any, end: Any) -> float:
        """us between two events that are over."""

    def close(self) -> None:
        """Give all events back."""


class GpuEvents:
    """The driver's events; the context must be current on the calling thread."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._made: list[ctypes.c_void_p] = []

    def _do(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise DriverError(f"{name}: CUDA error {status}")

    def record(self, stream: int) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._do("cuEventCreate", ctypes.byref(event), ctypes.c_uint(BLOCKING_SYNC))
        self._made.append(event)
        self._do("cuEventRecord", event, ctypes.c_void_p(stream))
        return event

    def wait(self, event: ctypes.c_void_p) -> None:
        self._do("cuEventSynchronize", event)

    def us(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        ms = ctypes.c_float()
        self._do("cuEventElapsedTime", ctypes.byref(ms), begin, end)
        return 1e3 * ms.value

    def close(self) -> None:
        for event in self._made:
            self._library.cuEventDestroy_v2(event)
        self._made = []


class HostEvents:
    """The host's clock."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def record(self, stream: int) -> float:
        while not self._driver.finished(stream):
            time.sleep(NAP_S)
        return time.perf_counter()

    def wait(self, event: float) -> None:
        """Nothing: it is over."""

    def us(self, begin: float, end: float) -> float:
        return 1e6 * (end - begin)

    def close(self) -> None:
        """Nothing is held."""


def events_of(driver: Driver) -> Events:
    """Events that go with a driver."""
    return GpuEvents() if isinstance(driver, CudaDriver) else HostEvents(driver)
