"""Prefill on a GPU: a layer of many rows against the link's time for its bytes, by rows and by what is resident.

Method: the link's rate is that of copies of a stage's size from the pinned store to the stages, in the same run. Passes
are put on a stream with ids in device memory, so all experts count. `alone` is one pass from submission to its end, the
median; `in a row` is the share of several behind each other, as layers of a model are. The ratio to the bound (missing
bytes / link) is what counts; with everything resident the time is that of the arithmetic. Bits are compared with those
of the host device, and decode steps (parts of the batch) are timed beside.

    python -m benchmarks.bench_prefill [--quick] [--rows 512 ...]
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from trilane import Config, ExpertScheduler
from trilane.host_runner import StepInput
from trilane.random_store import StepShape, random_store

SHAPE = StepShape(2048, 768, 128, 8, "q4_k")
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (64, 512)
RESIDENT = (0.0, 0.25, 1.0)
SEED = 7
NAP_S = 20e-6


class Line(NamedTuple):
    """What was measured of one batch; ms."""

    rows: int
    resident: float
    alone_ms: float
    in_row_ms: float
    bound_ms: float
    host_ms: float  # submission
    chosen: bool  # by itself


class DeviceBatch:
    """Rows, ids and weights in device memory."""

    def __init__(self, runner, rows, top_k, seed=SEED):
        self.runner, self.rows, self.top_k, driver = runner, rows, top_k, runner.driver
        rng, hidden = np.random.default_rng([seed, rows]), runner.store.hidden
        experts = runner.store.layers[0].num_experts
        self.x = rng.standard_normal((rows, hidden), np.float32)
        self.ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int64)
        self.weights = rng.random((rows, top_k), np.float32)
        self.blocks = [driver.allocate(a.nbytes) for a in (self.x, self.ids, self.weights, self.x)]
        stream = runner.device.work_stream
        for block, array in zip(self.blocks, (self.x, self.ids, self.weights), strict=False):
            driver.to_device(block, array.ctypes.data, array.nbytes, stream)
        _wait(runner)

    def put(self, passes, layer=0):
        """Put the batch on the stream, by passes or (None) by decode steps."""
        x, ids, weights, out = self.blocks
        stride, runner = 4 * self.runner.store.hidden, passes or self.runner
        most = runner.max_rows(self.top_k)
        for start in range(0, self.rows, most):
            rows, skip = min(most, self.rows - start), start * self.top_k
            step = StepInput(
                layer, rows, self.top_k, x + start * stride, stride, "f32", out + start * stride, stride, "f32"
            )
            runner.launch(step, ids + 8 * skip, 8, weights + 4 * skip, self.runner.device.work_stream)

    def output(self):
        result = np.empty_like(self.x)
        stream = self.runner.device.work_stream
        self.runner.driver.to_host(result.ctypes.data, self.blocks[3], result.nbytes, stream)
        _wait(self.runner)
        return result

    def close(self):
        for block in self.blocks:
            self.runner.driver.free(block)


def _wait(runner):
    while not runner.driver.finished(runner.device.work_stream):
        time.sleep(NAP_S)
    runner.check()


def open_gpu(store, resident, profile=None):
    """A scheduler whose slots hold this part of the experts, which came there by steps."""
    shards = store.layers[0].num_experts * store.layers[0].layout.num_shards
    config = Config(
        cache={"slots": int(resident * shards)}, policy={"lanes": ["stream"], "admit": "always", "fills": False}
    )
    scheduler = ExpertScheduler(store, profile=profile, config=config, device="cuda")
    count = int(resident * store.layers[0].num_experts)
    x = np.ones((1, store.hidden), np.float32)
    for expert in range(count):
        scheduler.forward(0, x, np.array([[expert]]), np.ones((1, 1), np.float32))
    return scheduler


def resident_part(scheduler):
    """Of the layer's bytes."""
    with scheduler._runner.threads.holding():
        return float((scheduler._runner.prefill._slot_of(0) >= 0).mean())


