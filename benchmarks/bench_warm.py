"""What a warm start is worth, in replay: the first tokens of conversations, from empty slots and from a run's before.

Method: the recorded routing of gpt-oss-20b (24 layers, 32 experts, top-4), experts of 2.65 MB (3 shards). A run over
the first 2,000 tokens leaves its hot set behind. Each of the next conversations is then replayed for some tokens three
times: from empty slots, warm, and from the state of the run itself, as if there had been no restart. Times are
modelled, without the gaps between layers; the copies at the start are not in them. Usage::

    python benchmarks/bench_warm.py [--conversations N] [--machine NAME]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from trilane.config import Config
from trilane.machines import load_machine
from trilane.policy import empty_state, policy_options
from trilane.replay import Replay
from trilane.state import State
from trilane.traces.trace import REQUEST, Trace
from trilane.traces.trace_file import read_trace
from trilane.warm_start import take_hot_set, warm_state

TRACE = Path(__file__).parent / "data" / "gptoss20b_160conv.trace"
EXPERT_NBYTES, SHARDS = 2_654_208, 3
HISTORY = 2000  # tokens
PARTS = (0.125, 0.25, 0.5)
TOKENS = (10, 50)


def copy_of(state: State) -> State:
    """A state that may be changed, with its clock at the start of a replay."""
    copy = State(*(value.copy() if isinstance(value, np.ndarray) else value for value in state))
    copy.clock[:], copy.last_clock[:] = 0, 0
    return copy


def conversations(trace: Trace, num: int) -> list[int]:
    """The first events of the conversations behind the history that are long enough."""
    starts = np.flatnonzero(trace.kind == REQUEST)
    begin = trace.first_passes(HISTORY).num_events
    longest = max(TOKENS) * trace.meta.num_layers
    lengths = np.diff([*starts, trace.num_events])
    return [int(at) for at, length in zip(starts, lengths, strict=True) if at >= begin and length > longest][:num]


def compare(trace: Trace, machine: str, part: float, tokens: int, starts: list[int]) -> list[tuple[float, float]]:
    """Mean hit rate and us of a token's MoE layers: from empty slots, warm, and without a restart."""
    config, played = Config(), load_machine(machine)
    before = Replay(trace.first_passes(HISTORY), played, expert_nbytes=EXPERT_NBYTES, num_shards=SHARDS)
    geometry, options = before.geometry, policy_options(config)
    slots, half_life = int(part * geometry.first_shard[-1]), config.cache.half_life_steps
    left = empty_state(config, geometry, slots)
    before.run_state("history", left, options)
    found: list[list[tuple[float, float]]] = [[], [], []]
    for at in starts:
        piece = trace.slice(slice(at, trace.num_events)).first_passes(tokens)
        replay = Replay(piece, played, expert_nbytes=EXPERT_NBYTES, num_shards=SHARDS)
        hot = take_hot_set(left, geometry, half_life)
        empty = [empty_state(config, geometry, slots) for _ in range(2)]
        states = empty[0], warm_state(hot, empty[1], geometry, half_life).state, copy_of(left)
        for results, state in zip(found, states, strict=True):
            result = replay.run_state("", state, options)
            assert result is not None and result.hit_rate is not None
            results.append((result.hit_rate, result.moe_us))
    return [tuple(np.mean(results, axis=0).tolist()) for results in found]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--machine", default="rtx3090-ddr4")
    given = parser.parse_args()
    trace = read_trace(TRACE)
    starts = conversations(trace, given.conversations)
    print(f"{given.machine}, {len(starts)} conversations\n")
    print("| slots | first tokens | cold: hits, us | warm: hits, us | no restart: hits, us | warm / cold |")
    print("|---|---|---|---|---|---|")
    for part in PARTS:
        for tokens in TOKENS:
            cells = compare(trace, given.machine, part, tokens, starts)
            texts = [f"{hits:.0%}, {us:,.0f}" for hits, us in cells]
            print(f"| {part:.1%} | {tokens} | {' | '.join(texts)} | {cells[1][1] / cells[0][1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
