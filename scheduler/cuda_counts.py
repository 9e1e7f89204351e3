"""What was done on a GPU since the start: totals of the control thread, and what the GPU alone counts beside them."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from trilane.cuda_threads import WAIT_NAP_S
from trilane.expert import HIT, Geometry
from trilane.gpu_kernels.cuda_device import CudaDevice
from trilane.gpu_kernels.words import TYPES
from trilane.stats import NUM_LANES, LaneTotal, Total


class CudaCounts:
    """Counters of one scheduler.

    Attributes
    ----------
    totals : float64 array by ``stats.Total``
        Of steps with misses; the control thread adds to it.
    begun : int
        Steps that the GPU had counted when counting began.
    """

    def __init__(self, device: CudaDevice, geometry: Geometry) -> None:
        self.totals = np.zeros(Total.SIZE)
        self._device, self._before = device, np.zeros(2, np.int64)
        self._shard_nbytes = float(geometry.shard_nbytes.sum() / geometry.num_shards.sum())

    @property
    def begun(self) -> int:
        return int(self._before[0])

    def begin_anew(self) -> None:
        """Count from now on; the control thread is held."""
        self.totals[:] = 0.0
        self._before = self.on_device()

    def in_all(self) -> NDArray[np.float64]:
        """Totals with the steps that nobody planned; bytes of their hits are an average."""
        totals = self.totals.copy()
        steps, routed = self.on_device() - self._before
        lanes = totals[Total.LANES : Total.SIZE].reshape(NUM_LANES, -1)
        hits = max(0.0, float(routed) - float(lanes[:, LaneTotal.SHARDS].sum()))
        lanes[HIT, LaneTotal.SHARDS] += hits
        lanes[HIT, LaneTotal.NBYTES] += hits * self._shard_nbytes
        totals[Total.STEPS] = max(totals[Total.STEPS], float(steps))
        return totals

    def on_device(self) -> NDArray[np.int64]:
        """Steps and shards routed to, as the GPU counts them now; on any thread, such as one that serves metrics."""
        driver = self._device.driver
        driver.make_current()
        state, stream = np.zeros((), TYPES["State"]), self._device.fill_stream
        driver.to_host(state.ctypes.data, self._device.address["state"], state.nbytes, stream)
        while not driver.finished(stream):
            time.sleep(WAIT_NAP_S)
        return np.array([int(state["clock"]), int(state["routed"])], np.int64)
