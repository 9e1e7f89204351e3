"""Bit identity on a GPU: random token sequences through every lane and cache, against the host device.

Each sequence is some tokens through all layers, with 1 to 4 rows a step and some ids that name no expert. It runs
cold (no expert resident) and at once again (warm), in two slot layouts: another number of slots, taken in a random
order. The host device computes what must come out once. The first output that differs ends the run with what differs.

    python -m benchmarks.cuda_identity [--sequences 20 --format q4_k]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np

from benchmarks.gpu_slots import check_slots, empty_slots, settle
from benchmarks.peer_trace import sweep_trace

LAYERS, EXPERTS, TOP_K, TOKENS, MAX_ROWS = 4, 16, 4, 5, 4
SKIPPED = 0.08  # of the ids
LANES = ("stream", "zero_copy", "cpu")
# name: (lanes that steps are forced to in turn, slots, whether a pass fills everything first)
CONFIGS = {
    "all resident": (("zero_copy",), 1.0, True),
    "stream": (("stream",), 0.25, False),
    "zero_copy": (("zero_copy",), 0.25, False),
    "cpu": (("cpu",), 0.25, False),
    "all lanes, split": ((None,), 0.25, False),
    "all lanes, in turn": ((*LANES, None), 0.25, False),
}


class Layout(NamedTuple):
    """Where experts come to lie: slots beyond the configuration's, the pools, and the order in which they are taken."""

    name: str
    more_slots: int
    pool: str
    shuffled: bool


LAYOUTS = (Layout("slots in order", 0, "shared", False), Layout("more slots, in random order", 7, "layer", True))


class Step(NamedTuple):
    """The arguments of `forward`."""

    layer: int
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def make_sequences(store, count, top_k=TOP_K, tokens=TOKENS, seed=1):
    """Lists of steps: all layers for each token."""
    rng, layers = np.random.default_rng(seed), range(store.num_layers)
    return [[_random_step(rng, store, layer, top_k) for _ in range(tokens) for layer in layers] for _ in range(count)]


def _random_step(rng, store, layer, top_k):
    rows, experts = int(rng.integers(1, MAX_ROWS + 1)), store.layers[layer].num_experts
    ids = np.stack([rng.choice(experts, top_k, False) for _ in range(rows)])
    ids[rng.random(ids.shape) < SKIPPED] = -1
    x = rng.standard_normal((rows, store.hidden)).astype(np.float32)
    return Step(layer, x, ids, rng.random((rows, top_k)).astype(np.float32))


def host_outputs(store, sequences, profile):
    """What the host device gives for every step."""
    from trilane import Config, ExpertScheduler

    with ExpertScheduler(store, profile=profile, config=Config(policy={"force": "cpu"}), device="host") as host:
        return [[host.forward(*step).copy() for step in sequence] for sequence in sequences]


class Checker:
    """One scheduler on a GPU, and what was compared on it."""

    def __init__(self, scheduler, name, layout):
        self.scheduler, self.runner, self.name, self.layout = scheduler, scheduler._runner, name, layout
        self.lanes, _, self.filled = CONFIGS[name]
        self.rng = np.random.default_rng(5)
        self.steps = self.rows = self.slots = self.evictions = 0
        self.shards = dict.fromkeys(("hit", *LANES), 0)

    def force(self, lane):
        """Send misses to a lane from now on."""
        from trilane.plan import make_options

        self.runner.use_options(make_options(force=lane, admit="always"))

    def run(self, number, sequence, wanted):
        """A sequence cold, then warm; what the slots hold in the end is compared with the store."""
        empty_slots(self.runner, self.rng if self.layout.shuffled else None)
        self._pass(number, sequence, wanted, "cold")
        if self.filled:
            self._fill(sequence[0])
        with self.scheduler.request() as request:
            self._pass(number, sequence, wanted, "warm")
            settle(self.runner)
        if self.filled:
            missed = sum(request.stats.lanes[lane].shards for lane in LANES)
            assert missed == 0, f"{missed} shards missed with everything resident"
        self.slots += check_slots(self.scheduler)[0]
        self._count(self.scheduler.stats())

    def _count(self, stats):
        """What was done since the slots were emptied."""
        self.evictions += stats.evictions
        for name in self.shards:
            self.shards[name] += stats.lanes[name].shards

    def _fill(self, step):
        """A pass over every expert of every layer."""
        for layer in range(self.scheduler.store.num_layers):
            experts, top_k = self.scheduler.store.layers[layer].num_experts, step.ids.shape[1]
            for ids in sweep_trace(1, experts, top_k):
                self.scheduler.forward(layer, step.x[:1], ids, step.weights[:1])

    def _pass(self, number, sequence, wanted, state):
        for place, (step, want) in enumerate(zip(sequence, wanted, strict=True)):
            if len(self.lanes) > 1:
                self.force(self.lanes[place % len(self.lanes)])
            got = self.scheduler.forward(*step)
            self.steps, self.rows = self.steps + 1, self.rows + len(got)
            if (got.view(np.uint32) != want.view(np.uint32)).any():
                raise AssertionError(f"{self.name}, {self.layout.name}, sequence {number}, {state}: "
                                     f"{difference(place, step, got, want)}")  # fmt: skip

    def line(self):
        """What was compared, and which lanes it took."""
        shards = ", ".join(f"{name} {count}" for name, count in self.shards.items() if count)
        return (
            f"{self.name}, {self.layout.name}: {self.steps} steps, {self.rows} rows, {self.slots} slots the same; "
            f"shards: {shards}; {self.evictions} evictions"
        )


