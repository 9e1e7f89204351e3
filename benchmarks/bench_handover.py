"""What it costs to hand work to the team, against a bare futex wake of the same run; how exact sleeps are.

Method. The time of a hand-over is from just before the post to the first instruction of the task on a worker.
For spinning workers, jobs follow each other after a pause of a few us. For parked workers, who posts sleeps
1 ms between jobs, and every job alternates with a bare wake (one thread in FUTEX_WAIT, one FUTEX_WAKE) from
the same compiled loop, so load on the machine hits both alike; the ratio is that of the medians. "All" is
the time until every worker of the team holds a task. Medians and 90th percentiles of many.

    python -m benchmarks.bench_handover [--samples 2000] [--threads 1 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import numpy as np

from trilane.cpu_kernels.atomics import (
    add_at,
    futex_wait,
    futex_wake,
    load_at,
    mono_ns,
    set_timer_slack_ns,
    sleep_ns,
    sleep_until_ns,
    store_at,
    thread_cpu_ns,
)
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.jobs import post_job, wait_job
from trilane.cpu_kernels.team import WorkerTeam
from trilane.jit import compiled
from trilane.probes.handover import measure_handover, stamp_task
from trilane.probes.machine import describe_machine

PARKED_GAP_NS = 1_000_000
SPIN_LIMIT_US = 5.0
PARKED_LIMIT_RATIO = 1.3
SLEEPS_US = (20, 100, 300, 1000, 5000)


@compiled
def sleep_on_futex(futex, num_wakes):
    """The bare partner: futex is the word's address, the time of each wake goes to the second word."""
    for seen in range(num_wakes):
        while load_at(futex) == seen:
            futex_wait(futex, seen, -1)
        store_at(futex + 128, mono_ns())


@compiled
def time_wakes(words, function, block, futex, team_ns, bare_ns):
    """Alternate hand-overs to a parked team of one with bare wakes."""
    for i in range(team_ns.size):
        sleep_ns(PARKED_GAP_NS)
        store_at(block, 0)
        begin = mono_ns()
        ticket = post_job(words, function, block, 1)
        sleep_ns(PARKED_GAP_NS)
        wait_job(words, ticket, -1)
        team_ns[i] = load_at(block + 24) - begin
        sleep_ns(PARKED_GAP_NS)
        begin = mono_ns()
        add_at(futex, 1)
        futex_wake(futex, 1)
        sleep_ns(PARKED_GAP_NS)
        bare_ns[i] = load_at(futex + 128) - begin


@compiled
def time_sleeps(duration_ns, late_ns, cpu_ns):
    """Lateness and CPU time of precise sleeps of one duration."""
    set_timer_slack_ns(1)
    for i in range(late_ns.size):
        before = thread_cpu_ns()
        late_ns[i] = sleep_until_ns(mono_ns() + duration_ns)
        cpu_ns[i] = thread_cpu_ns() - before


