"""Layer-steps on a GPU: several layers in one CUDA graph, on a trace with skewed and repeated routing.

Method: one graph of all layers is launched for each token and waited for, so a layer's time is the graph's time over
its layers, launch and wait included. The lanes take turns on the same trace, slots and store, in one process. Bits of
the last token are compared with the host device's.

    python benchmarks/bench_cuda.py [--layers 8 --experts 128 --fraction 0.25 --tokens 300]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from trilane import Config, ExpertScheduler
from trilane.gpu_kernels.driver import Encoded
from trilane.host_runner import StepInput
from trilane.step_bench import StepShape, random_store

LANES = (None, "zero_copy", "stream", "cpu")


def zipf_trace(tokens, layers, experts, top_k, zipf=0.8, reuse=0.3, seed=1):
    """Ids (tokens, layers, top_k): a skewed draw for each layer, some experts kept from the token before."""
    rng = np.random.default_rng(seed)
    logits = -zipf * np.log(np.arange(1, experts + 1))
    trace = np.empty((tokens, layers, top_k), np.int64)
    for layer in range(layers):
        names, before = rng.permutation(experts), np.empty(0, np.int64)
        for token in range(tokens):
            kept = before[rng.random(before.size) < reuse]
            order = names[np.argsort(-(logits + rng.gumbel(size=experts)))]
            before = np.concatenate([kept, order[~np.isin(order, kept)][: top_k - kept.size]])
            trace[token, layer] = before
    return trace


class LayersInOneGraph:
    """All layers of a scheduler, one token, inputs and outputs in mapped memory."""

    def __init__(self, scheduler, top_k):
        self.runner, self.top_k = scheduler._runner, top_k
        hidden, layers = scheduler.store.hidden, scheduler.store.num_layers
        driver = self.runner.driver
        self.blocks = [
            driver.allocate_mapped(n) for n in (4 * hidden, 8 * layers * top_k, 4 * top_k, 4 * hidden * layers)
        ]
        x, ids, weights, out = self.blocks
        self.x, self.ids, self.weights, self.out = (
            _array(x, np.float32, hidden), _array(ids, np.int64, layers * top_k).reshape(layers, top_k),
            _array(weights, np.float32, top_k), _array(out, np.float32, layers * hidden).reshape(layers, hidden),
        )  # fmt: skip
        self.weights[:] = 1 / top_k
        words, held = [], []
        for layer in range(layers):
            step = StepInput(layer, 1, top_k, x, 4 * hidden, "f32", out + 4 * hidden * layer, 4 * hidden, "f32")
            encoded = self.runner.launches.encode(step, ids + 8 * top_k * layer, 8, weights)
            words.append(encoded.words)
            held.append(encoded)
        self.encoded = Encoded(np.concatenate(words), held)
        self.graph = driver.make_graph(self.encoded)

    def run(self, ids):
        """One token; us of the whole graph."""
        from trilane.gpu_kernels.driver_calls import launch_graph

        self.ids[:] = ids
        stream, driver = self.runner.device.work_stream, self.runner.driver
        begin = time.perf_counter()
        launch_graph(driver.table.ctypes.data, self.graph, stream)
        while not driver.finished(stream):
            pass
        us = 1e6 * (time.perf_counter() - begin)
        self.runner.check()
        return us

    def close(self):
        self.runner.driver.destroy_graph(self.graph)
        for block in self.blocks:
            self.runner.driver.free_mapped(block)


def _array(address, dtype, count):
    import ctypes

    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (np.dtype(dtype).itemsize * count)).from_address(address))
    return raw.view(dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("layers", 8), ("experts", 128), ("hidden", 2048), ("intermediate", 768), ("top-k", 8),
                        ("tokens", 300), ("warm", 60)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fraction", type=float, default=0.25)
    args = parser.parse_args()
    shape = StepShape(args.hidden, args.intermediate, args.experts, args.top_k)
    store = random_store(shape, args.layers)
    trace = zipf_trace(args.tokens, args.layers, args.experts, args.top_k)
    x = np.random.default_rng(3).standard_normal(args.hidden).astype(np.float32)
    profile, outs = None, {}
    for lane, fraction in [(lane, args.fraction) for lane in LANES] + [(None, 1.0)]:
        config = Config(cache={"fraction": fraction}, policy={"force": lane, "admit": "always"})
        begin = time.perf_counter()
        with ExpertScheduler(store, profile=profile, config=config, device="cuda") as scheduler:
            made_s, profile = time.perf_counter() - begin, scheduler.profile
            if lane is None and fraction < 1:
                print(scheduler._runner.driver.describe(), f"{scheduler._runner.num_threads} CPU workers", flush=True)
                print(profile.to_json(), flush=True)
            graph = LayersInOneGraph(scheduler, args.top_k)
            graph.x[:] = x
            if fraction == 1.0:  # a first pass makes everything resident
                for ids in trace:
                    graph.run(ids)
            us = np.array([graph.run(ids) for ids in trace])[args.warm :] / args.layers
            outs[lane, fraction] = graph.out.copy()
            stats = scheduler.stats()
            lanes = {name: round(found.shards / max(1, stats.steps), 2) for name, found in stats.lanes.items()}
            p50, p90, p99 = np.quantile(us, [0.5, 0.9, 0.99])
            print(
                f"{lane or 'split':10s} slots {fraction:4.0%}: p50 {p50:6.1f} p90 {p90:6.1f} p99 {p99:6.1f} mean "
                f"{us.mean():6.1f} us a layer; shards {lanes}; plan {stats.plan_us / max(1, stats.steps):.2f} us;"
                f" start {made_s:.1f} s",
                flush=True,
            )
            graph.close()
    first = next(iter(outs.values()))
    same = all((out.view(np.uint32) == first.view(np.uint32)).all() for out in outs.values())
    print("all lanes give the same bits:", same, flush=True)
    assert same


if __name__ == "__main__":
    main()
