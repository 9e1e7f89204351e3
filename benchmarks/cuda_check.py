"""Everything to know first about a GPU, in one go: are the bits right, then where does the time of a layer go.

Method: each part is a process of its own with a time limit, so that one that hangs or dies costs only itself. Bits
come first; rates are medians of repeated runs; the last line of a part's output is its row in the table.

    python benchmarks/cuda_check.py [--parts bits cpu_lane --limit 120]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np

LANES = ("stream", "zero_copy", "cpu", None)
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 32, 8, 2048, 768
REPEATS = 40


def _store(experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, layers=2):
    from trilane.random_store import StepShape, random_store

    return random_store(StepShape(hidden, intermediate, experts, TOP_K), layers)


def _open(store, device, lane=None, slots=0.25):
    from trilane import Config, ExpertScheduler
    from trilane.profile import Curve, host_profile

    config = Config(cache={"fraction": slots}, policy={"force": lane, "admit": "always"})
    rates = {"num_cores": 1, "copy_gb_s": 10, "zero_copy_gb_s": 10, "device_experts": {"q4_k": 10.0}}
    profile = host_profile(**rates, cpu_experts={"q4_k": Curve((1.0,), (10.0,))})  # where a lane is forced, any will do
    return ExpertScheduler(store, profile=profile if lane else None, config=config, device=device)


def _routing(rng, experts):
    x = rng.standard_normal((1, HIDDEN)).astype(np.float32)
    return x, rng.choice(experts, TOP_K, False)[None], np.full((1, TOP_K), 1 / TOP_K, np.float32)


def _median_us(run, repeats=REPEATS):
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - begin))
    return float(np.median(times))


# ------------------------------------------------------------------------------------------------- the parts
def driver():
    """The GPU and its free memory."""
    from trilane.gpu_kernels.driver import CudaDriver

    found = CudaDriver()
    print(f"{found.describe()}, {found.free_nbytes() / 1e9:.1f} GB free")


def bits():
    """Steps on every lane against the host device."""
    store, rng = _store(), np.random.default_rng(1)
    steps = [(k % 2, *_routing(rng, EXPERTS)) for k in range(12)]
    with _open(store, "host", "cpu") as host:
        wanted = [host.forward(*step).copy() for step in steps]
    for lane in LANES:
        with _open(store, "cuda", lane) as scheduler:
            for step, want in zip(steps, wanted, strict=True):
                got = scheduler.forward(*step)
                assert (got.view(np.uint32) == want.view(np.uint32)).all(), f"lane {lane}: other bits than the host's"
        print(f"{lane or 'split'}: same bits", flush=True)
    print(f"all of {len(steps)} steps on {len(LANES)} lanes: the host's bits")


def mapped_memory():
    """How fast the processor reads memory that the GPU writes: it must be cached as any other."""
    import ctypes

    from trilane.gpu_kernels.driver import CudaDriver

    found, nbytes = CudaDriver(), 16 << 20
    address, target = found.allocate_mapped(nbytes), np.zeros(nbytes, np.uint8)
    plain = np.zeros(nbytes, np.uint8)
    rates = [
        nbytes / 1e3 / _median_us(lambda source=source: ctypes.memmove(target.ctypes.data, source, nbytes), 9)
        for source in (address, plain.ctypes.data)
    ]
    found.free_mapped(address)
    print(f"one thread copies {rates[0]:.1f} GB/s from mapped memory, {rates[1]:.1f} from plain")


def copies():
    """Copies of an expert's bytes from the registered arena to slots."""
    store = _store()
    with _open(store, "cuda", "stream") as scheduler:
        runner, nbytes = scheduler._runner, int(store.layers[0].layout.shard_nbytes.sum())
        stream, slots, source = runner.device.copy_stream, runner.device.slots, store.arena.address

        def copy():
            for k in range(8):
                runner.driver.to_device(slots, source + k * nbytes, nbytes, stream)
            runner.wait_for(stream)

        us = _median_us(copy)
        pinned = runner.pinned_nbytes / store.nbytes
    print(
        f"8 experts of {nbytes} bytes: {us:.0f} us, {8 * nbytes / us / 1e3:.1f} GB/s; {pinned:.0%} of the store pinned"
    )


def cpu_lane():
    """The CPU lane's job alone, in steps on the GPU and on the host device: the rates must be equal."""
    from trilane.cpu_kernels.words import TeamJob

    store, rows = _store(), []
    nbytes = TOP_K * int(store.layers[0].layout.shard_nbytes.sum())
    for device in ("host", "cuda"):
        with _open(store, device, "cpu") as scheduler:
            rng, job_us, step_us = np.random.default_rng(2), [], []
            for _ in range(REPEATS):
                begin = time.perf_counter()
                scheduler.forward(0, *_routing(rng, EXPERTS))
                step_us.append(1e6 * (time.perf_counter() - begin))
                job = scheduler._runner.ws.team_job
                job_us.append((job[TeamJob.END_NS] - job[TeamJob.POSTED_NS]) / 1e3)
            us = float(np.median(job_us[5:]))
            rows.append(f"{device} {us:.0f} us of {np.median(step_us[5:]):.0f}, {nbytes / us / 1e3:.1f} GB/s")
            threads = scheduler._runner.num_threads
    print(f"{threads} threads, 8 experts: " + "; ".join(rows))


def scaling():
    """Steps by missing experts, each lane: what grows with the bytes, and what does not."""
    from trilane.cuda_probe import fit
    from trilane.cuda_step_probe import hit_us, lane_us

    store, counts, rows = _store(EXPERTS * 4), (1, 2, 4, 8), []
    nbytes = int(store.layers[0].layout.shard_nbytes.sum())
    with _open(store, "cuda") as scheduler:
        for lane in ("zero_copy", "cpu", "stream", "hits"):
            if lane == "hits":
                us = hit_us(scheduler._runner, 0, counts)
            else:
                us = lane_us(scheduler._runner, [0, 1], counts, lane, fills=lane == "stream")
            line, times = fit(counts, nbytes, us), " ".join(f"{x:.1f}" for x in us)
            rows.append(f"{lane} {times} us: {line.fix_us:.1f} + {line.gb_s:.0f} GB/s")
        print(scheduler.profile.to_json())
    print("; ".join(rows))


def layers():
    """Whole layers in one graph on a skewed trace (bench_cuda.py)."""
    command = [sys.executable, "-m", "benchmarks.bench_cuda", "--tokens", "200", "--warm", "50"]
    subprocess.run(command, check=True)


PARTS = {part.__name__: part for part in (driver, bits, mapped_memory, copies, cpu_lane, scaling, layers)}


def run_part(name, limit_s):
    """A part in its own process: verdict, s, output."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.cuda_check", "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        verdict, text = ("ok" if done.returncode == 0 else "FAILED"), (done.stdout + done.stderr)
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        verdict, text = f"over {limit_s:g} s", out.decode() if isinstance(out, bytes) else out
    return verdict, time.perf_counter() - begin, text.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=180.0, help="s for each part")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return PARTS[args.only]()
    rows = []
    for name in args.parts:
        verdict, seconds, text = run_part(name, args.limit)
        rows.append((name, verdict, seconds, text.splitlines()[-1] if text else ""))
        print(f"--- {name}: {verdict} after {seconds:.0f} s\n{text}", flush=True)
    print(
        "\n" + "\n".join(f"{name:14s} {verdict:10s} {seconds:5.0f} s  {last}" for name, verdict, seconds, last in rows)
    )
    return sys.exit(any(verdict != "ok" for _, verdict, _, _ in rows))


if __name__ == "__main__":
    main()
