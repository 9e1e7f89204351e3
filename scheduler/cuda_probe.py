"""Measure a GPU's lanes through the real step: each lane forced in turn on the store's own experts.

Fixed costs are those of whole steps: some of them in one graph, each with other experts, so that no cache holds what
they read. A line through the times by missing experts gives a lane's fixed cost and its rate; what two lanes take
beyond a step without misses is the miss's, as far as they have it in common. Last, the CPU lane beside copies.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from trilane.calibrate import this_machine
from trilane.cuda_runner import CudaRunner
from trilane.cuda_step_graph import GraphStep, StepGraph
from trilane.layer_rates import layer_formats
from trilane.plan import Options, make_options
from trilane.profile import Curve, MachineProfile

log = logging.getLogger("trilane")

STEPS = 16  # of a graph; 1 where one of them takes longer than SLOW_US
SLOW_US = 5e3
SAMPLES = 7
ENOUGH_S = 0.03  # of samples of one kind
MAX_EXPERTS = 8
BATCH_ROWS = 16
COPY_NBYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
BESIDE_S = 0.04  # of copies beside the CPU lane


class Line(NamedTuple):
    """``us = fix_us + nbytes / (1e3 * gb_s)``."""

    fix_us: float
    gb_s: float


def calibrate_cuda(runner: CudaRunner) -> MachineProfile:
    """Measure every lane for each kind of layer of the runner's store."""
    log.info("no machine profile: measuring the GPU's lanes (about a second)")
    copies = CopyProbe(runner)
    try:
        profile = MachineProfile(machine=this_machine(), pinned_to_device=copies.curve())
        seen: set[str] = set()
        for layer, described in enumerate(runner.store.layers):
            new = set(layer_formats(described)) - seen
            if new:
                profile = _measure_layers(runner, copies, layers_like(runner, layer), new, profile)
                seen |= new
    finally:
        copies.close()
        runner.reset()
    return profile


