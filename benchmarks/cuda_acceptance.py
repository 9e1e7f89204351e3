"""The lines that the CUDA device is held to, on a GPU, in one go: line, figure, goal, and whether it is held.

Shape: hidden 2048, intermediate 768, top-8, Q4_K, 48 layers of 16 experts in one graph, slots for half of them.

Method: each part is a process of its own with a time limit. A layer-step's time is the GPU's time of the graph of 48
over 48, its experts drawn anew each time, the absent ones from 1 GB that no cache holds; medians over tokens. Times of
a lane are lines through 1, 2, 4 and 8 missing experts: the slope is its rate, and what the line begins with, less what
steps without misses begin with, is its fixed cost. What lanes are held against is measured in the same process.

    python -m benchmarks.cuda_acceptance [--parts lanes together]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time

import numpy as np

SHAPE = {"hidden": 2048, "intermediate": 768, "num_experts": 16, "top_k": 8, "format": "q4_k"}
NUM_LAYERS = 48
PREDICTED_SHAPE = SHAPE | {"num_experts": 32}
PREFILL_SHAPE = SHAPE | {"num_experts": 128}
COUNTS = (1, 2, 4, 8)
TOKENS = 20


def row(line, figure, goal=None, sense="<=", unit="us"):
    """A line of the table, printed for the process that collects them; without a goal it only informs."""
    print(json.dumps({"line": line, "figure": float(figure), "goal": goal, "sense": sense, "unit": unit}), flush=True)


@contextlib.contextmanager
def open_steps(shape=SHAPE, layers=NUM_LAYERS, *, fraction=0.5, profile="made"):
    """A scheduler on the GPU and its steps; ``profile`` None: measured."""
    from benchmarks.cuda_identity import made_profile
    from trilane import Config, ExpertScheduler
    from trilane.cuda_step_bench import LayerSteps, awake
    from trilane.random_store import StepShape, random_store

    store = random_store(StepShape(**shape), layers)
    config = Config(cache={"fraction": fraction, "pool": "layer"}, policy={"admit": "always"}, cpu=awake())
    profile = made_profile(store) if profile == "made" else profile
    with ExpertScheduler(store, profile=profile, config=config, device="cuda") as scheduler:
        steps = LayerSteps(scheduler)
        try:
            yield steps
        finally:
            steps.close()


def line_of(counts, us):
    """(us before the first expert, us of each) of the line through times by experts."""
    each, first = np.polyfit(counts, us, 1)
    return float(first), float(each)


def copy_gb_s(steps, count=64, samples=5):
    """GB/s of copies of whole experts from the pinned arena to slots, one behind the other."""
    from trilane.gpu_kernels.events import events_of

    runner, nbytes = steps.runner, steps.expert_nbytes
    runner.reset()
    arena, places = steps.store.arena, max(1, runner.num_slots * runner.device.slot_nbytes // nbytes)
    events, found = events_of(runner.driver), []
    for sample in range(samples):
        first = events.record(runner.device.copy_stream)
        for k in range(count):
            source = arena.address + (sample * count + k) % (arena.nbytes // nbytes) * nbytes
            target = runner.device.slots + k % places * nbytes
            runner.driver.to_device(target, source, nbytes, runner.device.copy_stream)
        last = events.record(runner.device.copy_stream)
        events.wait(last)
        found.append(count * nbytes / events.us(first, last) / 1e3)
    events.close()
    return float(np.median(found))


def open_reader(steps):
    """The reading kernel, an expert at a time, for a with statement."""
    from trilane.gpu_kernels.pinned_reader import PinnedReader

    pinned = steps.runner.device.pinned
    return contextlib.closing(
        PinnedReader(steps.runner.driver, pinned.address, pinned.pinned_nbytes, steps.expert_nbytes)
    )


def read_gb_s(steps):
    """GB/s of the reading kernel with 8 experts in flight; None where the driver is not NVIDIA's."""
    from trilane.gpu_kernels.driver import CudaDriver

    if not isinstance(steps.runner.driver, CudaDriver):
        return None
    with open_reader(steps) as reader:
        return reader.gb_s(8)


