"""A whole layer on the CPU lane: 8 experts of 2048 x 768, Q4_K, each time others, by threads and instruction set.

Method: a scheduler without slots sends every expert to the CPU lane; the time is the lane's own, from the post to
the last worker's end, publish and combine not counted. Experts are drawn at random from 1 GB of weights, so they
come from memory. Variants take turns in rounds within one run; medians over all steps are printed.

    python -m benchmarks.bench_layer [threads ...]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from trilane.accounts import CPU_US
from trilane.config import Config
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.isa import available_isas
from trilane.engine import ExpertScheduler
from trilane.probes.machine import describe_machine
from trilane.step_bench import StepShape, random_store
from trilane.store import ExpertStore

SHAPE = StepShape(num_experts=384)
ROUNDS, STEPS = 8, 40


@dataclass
class Layer:
    """One variant: a scheduler whose misses all go to the CPU lane."""

    store: ExpertStore
    threads: int
    isa: str

    def __post_init__(self) -> None:
        config = Config(cache={"slots": 0}, policy={"force": "cpu"}, cpu={"threads": self.threads, "isa": self.isa})
        self.scheduler = ExpertScheduler(self.store, config=config)
        self.rng = np.random.default_rng(1)
        self.hidden = self.rng.standard_normal((1, SHAPE.hidden)).astype(np.float32)
        self.out = np.empty_like(self.hidden)
        self.weights = np.full((1, SHAPE.top_k), 1 / SHAPE.top_k, np.float32)

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """us of the lane and of the whole step, for each of ``steps`` steps."""
        lane, whole = [], []
        for _ in range(steps):
            ids = self.rng.choice(SHAPE.num_experts, SHAPE.top_k, replace=False)[None]
            self.scheduler.forward(0, self.hidden, ids, self.weights, out=self.out)
            lane.append(float(self.scheduler._runner.lane_us[CPU_US]))
            whole.append(self.scheduler._runner.step_us)
        return lane, whole


def main(arguments: list[str]) -> None:
    """Print a table."""
    counts = [int(a) for a in arguments] or [1, read_cpu_budget().num_concurrent]
    store = random_store(SHAPE)
    nbytes = SHAPE.top_k * int(store.layers[0].layout.shard_nbytes.sum())
    print(f"machine: {describe_machine().line}")
    print(f"{'threads':>7s} {'isa':9s} {'lane us':>8s} {'GB/s':>6s} {'step us':>8s}")
    for threads in counts:
        layers = [Layer(store, threads, isa) for isa in available_isas() if isa != "portable"]
        times: list[tuple[list[float], list[float]]] = [([], []) for _ in layers]
        for _ in range(ROUNDS):
            for layer, (lane, whole) in zip(layers, times, strict=True):
                for kept, new in zip((lane, whole), layer.run(STEPS), strict=True):
                    kept += new
        for layer, (lane, whole) in zip(layers, times, strict=True):
            layer.scheduler.close()
            us = float(np.median(lane))
            print(f"{threads:7d} {layer.isa:9s} {us:8.1f} {nbytes / us / 1e3:6.1f} {np.median(whole):8.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