# -------------------------------------------------------------------------------------------------- copies
class CopyProbe:
    """Copies from the pinned arena to a piece of device memory of its own."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner, self.stream = runner, runner.device.fill_stream
        pinned = runner.device.pinned
        self.room = min(runner.pinned_nbytes, pinned.segment_nbytes) if pinned else 0  # no copy leaves a registration
        self.sizes = [nbytes for nbytes in COPY_NBYTES if nbytes <= self.room]
        self.most = max(self.sizes, default=0)
        self.target = runner.driver.allocate(self.most) if self.sizes else 0
        self._next = 0

    def put(self, nbytes: int, count: int) -> None:
        """Put copies on the stream, from one part of the arena after the other."""
        for _ in range(count):
            if self._next + nbytes > self.room:
                self._next = 0
            source = self.runner.store.arena.address + self._next
            self.runner.driver.to_device(self.target, source, nbytes, self.stream)
            self._next += nbytes

    def rate(self, nbytes: int, count: int = 24) -> float:
        """GB/s of copies of a size, the median of some samples."""
        self.put(nbytes, 2)
        self.runner.wait_for(self.stream)
        found = []
        for _ in range(SAMPLES // 2 + 1):
            begin = time.perf_counter()
            self.put(nbytes, count)
            self.runner.wait_for(self.stream)
            found.append(1e-9 * nbytes * count / (time.perf_counter() - begin))
        return float(np.median(found))

    def curve(self) -> Curve | None:
        """GB/s by size; None where nothing is pinned."""
        if not self.sizes:
            return None
        return Curve(tuple(map(float, self.sizes)), tuple(self.rate(nbytes) for nbytes in self.sizes))

    def close(self) -> None:
        if self.target:
            self.runner.driver.free(self.target)
        self.target = 0


# --------------------------------------------------------------------------------------------------- steps
@contextlib.contextmanager
def planned_with(runner: CudaRunner, options: Options) -> Iterator[None]:
    """Plan with these options inside a ``with`` block."""
    before = runner.use_options(options)
    try:
        yield
    finally:
        runner.use_options(before)


class StepProbe:
    """Steps of layers of one kind in turn, all alike but for their experts.

    Parameters
    ----------
    layers : sequence of int
        Of as many experts each, in the same formats.
    """

    def __init__(self, runner: CudaRunner, layers: Sequence[int], num_experts: int, rows: int = 1) -> None:
        self.runner, self.layers, self.num_experts, self._next = runner, list(layers), num_experts, 0
        self.rows = rows
        self.graph = self._make_graph(1)
        self.route(runner.store.layers[layers[0]].num_experts)
        if self.graph.run() < SLOW_US:
            self.graph.close()
            self.graph = self._make_graph(STEPS)

    def _make_graph(self, steps: int) -> StepGraph:
        layers = [self.layers[k % len(self.layers)] for k in range(steps)]
        graph = StepGraph(self.runner, [GraphStep(layer, self.rows, self.num_experts) for layer in layers])
        graph.hidden[:] = np.linspace(-1, 1, self.runner.store.hidden)
        return graph

    def route(self, experts: int) -> None:
        """Route the steps to the next of the first ``experts`` experts of their layers, round and round."""
        for k, ids in enumerate(self.graph.ids):
            ids[:] = (self._next + np.arange(self.num_experts)) % experts
            if (k + 1) % len(self.layers) == 0 or k + 1 == len(self.graph.ids):
                self._next += self.num_experts

    def us(self, experts: int) -> float:
        """Median us of a step; long ones are measured once."""
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) <= SAMPLES and (not times or time.perf_counter() - begin < ENOUGH_S):
            self.route(experts)
            times.append(self.graph.run())
        return float(np.median(times[min(1, len(times) - 1) :]))

    def close(self) -> None:
        self.graph.close()


def lane_us(
    runner: CudaRunner, layers: Sequence[int], counts: Sequence[int], lane: str, fills: bool = False
) -> list[float]:
    """us of steps with so many missing experts, all on one lane; streamed ones replace each other in the slots."""
    found = []
    for count in counts:
        runner.reset()
        options = make_options(force=lane, fills=fills)
        with planned_with(runner, options), contextlib.closing(StepProbe(runner, layers, count)) as probe:
            found.append(probe.us(runner.store.layers[layers[0]].num_experts))
    return found


def hit_us(runner: CudaRunner, layer: int, counts: Sequence[int]) -> list[float]:
    """us of steps with so many resident experts; of counts for which there are slots."""
    found: list[float] = []
    resident = resident_experts(runner, layer)
    for count in counts:
        if count > resident:
            break
        options = make_options(force="zero_copy")
        with planned_with(runner, options), contextlib.closing(StepProbe(runner, [layer], count)) as probe:
            for _ in range(2 + resident // (len(probe.graph.steps) * count)):  # what was read in place stays
                probe.route(resident)
                probe.graph.run()
            found.append(probe.us(resident))
    return found


def resident_experts(runner: CudaRunner, layer: int) -> int:
    """Experts of a layer that its slots hold at a time."""
    state, described = runner.state, runner.store.layers[layer]
    pool = state.pool_of[layer]
    slots = int(state.first_slot[pool + 1] - state.first_slot[pool])
    return min(described.num_experts, slots // described.layout.num_shards)


def layers_like(runner: CudaRunner, layer: int) -> list[int]:
    """The layers of a layer's kind, itself first: as many experts of as many bytes in the same formats."""
    store = runner.store

    def kind(index: int) -> tuple[Any, ...]:
        found = store.layers[index]
        return found.num_experts, found.layout.expert_nbytes, sorted(layer_formats(found))

    return [index for index in range(layer, len(store.layers)) if kind(index) == kind(layer)]


