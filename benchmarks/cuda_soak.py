"""Minutes at full speed on a GPU: random routing, evictions in every step, and a host that is disturbed.

Phases take turns until the time is over. In one, tokens with random experts run on a lane drawn for the phase, some
launched ahead, with slots for so few experts that every step evicts, and with background fills asked for. In the
other, everything that a token needs is resident, the control thread is stopped (Fault.DEAF), and the GPU laps it. All
the time another thread allocates and frees device memory, which makes the driver hold its locks until streams drain.

Every output is compared with the host device's bits; at intervals no step is under way, and every slot that the GPU's
table names is compared with the store's bytes. In the end device memory and the process's own must be what they were.

    python -m benchmarks.cuda_soak --seconds 360 [--faults]
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.cuda_identity import made_profile
from benchmarks.gpu_slots import check_slots, settle
from trilane.cuda_words import Control, Fault, Stage
from trilane.plan import make_options
from trilane.token_graphs import AHEAD, TokenGraphs

LANES = (None, "stream", "zero_copy", "cpu")
DRAWS = 48  # inputs of each layer for which the host's bits are known
LEAK_DEVICE_NBYTES = 8 << 20
LEAK_HOST_NBYTES = 96 << 20
ALLOCATION_NBYTES = (1 << 20, 64 << 20)


class Inputs(NamedTuple):
    """Experts of each layer, int32 (layers, draws, top_k), and what the host device gives, (layers, draws, hidden)."""

    ids: np.ndarray
    wanted: np.ndarray
    x: np.ndarray


def make_inputs(store, top_k, draws=DRAWS, profile=None, seed=3):
    """Random routing for every layer, with the host device's outputs."""
    from trilane import Config, ExpertScheduler

    rng = np.random.default_rng(seed)
    x = rng.standard_normal(store.hidden).astype(np.float32)
    experts = [layer.num_experts for layer in store.layers]
    ids = np.array([[rng.choice(num, top_k, False) for _ in range(draws)] for num in experts], np.int32)
    weights = np.full((1, top_k), 1 / top_k, np.float32)
    wanted = np.zeros((len(experts), draws, store.hidden), np.float32)
    with ExpertScheduler(store, profile=profile, config=Config(policy={"force": "cpu"}), device="host") as host:
        for layer, draw in np.ndindex(wanted.shape[:2]):
            wanted[layer, draw] = host.forward(layer, x[None], ids[layer, draw][None], weights)[0]
    return Inputs(ids, wanted, x)


class Allocations(threading.Thread):
    """Allocates and frees device memory without end."""

    def __init__(self, driver, seed=4):
        super().__init__(name="soak-allocations", daemon=True)
        self.driver, self.rng = driver, np.random.default_rng(seed)
        self.count, self.stop, self.error = 0, False, None

    def run(self):
        try:
            self.driver.make_current()
            while not self.stop:
                self.driver.free(self.driver.allocate(int(self.rng.integers(*ALLOCATION_NBYTES))))
                self.count += 1
        except Exception as error:
            self.error = error


class Counts:
    """What a soak has done so far."""

    def __init__(self):
        self.begin = time.perf_counter()
        self.tokens = self.steps = self.outputs = self.alone = self.laps = self.fills = self.slots = self.checks = 0
        self.worst_us = 0.0

    def line(self, scheduler, allocations):
        """One line; misses and evictions are the scheduler's own."""
        stats = scheduler.stats()
        missed = " ".join(f"{name} {stats.lanes[name].shards}" for name in ("stream", "zero_copy", "cpu"))
        parts = (
            f"{self.tokens} tokens, {self.steps} steps, {self.outputs} outputs compared",
            f"shards missed: {missed}; {stats.evictions} evictions",
            f"{stats.background_fills} of {self.fills} background fills",
            f"{self.laps} phases with {self.alone} steps without the control thread",
            f"{allocations.count} allocations; {self.checks} checks of {self.slots} slots",
            f"longest token {self.worst_us / 1e3:.1f} ms",
        )
        return f"{time.perf_counter() - self.begin:6.0f} s: " + "; ".join(parts)