def summary(sample_ns: np.ndarray) -> dict[str, float]:
    """Median and 90th percentile in us, the first tenth dropped as warm-up."""
    kept = sample_ns[sample_ns.size // 10 :] / 1e3
    return {"median_us": round(float(np.median(kept)), 3), "p90_us": round(float(np.quantile(kept, 0.9)), 3)}


def measure_team(num_workers: int, parked: bool, num_samples: int) -> dict[str, Any]:
    """Hand-over to the first and to all workers of a team."""
    found = measure_handover(num_workers, parked=parked, num_samples=num_samples)
    first = {"median_us": round(found.first_us, 3), "p90_us": round(found.first_p90_us, 3)}
    last = {"median_us": round(found.all_us, 3), "p90_us": round(found.all_p90_us, 3)}
    return {"num_workers": num_workers, "first": first, "all_running": last}


def measure_parked_ratio(num_samples: int) -> dict[str, Any]:
    """Hand-over to a parked worker against a bare futex wake."""
    team_ns, bare_ns = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
    futex = np.zeros(32, np.int64)
    sleep_on_futex(futex.ctypes.data, 0)
    with WorkerTeam(1, spin_us=0) as team:
        block = np.array([0, 1, team.abort_address, 0, 0], np.int64)
        partner = threading.Thread(target=sleep_on_futex, args=(futex.ctypes.data, num_samples), daemon=True)
        partner.start()
        time_wakes(team.words, stamp_task().address, block.ctypes.data, futex.ctypes.data, team_ns, bare_ns)
        partner.join()
    team, bare = summary(team_ns), summary(bare_ns)
    return {"team": team, "bare_futex": bare, "ratio": round(team["median_us"] / bare["median_us"], 3)}


def measure_python(num_workers: int, num_samples: int) -> dict[str, float]:
    """``run`` from Python, post to return, of an empty job for each worker."""
    took_ns = np.zeros(num_samples, np.int64)
    with WorkerTeam(num_workers, spin_us=1000) as team:
        block = np.array([0, num_workers, team.abort_address, 0, 0], np.int64)
        address, data = stamp_task().address, block.ctypes.data
        for i in range(num_samples):
            block[0] = 0
            begin = time.perf_counter_ns()
            team.run(address, data, num_workers)
            took_ns[i] = time.perf_counter_ns() - begin
    return summary(took_ns)


def measure_sleep(duration_us: int, num_samples: int) -> dict[str, Any]:
    """How late precise sleeps end, and how much CPU time they take."""
    late_ns, cpu_ns = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
    args = (duration_us * 1000, late_ns, cpu_ns)
    thread = threading.Thread(target=time_sleeps, args=args)  # its timer slack is its own
    thread.start()
    thread.join()
    return {"sleep_us": duration_us, "late": summary(late_ns), "cpu": summary(cpu_ns)}


def measure_all(num_samples: int, threads: list[int]) -> dict[str, Any]:
    """Everything, with the machine line and whether the two limits are met."""
    spinning = [measure_team(n, False, num_samples) for n in threads]
    parked = measure_parked_ratio(max(50, num_samples // 2))
    return {
        "machine": describe_machine().line,
        "spinning": spinning,
        "spinning_ok": spinning[0]["first"]["median_us"] < SPIN_LIMIT_US,
        "parked": parked,
        "parked_ok": parked["ratio"] <= PARKED_LIMIT_RATIO,
        "parked_teams": [measure_team(n, True, max(50, num_samples // 2)) for n in threads],
        "python_run": measure_python(threads[0], num_samples),
        "sleeps": [measure_sleep(us, max(20, min(num_samples, 500_000 // us))) for us in SLEEPS_US],
    }


def print_report(result: dict[str, Any]) -> None:
    """The figures as a table."""
    print(result["machine"])
    for title in ("spinning", "parked_teams"):
        for row in result[title]:
            first, last = row["first"], row["all_running"]
            print(
                f"{title:13s} {row['num_workers']:3d} workers: first {first['median_us']:7.2f} us "
                f"(p90 {first['p90_us']:.2f}), all {last['median_us']:7.2f} us (p90 {last['p90_us']:.2f})"
            )
    parked = result["parked"]
    print(
        f"parked, 1 worker {parked['team']['median_us']:.2f} us, bare futex wake "
        f"{parked['bare_futex']['median_us']:.2f} us: ratio {parked['ratio']:.3f}"
    )
    print(f"run() from Python, workers spinning: {result['python_run']['median_us']:.2f} us")
    for row in result["sleeps"]:
        late, cpu = row["late"], row["cpu"]
        print(
            f"sleep of {row['sleep_us']:5d} us: {late['median_us']:6.2f} us late (p90 {late['p90_us']:.2f}), "
            f"{cpu['median_us']:.1f} us of CPU time"
        )
    print(f"limits: spinning {'met' if result['spinning_ok'] else 'MISSED'} (< {SPIN_LIMIT_US} us), ", end="")
    print(f"parked {'met' if result['parked_ok'] else 'MISSED'} (<= {PARKED_LIMIT_RATIO} x futex)")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--threads", type=int, nargs="+", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    most = max(1, read_cpu_budget().num_concurrent - 1)
    result = measure_all(options.samples, options.threads or sorted({1, most}))
    print(json.dumps(result, indent=1)) if options.json else print_report(result)


if __name__ == "__main__":
    main()