# ----------------------------------------------------------------------------------------- layers of a kind
def _measure_layers(
    runner: CudaRunner, copies: CopyProbe, layers: Sequence[int], formats: set[str], profile: MachineProfile
) -> MachineProfile:
    layer = layers[0]
    described = runner.store.layers[layer]
    nbytes = int(described.layout.shard_nbytes.sum())
    most = max(1, min(MAX_EXPERTS, described.num_experts))
    counts = sorted({1, max(1, most // 4), max(1, most // 2), most})
    lines = {lane: fit(counts, nbytes, lane_us(runner, layers, counts, lane)) for lane in ("zero_copy", "cpu")}
    if 0 < resident_experts(runner, layer) < described.num_experts - most:
        streamed = [n for n in counts if n <= resident_experts(runner, layer)]
        lines["stream"] = fit(streamed, nbytes, lane_us(runner, [layer], streamed, "stream", fills=True))
    resident = hit_us(runner, layer, counts)
    hits = fit(counts[: len(resident)], nbytes, resident) if resident else lines["zero_copy"]
    threads = (float(runner.num_threads),)
    rows_gb_s = max(_rows_gb_s(runner, layers, nbytes), lines["cpu"].gb_s)
    profile = replace(
        profile,
        cpu_experts=dict(profile.cpu_experts) | dict.fromkeys(formats, Curve(threads, (lines["cpu"].gb_s,))),
        cpu_rows=dict(profile.cpu_rows) | dict.fromkeys(formats, Curve(threads, (rows_gb_s,))),
        device_experts=dict(profile.device_experts) | dict.fromkeys(formats, hits.gb_s),
    )
    if profile.step_fix_us is not None:
        return profile
    return replace(
        profile, zero_copy=Curve((1.0,), (lines["zero_copy"].gb_s,)), **fixed_costs(hits, lines),
        **_beside(runner, copies, layers, most, nbytes),
    )  # fmt: skip


def fixed_costs(hits: Line, lines: dict[str, Line]) -> dict[str, float]:
    """The step's, the miss's and each lane's fixed costs in us, by their names in the profile.

    A lane begins while hits are computed, so what a step with misses takes beyond its lane holds the publishing and
    the sum, but not the hits.
    """
    beyond = {lane: max(0.0, line.fix_us - hits.fix_us) for lane, line in lines.items()}
    miss = min(beyond["zero_copy"], beyond["cpu"])
    stream = beyond.get("stream", beyond["zero_copy"])
    return {
        "step_fix_us": hits.fix_us, "miss_fix_us": miss, "zero_copy_fix_us": beyond["zero_copy"] - miss,
        "cpu_fix_us": beyond["cpu"] - miss, "stream_fix_us": max(0.0, stream - miss),
    }  # fmt: skip


def _rows_gb_s(runner: CudaRunner, layers: Sequence[int], nbytes: int) -> float:
    """Bytes x rows of the CPU lane where arithmetic is its limit: one expert for many rows, less one for one row."""
    rows = min(BATCH_ROWS, runner.max_rows(1))
    us = []
    runner.reset()
    with planned_with(runner, make_options(force="cpu")):
        for count in (1, rows):
            with contextlib.closing(StepProbe(runner, layers, 1, count)) as probe:
                us.append(probe.us(runner.store.layers[layers[0]].num_experts))
    return nbytes * 1e-3 * (rows - 1) / max(1e-3, us[1] - us[0])


def _beside(runner: CudaRunner, copies: CopyProbe, layers: Sequence[int], most: int, nbytes: int) -> dict[str, Any]:
    """The CPU lane beside copies: what they read of host memory together, and what each of them loses."""
    if not copies.most:
        return {}
    alone = copies.rate(copies.most)
    count = max(1, int(1e9 * BESIDE_S * alone / copies.most))
    steps, options = 0, make_options(force="cpu")
    runner.reset()
    with planned_with(runner, options), contextlib.closing(StepProbe(runner, layers, most)) as probe:
        alone_us = probe.us(runner.store.layers[layers[0]].num_experts)
        begin = time.perf_counter()
        copies.put(copies.most, count)
        while not runner.driver.finished(copies.stream):
            probe.route(runner.store.layers[layers[0]].num_experts)
            probe.graph.run()
            steps += len(probe.graph.steps)
        seconds = time.perf_counter() - begin
    copied, read = 1e-9 * count * copies.most / seconds, 1e-9 * steps * most * nbytes / seconds
    slowdowns = {"link_slowdown": 1 - copied / alone, "cpu_slowdown": 1 - alone_us * steps / (1e6 * seconds)}
    return {"both_gb_s": copied + read} | {name: min(0.9, max(0.0, part)) for name, part in slowdowns.items()}


def fit(counts: Sequence[int], nbytes: int, us: Sequence[float]) -> Line:
    """The line through times by experts; with one point, all of it is rate."""
    sizes = nbytes * np.array(counts, float)
    if len(counts) > 1:
        slope, fix = np.polyfit(sizes, np.array(us), 1)
        if slope > 0 and fix >= 0:
            return Line(float(fix), float(1e-3 / slope))
    return Line(0.0, float(1e-3 * sizes.sum() / np.sum(us)))
