"""Whole layer-steps on a GPU for measurements: with so many experts that are all resident, or all missing on one lane.

Some steps are in one graph, each with other experts, so that no cache holds what they read; where one takes long it
is alone. Nothing here knows what follows from the times.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trilane.cuda_runner import CudaRunner
from trilane.cuda_step_graph import GraphStep, StepGraph
from trilane.gpu_kernels.driver import Encoded
from trilane.layer_rates import layer_formats
from trilane.plan import Options, make_options

STEPS = 16  # of a graph; 1 where one of them takes longer than SLOW_US
SLOW_US = 5e3
SAMPLES = 7
ENOUGH_S = 0.03  # of samples of one kind


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
    pause : Encoded, optional
        What the GPU does before each step. In a model it runs the rest of that meanwhile, so what answers a miss begins
        colder than in steps that follow each other at once. Its time does not count.
    """

    def __init__(
        self,
        runner: CudaRunner,
        layers: Sequence[int],
        num_experts: int,
        rows: int = 1,
        pause: Encoded | None = None,
    ) -> None:
        self.runner, self.layers, self.num_experts, self._next = runner, list(layers), num_experts, 0
        self.rows, self.pause_us = rows, 0.0
        self.graph = self._make_graph(1)
        self.route(runner.store.layers[layers[0]].num_experts)
        if self.graph.run() < SLOW_US:
            self.graph.close()
            self.graph = self._make_graph(STEPS)
            if pause is not None:
                self._add_pauses(pause)

    def _add_pauses(self, pause: Encoded) -> None:
        """Pause before each step from now on; how long is told by steps that name no expert, with and without."""
        before = self._empty_us()
        self.graph.close()
        self.graph = self._make_graph(STEPS, pause)
        self.pause_us = self._empty_us() - before

    def _empty_us(self) -> float:
        for ids in self.graph.ids:
            ids[:] = -1
        return float(np.median([self.graph.run() for _ in range(SAMPLES)]))

    def _make_graph(self, steps: int, pause: Encoded | None = None) -> StepGraph:
        layers = [self.layers[k % len(self.layers)] for k in range(steps)]
        graph = StepGraph(self.runner, [GraphStep(layer, self.rows, self.num_experts) for layer in layers], pause)
        graph.hidden[:] = np.linspace(-1, 1, self.runner.store.hidden)
        return graph

    @property
    def turn(self) -> list[int]:
        """The layers that its steps take in turn."""
        return self.layers[: len(self.graph.steps)]

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
        return float(np.median(times[min(1, len(times) - 1) :])) - self.pause_us

    def close(self) -> None:
        self.graph.close()


def lane_us(
    runner: CudaRunner,
    layers: Sequence[int],
    counts: Sequence[int],
    lane: str,
    fills: bool = False,
    pause: Encoded | None = None,
) -> list[float]:
    """us of steps with so many missing experts, all on one lane, each behind the pause if there is one.

    With ``fills`` what is missed is kept, and replaces what is there; then only counts up to the first of which some
    would be found in slots again.
    """
    found = []
    for count in counts:
        runner.reset()
        options = make_options(force=lane, fills=fills)
        with planned_with(runner, options), contextlib.closing(StepProbe(runner, layers, count, pause=pause)) as probe:
            if fills and not always_misses(runner, probe.turn, count):
                break
            found.append(probe.us(runner.store.layers[layers[0]].num_experts))
    return found


def hit_us(runner: CudaRunner, layers: Sequence[int], counts: Sequence[int]) -> list[float]:
    """us of steps with so many resident experts; of counts for which there are slots.

    Of as many of the layers in turn as there are slots for: the experts of one may all be in the GPU's cache.
    """
    found: list[float] = []
    layers = layers_with_room(runner, layers, counts[-1])
    resident = resident_experts(runner, layers)
    for count in counts:
        if count > resident:
            break
        options = make_options(force="zero_copy")
        with planned_with(runner, options), contextlib.closing(StepProbe(runner, layers, count)) as probe:
            for _ in range(2 + resident * len(probe.turn) // (len(probe.graph.steps) * count)):
                probe.route(resident)  # what was read in place stays
                probe.graph.run()
            found.append(probe.us(resident))
    return found


def layers_with_room(runner: CudaRunner, layers: Sequence[int], most: int) -> Sequence[int]:
    """The first of the layers, as many as have slots for ``most`` experts each; one at least."""
    count = min(STEPS, len(layers))
    while count > 1 and resident_experts(runner, layers[:count]) < most:
        count //= 2
    return layers[:count]


def resident_experts(runner: CudaRunner, layers: Sequence[int]) -> int:
    """Experts of each of these layers that slots hold at a time, all layers at once."""
    pools = [int(runner.state.pool_of[layer]) for layer in layers]
    return min(
        min(runner.store.layers[layer].num_experts, _pool_experts(runner, layer) // pools.count(pool))
        for layer, pool in zip(layers, pools, strict=True)
    )


def _pool_experts(runner: CudaRunner, layer: int) -> int:
    """Experts, each as large as this layer's, that its pool holds at a time, those of other layers too."""
    state, pool = runner.state, runner.state.pool_of[layer]
    slots = int(state.first_slot[pool + 1] - state.first_slot[pool])
    return slots // runner.store.layers[layer].layout.num_shards


def always_misses(runner: CudaRunner, layers: Sequence[int], count: int) -> bool:
    """Whether steps of these layers in turn, each of the next ``count`` experts, find none of them in slots, though
    what they miss is kept: the next ones are others, and slots hold half of all at most, whatever is evicted first."""
    experts = runner.store.layers[layers[0]].num_experts
    if 2 * count > experts:
        return False
    pools = [int(runner.state.pool_of[layer]) for layer in layers]
    return all(
        count <= _pool_experts(runner, layer) <= pools.count(pool) * experts // 2
        for layer, pool in zip(layers, pools, strict=True)
    )


def layers_like(runner: CudaRunner, layer: int) -> list[int]:
    """The layers of a layer's kind, itself first: as many experts of as many bytes in the same formats."""
    store = runner.store

    def kind(index: int) -> tuple[Any, ...]:
        found = store.layers[index]
        return found.num_experts, found.layout.expert_nbytes, sorted(layer_formats(found))

    return [index for index in range(layer, len(store.layers)) if kind(index) == kind(layer)]
