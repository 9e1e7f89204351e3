"""Large batches on a GPU: a layer's missing experts stream once through two stages past the slots.

The host decides what to copy when a pass is submitted; the GPU looks at the slot table when it gets there. Steps that a
graph of the caller has put in between may change the table: what was resident is read in place then, and what is
pageable, and cannot be, is copied unless the stream is idle. Slots are read and never filled, so nothing is evicted.

Decode steps that the runner put on the stream are waited for first. Their copies are issued when the GPU asks for them;
a stream of ours that waited for such a step could hold them up where streams share one of the GPU's queues.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from trilane.cost import Rates
from trilane.cuda_crossover import Batch, lane_allowed, prefill_is_faster
from trilane.cuda_errors import device_errors
from trilane.cuda_launches import StepLaunches
from trilane.cuda_stages import Stages
from trilane.cuda_threads import WAIT_NAP_S, CudaThreads
from trilane.expert import STREAM
from trilane.gpu_kernels.cuda_device import CudaDevice
from trilane.gpu_kernels.driver import DriverError, Encoded
from trilane.gpu_kernels.launch import Launch
from trilane.gpu_kernels.prefill_launch import (
    Parts,
    batch_launches,
    begin_launches,
    parts_of,
    sum_launch,
    write_batches,
)
from trilane.gpu_kernels.prefill_memory import STAGES
from trilane.host_runner import StepInput
from trilane.plan import Options
from trilane.prefill_batches import Batches, Bools, Copy, Ints, cut_batches, place_shards
from trilane.state import State
from trilane.stats import NUM_LANES, LaneTotal, Total

KEPT_LAUNCHES = 1024  # batches of which the launches are kept


class CudaPrefill:
    """Passes of many rows, for one runner.

    Parameters
    ----------
    device : CudaDevice
        One that has memory for it.
    launches : StepLaunches
    threads : CudaThreads
    state, totals
        The runner's; used while the control thread is held.
    from_rows : int or "auto"
        Rows from which on a batch goes this way; "auto": where it is faster.
    check : callable
        Raises if nothing runs any more.

    Attributes
    ----------
    submit_us : float
        The least that the host has taken to submit a pass; 0 before the first.
    """

    def __init__(
        self,
        device: CudaDevice,
        launches: StepLaunches,
        threads: CudaThreads,
        state: State,
        totals: np.ndarray,
        from_rows: int | str,
        check: Callable[[], None],
    ) -> None:
        assert device.prefill is not None and device.pinned is not None
        self.device, self.memory, self.driver = device, device.prefill, device.driver
        self.launches, self.threads, self.state, self.totals = launches, threads, state, totals
        self.from_rows, self.submit_us, self._check = from_rows, 0.0, check
        self._steps = launches.count
        self.stages = Stages(self.driver, self.memory, device.pinned, check)
        self._kept: OrderedDict[tuple[Any, ...], Encoded] = OrderedDict()
        self._words = [self._layer_words(layer) for layer in range(len(device.layers))]
        self._in_place = [self._can_be_read(layer) for layer in range(len(device.layers))]

    def _layer_words(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Layer, Step without a caller's arrays, and Prefill."""
        layer = self.device.layers[index]
        prefill = self.memory.prefill_words(layer.expert_base, layer.expert_stride)
        return self.device.layer_words(index), self.memory.step_words(self.device.step_words(index)), prefill

    def _can_be_read(self, index: int) -> Bools:
        """Which shards lie in pinned memory, (experts, shards)."""
        layer, pinned = self.device.layers[index], self.device.pinned
        assert pinned is not None
        ends = layer.layout.shard_offset + layer.layout.shard_nbytes
        bases = layer.expert_base + layer.expert_stride * np.arange(layer.num_experts)
        return np.asarray(bases[:, None] + ends[None, :] <= pinned.end)

    # ------------------------------------------------------------------------------------------- choosing
    def max_rows(self, top_k: int, from_host: bool = False) -> int:
        """Rows of one pass; a larger batch takes several. ``from_host``: of a caller's arrays in host memory."""
        shape = self.memory.shape
        rows, positions = (
            (shape.host_rows, self.memory.host_positions) if from_host else (shape.max_rows, shape.max_positions)
        )
        return min(rows, positions // max(1, top_k))

    def may_take(self, layer: int, rows: int, top_k: int) -> bool:
        """Whether a batch is worth a closer look: one comparison, since every step comes by here."""
        if isinstance(self.from_rows, str):
            return rows * top_k >= self.device.layers[layer].num_experts
        return top_k > 0 and rows >= self.from_rows

    def takes(
        self, layer: int, rows: int, top_k: int, experts: Ints | None, rates: Rates, options: Options, step_rows: int
    ) -> bool:
        """Whether a batch that may go this way does.

        Parameters
        ----------
        experts : int array, optional
            Those routed to; None: only the GPU knows.
        step_rows : int
            Rows that one decode step takes.
        """
        if self.max_rows(top_k, from_host=True) == 0 or not lane_allowed(options, STREAM):
            return False
        if not isinstance(self.from_rows, str):
            return True
        slot_of = self._slot_of(layer)
        known = slot_of if experts is None else slot_of[experts]
        missing = float((known < 0).mean()) if len(known) else 0.0
        nbytes = float(self.device.layers[layer].layout.shard_nbytes.sum())
        batch = Batch(rows, top_k, len(slot_of), len(known), missing, nbytes, step_rows)
        return prefill_is_faster(rates, options, batch, self.submit_us)

    def _slot_of(self, layer: int) -> np.ndarray:
        """Slots of a layer's shards, (experts, shards); negative: not resident."""
        where = self.device.layers[layer]
        start, shards = where.first_shard, where.layout.num_shards
        return self.state.slot_of[start : start + where.num_experts * shards].reshape(-1, shards)

    # ------------------------------------------------------------------------------------------- one pass
    def launch(
        self, step: StepInput, ids: int, id_nbytes: int, weights: int, stream: int, experts: Ints | None = None
    ) -> None:
        """Put a pass on a stream; all addresses are the GPU's. ``experts``: those routed to, where they are known."""
        self._check()
        with device_errors():
            self.launches.order(stream, capturing=False)
            self._wait_for_steps(stream)
            begin = time.perf_counter()
            address, read = self.stages.take_list()
            needed, missing = self._look(step, stream, experts)
            batches = cut_batches(needed, missing, self.memory.shape.stage_nbytes // self._stride(step.layer))
            turn = self.stages.take(len(batches.staged))
            places = [self.memory.stages[stage] for stage in turn[:STAGES]] or self.memory.stages
            staged, copies = place_shards(self.device.layers[step.layer], batches, missing, places)
            if turn:  # the link starts before anything else
                self.stages.fill(turn[0], copies[0])
            write_batches(self.memory.list_array(address), staged, batches.in_order)
            words = self.memory.step_words(self.launches.step_words(step, ids, id_nbytes, weights))
            layer_words, _, prefill = self._words[step.layer]
            self._start(step.layer, begin_launches(layer_words, words, prefill, address), stream)
            self.driver.record_event(read, stream)
            self._run_batches(step, batches, copies, turn, stream)
            self._start(step.layer, [sum_launch(layer_words, words, prefill)], stream)
        self.submit_us = min(self.submit_us or inf, 1e6 * (time.perf_counter() - begin))

    def _wait_for_steps(self, stream: int) -> None:
        """Until the steps are done that were put on a stream since the last pass."""
        while self._steps != self.launches.count:
            if self.driver.finished(stream):
                self._steps = self.launches.count
            else:
                self._check()
                time.sleep(WAIT_NAP_S)

    def _stride(self, layer: int) -> int:
        return self.device.layers[layer].expert_stride

    def _look(self, step: StepInput, stream: int, experts: Ints | None) -> tuple[Bools, Bools]:
        """Which experts are needed (experts,), and which shards are to be copied (experts, shards)."""
        where = self.device.layers[step.layer]
        needed = np.ones(where.num_experts, np.bool_)
        if experts is not None:
            needed[:] = False
            needed[experts] = True
        with self.threads.holding():
            missing = (self._slot_of(step.layer) < 0) & needed[:, None]
            if not self.driver.finished(stream):
                missing |= needed[:, None] & ~self._in_place[step.layer]
            self._count(step, missing)
        return needed, missing

    def _count(self, step: StepInput, missing: Bools) -> None:
        """Rows and copies; the GPU counts the step and its hits."""
        nbytes = self.device.layers[step.layer].layout.shard_nbytes
        lane = self.totals[Total.LANES : Total.SIZE].reshape(NUM_LANES, -1)[STREAM]
        lane[LaneTotal.EXPERTS] += int(missing.any(axis=1).sum())
        lane[LaneTotal.SHARDS] += int(missing.sum())
        lane[LaneTotal.NBYTES] += float((missing * nbytes[None, :]).sum())
        self.totals[Total.ROWS] += step.num_rows
        self.totals[Total.MISS_STEPS] += bool(missing.any())

    def _run_batches(
        self, step: StepInput, batches: Batches, copies: list[list[Copy]], turn: list[int], stream: int
    ) -> None:
        """What needs no copy first, then stage after stage, the next one's copies beside it."""
        parts = parts_of(step.num_rows, step.top_k, self.device.layers[step.layer].num_experts)
        ahead = 1 if len(batches.resident) else 0
        if ahead:
            self._compute(step.layer, 0, len(batches.resident), parts, stream)
        for k, experts in enumerate(batches.staged):
            if k:
                self.stages.fill(turn[k], copies[k])
            self.stages.wait(turn[k], stream)
            self._compute(step.layer, ahead + k, len(experts), parts, stream)
            self.stages.free(turn[k], stream)

    # ------------------------------------------------------------------------------------------- launches
    def _compute(self, layer: int, batch: int, num_experts: int, parts: Parts, stream: int) -> None:
        """A batch's kernels; their launches know no caller's arrays and are kept."""
        key = layer, batch, num_experts, parts
        if key not in self._kept:
            made = batch_launches(self.device.layers[layer].layout, *self._words[layer], batch, num_experts, parts)
            self._kept[key] = self.device.encode_whole(layer, made)
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_LAUNCHES:
            self._kept.popitem(last=False)
        self._put(self._kept[key], layer, stream)

    def _start(self, layer: int, launches: list[Launch], stream: int) -> None:
        self._put(self.device.encode_whole(layer, launches), layer, stream)

    def _put(self, encoded: Encoded, layer: int, stream: int) -> None:
        status = encoded.launch(self.driver.table, stream)
        if status:
            raise DriverError(f"the prefill kernels of layer {layer} were not launched: CUDA error {status}")