class Soak:
    """The phases, on one scheduler.

    Parameters
    ----------
    scheduler : ExpertScheduler
        On a GPU, slots for a small part of the experts.
    inputs : Inputs
    """

    def __init__(self, scheduler, inputs, ahead=AHEAD, seed=5):
        self.scheduler, self.runner, self.inputs = scheduler, scheduler._runner, inputs
        self.rng, self.counts = np.random.default_rng(seed), Counts()
        self.own_options = self.runner.options
        self.layers, self.draws, top_k = inputs.ids.shape
        self.graphs = TokenGraphs(scheduler, top_k, inputs.x, ahead=ahead)

    def _force(self, lane):
        self.runner.use_options(self.own_options if lane is None else make_options(force=lane, admit="always"))

    def _run(self, draws, hints=0):
        """Tokens of chosen draws, int (tokens, layers); every output is compared."""
        each = np.arange(self.layers)

        def compare(token, out):
            want = self.inputs.wanted[each, draws[token]]
            wrong = np.argwhere(out.view(np.uint32) != want.view(np.uint32))
            if len(wrong):
                layer = int(wrong[0][0])
                raise AssertionError(
                    f"token {self.counts.tokens + token}, layer {layer}, experts "
                    f"{self.inputs.ids[layer, draws[token, layer]].tolist()}: {len(wrong)} elements differ"
                )
            if hints and self.rng.random() < hints:
                self._hint()

        times = self.graphs.run(self.inputs.ids[each, draws], compare)
        self.counts.tokens += len(draws)
        self.counts.steps += draws.size
        self.counts.outputs += draws.size * self.inputs.x.size
        self.counts.worst_us = max(self.counts.worst_us, float(times.us.max()))

    def _hint(self):
        layer = int(self.rng.integers(self.layers))
        experts = self.rng.choice(self.scheduler.store.layers[layer].num_experts, 2, False)
        self.counts.fills += self.scheduler.hint(layer, experts.tolist())

    def random_phase(self, tokens):
        """Random experts, misses on a lane drawn for the phase."""
        self._force(LANES[int(self.rng.integers(len(LANES)))])
        self._run(self.rng.integers(self.draws, size=(tokens, self.layers)), hints=0.1)

    def alone_phase(self, tokens):
        """The same experts again and again, at last without a control thread."""
        self._force("zero_copy")
        draw = self.rng.integers(self.draws, size=(1, self.layers))
        for _ in range(20):  # fills of the phase before may still take slots
            self._run(np.repeat(draw, 2, axis=0))
            settle(self.runner)
            if self.runner.threads.control[Control.FILL_STAGE] == Stage.IDLE and self._resident(draw[0]):
                break
        else:
            raise AssertionError("a token's experts did not become resident")
        self.runner.inject_fault(Fault.DEAF)
        try:
            self._run(np.repeat(draw, tokens, axis=0))
        finally:
            self.runner.inject_fault(Fault.NONE)
        self.counts.laps, self.counts.alone = self.counts.laps + 1, self.counts.alone + tokens * self.layers

    def _resident(self, draw):
        """Whether all experts of a token are in slots."""
        first, shards = self.runner.geometry.first_shard, self.runner.geometry.num_shards
        with self.runner.threads.holding():
            here = self.runner.state.slot_of >= 0
        return all(
            here[first[layer] : first[layer + 1]].reshape(-1, shards[layer])[self.inputs.ids[layer, draw[layer]]].all()
            for layer in range(self.layers)
        )

    def check(self):
        """Every slot against the store; no step is under way between two phases."""
        self.counts.slots += check_slots(self.scheduler)[0]
        self.counts.checks += 1

    def close(self):
        self.graphs.close()


class Memory(NamedTuple):
    """Bytes of device memory that are free, and of the process."""

    device: int
    host: int


def memory_now(driver):
    return Memory(driver.free_nbytes(), psutil.Process().memory_info().rss)


def leaks(before, after):
    """What grew by more than measuring itself explains."""
    found = []
    if before.device - after.device > LEAK_DEVICE_NBYTES:
        found.append(f"{before.device - after.device} bytes of device memory are gone")
    if after.host - before.host > LEAK_HOST_NBYTES:
        found.append(f"the process has grown by {after.host - before.host} bytes")
    return found


def run_soak(scheduler, inputs, seconds, *, interval_s=15.0, tokens=200, ahead=AHEAD, report=print):
    """Phases for so long; the verdict's lines.

    Raises
    ------
    AssertionError
        An output, a slot or memory is not as it must be.
    WorkerError
        A wait was not answered in time: a stall.
    """
    driver, soak = scheduler._runner.driver, Soak(scheduler, inputs, ahead)
    allocations = Allocations(driver)
    soak.random_phase(tokens)
    soak.alone_phase(tokens)
    before = memory_now(driver)  # what the first use allocates is there
    allocations.start()
    begin = last = time.perf_counter()
    try:
        while time.perf_counter() - begin < seconds:
            soak.random_phase(tokens)
            soak.alone_phase(tokens)
            if time.perf_counter() - last > interval_s:
                last = time.perf_counter()
                soak.check()
                report(soak.counts.line(scheduler, allocations), flush=True)
    finally:
        allocations.stop = True
        allocations.join()
    soak.check()
    assert allocations.error is None, f"an allocation failed: {allocations.error}"
    after = memory_now(driver)
    report(soak.counts.line(scheduler, allocations), flush=True)
    soak.close()
    problems = leaks(before, after)
    assert not problems, "; ".join(problems)
    rate = soak.counts.steps / (time.perf_counter() - soak.counts.begin)
    return (
        f"no mismatch, no stall, no leak (device {before.device - after.device:+d} bytes, process "
        f"{after.host - before.host:+d}); {rate:.0f} steps a second"
    )


def open_soak(store, profile, *, slots, stall_timeout_s=20.0, threads="auto"):
    """A scheduler with slots for so many experts in all."""
    from trilane import Config, ExpertScheduler

    count = slots * store.layers[0].layout.num_shards
    config = Config(
        cache={"slots": count}, policy={"admit": "always"}, cpu={"stall_timeout_s": stall_timeout_s, "threads": threads}
    )
    return ExpertScheduler(store, profile=profile, config=config, device="cuda")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--interval", type=float, default=15.0, help="s between two lines, and checks of all slots")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--faults", action="store_true", help="also the faults of cuda_faults.py, afterwards")
    args = parser.parse_args()
    from trilane.random_store import StepShape, random_store

    store = random_store(StepShape(args.hidden, args.intermediate, args.experts, args.top_k), args.layers)
    profile = made_profile(store)
    inputs = make_inputs(store, args.top_k, profile=profile)
    code = 0
    try:
        with open_soak(store, profile, slots=args.layers * (args.top_k + 2)) as scheduler:
            print("SOAK HELD:", run_soak(scheduler, inputs, args.seconds, interval_s=args.interval))
    except Exception as error:
        print(f"SOAK FAILED: {type(error).__name__}: {error}")
        code = 1
    if args.faults:
        from benchmarks import cuda_faults

        code |= cuda_faults.main([])
    return code


if __name__ == "__main__":
    sys.exit(main())