# ------------------------------------------------------------------------------------------------- the parts
def lanes(steps, counts=COUNTS, tokens=TOKENS):
    """Each lane alone: its rate against what copies and reads reach, and its fixed cost."""
    most, nbytes = counts[-1], steps.expert_nbytes
    hits, _ = line_of(counts, [steps.median_us(n, 0, tokens=tokens) for n in counts])
    row("all hits: us before the first expert", hits)
    first = {}
    for lane in ("zero_copy", "stream", "cpu"):
        us = [steps.median_us(0, n, lane, tokens) for n in counts]
        first[lane], each = line_of(counts, us)
        times = " ".join(f"{value:.1f}" for value in us)
        name = f"{lane}: GB/s of its bytes ({'/'.join(map(str, counts))} experts: {times} us)"
        row(name, nbytes / each / 1e3, unit="GB/s")
        gb_s = most * nbytes / (us[-1] - hits) / 1e3
        if lane == "stream":
            copies = copy_gb_s(steps)
            row(f"streaming {most} experts over copies ({copies:.1f} GB/s)", gb_s / copies, 0.95, ">=", "")
        elif lane == "zero_copy" and (reads := read_gb_s(steps)):
            name = f"reading {most} in place with fill over the reading kernel ({reads:.1f} GB/s)"
            row(name, gb_s / reads, 0.93, ">=", "")
    row("CPU lane: fixed cost over its bytes", first["cpu"] - hits, 15.0)
    row("control overhead of a layer with misses (in place)", first["zero_copy"] - hits, 8.0)


def empty_us(steps, top_k, tokens=TOKENS):
    """us of a step whose ids name no expert."""
    layers = len(steps.store.layers)
    return float(np.median(steps.graphs(top_k).run(np.full((tokens, layers, top_k), -1)).us)) / layers


def no_fill(steps, counts=COUNTS, tokens=TOKENS):
    """Reads in place without slots to fill."""
    most, nbytes = counts[-1], steps.expert_nbytes
    first, each = line_of(counts, us := [steps.median_us(0, n, "zero_copy", tokens) for n in counts])
    empty = empty_us(steps, most, tokens)
    row("a step that names no expert", empty)
    row("in place, no fill: us before the first expert", first)
    row("in place, no fill: GB/s of its bytes", nbytes / each / 1e3, unit="GB/s")
    if reads := read_gb_s(steps):
        ratio = most * nbytes / (us[-1] - empty) / 1e3 / reads
        row(f"reading {most} in place, no fill, over the reading kernel ({reads:.1f} GB/s)", ratio, 0.95, ">=", "")


