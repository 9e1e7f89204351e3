"""Copies between the store's pinned arena, other host memory and a GPU, by size: rates of the copy engines.

Copies are issued by compiled code, as the control thread does it, so that small ones do not wait for an interpreter.
They take one part of host memory after the other, more than caches hold where there is so much.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from trilane.cuda_errors import device_errors
from trilane.cuda_runner import CudaRunner
from trilane.errors import ProbeError
from trilane.gpu_kernels.cuda_device import array_at
from trilane.gpu_kernels.driver import DriverError
from trilane.gpu_kernels.driver_calls import Call, copy_ring
from trilane.profile import Curve

COPY_NBYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
SAMPLES = 5
LEAST_COPIES, MOST_COPIES = 24, 256  # of a sample
SAMPLE_NBYTES = 16 << 20  # of small copies
HOST_NBYTES = 64 << 20  # of memory of our own, pinned and pageable


class CopyProbe:
    """Copies to and from a piece of device memory of its own.

    Parameters
    ----------
    runner : CudaRunner
        Pinned memory to read is its store's.

    Attributes
    ----------
    most : int
        Bytes of the largest copy from pinned memory; 0 where nothing is pinned.
    stream : int
        Where copies run.
    """

    def __init__(self, runner: CudaRunner) -> None:
        self.runner, self.driver, self.stream = runner, runner.driver, runner.device.fill_stream
        pinned = runner.device.pinned
        self.room = min(runner.pinned_nbytes, pinned.segment_nbytes) if pinned else 0  # no copy leaves a registration
        self.sizes = [nbytes for nbytes in COPY_NBYTES if nbytes <= self.room]
        self.most = max(self.sizes, default=0)
        self.target = self.driver.allocate(COPY_NBYTES[-1])
        self._next = 0

    def put(self, nbytes: int, count: int) -> None:
        """Put copies on the stream, from one part of the arena after the other."""
        self._next = self._issue(Call.COPY_TO_DEVICE, self.runner.store.arena.address, self.room, nbytes, count)

    def _issue(self, call: Call, host: int, room: int, nbytes: int, count: int) -> int:
        table = self.driver.table.ctypes.data
        found = int(copy_ring(table, int(call), self.target, host, room, self._next, nbytes, count, self.stream))
        if found < 0:
            with device_errors():
                raise DriverError(f"{call.name.lower()} of {nbytes} bytes: CUDA error {-found}")
        return found

    def rate(self, nbytes: int) -> float:
        """GB/s of copies of a size from the pinned arena."""
        return self._rate(nbytes, lambda count: self.put(nbytes, count))

    def _rate(self, nbytes: int, put: Callable[[int], None]) -> float:
        """GB/s of copies that ``put`` puts on the stream, the median of some samples."""
        count, found = min(MOST_COPIES, max(LEAST_COPIES, SAMPLE_NBYTES // nbytes)), []
        put(2)
        self._wait()
        for _ in range(SAMPLES):
            begin = time.perf_counter()
            put(count)
            self._wait()
            found.append(1e-9 * nbytes * count / (time.perf_counter() - begin))
        return float(np.median(found))

    def _wait(self) -> None:
        while not self.driver.finished(self.stream):
            pass

    def curve(self) -> Curve | None:
        """GB/s to the device by size; None where nothing is pinned."""
        if not self.sizes:
            return None
        return Curve(tuple(map(float, self.sizes)), tuple(self.rate(nbytes) for nbytes in self.sizes))

    def curves(self) -> dict[str, Curve | None]:
        """Both ways, pinned and pageable, by their names in the profile; checked first.

        Raises
        ------
        ProbeError
            Other bytes came back than were sent.
        """
        self._check()
        found = {"pinned_to_device": self.curve()}
        host = self.driver.allocate_mapped(HOST_NBYTES)
        try:
            found["pinned_to_host"] = self._own_curve(Call.COPY_TO_HOST, host)
        finally:
            self.driver.free_mapped(host)
        pageable = np.ones(HOST_NBYTES, np.uint8)  # pages that nobody wrote are all one page
        for name, call in (("pageable_to_device", Call.COPY_TO_DEVICE), ("pageable_to_host", Call.COPY_TO_HOST)):
            found[name] = self._own_curve(call, pageable.ctypes.data)
        return found

    def _own_curve(self, call: Call, host: int) -> Curve:
        """GB/s by size, with host memory that is not the store's."""
        sizes = [nbytes for nbytes in COPY_NBYTES if nbytes <= HOST_NBYTES]
        rates = []
        for nbytes in sizes:

            def put(count: int, nbytes: int = nbytes) -> None:
                self._next = self._issue(call, host, HOST_NBYTES, nbytes, count)

            rates.append(self._rate(nbytes, put))
        self._next = 0
        return Curve(tuple(map(float, sizes)), tuple(rates))

    def _check(self) -> None:
        """Bytes that go to the device come back as they were."""
        sent = np.random.default_rng(0).integers(0, 256, COPY_NBYTES[0], np.uint8)
        back = self.driver.allocate_mapped(sent.nbytes)
        try:
            self.driver.to_device(self.target, sent.ctypes.data, sent.nbytes, self.stream)
            self._wait()
            self.driver.to_host(back, self.target, sent.nbytes, self.stream)
            self._wait()
            if not np.array_equal(array_at(back, np.uint8, sent.shape), sent):
                raise ProbeError("copies brought other bytes than were sent, so their rates are worthless")
        finally:
            self.driver.free_mapped(back)

    def close(self) -> None:
        """Give the device memory back."""
        if self.target:
            self.driver.free(self.target)
        self.target = 0
