"""Measure a GPU's lanes through the real step: each lane forced in turn on the store's own experts.

As on the host device, fixed costs are those of whole steps: steps are put on the stream one behind the other, and the
time of one is the whole's share. A line through the times by missing experts gives a lane's fixed cost and its rate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trilane.calibrate import this_machine
from trilane.cuda_runner import CudaRunner
from trilane.host_runner import StepInput
from trilane.layer_rates import layer_formats
from trilane.plan import make_options
from trilane.profile import Curve, MachineProfile

log = logging.getLogger("trilane")

REPEATS = 20
SAMPLES = 3
MAX_EXPERTS = 8
BATCH_ROWS = 16
COPY_NBYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


class Line(NamedTuple):
    """``us = fix_us + nbytes / (1e3 * gb_s)``."""

    fix_us: float
    gb_s: float


def calibrate_cuda(runner: CudaRunner) -> MachineProfile:
    """Measure every lane for each kind of layer of the runner's store."""
    log.info("no machine profile: measuring the GPU's lanes (about a second)")
    profile = MachineProfile(machine=this_machine(), zero_copy_on_device=True, pinned_to_device=measure_copies(runner))
    seen: set[str] = set()
    for layer, described in enumerate(runner.store.layers):
        new = set(layer_formats(described)) - seen
        if new:
            profile = _measure_layer(runner, layer, new, profile)
            seen |= new
    runner.forget_counts()
    return profile


def measure_copies(runner: CudaRunner, sizes: Sequence[int] = COPY_NBYTES) -> Curve | None:
    """GB/s of copies from the pinned arena to the slots, by size; None where there is nothing to copy to or from."""
    room = min(runner.num_slots * runner.device.slot_nbytes, runner.pinned_nbytes)
    fitting = [nbytes for nbytes in sizes if nbytes <= room]
    if not fitting or runner.totals[0] > 0:  # what slots hold would be lost
        return None
    source, stream = runner.store.arena.address, runner.device.copy_stream

    def copy(nbytes: int) -> Callable[[], None]:
        return lambda: runner.driver.to_device(runner.device.slots, source, nbytes, stream)

    return Curve(tuple(map(float, fitting)), tuple(1e-3 * n / _time_us(runner, copy(n), stream) for n in fitting))


def _time_us(runner: CudaRunner, put: Callable[[], None], stream: int) -> float:
    """us of one of many of the same, put on a stream one behind the other."""
    put()
    runner.wait_for(stream)
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            put()
        runner.wait_for(stream)
        times.append(1e6 * (time.perf_counter() - begin) / REPEATS)
    return float(np.median(times))


def _measure_layer(runner: CudaRunner, layer: int, formats: set[str], profile: MachineProfile) -> MachineProfile:
    described = runner.store.layers[layer]
    nbytes = int(described.layout.shard_nbytes.sum())
    most = max(1, min(MAX_EXPERTS, described.num_experts))
    counts = sorted({1, max(1, most // 2), most})
    lines = {lane: _fit(counts, nbytes, [_step_us(runner, layer, n, 1, lane) for n in counts])
             for lane in ("zero_copy", "cpu")}  # fmt: skip
    in_cpu = (
        nbytes
        * 1e-3
        * (BATCH_ROWS - 1)
        / max(1e-3, _step_us(runner, layer, 1, BATCH_ROWS, "cpu") - _step_us(runner, layer, 1, 1, "cpu"))
    )
    resident = [n for n in counts if n * described.layout.num_shards <= runner.num_slots]
    hits = _fit(resident, nbytes, [_step_us(runner, layer, n, 1, None) for n in resident]) if resident else None
    hits = hits or lines["zero_copy"]
    threads = (float(runner.num_threads),)
    profile = replace(
        profile,
        cpu_experts=dict(profile.cpu_experts) | dict.fromkeys(formats, Curve(threads, (lines["cpu"].gb_s,))),
        cpu_rows=dict(profile.cpu_rows) | dict.fromkeys(formats, Curve(threads, (max(in_cpu, lines["cpu"].gb_s),))),
        device_experts=dict(profile.device_experts) | dict.fromkeys(formats, hits.gb_s),
    )
    if profile.step_fix_us is not None:
        return profile
    beyond = {lane: max(0.0, line.fix_us - hits.fix_us) for lane, line in lines.items()}
    return replace(
        profile, step_fix_us=hits.fix_us, zero_copy_fix_us=beyond["zero_copy"], cpu_fix_us=beyond["cpu"],
        stream_fix_us=beyond["zero_copy"], zero_copy=Curve((1.0,), (lines["zero_copy"].gb_s,)),
    )  # fmt: skip


def _step_us(runner: CudaRunner, layer: int, num_experts: int, rows: int, lane: str | None) -> float:
    """us of a step of ``num_experts``: all missing and on one lane, or (None) all resident."""
    device, address, stream = runner.device, runner.device.address, runner.device.work_stream
    device.mapped("host_ids", np.int64, rows * num_experts)[:] = np.tile(np.arange(num_experts), rows)
    device.mapped("host_weights", np.float32, rows * num_experts)[:] = 1.0
    device.mapped("host_x", np.float32, rows * runner.store.hidden)[:] = np.linspace(-1, 1, rows * runner.store.hidden)
    stride = 4 * runner.store.hidden
    step = StepInput(layer, rows, num_experts, address["host_x"], stride, "f32", address["host_out"], stride, "f32")
    options = make_options(force="zero_copy" if lane is None else lane, fills=lane is None)
    before = runner.use_options(options)
    try:
        return _time_us(
            runner, lambda: runner.launch(step, address["host_ids"], 8, address["host_weights"], stream), stream
        )
    finally:
        runner.use_options(before)


def _fit(counts: Sequence[int], nbytes: int, us: Sequence[float]) -> Line:
    """The line through times by experts; with one point, all of it is rate."""
    sizes = nbytes * np.array(counts, float)
    if len(counts) > 1:
        slope, fix = np.polyfit(sizes, np.array(us), 1)
        if slope > 0 and fix >= 0:
            return Line(float(fix), float(1e-3 / slope))
    return Line(0.0, float(1e-3 * sizes.sum() / np.sum(us)))