def together(steps, tokens=TOKENS):
    """The split: hits beside misses, and link and CPU lane at once."""
    top_k = SHAPE["top_k"] if steps.store.layers[0].num_experts >= 2 * SHAPE["top_k"] else 2
    missing = max(1, top_k // 4)
    for lane in (None, "zero_copy", "stream", "cpu"):
        hits = steps.median_us(top_k - missing, 0, lane, tokens)
        misses = steps.median_us(0, missing, lane, tokens)
        both = steps.median_us(top_k - missing, missing, lane, tokens)
        name, alone = f"{top_k - missing} hits and {missing} misses, {lane or 'split'}", f"{hits:.1f} and {misses:.1f}"
        row(f"{name}: {both:.1f} us, alone {alone}; beyond the longer", both - max(hits, misses), 10.0)


def probed_gb_s(steps, count):
    """What the probe of all lanes together reaches: copies, reads in place and steps of the CPU lane, their sum."""
    from trilane.cuda_beside import measure_together
    from trilane.cuda_copies import CopyProbe
    from trilane.cuda_step_probe import layers_like

    runner, rest = steps.runner, (layers_like(steps.runner, 0), count, steps.expert_nbytes)
    with contextlib.closing(CopyProbe(runner)) as copies, open_reader(steps) as reader:
        return sum(measure_together(runner, copies, reader, *rest)["together_gb_s"].values())


def joint(steps, tokens=TOKENS):
    """Link and CPU lane at once against what memory gives both (joint_rate.py), and against the product's own probe."""
    from benchmarks.joint_rate import measure_joint_rate

    most = min(SHAPE["top_k"], steps.store.layers[0].num_experts // 2)
    counts = sorted({1, max(1, most // 2), most})
    hits, _ = line_of((1, most), [steps.median_us(n, 0, tokens=tokens) for n in (1, most)])
    us = [steps.median_us(0, n, None, tokens) for n in counts]
    gb_s = most * steps.expert_nbytes / (us[-1] - hits) / 1e3
    rate = measure_joint_rate(steps.runner.driver, steps.runner.num_threads, most_nbytes=steps.store.nbytes)
    name = f"lanes together, {most} misses split: {gb_s:.1f} of {rate.both:.1f} GB/s ({rate.cpu_together:.1f} CPU"
    row(f"{name}, {rate.link_together:.1f} link)", gb_s / rate.both, 0.9, ">=", "")
    probed = probed_gb_s(steps, most)
    row(f"the same over the probe of all lanes together ({probed:.1f} GB/s)", gb_s / probed, 0.9, ">=", "")
    slope = steps.expert_nbytes / line_of(counts, us)[1] / 1e3
    row(
        f"the same by each further miss: {slope:.1f} GB/s (what a step begins with left out)",
        slope / rate.both,
        unit="",
    )


def resident(steps, tokens=TOKENS):
    """Everything resident, through the general path; then with the control thread stopped."""
    from trilane.cuda_words import Control, Fault

    top_k = min(SHAPE["top_k"], steps.store.layers[0].num_experts // 2)
    steps.force("zero_copy")
    graphs, layers = steps.graphs(top_k), len(steps.store.layers)
    rng = np.random.default_rng(2)
    draws = [
        [rng.choice(steps.store.layers[0].num_experts, top_k, False) for _ in range(layers)] for _ in range(tokens)
    ]
    trace, wanted, stopped = np.array(draws, np.int32), {}, {}
    for ids in _sweep(steps, top_k):
        graphs.run(ids[None])
    before = _mailboxes(steps)
    us = np.median(graphs.run(trace, lambda token, out: wanted.update({token: out})).us) / layers
    row(f"{layers} layers in one launch, all hits: us a layer", us)
    row("mailboxes written in steps without misses", _mailboxes(steps) - before, 0, unit="")
    steps.runner.inject_fault(Fault.DEAF)
    time.sleep(0.01)
    alone = np.median(graphs.run(trace, lambda token, out: stopped.update({token: out})).us) / layers
    differ = sum((wanted[t].view(np.uint32) != stopped[t].view(np.uint32)).any() for t in range(tokens))
    row(f"outputs that differ, of {tokens * layers} steps without a control thread", differ, 0, unit="")
    row("all hits: what the control thread costs a layer", us - alone, 1.0)
    steps.runner.inject_fault(Fault.NONE)
    assert steps.runner.threads.control[Control.FAULT] == Fault.NONE


def _mailboxes(steps):
    """Steps with misses since the start, as the GPU counts them."""
    from trilane.gpu_kernels.words import TYPES

    state, stream = np.zeros((), TYPES["State"]), steps.runner.device.fill_stream
    steps.runner.driver.to_host(state.ctypes.data, steps.runner.device.address["state"], state.nbytes, stream)
    steps.runner.wait_for(stream)
    return int(state["sequence"])


def _sweep(steps, top_k):
    from benchmarks.peer_trace import sweep_trace

    layers = steps.store.layers
    return np.concatenate([sweep_trace(len(layers), layers[0].num_experts, top_k)] * 2)


def predicted(shape=PREDICTED_SHAPE, layers=8, slots=(0.25, 0.5), repeats=10, profile=None):
    """Steps of 0 to top-k misses, each against what was predicted before it ran; the profile measured first."""
    from trilane.cuda_step_bench import measure_cuda_steps
    from trilane.random_store import StepShape, random_store
    from trilane.step_bench import all_errors

    shape = StepShape(**shape)
    misses, store = range(shape.top_k + 1), random_store(shape, layers)
    rows = list(measure_cuda_steps(store, shape, slots, misses=misses, repeats=repeats, profile=profile))
    for found in rows:
        name = f"{found.misses} misses, slots for {found.slots:.0%}: {found.p50_us:.1f} us, predicted"
        row(name, found.predicted_us)
    for name, error, goal in zip(("median", "90th percentile"), all_errors(rows), (0.10, 0.20), strict=True):
        row(f"predicted against measured: {name} of the relative error", error, goal, unit="")


def prefill(shape=PREFILL_SHAPE, rows=512, residents=(0.0, 0.25), repeats=9):
    """A layer of many rows over what the link takes for its missing bytes; and what was copied."""
    from benchmarks.bench_prefill import link_gb_s, measure, open_gpu
    from benchmarks.cuda_identity import made_profile
    from trilane.random_store import StepShape, random_store

    store = random_store(StepShape(**shape))
    for resident in residents:
        with open_gpu(store, resident, made_profile(store)) as scheduler:
            gb_s, before = link_gb_s(scheduler._runner, repeats), scheduler.stats()
            found, after = measure(scheduler, rows, gb_s, repeats, shape["top_k"]), scheduler.stats()
        name = f"prefill, {rows} rows, {found.resident:.0%} resident"
        row(
            f"{name}: {found.alone_ms:.2f} ms over the link's {found.bound_ms:.2f}",
            found.alone_ms / found.bound_ms,
            1.2,
            unit="",
        )
        row(f"{name}: one of several in a row", found.in_row_ms / found.bound_ms, 1.2, unit="")
        all_shards = store.layers[0].num_experts * store.layers[0].layout.num_shards
        copied = (after.lanes["stream"].shards - before.lanes["stream"].shards) / (after.steps - before.steps)
        beyond = round(copied - (1 - found.resident) * all_shards, 6)
        row(f"{name}: shards copied in a pass, beyond those that are missing", beyond, 0, unit="")


# part: (function, slots as a part of all experts, whether the lanes' rates are measured first)
PARTS = {
    "resident": (resident, 1.0, False),
    "lanes": (lanes, 0.5, False),
    "no_fill": (no_fill, 0.0, False),
    "together": (together, 0.5, True),
    "joint": (joint, 0.5, True),
    "predicted": (predicted, None, True),  # opens schedulers itself
    "prefill": (prefill, None, False),
}
START_S = 240.0  # what compiling may take, once on a machine


def start():
    """Compile everything, and keep it for the other parts."""
    with open_steps(SHAPE | {"num_experts": 8, "top_k": 2}, 1) as steps:
        steps.median_us(1, 1, tokens=1)
        copy_gb_s(steps, 4, 1)
        joint(steps, tokens=1)


def run_part(name, limit_s, module="benchmarks.cuda_acceptance", options=()):
    """Rows of a part in its own process, and what went wrong."""
    command = [sys.executable, "-m", module, "--only", name, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        text, problem = done.stdout, "" if done.returncode == 0 else done.stderr.strip()[-1500:] or "failed"
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        problem = f"took more than {limit_s:g} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")], problem


def run_here(name):
    """A part in this process."""
    if name == "start":
        start()
        return
    part, fraction, measured = PARTS[name]
    if fraction is None:
        part()
        return
    with open_steps(fraction=fraction, profile=None if measured else "made") as steps:
        part(steps)


def verdict(found):
    """ "held", "NOT held", or nothing for a row without a goal."""
    if found["goal"] is None:
        return ""
    figure, goal = found["figure"], found["goal"]
    return "held" if (figure <= goal if found["sense"] == "<=" else figure >= goal) else "NOT held"


def table_line(found):
    goal = "" if found["goal"] is None else f"{found['sense']} {found['goal']:g}"
    return f"{found['line']:96s} {found['figure']:9.3f} {found['unit']:5s} {goal:8s} {verdict(found)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=90.0, help="s for each part")
    parser.add_argument("--only", choices=["start", *PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return run_here(args.only)
    rows, problems = [], {}
    for name in ("start", *args.parts):
        begin = time.perf_counter()
        found, problem = run_part(name, START_S if name == "start" else args.limit)
        rows += found if name != "start" else []
        if problem:
            problems[name] = problem
        print(
            f"--- {name}: {'FAILED' if problem else 'done'}, {time.perf_counter() - begin:.0f} s\n{problem}", flush=True
        )
    print("\n" + "\n".join(map(table_line, rows)))
    for name, problem in problems.items():
        print(f"part {name}: FAILED: {problem.splitlines()[-1]}")
    return int(bool(problems) or any(verdict(found) == "NOT held" for found in rows))


if __name__ == "__main__":
    sys.exit(main())
