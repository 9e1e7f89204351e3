"""Our lanes on a routing trace: the split, each lane alone, everything resident, and the joint rate of host memory.

Each part prints one line of JSON as soon as it is done, so that a part which hangs or fails costs only itself and
those after it. bench_peers.py runs this in a process of its own and reads the lines.

Method: all layers in one CUDA graph, one launch for each token of one row, some tokens ahead of the GPU as an engine
has them; a layer's time is the GPU's time between two events around the launch, over the number of layers.

    python -m benchmarks.trace_lanes --trace trace.npy [--parts split cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu_slots import settle
from benchmarks.joint_rate import measure_joint_rate
from benchmarks.peer_trace import load_trace, sweep_trace
from trilane.token_graphs import AHEAD, TokenGraphs

# name: (lane that is forced, admission, whether everything is resident)
PARTS = {
    "split": (None, "score", False),
    "split, admit always": (None, "always", False),
    "stream": ("stream", "always", False),
    "zero_copy": ("zero_copy", "always", False),
    "cpu": ("cpu", "always", False),
    "resident": ("zero_copy", "always", True),
}
SWEEPS = 5  # passes over all experts until everything is resident
LANES = ("stream", "zero_copy", "cpu")


@dataclass
class Run:
    """What all parts share."""

    store: object
    trace: np.ndarray
    warm: int
    fraction: float
    ahead: int = AHEAD
    profile: object = None

    @property
    def num_experts(self):
        return self.store.layers[0].num_experts


def missed_nbytes(stats):
    """Bytes of experts that were not resident."""
    return sum(stats.lanes[lane].nbytes for lane in LANES)


def fill_everything(scheduler, graphs, layers, experts, top_k):
    """Pass over every expert until a pass finds no miss.

    Raises
    ------
    RuntimeError
        Something is still missing after SWEEPS passes.
    """
    sweep = sweep_trace(layers, experts, top_k)
    for _ in range(SWEEPS):
        with scheduler.request() as request:
            graphs.run(sweep)
            settle(scheduler._runner)
        if not missed_nbytes(request.stats):
            return
    raise RuntimeError(f"{missed_nbytes(request.stats)} bytes still miss; {dict(request.stats.inactive)}")


def measure_part(run, name):
    """One part's figures, times in us of a layer, bytes and shards of a layer."""
    from trilane import Config, ExpertScheduler

    lane, admit, resident = PARTS[name]
    layers, top_k = run.trace.shape[1:]
    config = Config(cache={"fraction": 1.0 if resident else run.fraction}, policy={"force": lane, "admit": admit})
    begin = time.perf_counter()
    with ExpertScheduler(run.store, profile=run.profile, config=config, device="cuda") as scheduler:
        made_s, run.profile = time.perf_counter() - begin, scheduler.profile
        x = np.random.default_rng(3).standard_normal(run.store.hidden).astype(np.float32)
        graphs = TokenGraphs(scheduler, top_k, x, ahead=run.ahead)
        try:
            if resident:
                fill_everything(scheduler, graphs, layers, run.num_experts, top_k)
            graphs.run(run.trace[: run.warm])
            settle(scheduler._runner)
            with scheduler.request() as request:
                times = graphs.run(run.trace[run.warm :])
                settle(scheduler._runner)
            checksum = int(graphs.outputs(len(run.trace) - run.warm - 1).view(np.uint32).sum(dtype=np.uint64))
        finally:
            graphs.close()
    if resident and missed_nbytes(request.stats):
        raise RuntimeError(f"not everything was resident: {missed_nbytes(request.stats)} bytes missed")
    return _figures(times, request.stats, layers) | {"start_s": round(made_s, 2), "checksum": checksum}


def _figures(times, stats, layers):
    us, steps = times.us / layers, len(times.us) * layers
    p50, p90, p99 = np.quantile(us, [0.5, 0.9, 0.99])
    return {
        "p50": p50, "p90": p90, "p99": p99, "mean": us.mean(), "wall": 1e6 * times.wall_s / steps, "tokens": len(us),
        "missed_nbytes": missed_nbytes(stats) / steps, "plan_us": stats.plan_us / steps,
        "shards": {name: round(lane.shards / steps, 2) for name, lane in stats.lanes.items()},
        "inactive": {name: why for name, why in stats.inactive.items() if name not in LANES},
    }  # fmt: skip


def measure_joint(run):
    """GB/s of the CPU lane and of the link, alone and together."""
    import trilane.cuda_runner
    from trilane import Config
    from trilane.cuda_threads import CudaThreads

    driver = trilane.cuda_runner.CudaDriver()
    try:
        found = measure_joint_rate(driver, CudaThreads(Config()).num_threads, most_nbytes=run.store.nbytes)
    finally:
        driver.close()
    return found._asdict() | {"both": found.both}


def measure_all(run, names):
    """Yields (part, figures), or {"error": ...} where it fails."""
    for name in names:
        try:
            yield name, measure_joint(run) if name == "joint" else measure_part(run, name)
        except Exception as error:
            yield name, {"error": f"{type(error).__name__}: {error}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True, help=".npy (tokens, layers, top_k)")
    for name, value in (("layers", 8), ("experts", 128), ("hidden", 2048), ("inter", 768), ("top-k", 8), ("warm", 100)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fraction", type=float, default=0.25, help="of the experts that have slots")
    parser.add_argument("--ahead", type=int, default=AHEAD, help="tokens launched ahead; 1: each is waited for")
    parser.add_argument("--format", default="q4_k")
    parser.add_argument("--parts", nargs="+", choices=["joint", *PARTS], default=["joint", *PARTS])
    args = parser.parse_args()
    from trilane.random_store import StepShape, random_store

    shape = StepShape(args.hidden, args.inter, args.experts, args.top_k, args.format)
    trace = load_trace(args.trace, args.layers, args.experts, args.top_k)
    run = Run(random_store(shape, args.layers), trace, args.warm, args.fraction, args.ahead)
    for name, figures in measure_all(run, args.parts):
        print(json.dumps({"part": name, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
