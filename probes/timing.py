"""The one timing routine: threads without an interpreter run native calls and time themselves.

A :class:`Case` is a ring of steps; a step is one native call per thread, and successive steps touch
successive memory, so that nothing is found in a cache. Cases take turns within each round, so that they are
compared under the same conditions. Threads meet at a spinning barrier before each sample; a sample counts as
long as its slowest thread. Samples in which a thread did not have its core all the time are discarded.

The file knows addresses and clocks, and nothing of what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.atomics import atomic_add, atomic_load, atomic_store, mono_ns, pause, thread_cpu_ns
from trilane.cpu_kernels.simd import call_rows
from trilane.jit import compiled

NUM_WORDS = 12  # of a call: the address and eleven arguments
OWN_CORE = 0.97  # part of a sample's time that each thread must have had its core
_ARRIVED, _GENERATION, _ABORT, _LINE = 0, 16, 32, 48  # words of the barrier, each on cache lines of its own


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes
    ----------
    name : str
    nbytes : int
        Bytes that one step reads, over all threads.
    calls : ndarray of int64, (num_threads, num_steps, 12)
        Address and arguments of the call of each thread in each step; address 0: nothing to do.
    verify : callable or None
        Runs after the first step; raises if the step did not do what it should have done.
    waits : bool
        The calls wait for other threads, so that the caller's own core time says nothing: the faster half of the
        samples counts, since whatever disturbs a sample makes it longer.
    held : tuple
        Memory that the calls use.
    """

    name: str
    nbytes: int
    calls: NDArray[np.int64]
    verify: Callable[[], None] | None = None
    waits: bool = False
    held: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Timing:
    """What a case took.

    Attributes
    ----------
    name : str
    median_us, low_us, high_us, best_us : float
        Of one step: median, quartiles and least over the samples.
    gb_s : float
        Bytes of a step over its median time, in 1e9 bytes a second.
    num_steps : int
        Steps in a sample.
    num_samples, num_discarded : int
        Samples that counted, and those in which a thread lost its core.
    disturbed : bool
        So few samples were undisturbed that all were counted, by the time that threads had a core.
    """

    name: str
    median_us: float
    low_us: float
    high_us: float
    best_us: float
    gb_s: float
    num_steps: int
    num_samples: int
    num_discarded: int
    disturbed: bool


def scattered(num_steps: int) -> NDArray[np.int64]:
    """An order in which to visit pieces of memory, so that no step continues where the one before ended."""
    return np.random.default_rng(num_steps).permutation(num_steps)


@compiled
def _meet(words, num_threads):
    """Wait until all threads are here (or someone gave up)."""
    generation = atomic_load(words, _GENERATION)
    if atomic_add(words, _ARRIVED, 1) == num_threads - 1:
        atomic_store(words, _ARRIVED, 0)
        atomic_add(words, _GENERATION, 1)
        return
    while atomic_load(words, _GENERATION) == generation and atomic_load(words, _ABORT) == 0:
        pause()


@compiled
def _run_thread(words, num_threads, calls, rings, first, num_steps, wall_ns, cpu_ns):
    """All rounds of one thread: case c runs ``num_steps[c]`` steps of its ring from ``first[r, c]`` on.

    Each round begins with another case: on a busy machine, time slices would else hit the same one each time.
    """
    num_cases = first.shape[1]
    for r in range(first.shape[0]):
        for turn in range(num_cases):
            c = (r + turn) % num_cases
            _meet(words, num_threads)
            begin_cpu = thread_cpu_ns()
            begin = mono_ns()
            for k in range(num_steps[c]):
                w = calls[rings[c, 0] + (first[r, c] + k) % rings[c, 1]]
                if w[0] != 0:
                    call_rows(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11])
            wall_ns[r, c] = mono_ns() - begin
            cpu_ns[r, c] = thread_cpu_ns() - begin_cpu