def difference(place, step, got, want):
    """Where two outputs of a step differ first."""
    a, b = got.view(np.uint32), want.view(np.uint32)
    row, column = np.argwhere(a != b)[0]
    return (
        f"step {place} of layer {step.layer}: {int((a != b).sum())} of {a.size} elements differ, first "
        f"[{row}, {column}]: {got[row, column]!r} (0x{a[row, column]:08x}) on the GPU, {want[row, column]!r} "
        f"(0x{b[row, column]:08x}) on the host; experts {step.ids[row].tolist()}"
    )


def open_gpu(store, profile, name, layout):
    """A scheduler for one row of CONFIGS in one layout."""
    from trilane import Config, ExpertScheduler

    lanes, fraction, _ = CONFIGS[name]
    shards = sum(layer.num_experts * layer.layout.num_shards for layer in store.layers)
    slots = min(shards, int(fraction * shards) + layout.more_slots)
    cache, policy = {"slots": slots, "pool": layout.pool}, {"force": lanes[0], "admit": "always"}
    return ExpertScheduler(store, profile=profile, config=Config(cache=cache, policy=policy), device="cuda")


def check_identity(store, sequences, wanted, profile, names=tuple(CONFIGS), report=print):
    """Every configuration in both layouts; outputs compared.

    Raises
    ------
    AssertionError
        At the first output, or slot, that is not as it must be.
    """
    total = 0
    for name in names:
        for layout in LAYOUTS:
            with open_gpu(store, profile, name, layout) as scheduler:
                checker = Checker(scheduler, name, layout)
                for number, (sequence, want) in enumerate(zip(sequences, wanted, strict=True)):
                    checker.run(number, sequence, want)
                report(checker.line(), flush=True)
                total += checker.steps
    return total


def made_profile(store):
    """Rates that make the planner use CPU lane and link together; bits must not depend on it."""
    from trilane.layer_rates import layer_formats
    from trilane.profile import Curve, MachineProfile

    formats = sorted({name for layer in store.layers for name in layer_formats(layer)})
    rate = Curve((1.0,), (40.0,))
    return MachineProfile(
        pinned_to_device=Curve((1.0,), (44.0,)), zero_copy=rate, zero_copy_fix_us=4.0,
        cpu_experts=dict.fromkeys(formats, rate), device_experts=dict.fromkeys(formats, 1500.0), copy_fix_us=1.0,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--format", default="q4_k")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    args = parser.parse_args()
    from trilane.random_store import StepShape, random_store

    begin = time.perf_counter()
    store = random_store(StepShape(args.hidden, args.intermediate, EXPERTS, TOP_K, args.format), LAYERS)
    profile, sequences = made_profile(store), make_sequences(store, args.sequences)
    wanted = host_outputs(store, sequences, profile)
    print(f"{sum(map(len, sequences))} steps on the host device, {time.perf_counter() - begin:.1f} s", flush=True)
    try:
        total = check_identity(store, sequences, wanted, profile, args.configs)
    except AssertionError as error:
        print(f"NOT THE SAME BITS: {error}")
        return 1
    print(
        f"{total} steps of {args.sequences} sequences in {len(args.configs)} configurations and {len(LAYOUTS)} slot "
        f"layouts, cold and warm: every output has the host's bits; {time.perf_counter() - begin:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
