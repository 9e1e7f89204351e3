"""FreeToken 0.2.1's mixture-of-experts decode layer with random NVFP4 weights: no model, no server.

Ran on an H200 (Python 3.12, torch 2.11+cu130, triton 3.6, CUDA 13). It calls public functions of the `freetoken` wheel
(PyPI, Apache-2.0), in the order of its layers/moe.py:

    moe/offload_cache.py  OffloadMoeCache(...)  .set_bank_sources .ensure_experts .ensure_experts_hybrid .copy_missing
    moe/fused_nvfp4.py    fused_experts_decode_nvfp4_marlin(...)
    moe/cpu_executor.py   CpuMoeExecutor(...)   .decode_submit .decode_sync
    moe/benchbw.py        measure_pcie_gather_bw, measure_cpu_moe_bw, measure_overlap_bw

Wheels (PyPI; beside torch and triton they need no others): freetoken==0.2.1 (cp312), flashlib==0.4.0,
apache_tvm_ffi==0.1.13.post3, pyzmq==27.3.0; `pip install --no-index --no-deps --target DIR *.whl`. ninja, nvcc and a
C++ compiler are used at the first run.

Method: one step is every layer once, batch 1, in one replay of a CUDA graph; a layer's time is the GPU's time of
the step between two events, over the number of layers. Routing comes from a file of NumPy (tokens, layers,
top_k), or is made (peer_trace.py) and can be written with --save-trace.

    python -m benchmarks.freetoken_bench --mode offload,hybrid --slots 256 --steps 300 --breakdown --json ft.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import OrderedDict

# What freetoken reads when it is imported.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")  # for ninja
if "CUDA_HOME" not in os.environ and os.path.isdir("/usr/local/cuda"):
    os.environ["CUDA_HOME"] = "/usr/local/cuda"

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.freetoken_parts import (  # noqa: E402
    DEV,
    breakdown,
    calibrate,
    make_banks,
    patch_pinned,
    patch_threads,
    reference,
)
from benchmarks.peer_trace import load_trace, synth_trace  # noqa: E402

TARGETS = {"offload": "gpu", "hybrid": "hybrid", "cpu": "cpu"}
HEADINGS = f"{'mode':9}{'us/layer p50':>13}{'p90':>9}{'p99':>9}{'mean':>9}{'wall':>9}{'miss':>7}{'fetch':>7}{'cpu':>7}"


def lru_misses(trace, slots):
    """Misses of a plain LRU over one shared pool, used layer after layer: what ``offload`` is expected to miss."""
    held, misses = OrderedDict(), 0
    for token in trace:
        for layer, ids in enumerate(token):
            keys = [(layer, int(expert)) for expert in dict.fromkeys(ids.tolist())]
            new = [key for key in keys if key not in held]
            for key in keys:
                if key in held:
                    held.move_to_end(key)
            misses += len(new)
            for key in new:
                if len(held) >= slots:
                    held.popitem(last=False)
                held[key] = True
    return misses


class Rig:
    """FreeToken's cache, its executor and a captured step in one of its modes."""

    def __init__(self, args, banks, mode, fraction):
        from freetoken.moe.fused_nvfp4 import fused_experts_decode_nvfp4_marlin
        from freetoken.moe.offload_cache import OffloadMoeCache

        self.args, self.banks, self.mode, self.executor = args, banks, mode, None
        self._multiply = fused_experts_decode_nvfp4_marlin
        pools = {}
        if args.per_layer_pools:
            assert args.slots % args.layers == 0
            each = [args.slots // args.layers] * args.layers
            pools = {"pool_of_layer": list(range(args.layers)), "pool_sizes": each}
        self.cache = OffloadMoeCache(
            num_layers=args.layers, num_experts=args.experts, cache_size=args.slots, device=DEV,
            quant_format="nvfp4", decode_target=TARGETS[mode], hybrid_max_fetch=args.max_fetch,
            hybrid_fetch_fraction=[fraction] * args.layers if mode == "hybrid" and fraction is not None else None,
            **pools,
        )  # fmt: skip
        self.cache.collect_stats = True  # before the capture: the counters are part of what is captured
        self.cache.set_bank_sources(banks)
        assert self.cache._copy_fused_ok, "its copy of several banks at once is off: rows or addresses are not aligned"
        if mode != "offload":
            self._make_executor()
        generator = torch.Generator().manual_seed(5)
        self.x = (torch.randn(1, args.hidden, generator=generator) * 0.5).to(torch.bfloat16).to(DEV)
        weights = torch.softmax(torch.randn(args.layers, 1, args.top_k, generator=generator), -1)
        self.weights = weights.float().to(DEV).contiguous()
        self.ids = torch.zeros(args.layers, 1, args.top_k, dtype=torch.int32, device=DEV)  # the graph's input
        self.out = torch.zeros(args.layers, 1, args.hidden, dtype=torch.bfloat16, device=DEV)

    def _make_executor(self):
        from freetoken.moe.cpu_executor import CpuMoeExecutor

        args = self.args
        self.executor = CpuMoeExecutor(
            self.cache, top_k=args.top_k, activation="silu", apply_router_weight_on_input=False,
            num_threads=args.cpu_threads, max_tokens=1, device=DEV, layer_formats=[("nvfp4", {})] * args.layers,
        )  # fmt: skip
        self.cache.set_cpu_executor(self.executor)
        if self.mode == "cpu":
            self.cache.cpu_layer_ids = frozenset(range(args.layers))

    def product(self, layer, weights, slots):
        """The layer's experts out of slots."""
        views = self.cache.pool_bank_views(layer)
        return self._multiply(self.x, *views, weights, slots, "silu", False, 1.0, float("inf"))

    def layer(self, layer):
        """One layer as layers/moe.py decodes it; the look-up rewrites ids in place."""
        cache, x, weights = self.cache, self.x, self.weights[layer]
        ids = self.ids[layer].clone()
        if self.mode == "cpu":
            return self.executor.decode(layer, x, weights, ids)
        if self.mode == "hybrid":  # clamp: the Triton kernel reads every slot
            slots, on_gpu, on_cpu = cache.ensure_experts_hybrid(layer, ids, weights, clamp=True)
            pending = self.executor.decode_submit(layer, x, weights, on_cpu)
            cache.copy_missing()
            return self.executor.decode_sync(pending, add_to=self.product(layer, on_gpu, slots))
        cache.ensure_experts(layer, ids)
        cache.copy_missing()
        return self.product(layer, weights, ids)

    def step(self):
        """Every layer once."""
        for layer in range(self.args.layers):
            self.out[layer].copy_(self.layer(layer))

    def capture(self):
        """Compile and capture the step."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.step()
        torch.cuda.synchronize()

    def go(self):
        """One step."""
        if self.args.graph:
            self.graph.replay()
        else:
            self.step()

    def reset(self):
        """An empty cache."""
        self.cache.reset()
        self.cache.reset_stats()
        torch.cuda.synchronize()

    def run(self, trace, warm):
        """GPU ms of each step after the first ``warm``, the cache's counts, and wall ms of a step."""
        ids = torch.from_numpy(trace).to(DEV).unsqueeze(2)
        self.reset()
        for token in range(warm):
            self.ids.copy_(ids[token])
            self.go()
        torch.cuda.synchronize()
        self.cache.reset_stats()
        num = trace.shape[0] - warm
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num)]
        start = time.perf_counter()
        for token, (begin, end) in enumerate(events):
            self.ids.copy_(ids[warm + token])
            begin.record()
            self.go()
            end.record()
            if self.args.sync_each:
                end.synchronize()  # as a server that reads the token each step
            if self.executor is not None:
                self.executor.raise_if_unhealthy()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - start) / num * 1e3
        return [begin.elapsed_time(end) for begin, end in events], self.cache.decode_miss_stats(), wall_ms

    def check(self, trace):
        """The worst relative error of some steps: about 0.005, and 0.01 to 0.03 where the CPU computes."""
        self.reset()
        worst = 0.0
        for ids in trace[:3]:
            self.ids.copy_(torch.from_numpy(ids).to(DEV).unsqueeze(1))
            self.go()
            torch.cuda.synchronize()
            for layer in (0, self.args.layers - 1):
                wanted = reference(self.banks, layer, self.x, self.ids[layer], self.weights[layer])
                worst = max(worst, ((self.out[layer][0].float() - wanted).norm() / wanted.norm()).item())
        return worst


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def measure_mode(args, banks, expert_nbytes, trace, mode, fraction):
    """One mode's row, times in us of a layer."""
    rig = Rig(args, banks, mode, fraction)
    if args.graph:
        rig.capture()
    else:
        rig.step()
    error = rig.check(trace)
    step_ms, counts, wall_ms = rig.run(trace, args.warm)
    us, misses = [1e3 * ms / args.layers for ms in step_ms], counts["missing_per_layer"]
    row = {
        "p50": quantile(us, 0.5), "p90": quantile(us, 0.9), "p99": quantile(us, 0.99), "mean": statistics.fmean(us),
        "wall": 1e3 * wall_ms / args.layers, "miss": misses,
        "fetch": counts["fetched_per_layer"] if mode == "hybrid" else misses * (mode == "offload"),
        "cpu": counts["cpu_per_layer"] if mode == "hybrid" else args.top_k * (mode == "cpu"),
        "rel_err": error, "fraction": fraction if mode == "hybrid" else None,
    }  # fmt: skip
    print(
        f"{mode:9}{row['p50']:13.1f}{row['p90']:9.1f}{row['p99']:9.1f}{row['mean']:9.1f}{row['wall']:9.1f}"
        f"{row['miss']:7.2f}{row['fetch']:7.2f}{row['cpu']:7.2f}{error:9.4f}", flush=True,
    )  # fmt: skip
    if args.breakdown:
        row["parts"] = breakdown(rig, expert_nbytes)
        print("#  ", json.dumps(row["parts"]))
    if rig.executor is not None:
        rig.executor._watchdog_stop = True
    return row


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--mode", default="offload,hybrid", help="of offload, hybrid, cpu; with commas")
    for name, value in (("hidden", 2048), ("inter", 768), ("experts", 128), ("top-k", 8), ("layers", 8),
                        ("steps", 400), ("seed", 1), ("max-fetch", 1)):  # fmt: skip
        add(f"--{name}", type=int, default=value)
    add("--slots", type=int, default=256, help="experts in all; not fewer than --experts")
    add("--per-layer-pools", action="store_true", help="an equal part of the slots for each layer")
    add("--trace", help="file of NumPy (tokens, layers, top_k) or (tokens, top_k)")
    add("--save-trace", help="write the trace that is used to a file of NumPy")
    add("--warm", type=int, default=100, help="first steps of the trace, not timed")
    add("--zipf", type=float, default=0.8)
    add("--reuse", type=float, default=0.3)
    add("--fraction", default="auto", help="auto, cap (fixed --max-fetch, no profile), or 0 to 1")
    add("--cpu-threads", type=int, default=0, help="0: automatic")
    add("--stock-threads", action="store_true", help="do not keep two cores free for FreeToken's spinning")
    add("--native-pinned", action="store_true", help="FreeToken's own pinned memory (torch 2.14 only)")
    add("--no-graph", dest="graph", action="store_false")
    add("--sync-each", action="store_true")
    add("--breakdown", action="store_true")
    add("--json")
    return parser.parse_args()


