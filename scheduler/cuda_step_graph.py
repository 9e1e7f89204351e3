"""Several layer-steps in one graph of the GPU, with inputs and outputs in its memory: for measurements.

One launch runs all of them one behind the other, so the time of one is the launch's share and the interpreter's part
in it is small. Inputs may change between two launches: they are copied to the GPU before each, as part of the time.
Nothing here knows lanes or costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trilane.cpu_kernels.formats import align_up
from trilane.cuda_errors import device_errors
from trilane.cuda_runner import CudaRunner
from trilane.gpu_kernels.cuda_device import ALIGNMENT, array_at
from trilane.gpu_kernels.driver import Encoded, put_graph
from trilane.host_runner import StepInput


class GraphStep(NamedTuple):
    """A layer-step of ``rows`` rows with ``top_k`` experts each."""

    layer: int
    rows: int
    top_k: int


class StepGraph:
    """A graph of layer-steps, and what they read and write.

    Parameters
    ----------
    runner : CudaRunner
    steps : sequence of GraphStep
        All with as many rows; they share the hidden states.
    pause : Encoded, optional
        What the GPU does before each step.

    Attributes
    ----------
    hidden : float32 (rows, hidden)
    ids : list of int64 (rows, top_k)
        Of each step; -1 at first: nothing is routed to.
    weights : list of float32 (rows, top_k)
    """

    def __init__(self, runner: CudaRunner, steps: Sequence[GraphStep], pause: Encoded | None = None) -> None:
        self.runner, self.steps, rows, hidden = runner, tuple(steps), steps[0].rows, runner.store.hidden
        assert all(step.rows == rows for step in steps)
        shapes: list[tuple[Any, tuple[int, int]]] = [(np.float32, (rows, hidden))]
        for step in steps:
            shapes += [(np.int64, (rows, step.top_k)), (np.float32, (rows, step.top_k))]
        starts = np.cumsum(
            [0, *(align_up(np.dtype(kind).itemsize * a * b, ALIGNMENT) for kind, (a, b) in shapes)]
        ).tolist()
        self._nbytes, self._out_nbytes = starts[-1], align_up(4 * rows * hidden, ALIGNMENT)
        self._graph = self._device = 0
        self._mapped = runner.driver.allocate_mapped(self._nbytes + len(steps) * self._out_nbytes)
        arrays = [array_at(self._mapped + at, *shape) for at, shape in zip(starts[:-1], shapes, strict=True)]
        self.hidden, self.ids, self.weights = arrays[0], arrays[1::2], arrays[2::2]
        for ids, weights in zip(self.ids, self.weights, strict=True):
            ids[:], weights[:] = -1, 1.0 / ids.shape[1]
        with device_errors():
            self._device = runner.driver.allocate(self._nbytes + len(steps) * self._out_nbytes)
            encoded = [self._encode(k, *starts[1 + 2 * k :][:2]) for k in range(len(steps))]
            parts = [part for step in encoded for part in ([pause, step] if pause else [step])]
            self._encoded = Encoded.joined(parts)
            self._graph = runner.driver.make_graph(self._encoded)

    def _encode(self, k: int, ids: int, weights: int) -> Encoded:
        step, stride, x = self.steps[k], 4 * self.runner.store.hidden, self._device
        out = x + self._nbytes + k * self._out_nbytes
        inputs = StepInput(step.layer, step.rows, step.top_k, x, stride, "f32", out, stride, "f32")
        return self.runner.launches.encode(inputs, x + ids, 8, x + weights)

    def run(self) -> float:
        """Launch it and wait, looking at the stream all the time; us of one step.

        Raises
        ------
        DeviceError, WorkerError, RoutingError
        """
        stream, driver = self.runner.device.work_stream, self.runner.driver
        begin = time.perf_counter()
        with device_errors():
            driver.to_device(self._device, self._mapped, self._nbytes, stream)
            put_graph(driver, self._graph, stream, f"the graph of {len(self.steps)} steps")
            while not driver.finished(stream):
                pass
        us = 1e6 * (time.perf_counter() - begin) / len(self.steps)
        self.runner.check()
        return us

    def outputs(self) -> list[np.ndarray]:
        """The last run's output of each step, float32 (rows, hidden)."""
        stream, driver, nbytes = self.runner.device.work_stream, self.runner.driver, len(self.steps) * self._out_nbytes
        target = self._mapped + self._nbytes
        with device_errors():
            driver.to_host(target, self._device + self._nbytes, nbytes, stream)
        self.runner.wait_for(stream)
        shape = self.hidden.shape
        return [array_at(target + k * self._out_nbytes, np.float32, shape).copy() for k in range(len(self.steps))]

    def close(self) -> None:
        """Give graph and memory back."""
        if self._graph:
            self.runner.driver.destroy_graph(self._graph)
        if self._device:
            self.runner.driver.free(self._device)
        if self._mapped:
            self.runner.driver.free_mapped(self._mapped)
        self._graph = self._device = self._mapped = 0
