"""How long `plan_step` and `learn_step` take, compiled into a loop without Python, on a full cache.

Method: each plan is timed by the monotonic clock (its own cost is shown and included); 20,000 plans after as many
to warm up; p50 and p99; the median of five such runs. "cold" routing goes round all experts, so that nothing hits
and every slot is won from a victim; "zipf" routing repeats popular experts. Usage::

    python benchmarks/bench_planner.py [--json]
"""

from __future__ import annotations

import json
import sys

import numpy as np

from trilane.cost import make_rates
from trilane.cpu_kernels.atomics import mono_ns
from trilane.expert import decision, make_geometry
from trilane.plan import NUM_MISSING, make_options, make_work
from trilane.planner import learn_step, plan_step
from trilane.probes.machine import describe_machine
from trilane.state import EVICTIONS, check, make_state

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


@decision
def time_plans(state, geometry, rates, options, ids, rows, work, elapsed_ns):
    """Plan a step for each row of ``ids``, layer after layer, and note the ns of each and of its learning."""
    missing = 0
    for k in range(ids.shape[0]):
        start = mono_ns()
        plan_step(
            state,
            geometry,
            rates,
            options,
            k % geometry.num_layers,
            ids[k],
            rows,
            ids.shape[1],
            state.clock[0] + 1,
            False,
            work,
        )
        elapsed_ns[0, k] = mono_ns() - start
        start = mono_ns()
        learn_step(state, geometry, options, k % geometry.num_layers, ids[k], ids.shape[1])
        elapsed_ns[1, k] = mono_ns() - start
        missing += work.counts[NUM_MISSING]
    return missing


@decision
def time_clock(elapsed_ns):
    """What two readings of the clock take."""
    for k in range(elapsed_ns.size):
        start = mono_ns()
        elapsed_ns[k] = mono_ns() - start


def routing(kind: str, rng: np.random.Generator) -> np.ndarray:
    """(PLANS, TOP_K) ids: round all experts of a layer ("cold"), or popular ones more often ("zipf")."""
    if kind == "cold":
        return ((np.arange(PLANS)[:, None] // LAYERS * TOP_K + np.arange(TOP_K)) % EXPERTS).astype(np.int32)
    keys = rng.gumbel(size=(PLANS, EXPERTS)) - 0.8 * np.log(np.arange(1, EXPERTS + 1))
    return np.argsort(-keys, axis=1)[:, :TOP_K].astype(np.int32)


def bench_shape(num_shards: int, kind: str, eviction: str) -> dict[str, object]:
    """One row of the table: p50 and p99 us of a plan, and how many shards were missing on average."""
    geometry = make_geometry([EXPERTS] * LAYERS, [[SHARD_NBYTES] * num_shards] * LAYERS)
    state = make_state(geometry, LAYERS * EXPERTS * num_shards // 4, eviction=eviction)
    work, options, rows = make_work(geometry), make_options(background=True), np.ones(TOP_K, np.int32)
    ids = routing(kind, np.random.default_rng(1))
    elapsed, quantiles, missing = np.zeros((2, PLANS), np.int64), [], 0
    for _ in range(RUNS + 1):
        missing = time_plans(state, geometry, RATES, options, ids, rows, work, elapsed)
        quantiles.append(np.percentile(elapsed, (50, 99), axis=1) / 1e3)
    check(state, geometry)
    (p50, learn_p50), (p99, learn_p99) = np.median(quantiles[1:], axis=0)
    return {
        "shape": f"{TOP_K}x{num_shards}",
        "routing": kind,
        "eviction": eviction,
        "p50_us": round(float(p50), 2),
        "p99_us": round(float(p99), 2),
        "learn_p50_us": round(float(learn_p50), 2),
        "learn_p99_us": round(float(learn_p99), 2),
        "missing_shards": round(missing / PLANS, 1),
    }


def main() -> None:
    """Print the table, or JSON."""
    clock = np.zeros(1000, np.int64)
    time_clock(clock)
    rows = [bench_shape(n, kind, eviction) for n in (3, 8) for kind in ("cold", "zipf") for eviction in EVICTIONS[:3]]
    result = {"machine": str(describe_machine()), "clock_ns": float(np.median(clock)), "rows": rows}
    if "--json" in sys.argv[1:]:
        print(json.dumps(result))
        return
    print(result["machine"], f"\ntwo clock readings: {result['clock_ns']:.0f} ns")
    for row in rows:
        print(
            "{shape} {routing:5s} {eviction:18s} p50 {p50_us:5.2f} us  p99 {p99_us:5.2f} us  "
            "learning {learn_p50_us:5.2f} {learn_p99_us:5.2f} us  missing shards "
            "{missing_shards}".format(**row)
        )


if __name__ == "__main__":
    main()
