"""Layer-steps as launches on a stream, kept by their inputs: as a graph of one layer from the second time on.

Knows addresses, streams and launches, and nothing of what a step does.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from trilane.cuda_errors import device_errors
from trilane.errors import DeviceError
from trilane.gpu_kernels.cuda_device import CudaDevice
from trilane.gpu_kernels.driver import DriverError, Encoded
from trilane.gpu_kernels.driver_calls import launch_graph
from trilane.host_runner import ELEMENTS, StepInput

CACHED_STEPS = 256  # of which the launches are kept


class StepLaunches:
    """The launches of one device's steps.

    Parameters
    ----------
    device : CudaDevice

    Attributes
    ----------
    count : int
        Steps that were put on streams; what a graph of the caller replays is not among them.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.count = 0
        self.device, self.driver = device, device.driver
        self._steps: OrderedDict[tuple[Any, ...], tuple[Encoded, int]] = OrderedDict()
        self._stream: int | None = None

    def launch(self, step: StepInput, ids: int, id_nbytes: int, weights: int, stream: int) -> None:
        """Put a layer-step on a stream. All addresses are the GPU's; nothing is waited for."""
        with device_errors():
            capturing = self.driver.is_capturing(stream)
            self.order(stream, capturing)
            self.count += 1
            encoded, graph = self._encoded(step, ids, id_nbytes, weights, make_graph=not capturing)
            if graph:
                status = launch_graph(self.driver.table.ctypes.data, graph, stream)
            else:
                status = encoded.launch(self.driver.table, stream)
            if status:
                raise DriverError(f"the kernels of layer {step.layer} were not launched: CUDA error {status}")

    def encode(self, step: StepInput, ids: int, id_nbytes: int, weights: int) -> Encoded:
        """The launches of a layer-step for these inputs."""
        return self.device.encode_step(step.layer, self.step_words(step, ids, id_nbytes, weights))

    def _encoded(
        self, step: StepInput, ids: int, id_nbytes: int, weights: int, make_graph: bool
    ) -> tuple[Encoded, int]:
        """The launches for these inputs, and the graph of them from the second time on."""
        key = (step, ids, id_nbytes, weights)
        found = self._steps.get(key)
        if found is None:
            found = self.encode(step, ids, id_nbytes, weights), 0
        elif make_graph and not found[1]:
            found = found[0], self.driver.make_graph(found[0])
        self._steps[key] = found
        self._steps.move_to_end(key)
        if len(self._steps) > CACHED_STEPS:
            _, (_, graph) = self._steps.popitem(last=False)
            if graph:
                self.driver.destroy_graph(graph)
        return found if make_graph else (found[0], 0)

    def step_words(self, step: StepInput, ids: int, id_nbytes: int, weights: int) -> np.ndarray:
        """The Step struct for these inputs."""
        words = self.device.step_words(step.layer)
        for name, value in (
            ("x", step.hidden), ("x_stride", step.hidden_stride), ("x_element", ELEMENTS[step.hidden_element]),
            ("ids", ids), ("id_nbytes", id_nbytes), ("weights", weights),
            ("weight_element", ELEMENTS[step.weight_element]), ("out", step.out),
            ("out_stride", step.out_stride), ("out_element", ELEMENTS[step.out_element]),
            ("num_rows", step.num_rows), ("top_k", step.top_k),
        ):  # fmt: skip
            words[name] = value
        return words

    def order(self, stream: int, capturing: bool) -> None:
        """Steps share buffers, so one on another stream than the last comes after it."""
        before, self._stream = self._stream, stream
        if before is None or before == stream:
            return
        if not capturing:
            self.driver.order_after(stream, before)
        elif not self.driver.finished(before):
            self._stream = before
            raise DeviceError(
                "stream: it is captured while a step on another stream is still running, and the two share buffers; "
                "synchronize that stream before the capture"
            )

    def close(self) -> None:
        """Give the graphs back."""
        for _, graph in self._steps.values():
            if graph:
                self.driver.destroy_graph(graph)
        self._steps.clear()
