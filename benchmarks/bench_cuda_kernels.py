"""The CUDA kernels by themselves on one GPU: a layer with all experts resident, its kernels, and reads in place.

Run with `python -m benchmarks.bench_cuda_kernels` from the checkout. Method: Q4_K experts of 2048 x 768, 8 layers of
128 experts, top-8, batch 1. A step is what the general path launches; 40 tokens x 8 layers with other experts each are
captured in one graph, so that every byte comes from memory; the graph is launched nine times, the median counts.
Reads in place: 20 launches on a plan of n experts in pinned memory. Bits are those that the kernels' tests check.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.layout import ExpertLayout, pack_expert
from trilane.gpu_kernels import launch as launches
from trilane.gpu_kernels import words
from trilane.gpu_kernels.buffers import buffer_sizes, max_items
from trilane.gpu_kernels.build import variant_of
from trilane.gpu_kernels.kernels import Kernels
from trilane.gpu_kernels.words import TYPES

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 128, 8, 2048, 768, 40


def random_expert(layout: ExpertLayout, rng: np.random.Generator) -> np.ndarray:
    """Random nibbles with scales as trained weights have them (format q4_k)."""

    def rows(count: int, columns: int) -> np.ndarray:
        blocks = rng.integers(0, 256, (count * columns // 256, 144), np.uint8)
        for start, size in ((0, 0.0003), (2, 0.002)):
            scale = (rng.uniform(0.8, 1.2, len(blocks)) * size).astype(np.float16)
            blocks[:, start : start + 2] = scale.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(count, -1)

    out = np.empty(layout.expert_nbytes, np.uint8)
    gate, up = rows(layout.intermediate, layout.hidden), rows(layout.intermediate, layout.hidden)
    pack_expert(layout, out, gate, up, rows(layout.hidden, layout.intermediate))
    return out


class Bench:
    """Experts in VRAM and in pinned memory, one set of buffers, and launches on them."""

    def __init__(self, num_pinned: int = 128) -> None:
        import cupy

        self.cupy, rng = cupy, np.random.default_rng(0)
        fmt = format_of("q4_k")
        self.layout = ExpertLayout(HIDDEN, INTERMEDIATE, fmt, fmt, fmt)
        self.shards, self.nbytes = self.layout.num_shards, self.layout.expert_nbytes
        self.kernels, self.stream = Kernels(variant_of(self.layout)), cupy.cuda.Stream(non_blocking=True)
        some = np.stack([random_expert(self.layout, rng) for _ in range(8)])
        self.num_pinned = num_pinned
        self.pinned = cupy.cuda.PinnedMemory(num_pinned * self.nbytes, 2)
        host = self.host_view(self.pinned.ptr, num_pinned * self.nbytes).reshape(num_pinned, -1)
        host[:] = some[np.arange(num_pinned) % 8]
        self.slot_nbytes = int(self.layout.shard_nbytes.max())
        self.slots = cupy.empty((LAYERS * EXPERTS, self.shards, self.slot_nbytes), cupy.uint8)
        resident = cupy.asarray(some.reshape(8, self.shards, -1))
        for first in range(0, LAYERS * EXPERTS, 8):
            self.slots[first : first + 8] = resident
        self.table = cupy.asarray(rng.permutation(LAYERS * EXPERTS * self.shards).astype(np.int32))
        self.items = max_items(EXPERTS, self.shards, 1, TOP_K)
        self.make_buffers(rng)

    @staticmethod
    def host_view(address: int, nbytes: int) -> np.ndarray:
        import ctypes

        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def make_buffers(self, rng: np.random.Generator) -> None:
        cupy = self.cupy
        sizes = buffer_sizes(HIDDEN, self.shards, EXPERTS, 1, TOP_K, 256)
        self.buffers: dict[str, Any] = {n: cupy.zeros(max(64, b), cupy.uint8) for n, b in sizes.device.items()}
        self.buffers |= {name: cupy.cuda.PinnedMemory(max(64, b), 2) for name, b in sizes.mapped.items()}
        self.buffers["plans"] = cupy.cuda.PinnedMemory(32 * words.list_nbytes(self.items), 2)
        self.buffers["updates"] = cupy.cuda.PinnedMemory(64 + 2 * words.UPDATE_NBYTES * self.items, 2)
        self.x = cupy.asarray(rng.standard_normal(HIDDEN).astype(np.float32))
        self.weights = cupy.asarray(rng.dirichlet(np.ones(TOP_K)).astype(np.float32))
        self.out = cupy.zeros(HIDDEN, cupy.float32)
        ids = [rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(TOKENS * LAYERS)]
        self.ids = cupy.asarray(np.stack(ids).astype(np.int32))
        counters = 2 * words.progress_nbytes(self.items)
        self.counters = cupy.zeros(counters, cupy.uint8)
        for name in sizes.mapped:
            self.host_view(self.buffers[name].ptr, max(64, sizes.mapped[name]))[:] = 0

    def address(self, name: str) -> int:
        buffer = self.buffers[name]
        return int(buffer.ptr if hasattr(buffer, "ptr") else buffer.data.ptr)

    def layer(self, layer: int) -> Any:
        entries = EXPERTS * self.shards
        return words.layer_words(
            self.layout, layer=layer, num_experts=EXPERTS, gate_kind=0, slots=self.slots.data.ptr,
            slot_nbytes=self.slot_nbytes, slot_of=self.table.data.ptr + 4 * layer * entries,
        )  # fmt: skip

    def step(self, number: int) -> Any:
        step = np.zeros((), TYPES["Step"])
        for name in self.buffers:
            if name in TYPES["Step"].names and not name.endswith("floats"):
                step[name] = self.address(name)
        step["x"], step["ids"], step["weights"] = self.x.data.ptr, self.ids[number].data.ptr, self.weights.data.ptr
        step["out"], step["out_stride"], step["x_stride"] = self.out.data.ptr, 4 * HIDDEN, 4 * HIDDEN
        step["id_nbytes"], step["num_rows"], step["top_k"] = 4, 1, TOP_K
        step["table"] = self.table.data.ptr
        return step

    def progress(self, plan: int) -> Any:
        return words.progress_words(self.counters.data.ptr + plan * words.progress_nbytes(self.items), self.items)

    # ------------------------------------------------------------------------------------------ timing
    def graph_us(self, make: Any, count: int, repeats: int = 9, reset: bool = False) -> float:
        """Median us per item of a graph that holds the launches of ``make(i)`` for ``count`` items.

        ``reset`` clears the flags before each launch, for steps that all have the same number (it counts in the time).
        """
        cupy = self.cupy
        work = [launch for i in range(count) for launch in make(i)]
        for launch in work:
            self.kernels.prepare(launch)
        with self.stream:
            self.stream.begin_capture()
            for launch in work:
                if reset:
                    self.counters.data.memset_async(0, self.counters.nbytes, self.stream)
                self.kernels.launch(launch, self.stream)
            graph = self.stream.end_capture()
        begin, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
        for _ in range(repeats + 2):
            begin.record(self.stream)
            graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / count)
        return round(float(np.median(times[2:])), 2)

    def launches(self, number: int, names: str) -> list[Any]:
        """Launches of one layer-step by name: p(ublish), h(its), z (plan), c(ombine)."""
        layer, step = self.layer(number % LAYERS), self.step(number)
        args = (self.layout, layer, step)
        makers = {
            "p": lambda: launches.publish_launch(layer, step),
            "h": lambda: launches.hit_launch(*args, self.progress(0), self.items),
            "z": lambda: self.plan(layer, step, self.address("plans")),
            "c": lambda: launches.combine_launch(layer, step, self.progress(0), self.progress(1)),
        }
        return [makers[name]() for name in names]

    def plan(self, layer: Any, step: Any, plan: int) -> Any:
        updates = self.address("updates")
        return launches.plan_launch(self.layout, layer, step, self.progress(1), self.items, plan, updates)

    def read_in_place(self, experts: int, fill: bool) -> float:
        """Us of a plan of so many whole experts in pinned memory."""
        state = np.zeros((), TYPES["State"])
        state["clock"] = state["missing"] = state["sequence"] = 1
        self.buffers["state"][:64].set(np.frombuffer(state.tobytes(), np.uint8))
        nbytes, rng = words.list_nbytes(self.items), np.random.default_rng(experts)
        for number in range(20):
            self.write_plan(number * nbytes, rng.choice(self.num_pinned, experts, replace=False), fill)
        layer, step = self.layer(0), self.step(0)

        def make(number: int) -> list[Any]:
            return [self.plan(layer, step, self.address("plans") + number * nbytes)]

        return self.graph_us(make, 20, reset=True)

    def write_plan(self, offset: int, experts: np.ndarray, fill: bool) -> None:
        items = np.zeros(len(experts) * self.shards, TYPES["Item"])
        for i, (rank, expert, shard) in enumerate(
            (rank, expert, shard) for rank, expert in enumerate(experts) for shard in range(self.shards)
        ):
            start = self.pinned.ptr + int(expert) * self.nbytes + int(self.layout.shard_offset[shard])
            slot = self.slots.data.ptr + (rank * self.shards + shard) * self.slot_nbytes if fill else 0
            items[i] = (start, 1, shard, slot, 1, rank, 0, 1, 1, 0)
        memory = self.host_view(self.address("plans") + offset, words.list_nbytes(self.items))
        memory[64 : 64 + items.nbytes] = items.view(np.uint8)
        memory[:12].view(np.int32)[:] = 1, len(items), 0


def measure(bench: Bench) -> dict[str, Any]:
    """All figures of one machine."""
    count = TOKENS * LAYERS
    chains = {"publish": "p", "publish, hits": "ph", "general path, nothing missing": "phzc"}
    found: dict[str, Any] = {
        name: bench.graph_us(lambda i, chain=chain: bench.launches(i, chain), count) for name, chain in chains.items()
    }
    found["hits_gb_s"] = round(TOP_K * bench.nbytes / 1e3 / (found["publish, hits"] - found["publish"]), 1)
    for fill in (False, True):
        for experts in (1, 2, 4, 8):
            us = bench.read_in_place(experts, fill)
            rate = round(experts * bench.nbytes / us / 1e3, 1)
            found[f"in place, {experts} experts" + (", fill" if fill else "")] = {"us": us, "gb_s": rate}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    bench = Bench()
    name = bench.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(json.dumps({"gpu": name, "rows": measure(bench)}, indent=1))


if __name__ == "__main__":
    main()