class _Runner:
    """Runs rounds of a set of cases and remembers where in its ring each case is."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.calls = np.concatenate([case.calls for case in cases], axis=1)
        self.num_threads = self.calls.shape[0]
        lengths = [case.calls.shape[1] for case in cases]
        self.rings = np.stack([np.cumsum([0, *lengths[:-1]]), lengths], axis=1).astype(np.int64)
        # Neighbouring cases may read the same memory: start them apart, so that none warms another's bytes.
        self.next_step = np.array([n * k // len(cases) for k, n in enumerate(lengths)], np.int64)

    def run(self, num_steps: NDArray[np.int64], num_rounds: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Wall and CPU ns, (threads, rounds, cases)."""
        first = self.next_step + np.arange(num_rounds)[:, None] * num_steps
        self.next_step = (self.next_step + num_rounds * num_steps) % self.rings[:, 1]
        words = np.zeros(_LINE, np.int64)
        wall, cpu = np.zeros((2, self.num_threads, num_rounds, len(num_steps)), np.int64)
        shared = (words, self.num_threads)
        jobs = [
            (*shared, self.calls[t], self.rings, first, num_steps, wall[t], cpu[t]) for t in range(self.num_threads)
        ]
        self._run_jobs(words, jobs)
        return wall, cpu

    def _run_jobs(self, words: NDArray[np.int64], jobs: Sequence[tuple[Any, ...]]) -> None:
        threads = [threading.Thread(target=_run_thread, args=job, daemon=True) for job in jobs[1:]]
        try:
            for thread in threads:
                thread.start()
            _run_thread(*jobs[0])
        except BaseException:
            words[_ABORT] = 1  # let go of those that wait for a thread that never came
            raise
        for thread in threads:
            thread.join()


def time_cases(
    cases: Sequence[Case], *, num_samples: int = 31, sample_us: float = 500.0, most_rounds: int = 310
) -> list[Timing]:
    """Time cases against each other.

    Parameters
    ----------
    cases : sequence of Case
        All for the same number of threads.
    num_samples : int
        Undisturbed samples wanted of each case.
    sample_us : float
        About how long one sample should take; sets the number of steps in it. Well under a time slice, so
        that samples fit between those of other programs.
    most_rounds : int
        When to give up on a machine that is busy with other things.

    Returns
    -------
    list of Timing, one per case.
    """
    for case in cases:  # compiles, faults pages in, wakes the cores: nothing of it is counted
        _Runner([case]).run(np.ones(1, np.int64), 1)
        if case.verify is not None:
            case.verify()
    once = np.ones(len(cases), np.int64)
    runner = _Runner(cases)
    wall, cpu = runner.run(once, 3)
    step_us = wall.max(0).min(0) / 1e3
    num_steps = np.maximum(1, sample_us / np.maximum(step_us, 0.01)).astype(np.int64)
    if any(case.waits for case in cases):
        most_rounds = num_samples
    first = 1 if num_steps.max() == 1 else len(wall[0])  # steps that are samples already: all but the first to run
    wall, cpu = _collect(runner, num_steps, num_samples, most_rounds, wall[:, first:], cpu[:, first:])
    return [
        _summary(case, wall[:, :, c], cpu[:, :, c], int(num_steps[c]), min(5, num_samples))
        for c, case in enumerate(cases)
    ]


def _collect(
    runner: _Runner,
    num_steps: NDArray[np.int64],
    num_samples: int,
    most_rounds: int,
    walls: NDArray[Any],
    cpus: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Wall and CPU ns, (threads, rounds, cases), of so many more rounds that every case has enough samples."""
    while _own_core(walls, cpus).sum(0).min() < num_samples and walls.shape[1] < most_rounds:
        wall, cpu = runner.run(num_steps, min(num_samples, most_rounds - walls.shape[1]))
        walls, cpus = np.concatenate([walls, wall], axis=1), np.concatenate([cpus, cpu], axis=1)
    return walls, cpus


def _own_core(wall_ns: NDArray[Any], cpu_ns: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether all threads had their core all the time, for each sample."""
    return np.all(cpu_ns >= OWN_CORE * wall_ns, axis=0)


def _summary(case: Case, wall_ns: NDArray[Any], cpu_ns: NDArray[Any], num_steps: int, fewest: int) -> Timing:
    wall = wall_ns.max(0)
    kept = wall <= np.median(wall) if case.waits else _own_core(wall_ns, cpu_ns)
    disturbed = not case.waits and int(kept.sum()) < fewest
    counted = cpu_ns.max(0) if disturbed else wall[kept]
    best, low, median, high = np.quantile(counted / (1e3 * num_steps), [0.0, 0.25, 0.5, 0.75])
    return Timing(
        name=case.name,
        median_us=float(median),
        low_us=float(low),
        high_us=float(high),
        best_us=float(best),
        gb_s=case.nbytes / (float(median) * 1e3),
        num_steps=num_steps,
        num_samples=len(counted),
        num_discarded=len(kept) - len(counted),
        disturbed=disturbed,
    )
