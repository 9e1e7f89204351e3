"""How long `plan_step` and `learn_step` take, compiled into a loop without Python, on a full cache.

Method: each plan is timed by the monotonic clock (its own cost is shown and included); 20,000 plans after as many
to warm up; p50 and p99; the median of five such runs. "cold" routing goes round all experts, so that nothing hits
and every slot is won from a victim; "zipf" routing repeats popular experts. With a batch each of its rows is routed so,
and an expert has as many rows as chose it; a tenth of the plans then.

Where others use the machine, a p99 tells of their interruptions: with ``--least N`` a plan's time is the least of N
repetitions, all from the same state. Usage::

    python -m benchmarks.bench_planner [--least N] [--batch ROWS] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trilane.cost import make_rates
from trilane.cpu_kernels.atomics import mono_ns
from trilane.expert import decision, make_geometry
from trilane.plan import NUM_MISSING, make_options, make_work
from trilane.planner import learn_step, plan_step
from trilane.probes.machine import describe_machine
from trilane.records import record
from trilane.state import EVICTIONS, State, check, make_state

LAYERS, EXPERTS, TOP_K, SHARD_NBYTES, PLANS, RUNS = 8, 128, 8, 884_736, 20_000, 5
RATES = make_rates(
    step_fix_us=10,
    miss_fix_us=10,
    hit_us_per_byte=1e-3 / 3400,
    stream_fix_us=3,
    run_fix_us=2,
    stream_us_per_byte=1e-3 / 54.6,
    stream_tail_us=3,
    zero_copy_fix_us=2,
    zero_copy_us_per_byte=[1e-3 / x for x in (20, 41, 43, 45, 46, 47, 48, 49)],
    cpu_fix_us=10,
    cpu_us_per_byte=1e-3 / 75,
    both_us_per_byte=1e-3 / 125,
)


@record
class Routing(NamedTuple):
    """What the steps ask for: int32 ``ids`` and ``rows`` (plans, most experts), of which the first ``num`` count."""

    ids: np.ndarray
    rows: np.ndarray
    num: np.ndarray


@decision
def time_plans(state, geometry, rates, options, routing, work, elapsed_ns):
    """Plan the steps, layer after layer, and note the ns of each and of its learning; missing shards of all."""
    missing = 0
    for k in range(routing.num.size):
        ids, rows, num = routing.ids[k], routing.rows[k], routing.num[k]
        start = mono_ns()
        plan_step(
            state,
            geometry,
            rates,
            options,
            k % geometry.num_layers,
            ids,
            rows,
            num,
            state.clock[0] + 1,
            False,
            work,
        )
        elapsed_ns[0, k] = mono_ns() - start
        start = mono_ns()
        learn_step(state, geometry, options, k % geometry.num_layers, ids, num)
        elapsed_ns[1, k] = mono_ns() - start
        missing += work.counts[NUM_MISSING]
    return missing


@decision
def time_clock(elapsed_ns):
    """What two readings of the clock take."""
    for k in range(elapsed_ns.size):
        start = mono_ns()
        elapsed_ns[k] = mono_ns() - start


def make_routing(kind: str, batch: int) -> Routing:
    """Each row goes round all experts of a layer ("cold"), or chooses popular ones more often ("zipf")."""
    plans = PLANS if batch == 1 else PLANS // 10
    rng = np.random.default_rng(1)
    if kind == "cold":
        asked = (np.arange(plans)[:, None] // LAYERS * TOP_K + np.arange(TOP_K * batch)) % EXPERTS
    else:
        keys = (rng.gumbel(size=(plans, EXPERTS)) - 0.8 * np.log(np.arange(1, EXPERTS + 1)) for _ in range(batch))
        asked = np.concatenate([np.argsort(-key, axis=1)[:, :TOP_K] for key in keys], axis=1)
    ids, rows = np.zeros((2, plans, EXPERTS), np.int32)
    num = np.zeros(plans, np.int64)
    for k in range(plans):
        unique, first, count = np.unique(asked[k], return_index=True, return_counts=True)
        order, num[k] = np.argsort(first), len(unique)
        ids[k, : num[k]], rows[k, : num[k]] = unique[order], count[order]
    return Routing(ids, rows, num)


def time_runs(state: State, least: int, time_run: Callable[[], np.ndarray]) -> list[np.ndarray]:
    """Times of RUNS runs, each going on where the one before ended; or the least of ``least`` from the same state."""
    time_run()
    if least == 0:
        return [time_run() for _ in range(RUNS)]
    arrays = [field for field in state if isinstance(field, np.ndarray)]
    before = [array.copy() for array in arrays]
    shortest = time_run()
    for _ in range(least - 1):
        for array, old in zip(arrays, before, strict=True):
            array[...] = old
        shortest = np.minimum(shortest, time_run())
    return [shortest]


def bench_shape(num_shards: int, kind: str, eviction: str, batch: int, least: int) -> dict[str, object]:
    """One row of the table: p50 and p99 us of a plan, and how many shards were missing on average."""
    geometry = make_geometry([EXPERTS] * LAYERS, [[SHARD_NBYTES] * num_shards] * LAYERS)
    state = make_state(geometry, LAYERS * EXPERTS * num_shards // 4, eviction=eviction)
    work, options, routing = make_work(geometry), make_options(background=True), make_routing(kind, batch)
    elapsed, missing = np.zeros((2, routing.num.size), np.int64), 0

    def time_run() -> np.ndarray:
        nonlocal missing
        missing = time_plans(state, geometry, RATES, options, routing, work, elapsed)
        return elapsed.copy()

    quantiles = [np.percentile(run, (50, 99), axis=1) / 1e3 for run in time_runs(state, least, time_run)]
    check(state, geometry)
    (p50, learn_p50), (p99, learn_p99) = np.median(quantiles, axis=0)
    return {
        "shape": f"{TOP_K}x{num_shards}",
        "batch": batch,
        "experts": round(float(routing.num.mean()), 1),
        "routing": kind,
        "eviction": eviction,
        "p50_us": round(float(p50), 2),
        "p99_us": round(float(p99), 2),
        "learn_p50_us": round(float(learn_p50), 2),
        "learn_p99_us": round(float(learn_p99), 2),
        "missing_shards": round(missing / routing.num.size, 1),
    }


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=int, default=0, metavar="N", help="repetitions of which the least counts")
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    clock = np.zeros(1000, np.int64)
    time_clock(clock)
    shapes = [(n, kind, eviction) for n in (3, 8) for kind in ("cold", "zipf") for eviction in EVICTIONS[:3]]
    rows = [bench_shape(*shape, asked.batch, asked.least) for shape in shapes]
    result = {"machine": str(describe_machine()), "clock_ns": float(np.median(clock)), "rows": rows}
    if asked.json:
        print(json.dumps(result))
        return
    print(result["machine"], f"\ntwo clock readings: {result['clock_ns']:.0f} ns")
    for row in rows:
        print(
            "{shape} batch {batch} {routing:5s} {eviction:18s} p50 {p50_us:5.2f} us  p99 {p99_us:5.2f} us  "
            "learning {learn_p50_us:5.2f} {learn_p99_us:5.2f} us  missing shards "
            "{missing_shards}".format(**row)
        )


if __name__ == "__main__":
    main()
