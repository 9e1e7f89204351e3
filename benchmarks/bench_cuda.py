"""Layer-steps on a GPU: several layers in one CUDA graph, on a trace with skewed and repeated routing.

Method: one graph of all layers is launched for each token and waited for, so a layer's time is the graph's time over
its layers, launch and wait included. The lanes take turns on the same trace, slots and store, in one process. Bits of
the last token are compared with the host device's.

    python -m benchmarks.bench_cuda [--layers 8 --experts 128 --fraction 0.25 --tokens 300]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.peer_trace import synth_trace
from trilane import Config, ExpertScheduler
from trilane.cuda_step_graph import GraphStep, StepGraph
from trilane.cuda_step_probe import planned_with
from trilane.plan import make_options
from trilane.step_bench import StepShape, random_store

LANES = ("split", "zero_copy", "stream", "cpu", "resident")


class LayersInOneGraph:
    """All layers of a scheduler, one token; inputs and outputs in mapped memory."""

    def __init__(self, scheduler, top_k):
        self.runner, layers = scheduler._runner, range(scheduler.store.num_layers)
        self.graph = StepGraph(self.runner, [GraphStep(layer, 1, top_k) for layer in layers])

    def run(self, ids):
        """One token; us of a layer."""
        for into, given in zip(self.graph.ids, ids, strict=True):
            into[:] = given
        return self.graph.run()

    def make_resident(self):
        """Every expert into its slot: each layer reads all of its experts in place, until nothing is missing."""
        experts, top_k = self.runner.store.layers[0].num_experts, self.graph.steps[0].top_k
        with planned_with(self.runner, make_options(force="zero_copy")):
            for _ in range(2):
                for first in range(0, experts, top_k):
                    self.run([(first + np.arange(top_k)) % experts] * len(self.graph.steps))

    @property
    def out(self):
        return np.stack(self.graph.outputs())

    def close(self):
        self.graph.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("layers", 8), ("experts", 128), ("hidden", 2048), ("intermediate", 768), ("top-k", 8),
                        ("tokens", 300), ("warm", 60)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=LANES)
    parser.add_argument("--in-turn", action="store_true", help="no kernel starts before the one before it has ended")
    args = parser.parse_args()
    shape = StepShape(args.hidden, args.intermediate, args.experts, args.top_k)
    store = random_store(shape, args.layers)
    trace = synth_trace(args.tokens, args.layers, args.experts, args.top_k)
    x = np.random.default_rng(3).standard_normal(args.hidden).astype(np.float32)
    profile, outs = None, {}
    for lane in args.lanes:
        force = None if lane in ("split", "resident") else lane
        fraction = 1.0 if lane == "resident" else args.fraction
        config = Config(cache={"fraction": fraction}, policy={"force": force, "admit": "always"})
        begin = time.perf_counter()
        with ExpertScheduler(store, profile=profile, config=config, device="cuda") as scheduler:
            made_s, fresh, profile = time.perf_counter() - begin, profile is None, scheduler.profile
            if fresh:
                print(scheduler._runner.driver.describe(), f"{scheduler._runner.num_threads} CPU workers", flush=True)
                print(profile.to_json(), flush=True)
            if args.in_turn:
                scheduler._runner.driver.starts_early = False
            graph = LayersInOneGraph(scheduler, args.top_k)
            graph.graph.hidden[:] = x
            if lane == "resident":
                graph.make_resident()
            scheduler._runner.forget_counts()
            us = np.array([graph.run(ids) for ids in trace])[args.warm :]
            outs[lane] = graph.out.copy()
            stats = scheduler.stats()
            lanes = {name: round(found.shards / max(1, stats.steps), 2) for name, found in stats.lanes.items()}
            p50, p90, p99 = np.quantile(us, [0.5, 0.9, 0.99])
            steps = max(1, stats.steps)
            times = f"plan {stats.plan_us / steps:.2f}, answer {stats.step_us / steps:.1f}"
            print(
                f"{lane:10s} slots {fraction:4.0%}: p50 {p50:6.1f} p90 {p90:6.1f} p99 {p99:6.1f} mean "
                f"{us.mean():6.1f} us a layer; shards {lanes}; with misses: {times}, "
                f"predicted {stats.predicted_step_us / steps:.1f} us; start {made_s:.1f} s",
                flush=True,
            )
            graph.close()
    first = next(iter(outs.values()))
    same = all((out.view(np.uint32) == first.view(np.uint32)).all() for out in outs.values())
    print("all lanes give the same bits:", same, flush=True)
    assert same


if __name__ == "__main__":
    main()
