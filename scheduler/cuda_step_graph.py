"""Several layer-steps in one graph of the GPU, their ids in mapped memory: for measurements.

One launch runs all of them one behind the other, so the time of one is the launch's share and the interpreter's part
in it is small. Ids may change between two launches; nothing here knows lanes or costs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trilane.cuda_errors import device_errors
from trilane.cuda_runner import CudaRunner
from trilane.gpu_kernels.driver import DriverError, Encoded
from trilane.gpu_kernels.driver_calls import launch_graph
from trilane.host_runner import StepInput

ALIGNMENT = 256


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

    Attributes
    ----------
    hidden : float32 (rows, hidden)
    ids : list of int64 (rows, top_k)
        Of each step; -1 at first: nothing is routed to.
    weights : list of float32 (rows, top_k)
    out : list of float32 (rows, hidden)
    """

    def __init__(self, runner: CudaRunner, steps: Sequence[GraphStep]) -> None:
        self.runner, self.steps, rows, hidden = runner, tuple(steps), steps[0].rows, runner.store.hidden
        assert all(step.rows == rows for step in steps)
        shapes: list[tuple[Any, tuple[int, int]]] = [(np.float32, (rows, hidden))]
        for step in steps:
            routing = (rows, step.top_k)
            shapes += [(np.int64, routing), (np.float32, routing), (np.float32, (rows, hidden))]
        sizes = [-(-np.dtype(kind).itemsize * a * b // ALIGNMENT) * ALIGNMENT for kind, (a, b) in shapes]
        self._graph, self._block = 0, runner.driver.allocate_mapped(sum(sizes))
        starts = [self._block + start for start in np.cumsum([0, *sizes[:-1]]).tolist()]
        arrays = [_array_at(start, kind, shape) for start, (kind, shape) in zip(starts, shapes, strict=True)]
        self.hidden, self.ids, self.weights, self.out = arrays[0], arrays[1::3], arrays[2::3], arrays[3::3]
        for ids, weights in zip(self.ids, self.weights, strict=True):
            ids[:], weights[:] = -1, 1.0 / ids.shape[1]
        encoded = [self._encode(step, starts[0], *starts[1 + 3 * k :][:3]) for k, step in enumerate(steps)]
        self._encoded = Encoded(np.concatenate([part.words for part in encoded]), encoded)
        with device_errors():
            self._graph = runner.driver.make_graph(self._encoded)

    def _encode(self, step: GraphStep, x: int, ids: int, weights: int, out: int) -> Encoded:
        stride = 4 * self.runner.store.hidden
        inputs = StepInput(step.layer, step.rows, step.top_k, x, stride, "f32", out, stride, "f32")
        return self.runner.launches.encode(inputs, ids, 8, weights)

    def run(self) -> float:
        """Launch it and wait, looking at the stream all the time; us of one step.

        Raises
        ------
        DeviceError, WorkerError, RoutingError
        """
        stream, driver = self.runner.device.work_stream, self.runner.driver
        begin = time.perf_counter()
        with device_errors():
            if status := launch_graph(driver.table.ctypes.data, self._graph, stream):
                raise DriverError(f"the graph of {len(self.steps)} steps was not launched: CUDA error {status}")
            while not driver.finished(stream):
                pass
        us = 1e6 * (time.perf_counter() - begin) / len(self.steps)
        self.runner.check()
        return us

    def close(self) -> None:
        """Give graph and memory back."""
        if self._graph:
            self.runner.driver.destroy_graph(self._graph)
        if self._block:
            self.runner.driver.free_mapped(self._block)
        self._graph = self._block = 0


def _array_at(address: int, kind: Any, shape: tuple[int, int]) -> np.ndarray:
    nbytes = np.dtype(kind).itemsize * shape[0] * shape[1]
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).view(kind).reshape(shape)