def start(args):
    """Check the machine, patch, and begin the report."""
    assert torch.cuda.is_available(), "needs a CUDA GPU"
    assert args.slots >= args.experts, "FreeToken refuses a cache that is smaller than a layer's experts"
    assert args.hidden % 64 == 0 and args.inter % 64 == 0
    torch.cuda.set_device(DEV)
    for tool in ("ninja", "nvcc", "c++"):
        where = shutil.which(tool) or shutil.which(tool, path=os.environ.get("CUDA_HOME", "") + "/bin")
        print(f"# {tool}: {where or 'MISSING (the copy kernel is compiled at first use)'}")
    pinned = patch_pinned(args.native_pinned)
    threads = "stock" if args.stock_threads else patch_threads()
    import freetoken

    gpu = torch.cuda.get_device_name()
    print(f"# freetoken {freetoken.__version__} torch {torch.__version__} {gpu} pinned={pinned} threads={threads}")
    return {
        "freetoken": freetoken.__version__, "torch": torch.__version__, "gpu": gpu,
        "cpus": len(os.sched_getaffinity(0)), "pinned": pinned, "threads": threads, "args": vars(args), "modes": {},
    }  # fmt: skip


def read_trace(args):
    """The trace that was asked for."""
    shape = args.layers, args.experts, args.top_k
    made = (args.steps + args.warm, *shape, args.zipf, args.reuse, args.seed)
    trace = load_trace(args.trace, *shape) if args.trace else synth_trace(*made)
    if args.save_trace:
        np.save(args.save_trace, trace)
    return trace


