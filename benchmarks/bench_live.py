"""The default policy on a GPU beside the plain one, live: us of a layer, and whether replay foretells them.

The plain policy evicts what was used least recently, foretells nothing, and admits all that was missed. Cells: the
recorded routing of gpt-oss-20b (24 layers, 32 experts, top-4) with random experts in Q4_K of 2.65 MB (2048 x 768, 3
shards) and of 13.27 MB (2560 x 3072, 12 shards), slots for 25 and 50 % of them, each with and without a pause of 60
us before every layer (what the bundled machine h200-host has: what the rest of a model takes); and the trace of the
comparison with peers (peer_trace.py: 8 layers, 128 experts of 2.65 MB, top-8, slots for a quarter) without one.

Method: a part is a process of its own, with one scheduler, whose lanes are measured at its start. All layers are one
CUDA graph a token, some tokens launched ahead; a layer's time is the GPU's time between two events around the launch,
over the layers, less what the pauses add to steps that name no expert. Both policies take turns on the same tokens of
the same slots, each beginning with empty ones: tokens that fill them (--warm), then those that count (--tokens); each
round has another stretch of the recorded trace, and begins with the other policy. The replay is of the same tokens
from the first on, with the rates that the scheduler plans with, as a GPU's control thread decides (cuda_replay.py
says what differs from a live run). Medians over the tokens are compared, since others on the machine make some tokens
much longer, which no replay foretells; means stand beside them.

The time that --limit gives is for the parts together: what one leaves is the others'. Compiling, once on a machine, is
not counted. A part that has used its time makes fewer rounds.

    python -m benchmarks.bench_live [--parts small-25 peer] [--limit 120] [--json live.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cuda_acceptance import row, run_part, table_line, verdict

SMALL, LARGE = (2048, 768), (2560, 3072)
TRACE = Path(__file__).parent / "data" / "gptoss20b_160conv.trace"
RATIO_GOAL, REPLAY_GOAL = 0.9, 0.10
GAP_US = 60.0
START_S = 300.0  # what compiling may take, once on a machine


@dataclass(frozen=True)
class Cell:
    """Experts, slots and tokens of a part.

    Attributes
    ----------
    size : (hidden, intermediate)
    fraction : float
        Of the experts that have slots.
    peer : bool
        The trace of the comparison with peers, and not the recorded one.
    goal : float
        The default policy's time over the plain one's, at most.
    share : float
        Of the time for all parts.
    gap_us : float
        About how long the GPU pauses before each layer.
    """

    size: tuple[int, int]
    fraction: float
    peer: bool = False
    goal: float = RATIO_GOAL
    share: float = 2.0
    warm: int = 300
    tokens: int = 300
    rounds: int = 4
    gap_us: float = 0.0
    format: str = "q4_k"
    shape: tuple[int, int, int] = (24, 32, 4)  # layers, experts, top-k

    def stretches(self):
        """For each round int32 (warm + tokens, layers, top_k)."""
        from benchmarks.bench_policy import load_tokens
        from benchmarks.peer_trace import synth_trace

        length = self.warm + self.tokens
        if self.peer:
            return [synth_trace(length, *self.shape)] * self.rounds
        ids = load_tokens(TRACE, 0, None).tokens()[0]
        starts = np.linspace(0, len(ids) - length, self.rounds).astype(int)
        return [ids[start : start + length, : self.shape[0]].astype(np.int32) for start in starts]


PARTS = {
    "small-25": Cell(SMALL, 0.25, gap_us=GAP_US),
    "small-50": Cell(SMALL, 0.5, gap_us=GAP_US),
    "large-25": Cell(LARGE, 0.25, gap_us=GAP_US, share=3.0),
    "large-50": Cell(LARGE, 0.5, gap_us=GAP_US, share=3.0),
    "peer": Cell(SMALL, 0.25, peer=True, goal=1.0, warm=100, shape=(8, 128, 8)),
    "small-25-bare": Cell(SMALL, 0.25),
    "small-50-bare": Cell(SMALL, 0.5),
    "large-25-bare": Cell(LARGE, 0.25, share=3.0),
    "large-50-bare": Cell(LARGE, 0.5, share=3.0),
}
COMPILE_CELL = Cell((256, 512), 0.5, peer=True, warm=2, tokens=2, rounds=1, gap_us=5.0, shape=(2, 4, 2))


def policies(fraction):
    """Configurations by name."""
    from trilane import Config

    plain = {"fraction": fraction, "eviction": "lru", "prediction": 0.0}
    return {
        "default": Config(cache={"fraction": fraction}),
        "plain": Config(cache=plain, policy={"admit": "always", "background": False}),
    }


@dataclass
class Turn:
    """One policy on one stretch: us of a layer by token, live and replayed, and what was found in slots."""

    live_us: np.ndarray
    replay_us: np.ndarray
    hit_rate: float
    replay_hit_rate: float
    shards: dict
    background_fills: float  # a step
    checksum: int


def measure_gap(scheduler, graphs, x):
    """us that the pauses add to a layer: steps that name no expert, with and without them."""
    from trilane.token_graphs import TokenGraphs

    ids = np.full((20, len(graphs.layers), graphs.top_k), -1)
    bare = TokenGraphs(scheduler, graphs.top_k, x)
    try:
        with_gaps, without = (float(np.median(one.run(ids).us)) for one in (graphs, bare))
    finally:
        bare.close()
    return (with_gaps - without) / len(graphs.layers)


def measure_turn(scheduler, graphs, config, ids, warm, gap_us):
    """A policy from empty slots on: the first tokens fill them, the others count."""
    from benchmarks.gpu_slots import settle, use_policy

    runner, steps = scheduler._runner, (len(ids) - warm) * ids.shape[1]
    use_policy(runner, config)
    graphs.run(ids[:warm])
    settle(runner)
    with scheduler.request() as request:
        us = graphs.run(ids[warm:]).us / ids.shape[1] - gap_us
        settle(runner)
    checksum = int(graphs.outputs(len(ids) - warm - 1).view(np.uint32).sum(dtype=np.uint64))
    lanes = {name: lane.shards / steps for name, lane in request.stats.lanes.items()}
    again = replay(runner, config, ids, warm, request.stats.hit_rate, gap_us)
    return Turn(us, *again, lanes, request.stats.background_fills / steps, checksum)


def replay(runner, config, ids, warm, hit_rate, gap_us):
    """us of a layer by token, the live hit rate, and the replayed one."""
    from trilane.cuda_replay import replay_tokens
    from trilane.policy import empty_state

    state = empty_state(config, runner.geometry, runner.num_slots)
    found = replay_tokens(ids, runner.geometry, state, runner.options, runner.rates[0], gap_us)
    routed = ids.shape[2] * int(runner.geometry.num_shards[0])
    return found.step_us[warm:].mean(axis=1), hit_rate, 1 - float(found.missing[warm:].mean()) / routed


def measure_cell(cell, seconds, profile=None):
    """Turns by policy, as many rounds as there is time for; and the profile."""
    from trilane import ExpertScheduler
    from trilane.random_store import StepShape, random_store
    from trilane.token_graphs import TokenGraphs

    begin, configs = time.perf_counter(), policies(cell.fraction)
    layers, experts, top_k = cell.shape
    store = random_store(StepShape(*cell.size, experts, top_k, cell.format), layers)
    turns = {name: [] for name in configs}
    with ExpertScheduler(store, profile=profile, config=configs["default"], device="cuda") as scheduler:
        x = np.random.default_rng(3).standard_normal(store.hidden).astype(np.float32)
        graphs = TokenGraphs(scheduler, top_k, x, gap_us=cell.gap_us)
        try:
            gap_us = measure_gap(scheduler, graphs, x) if cell.gap_us else 0.0
            for number, ids in enumerate(cell.stretches()):
                started = time.perf_counter()
                for name in sorted(configs, reverse=number % 2 == 1):
                    turns[name].append(measure_turn(scheduler, graphs, configs[name], ids, cell.warm, gap_us))
                now = time.perf_counter()
                if now - begin + 1.5 * (now - started) > seconds:
                    break
        finally:
            graphs.close()
        return turns, scheduler.profile


def report(part, cell, turns):
    """The rows of a cell."""
    live, replayed = ({name: _joined(found, key) for name, found in turns.items()} for key in ("live_us", "replay_us"))
    for name, found in turns.items():
        hits, again = (np.mean([getattr(turn, key) for turn in found]) for key in ("hit_rate", "replay_hit_rate"))
        lanes = " ".join(f"{lane} {np.mean([turn.shards[lane] for turn in found]):.2f}" for lane in found[0].shards)
        lanes += f" background {np.mean([turn.background_fills for turn in found]):.2f}"
        row(f"{part}, {name}: median us a layer ({len(found)} rounds; shards: {lanes})", np.median(live[name]))
        row(f"{part}, {name}: mean us a layer", live[name].mean())
        row(f"{part}, {name}: part of shards in slots (replay {again:.3f})", hits, unit="")
    for kind, mean in (("medians", np.median), ("means", np.mean)):
        us = [float(mean(live[name])) for name in ("default", "plain")]
        row(f"{part}: default over plain, {kind} ({us[0]:.1f} over {us[1]:.1f} us)", us[0] / us[1], cell.goal, unit="")
    for name in turns:
        for kind, mean, goal in (("median", np.median, REPLAY_GOAL), ("mean", np.mean, None)):
            us, model = float(mean(live[name])), float(mean(replayed[name]))
            figures = f"replay {model:.1f} us, live {us:.1f}, {model / us:.3f} x"
            row(f"{part}, {name}: replay off the live {kind} ({figures})", abs(model / us - 1), goal, unit="")
    differ = sum(a.checksum != b.checksum for a, b in zip(*turns.values(), strict=True))
    row(f"{part}: rounds whose last outputs differ between the policies", differ, 0, unit="")


def _joined(turns, key):
    """Of all rounds, one behind the other."""
    return np.concatenate([getattr(turn, key) for turn in turns])


def raw_line(part, cell, turns, profile):
    """All that was measured, as JSON, for the process that collects it."""
    rounds = {
        name: [
            {**vars(turn), "live_us": turn.live_us.round(3).tolist(), "replay_us": turn.replay_us.round(3).tolist()}
            for turn in found
        ]
        for name, found in turns.items()
    }
    return json.dumps({"part": part, "cell": vars(cell), "rounds": rounds, "profile": json.loads(profile.to_json())})


def run_here(part, seconds):
    """A part in this process."""
    cell = COMPILE_CELL if part == "start" else PARTS[part]
    turns, profile = measure_cell(cell, seconds)
    report(part, cell, turns)
    print(raw_line(part, cell, turns, profile), flush=True)


def collect(name, limit_s):
    """Rows of a part, all that it measured, and what went wrong."""
    begin = time.perf_counter()
    found, problem = run_part(name, limit_s, "benchmarks.bench_live", ["--limit", str(0.85 * limit_s)])
    rows = [one for one in found if "line" in one]
    taken = f"{time.perf_counter() - begin:.0f} s of {limit_s:.0f}"
    print(f"--- {name}, {taken}: " + (f"FAILED: {problem.splitlines()[-1]}\n{problem}" if problem else "done"))
    if name != "start":
        print("\n".join(map(table_line, rows)), flush=True)
    return rows, [one for one in found if "rounds" in one], problem


def run_parts(names, limit_s):
    """The same for all parts, each with its share of what is left of the time."""
    rows, raw, problems, left = [], [], {}, limit_s
    for place, name in enumerate(names):
        shares = [PARTS[one].share for one in names[place:]]
        begin = time.perf_counter()
        found, measured, problem = collect(name, left * min(1.0, 1.3 * shares[0] / sum(shares)))
        left = max(1.0, left - (time.perf_counter() - begin))
        rows, raw = rows + found, raw + measured
        if problem:
            problems[name] = problem
    return rows, raw, problems


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=120.0, help="s for all parts together")
    parser.add_argument("--json", help="write rows and all measured figures to this file")
    parser.add_argument("--only", choices=["start", *PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.only:
        return run_here(args.only, args.limit)
    problem = collect("start", START_S)[2]
    rows, raw, problems = run_parts(args.parts, args.limit)
    problems |= {"start": problem} if problem else {}
    for name in problems:
        print(f"part {name}: FAILED")
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "parts": raw, "problems": problems}))
    return int(bool(problems) or any(verdict(found) == "NOT held" for found in rows))


if __name__ == "__main__":
    sys.exit(main())
