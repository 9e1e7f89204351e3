"""What it takes to hand work to a worker: from just before the post to the worker's first instruction.

For a worker that spins, jobs follow each other after a few us; for a parked one, who posts sleeps between jobs.
The first samples are dropped; the median counts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from trilane.cpu_kernels.atomics import add_at, load_at, mono_ns, pause, sleep_ns, store_at
from trilane.cpu_kernels.jobs import post_job, wait_job
from trilane.cpu_kernels.parking import wait_word
from trilane.cpu_kernels.team import WorkerTeam
from trilane.jit import compiled, native

PARKED_GAP_NS = 500_000
SPINNING_GAP_NS = 5_000
ENDLESS_SPIN_US = 1000.0
DROPPED = 0.1  # part of the samples that only warm up


@dataclass(frozen=True)
class HandOver:
    """us from the post to the first worker running, and to all of them: median and 90th percentile."""

    num_workers: int
    first_us: float
    first_p90_us: float
    all_us: float
    all_p90_us: float


@functools.cache
def stamp_task() -> Any:
    """Block: arrivals, workers, abort address, time of the first arrival, time of the last."""

    @native(types.int64(types.int64, types.int64, types.int64))
    def stamp(block, task, worker):
        now = mono_ns()
        arrival = add_at(block, 1)
        if arrival == 0:
            store_at(block + 24, now)
        if arrival == load_at(block + 8) - 1:
            store_at(block + 32, now)
        return wait_word(block, load_at(block + 8), load_at(block + 16))

    return stamp


@compiled
def _gap(duration_ns):
    if duration_ns >= 100_000:
        sleep_ns(duration_ns)
    else:
        end = mono_ns() + duration_ns
        while mono_ns() < end:
            pause()


@compiled
def time_posts(words, function, block, num_workers, gap_ns, first_ns, all_ns):
    """Post one job of ``num_workers`` tasks for each sample; ns to the first and to the last worker."""
    for i in range(first_ns.size):
        _gap(gap_ns)
        store_at(block, 0)
        begin = mono_ns()
        ticket = post_job(words, function, block, num_workers)
        wait_job(words, ticket, -1)
        first_ns[i], all_ns[i] = load_at(block + 24) - begin, load_at(block + 32) - begin


def measure_handover(num_workers: int, *, parked: bool, num_samples: int = 100) -> HandOver:
    """Hand-over to a team of ``num_workers`` that is parked, or that spins (each worker then needs a CPU)."""
    first_ns, all_ns = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
    spin_us, gap_ns = (0.0, PARKED_GAP_NS) if parked else (ENDLESS_SPIN_US, SPINNING_GAP_NS)
    with WorkerTeam(num_workers, spin_us=spin_us) as team:
        block = np.array([0, num_workers, team.abort_address, 0, 0], np.int64)
        time_posts(team.words, stamp_task().address, block.ctypes.data, num_workers, gap_ns, first_ns, all_ns)
    return HandOver(num_workers, *_summary(first_ns), *_summary(all_ns))


def _summary(sample_ns: NDArray[np.int64]) -> tuple[float, float]:
    """Median and 90th percentile in us, the first tenth dropped."""
    kept = sample_ns[int(len(sample_ns) * DROPPED) :] / 1e3
    return float(np.median(kept)), float(np.quantile(kept, 0.9))