def fetch_fraction(args, report):
    """What FreeToken fetches of the misses in ``hybrid``; None: a fixed number."""
    if "hybrid" not in args.mode or args.fraction == "cap":
        return None
    if args.fraction != "auto":
        return float(args.fraction)
    report["calibration"] = calibrate(args)
    print("# calibration", json.dumps(report["calibration"]))
    return report["calibration"]["fraction"]


def main() -> int:
    args = parse_args()
    report, trace = start(args), read_trace(args)
    if not args.per_layer_pools:
        steps = (trace.shape[0] - args.warm) * args.layers
        expected = (lru_misses(trace, args.slots) - lru_misses(trace[: args.warm], args.slots)) / steps
        print(f"# host LRU model: {expected:.3f} misses per layer-step of {args.top_k}")
        report["host_lru_misses_per_layer_step"] = expected
    fraction = fetch_fraction(args, report)
    banks, nbytes = make_banks(args.layers, args.experts, args.hidden, args.inter, args.seed)
    report["expert_bytes"], num = nbytes, args.layers * args.experts
    print(
        f"# expert {nbytes} B, {args.layers} layers x {args.experts} experts = {nbytes * num / 1e9:.2f} GB pinned, "
        f"cache {args.slots} slots = {nbytes * args.slots / 1e9:.2f} GB ({args.slots / num:.0%})"
    )
    print(HEADINGS + f"{'rel.err':>9}")
    for mode in args.mode.split(","):
        report["modes"][mode] = measure_mode(args, banks, nbytes, trace, mode, fraction)
        torch.cuda.empty_cache()
        if args.json:  # after each mode: one that fails leaves the others' rows
            with open(args.json, "w") as file:
                json.dump(report, file, indent=1, default=str)
    return 0


if __name__ == "__main__":
    sys.exit(main())
