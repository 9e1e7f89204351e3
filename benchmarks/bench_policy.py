"""The default policy beside fixed rules and a clairvoyant reference, in replay: every cell of machine, expert, slots.

Method: the recorded routing of gpt-oss-20b (24 layers, 32 experts, top-4) with experts of 13.2 MB (12 shards) and of
2.65 MB (3 shards), slots for 12.5, 25, 50 and 75 % of all experts, all bundled machines. Times are modelled, fixed
costs included, without the gaps between layers. See docs/policy.md for what the columns mean. Usage::

    python benchmarks/bench_policy.py [--tokens N] [--skip N] [--policy FILE] [--machine NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from trilane.config import Config
from trilane.laboratory import Cell, compare_cell, next_uses
from trilane.machines import bundled_machines, load_machine
from trilane.settings.effective_config import load_config
from trilane.traces.trace import Trace
from trilane.traces.trace_file import read_trace

TRACE = Path(__file__).parent / "data" / "gptoss20b_160conv.trace"
EXPERTS = ((2_654_208, 3), (13_200_000, 12))
PARTS = (0.125, 0.25, 0.5, 0.75)


def load_tokens(path: Path, skip: int, tokens: int | None) -> Trace:
    """A stretch of a trace."""
    trace = read_trace(path)
    last = trace if tokens is None else trace.first_passes(skip + tokens)
    return last.slice(slice(trace.first_passes(skip).num_events if skip else 0, last.num_events))


def print_table(cells: list[Cell]) -> None:
    """A Markdown table, and what the cells have in common."""
    print(
        "| machine | expert MB | slots | fixed rule | best lane alone | hot list | clairvoyant | policy | hits: rule, "
        "policy, clairvoyant | gap closed | against best lane |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for cell in cells:
        print(row_of(cell), flush=True)
    closed = np.array([cell.gap_closed for cell in cells])
    lanes = np.array([cell.policy_us / cell.best_single_us for cell in cells])
    print(
        f"\ngap closed: median {np.median(closed):.1%}, least {closed.min():.1%} of {len(cells)} cells; "
        f"against the best lane alone: at most {lanes.max():.3f} x"
    )


def row_of(cell: Cell) -> str:
    """A row of the table."""
    lane = min(cell.single_us, key=cell.single_us.__getitem__)
    hits = f"{cell.rule_hit_rate:.0%}, {cell.hit_rate:.0%}, {cell.clairvoyant_hit_rate:.0%}"
    return (
        f"| {cell.machine} | {cell.expert_nbytes / 1e6:.2f} | {cell.slots:.1%} | {cell.rule_us:,.0f} | "
        f"{cell.best_single_us:,.0f} {lane} | {cell.hot_list_us:,.0f} | {cell.clairvoyant_us:,.0f} | "
        f"{cell.policy_us:,.0f} | {hits} | {cell.gap_closed:.0%} | {cell.policy_us / cell.best_single_us:.3f} |"
    )


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--machine", action="append")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    config = Config() if given.policy is None else load_config(given.policy, environment={}).config
    trace = load_tokens(TRACE, given.skip, given.tokens)
    known = next_uses(trace)
    cells = []
    for name in given.machine or bundled_machines():
        machine = load_machine(name)
        for nbytes, shards in EXPERTS:
            for part in PARTS:
                cells.append(compare_cell(trace, machine, nbytes, shards, part, config=config, next_use=known))
    if given.json:
        print(json.dumps([cell.to_dict() for cell in cells], indent=1))
    else:
        print_table(cells)


if __name__ == "__main__":
    main()
