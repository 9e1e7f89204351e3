"""Tokens as launches of one CUDA graph of all layers, timed by the GPU's own events.

Inputs and outputs are in device memory. A few graphs take turns, each with ids of its own, so that the host can launch
some tokens ahead and the GPU never waits for it. A token's ids are copied while nothing of the same graph is
running, and waited for: no copy stands in a queue behind a graph that itself waits for copies.
"""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

import numpy as np

from trilane.gpu_kernels.driver import Encoded
from trilane.gpu_kernels.driver_calls import launch_graph
from trilane.host_runner import StepInput

AHEAD = 4  # graphs, and so tokens that are launched at most before the first of them is over
BLOCKING_SYNC = 1  # an event that is waited for asleep
NAP_S = 10e-6


class GpuEvents:
    """The driver's events: a place in a stream, and the time between two of them."""

    def __init__(self, driver):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._made = []

    def _do(self, name, *args):
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def record(self, stream):
        """A new event on a stream."""
        event = ctypes.c_void_p()
        self._do("cuEventCreate", ctypes.byref(event), ctypes.c_uint(BLOCKING_SYNC))
        self._made.append(event)
        self._do("cuEventRecord", event, ctypes.c_void_p(stream))
        return event

    def wait(self, event):
        """Until the GPU is there."""
        self._do("cuEventSynchronize", event)

    def us(self, begin, end):
        """us of the GPU's clock between two events that are over."""
        ms = ctypes.c_float()
        self._do("cuEventElapsedTime", ctypes.byref(ms), begin, end)
        return 1e3 * ms.value

    def close(self):
        for event in self._made:
            self._library.cuEventDestroy_v2(event)
        self._made = []


class HostEvents:
    """The same with the host's clock, where a driver is played: an event waits for its stream."""

    def __init__(self, driver):
        self._driver = driver

    def record(self, stream):
        while not self._driver.finished(stream):
            time.sleep(NAP_S)
        return time.perf_counter()

    def wait(self, event):
        """Nothing: it is over."""

    def us(self, begin, end):
        return 1e6 * (end - begin)

    def close(self):
        """Nothing is held."""


def events_of(driver):
    """The events that go with a driver."""
    return GpuEvents(driver) if type(driver).__name__ == "CudaDriver" else HostEvents(driver)


class TokenTimes(NamedTuple):
    """us of each token by the GPU's events, and s of all of them by the host's clock."""

    us: np.ndarray
    wall_s: float


class TokenGraphs:
    """All layers of a scheduler for one token of one row.

    Parameters
    ----------
    scheduler : ExpertScheduler
        On a GPU.
    x : float32 (hidden,)
        The input of every layer.
    layers : sequence of int, optional
        Which layers a graph runs, in order; None: all once.
    ahead : int
        Graphs that take turns; 1: each token is waited for.
    """

    def __init__(self, scheduler, top_k, x, layers=None, ahead=AHEAD):
        self.runner, self.top_k, self.ahead = scheduler._runner, top_k, ahead
        self.layers = list(range(scheduler.store.num_layers)) if layers is None else list(layers)
        self.driver, self.stream = self.runner.driver, self.runner.device.work_stream
        self.side = self.driver.make_stream()
        self.hidden, self.num_ids = scheduler.store.hidden, len(self.layers) * top_k
        sizes = (4 * self.hidden, 4 * top_k, 4 * self.num_ids * ahead, 4 * self.hidden * len(self.layers))
        self.blocks = [self.driver.allocate(nbytes) for nbytes in sizes]
        self._put(self.blocks[0], np.asarray(x, np.float32))
        self._put(self.blocks[1], np.full(top_k, 1 / top_k, np.float32))
        self.encoded = [self._encode(turn) for turn in range(ahead)]
        self.graphs = [self.driver.make_graph(encoded) for encoded in self.encoded]

    def _encode(self, turn):
        x, weights, ids, out = self.blocks
        row, words, held = 4 * self.hidden, [], []
        for place, layer in enumerate(self.layers):
            step = StepInput(layer, 1, self.top_k, x, row, "f32", out + row * place, row, "f32")
            where = ids + 4 * (self.num_ids * turn + self.top_k * place)
            encoded = self.runner.launches.encode(step, where, 4, weights)
            words.append(encoded.words)
            held.append(encoded)
        return Encoded(np.concatenate(words), held)

    def _put(self, address, array):
        """Copy to the device and wait; only this copy's stream is waited for."""
        kept = np.ascontiguousarray(array)
        self.driver.to_device(address, kept.ctypes.data, kept.nbytes, self.side)
        while not self.driver.finished(self.side):
            pass

    def run(self, trace):
        """All tokens of a trace (tokens, layers, top_k).

        Raises
        ------
        WorkerError, RoutingError
            What the runner has found.
        """
        events, pairs = events_of(self.driver), []
        table = self.driver.table.ctypes.data
        try:
            begin = time.perf_counter()
            for token, ids in enumerate(np.ascontiguousarray(trace, np.int32)):
                turn = token % self.ahead
                if token >= self.ahead:
                    events.wait(pairs[token - self.ahead][1])
                    self.runner.check()
                self._put(self.blocks[2] + 4 * self.num_ids * turn, ids)
                first = events.record(self.stream)
                status = launch_graph(table, self.graphs[turn], self.stream)
                if status:
                    raise RuntimeError(f"a graph was not launched: CUDA error {status}")
                pairs.append((first, events.record(self.stream)))
            events.wait(pairs[-1][1])
            wall_s = time.perf_counter() - begin
            self.runner.check()
            return TokenTimes(np.array([events.us(*pair) for pair in pairs]), wall_s)
        finally:
            events.close()

    def outputs(self):
        """float32 (layers, hidden): what the last token gave."""
        out = np.zeros((len(self.layers), self.hidden), np.float32)
        self.driver.to_host(out.ctypes.data, self.blocks[3], out.nbytes, self.side)
        while not self.driver.finished(self.side):
            time.sleep(NAP_S)
        return out

    def close(self):
        for graph in self.graphs:
            self.driver.destroy_graph(graph)
        for block in self.blocks:
            self.driver.free(block)
        self.driver.destroy_stream(self.side)
