"""A layer-step on the CUDA device from a caller's arrays: on the GPU as they are, from the host by way of pinned rows.

With arrays on the GPU nothing is waited for: the output is there when the stream gets to it, and the stream may be
recording a graph. With host arrays the result is copied out when it is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trilane.arguments import apart_from, check_hidden, check_ids, check_out, check_routing
from trilane.arrays import HostView, like_input
from trilane.config import Config
from trilane.cuda_arrays import NBYTES, DeviceView, device_routing, device_rows, empty_like, is_on_device, stream_handle
from trilane.cuda_machine import cuda_machine
from trilane.cuda_prefill import CudaPrefill
from trilane.cuda_probe import calibrate_cuda
from trilane.cuda_runner import CudaRunner
from trilane.gpu_kernels.cuda_device import array_at
from trilane.host_runner import StepInput
from trilane.layer_rates import lacks_rates
from trilane.prefill_batches import routed_experts
from trilane.profile import Machine, MachineProfile
from trilane.start_profile import Given, start_gpu_profile


@dataclass
class CudaTicketed:
    """What a ticket holds: the result, what it must outlive, and host rows that are still to be copied out."""

    result: Any
    held: tuple[Any, ...]
    stream: int
    copy_out: HostView | None = None
    first_row: int = 0
    num_rows: int = 0
    out: int = 0  # address of the rows
    done: bool = False


class PinnedRows(NamedTuple):
    """Addresses of mapped memory for a step's arrays, and how many rows it holds; hidden and out may be one."""

    hidden: int
    out: int
    ids: int
    weights: int
    most: int


class CudaSteps:
    """Arguments of steps, for one runner."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner, self.store = runner, runner.store

    def machine(self) -> Machine:
        """This machine with the GPU."""
        return cuda_machine(self.runner.driver)

    def start_profile(self, given: Given, config: Config) -> MachineProfile:
        """The profile to start with: given, saved, or measured now through real steps.

        Raises
        ------
        ProfileError
        """
        return start_gpu_profile(
            given,
            config,
            here=self.machine(),
            lacks=lambda profile: lacks_rates(profile, self.runner),
            measure=lambda: calibrate_cuda(self.runner),
        )

    def submit(self, layer: int, hidden: Any, topk_ids: Any, topk_weights: Any, out: Any, stream: Any) -> CudaTicketed:
        """Put a step on a stream."""
        if is_on_device(hidden):
            return self._submit_device(layer, hidden, topk_ids, topk_weights, out, stream)
        return self._submit_host(layer, hidden, topk_ids, topk_weights, out, stream)

    def finish(self, ticket: CudaTicketed) -> Any:
        """The result; host rows are waited for."""
        if ticket.copy_out is not None:
            self._copy_out(ticket)
            ticket.copy_out = None
        return ticket.result

    # ----------------------------------------------------------------------------------- arrays on the GPU
    def _submit_device(self, layer: int, hidden: Any, ids: Any, weights: Any, out: Any, stream: Any) -> CudaTicketed:
        x = device_rows(hidden, "hidden", self.store.hidden)
        e, w = device_routing(ids, weights, x.shape[0])
        handle = stream_handle(stream, hidden)
        handle = self.runner.device.work_stream if handle is None else handle
        result = empty_like(hidden, "out") if out is None else out
        y = device_rows(result, "out", self.store.hidden, x.shape[0])
        assert w.element is not None
        top_k, weight_nbytes = e.shape[1], NBYTES[w.element]
        passes = self.runner.prefill_for(layer, e.shape[0], top_k, handle)
        most = passes.max_rows(top_k) if passes else self.runner.max_rows(top_k)
        for start in range(0, x.shape[0], most):
            rows = min(most, x.shape[0] - start)
            step = StepInput(layer, rows, top_k, *_rows_at(x, start), *_rows_at(y, start), w.element)
            skip = start * top_k
            id_nbytes = 8 if e.dtype == "int64" else 4
            ids_at, weights_at = e.address + skip * id_nbytes, w.address + skip * weight_nbytes
            (passes or self.runner).launch(step, ids_at, id_nbytes, weights_at, handle)
        return CudaTicketed(result, (x, e, w, y), handle)

    # -------------------------------------------------------------------------------- arrays in host memory
    def _submit_host(self, layer: int, hidden: Any, ids: Any, weights: Any, out: Any, stream: Any) -> CudaTicketed:
        x = check_hidden(hidden, self.store.hidden)
        e, w = check_routing(ids, weights, len(x.array))
        result = like_input(hidden, x.array.shape) if out is None else out
        y = check_out(result, x)
        check_ids(layer, e, self.store.layers[layer].num_experts)
        handle = stream_handle(stream)
        ticket = CudaTicketed(result, (x, y), self.runner.device.work_stream if handle is None else handle)
        rows, top_k = e.shape
        if rows == 0 or top_k == 0:
            y.array[...] = 0
            return ticket
        passes = self.runner.prefill_for(layer, rows, top_k, ticket.stream, e)
        pinned = self._pinned_rows(passes, top_k)
        x = apart_from(x, y) if rows > pinned.most else x
        for start in range(0, rows, pinned.most):
            if start:
                self._copy_out(ticket)
            part = slice(start, min(rows, start + pinned.most))
            step, at = self._stage_host(layer, x, e[part], w[part], y, start, pinned), (pinned.ids, 8, pinned.weights)
            if passes:
                passes.launch(step, *at, ticket.stream, routed_experts(e[part], self.store.layers[layer].num_experts))
            else:
                self.runner.launch(step, *at, ticket.stream)
            ticket.first_row, ticket.num_rows, ticket.out, ticket.copy_out = start, step.num_rows, pinned.out, y
        return ticket

    def _pinned_rows(self, passes: CudaPrefill | None, top_k: int) -> PinnedRows:
        if passes is None:
            names = ("host_x", "host_out", "host_ids", "host_weights")
            x, y, ids, weights = (self.runner.device.address[name] for name in names)
            return PinnedRows(x, y, ids, weights, self.runner.max_rows(top_k))
        host = passes.memory.host  # a pass has read all rows before it writes one
        return PinnedRows(
            host["rows"], host["rows"], host["ids"], host["weights"], passes.max_rows(top_k, from_host=True)
        )

    def _stage_host(
        self, layer: int, x: HostView, ids: np.ndarray, weights: np.ndarray, y: HostView, start: int, pinned: PinnedRows
    ) -> StepInput:
        """Copy a part's arrays to mapped memory."""
        rows = len(ids)
        for address, array, dtype in (
            (pinned.hidden, x.array[start : start + rows], x.array.dtype),
            (pinned.ids, ids, np.int64), (pinned.weights, weights, np.float32),
        ):  # fmt: skip
            array_at(address, dtype, array.shape)[...] = array
        x_stride, y_stride = (NBYTES[view.element] * self.store.hidden for view in (x, y))
        return StepInput(layer, rows, ids.shape[1], pinned.hidden, x_stride, x.element, pinned.out, y_stride, y.element)

    def _copy_out(self, ticket: CudaTicketed) -> None:
        self.runner.wait_for(ticket.stream)
        assert ticket.copy_out is not None
        part = ticket.copy_out.array[ticket.first_row : ticket.first_row + ticket.num_rows]
        part[...] = array_at(ticket.out, part.dtype, part.shape)


def _rows_at(view: DeviceView, start: int) -> tuple[int, int, str]:
    """Address, stride and element type of the rows of a device array from ``start`` up."""
    assert view.element is not None
    return view.address + start * view.strides[0], view.strides[0], view.element