def link_gb_s(runner, repeats):
    """GB/s of copies as passes make them: a stage's size, one after the other, the best of some runs."""
    memory, arena = runner.prefill.memory, runner.store.arena
    piece = min(memory.shape.stage_nbytes, runner.device.pinned.segment_nbytes)
    count = max(1, min(16, runner.pinned_nbytes // piece))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for k in range(count):
            nbytes = min(piece, runner.pinned_nbytes - k * piece)
            runner.driver.to_device(memory.stages[k % 2], arena.address + k * piece, nbytes, memory.stream)
        while not runner.driver.finished(memory.stream):
            pass
        times.append(time.perf_counter() - begin)
    return min(count * piece, runner.pinned_nbytes) / min(times) / 1e9


def time_ms(runner, put, repeats, in_row):
    """Medians: alone, each of several in a row, and what the submission of one takes."""
    put()
    _wait(runner)
    alone, submit, each = [], [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        put()
        submit.append(time.perf_counter() - begin)
        _wait(runner)
        alone.append(time.perf_counter() - begin)
    for _ in range(max(1, repeats // 3)):
        begin = time.perf_counter()
        for _ in range(in_row):
            put()
        _wait(runner)
        each.append((time.perf_counter() - begin) / in_row)
    return [1e3 * float(np.median(seconds)) for seconds in (alone, each, submit)]


def measure(scheduler, rows, gb_s, repeats, top_k=SHAPE.top_k, in_row=8):
    """One line of passes."""
    runner, prefill, layer = scheduler._runner, scheduler._runner.prefill, scheduler.store.layers[0]
    batch, resident = DeviceBatch(runner, rows, top_k), resident_part(scheduler)
    missing = (1 - resident) * layer.num_experts * float(layer.layout.shard_nbytes.sum())
    alone, each, submit = time_ms(runner, lambda: batch.put(prefill), repeats, in_row)
    chosen = runner.prefill_for(0, rows, top_k, runner.device.work_stream) is not None
    batch.close()
    bound = -(-rows // prefill.max_rows(top_k)) * missing / gb_s / 1e6
    return Line(rows, resident, alone, each, bound, submit, chosen)


def steps_ms(scheduler, rows, top_k):
    """The same batch by decode steps, which change what is resident."""
    batch = DeviceBatch(scheduler._runner, rows, top_k)
    alone, _, _ = time_ms(scheduler._runner, lambda: batch.put(None), 3, 1)
    batch.close()
    return alone


def check_bits(scheduler, rows, top_k):
    """Passes against the host device, every bit."""
    batch = DeviceBatch(scheduler._runner, rows, top_k)
    batch.put(scheduler._runner.prefill)
    _wait(scheduler._runner)
    found = batch.output()
    with ExpertScheduler(scheduler.store, config=Config(cache={"slots": 0}), device="host") as host:
        wanted = host.forward(0, batch.x, batch.ids, batch.weights)
    batch.close()
    same = bool((found.view(np.uint32) == wanted.view(np.uint32)).all())
    print(f"bits of {rows} rows are those of the host device: {same}", flush=True)
    assert same


def main(argv=None, shape=SHAPE):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, few repetitions")
    parser.add_argument("--rows", nargs="+", type=int, help="rows of the batches")
    args = parser.parse_args(argv)
    rows, repeats = args.rows or (QUICK_ROWS if args.quick else ROWS), 5 if args.quick else 15
    store, profile = random_store(shape), None
    for resident in RESIDENT:
        with open_gpu(store, resident, profile) as scheduler:
            runner = scheduler._runner
            if profile is None:
                profile = scheduler.profile
                print(runner.driver.describe(), f"store {store.nbytes / 1e6:.0f} MB, {runner.notes() or 'all fits'}")
                memory = runner.prefill.memory.shape
                print(
                    f"stages of {memory.stage_nbytes / 1e6:.1f} MB, passes of up to {memory.max_rows} rows", flush=True
                )
                check_bits(scheduler, min(rows), shape.top_k)
            gb_s = link_gb_s(runner, repeats)
            print(f"\n{resident_part(scheduler):.0%} resident; link {gb_s:.1f} GB/s")
            print("  rows   alone ms  in a row   bound   ratio  in a row  submit ms  chosen  decode steps ms")
            for count in rows:
                line = measure(scheduler, count, gb_s, repeats, shape.top_k)
                steps = steps_ms(scheduler, count, shape.top_k) if count <= 512 and resident < 1 else float("nan")
                ratios = [ms / line.bound_ms if line.bound_ms else float("nan") for ms in line[2:4]]
                print(
                    f"{line.rows:6d} {line.alone_ms:10.2f} {line.in_row_ms:9.2f} {line.bound_ms:7.2f} {ratios[0]:7.2f}"
                    f" {ratios[1]:9.2f} {line.host_ms:10.2f}  {'yes' if line.chosen else 'no':>6s} {steps:16.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
