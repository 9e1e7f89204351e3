"""A team of native threads that runs posted jobs, and what Python has to do with it: start, watch, stop.

The workers run compiled code without the interpreter; jobs.py is what they do. This file starts them, waits
in slices so that signals get through, notices a worker that died or hangs, and stops everything at exit. It
knows no experts: a job is the address of a task, an argument and a number of tasks.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import config

from trilane.cpu_kernels import jobs
from trilane.cpu_kernels.jobs import cancel_job, job_error, post_job, wait_job
from trilane.cpu_kernels.spread import each_worker_task, first_touch_task, touch_blocks
from trilane.cpu_kernels.team_errors import (
    TaskFailed,
    TeamClosed,
    TeamError,
    TeamForked,
    WorkerDied,
    WorkerStalled,
)
from trilane.cpu_kernels.team_options import resolve_options
from trilane.cpu_kernels.worker_threads import compile_jobs, live, stop

__all__ = [
    "LaneThread",
    "TaskFailed",
    "TeamClosed",
    "TeamError",
    "TeamForked",
    "WorkerDied",
    "WorkerStalled",
    "WorkerTeam",
]

DRAIN_S = 0.2  # how long an interrupted wait lets running tasks end before it gives the interrupt on
START_TIMEOUT_S = 30.0
LAST_BREATH_S = 0.2  # how long the thread of a worker that died may take to end
FAULTS = {"die": jobs.DIE, "stall": jobs.STALL}


class WorkerTeam:
    """Worker threads without an interpreter, parked while there is nothing to do.

    Parameters
    ----------
    num_threads : int or "auto"
        Workers; "auto" asks :func:`~trilane.cpu_kernels.cpus.suggest_num_threads`.
    spin_us : float or "auto"
        How long a worker without work spins before it parks; "auto": 100 if every thread has a CPU, else 0.
    wait_spin_us : float or "auto"
        The same for who waits for a job; "auto" is 10 times ``spin_us``.
    affinity : sequence of int, optional
        CPUs to pin the workers to, in turn.
    stall_timeout_s : float
        A job of which no task ends for this long is given up.
    name : str
        Name of the threads.
    num_others : int
        Busy threads beside the workers (who posts, copies, plans), for "auto" spins.

    Attributes
    ----------
    options : TeamOptions
        The options with "auto" resolved, and the reasons for the number of threads.
    words : int
        Address for ``post_job``, ``wait_job`` and ``job_done`` from compiled code.

    Notes
    -----
    Ctrl-C during a wait calls the job off, raises KeyboardInterrupt within a quarter of a second and leaves
    the team usable; the next ``post`` waits for tasks that still run. After WorkerDied or WorkerStalled a
    hanging task may still write to memory that it was given: keep it alive until :meth:`close` returns True.

    Examples
    --------
    >>> with WorkerTeam(2) as team:  # doctest: +SKIP
    ...     team.run(task.address, block.ctypes.data, num_tasks=16)
    """

    def __init__(
        self,
        num_threads: int | str = "auto",
        *,
        spin_us: float | str = "auto",
        wait_spin_us: float | str = "auto",
        affinity: Sequence[int] | None = None,
        stall_timeout_s: float = 10.0,
        name: str = "worker",
        num_others: int = 1,
    ) -> None:
        options = resolve_options(num_threads, spin_us, wait_spin_us, stall_timeout_s, num_others)
        self.options = options
        self.num_threads = options.num_threads
        self._affinity, self.name = affinity, name
        spin_ns, wait_spin_ns = int(1e3 * options.spin_us), int(1e3 * options.wait_spin_us)
        self._block = jobs.make_words(self.num_threads, spin_ns, wait_spin_ns)
        self.words: int = self._block.ctypes.data
        self._pid = os.getpid()
        self._failure: TeamError | None = None
        self._threads: list[threading.Thread] = []
        self._start_errors: list[BaseException] = []
        self._finalizer: Any = None
        self._held: tuple[np.ndarray, ...] = ()

    # ------------------------------------------------------------------------------------ life
    def start(self) -> WorkerTeam:
        """Compile what the workers run and start them; nothing where they run already."""
        self._check_usable()
        if self._finalizer is not None:
            return self
        if config.DISABLE_JIT:
            raise TeamError("workers need compiled code, but NUMBA_DISABLE_JIT is set; unset it")
        compile_jobs()
        for k in range(self.num_threads):
            cpu = None if self._affinity is None else int(self._affinity[k % len(self._affinity)])
            args = (self._block, k, f"{self.name}-{k}", cpu, self._start_errors)
            self._threads.append(threading.Thread(target=live, args=args, name=args[2], daemon=True))
        # called at garbage collection and at exit too: a native thread must not outlive the interpreter
        self._finalizer = weakref.finalize(self, stop, self._block, self._threads, self._pid)
        for thread in self._threads:
            thread.start()
        self._await_start()
        return self

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._word(jobs.LIVE) < self.num_threads:
            if self._start_errors or time.monotonic() > deadline:
                cause = self._start_errors[0] if self._start_errors else None
                self._fail(WorkerDied(f"a worker did not start: {cause or 'no sign of life'}"), cause)
            time.sleep(0.0002)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop the workers and wait for them; True once none is left. May be called again."""
        if self._failure is None:
            self._failure = TeamClosed("the team has been closed; make a new one")
        if self._finalizer is None or os.getpid() != self._pid:
            return True
        self._finalizer.detach()
        return stop(self._block, self._threads, self._pid, timeout_s)

    def hold(self, memory: object) -> None:
        """Keep ``memory`` alive for as long as one of the workers is (after a close that returned False)."""
        for thread in self._threads:
            if thread.is_alive():  # the interpreter refers to running threads
                thread.holds = memory  # type: ignore[attr-defined]

    def __enter__(self) -> WorkerTeam:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ jobs
    def post(self, fn_address: int, arg: int, num_tasks: int) -> int:
        """Post a job and return its ticket; waits for the job before it, if that is still running.

        Parameters
        ----------
        fn_address : int
            Address of a task: ``native(int64(int64, int64, int64))`` of ``fn(arg, task, worker)``; it returns
            0 or an error code.
        arg : int
            Its first argument, most often the address of a block.
        num_tasks : int
            Number of calls; they begin in the order of their numbers.
        """
        if not 0 <= num_tasks <= jobs.MAX_TASKS:
            raise ValueError(f"num_tasks is {num_tasks}; it must be 0 to {jobs.MAX_TASKS}; split the job")
        if self._finalizer is None:
            self.start()
        self._check_usable()
        ticket = post_job(self.words, fn_address, arg, num_tasks)
        while ticket == jobs.BUSY:
            self._wait_sliced(self._word(jobs.TICKET), None)
            ticket = post_job(self.words, fn_address, arg, num_tasks)
        if ticket < 0:
            self.check()
            raise TeamClosed("the team has been stopped; make a new one")
        return ticket

    def wait(self, ticket: int, timeout_s: float | None = None) -> None:
        """Wait until a job has ended; raises what became of it.

        Raises
        ------
        TaskFailed, WorkerDied, WorkerStalled, TeamClosed, TeamForked
        TimeoutError
            The job still runs and may be waited for again.
        """
        self._check_usable()
        if not 0 < ticket <= self._word(jobs.TICKET):
            raise ValueError(f"ticket {ticket} was never posted; wait for what post() returned")
        try:
            self._wait_sliced(ticket, timeout_s)
        except (TeamError, TimeoutError):
            raise
        except BaseException:  # Ctrl-C, or whatever a signal handler raises
            cancel_job(self.words)
            wait_job(self.words, ticket, int(DRAIN_S * 1e9))
            raise
        code = job_error(self.words, ticket)
        if code != 0:
            raise TaskFailed(code)

    def run(self, fn_address: int, arg: int, num_tasks: int, timeout_s: float | None = None) -> None:
        """Post a job and wait for it."""
        self.wait(self.post(fn_address, arg, num_tasks), timeout_s)

    def run_on_each(self, fn_address: int, arg: int) -> None:
        """Call ``fn(arg, k, k)`` once on every worker k, all at the same time."""
        self._run_on_each(fn_address, arg)

    def _run_on_each(self, fn_address: int, arg: int, *held: np.ndarray) -> None:
        block = np.array([0, self.num_threads, fn_address, arg, self.abort_address], np.int64)
        self._held = (block, *held)  # a worker that hangs may read them after this call has failed
        self.run(each_worker_task().address, block.ctypes.data, self.num_threads)

    def first_touch(self, address: int, nbytes: int, stripe_nbytes: int = 2 << 20) -> None:
        """Touch memory from the workers that will read it, in turn by stripes; contents are kept.

        The system places a page on the node of the thread that first touches it.
        """
        for block in touch_blocks(address, nbytes, stripe_nbytes, self.num_threads):
            self._run_on_each(first_touch_task().address, block.ctypes.data, block)

    @property
    def abort_address(self) -> int:
        """Address of the word that is not 0 once the job in flight has failed; for ``wait_word`` in tasks."""
        return self.words + jobs.ABORT

    def inject_fault(self, worker: int, kind: str | None) -> None:
        """Let a worker "die" or "stall" at its next task (None takes the fault back); for tests."""
        self._block[jobs.FAULT_KIND // 8] = FAULTS[kind] if kind else 0
        self._block[jobs.FAULT_WORKER // 8] = worker + 1 if kind else 0

    # ------------------------------------------------------------------------------------ watching
    def check(self) -> None:
        """Raise if the team cannot be used or a worker is gone; for who drives it from native code."""
        self._check_usable()
        if self._finalizer is not None:
            gone = self._lost_workers()
            if gone or self._word(jobs.DEAD):
                who = ", ".join(gone) or f"a worker of {self.name}"
                self._fail(WorkerDied(f"{who} is gone; close the team and make a new one"), None)

    def _lost_workers(self) -> list[str]:
        """Names of workers whose threads have ended; one that has just said so gets a moment to end."""
        deadline = time.monotonic() + (LAST_BREATH_S if self._word(jobs.DEAD) else 0.0)
        while True:
            gone = [thread.name for thread in self._threads if not thread.is_alive()]
            if gone or time.monotonic() >= deadline:
                return gone
            time.sleep(0.001)

    def longest_task_s(self) -> float:
        """For how long the longest of the running tasks has been running; 0 where none runs."""
        return float(jobs.longest_task(self.words)[0]) / 1e9

    def _word(self, offset: int) -> int:
        return int(self._block[offset // 8])

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise TeamForked(
                f"the workers belong to process {self._pid}, and threads do not survive a fork into "
                f"process {os.getpid()}; make a new team in the child"
            )
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _wait_sliced(self, ticket: int, timeout_s: float | None) -> None:
        """Wait in slices: between two of them Python sees signals, and this looks at the workers.

        Stalls are counted in slices, not by a clock: a process that was stopped for an hour has not stalled.
        """
        slice_s = min(jobs.WAIT_SLICE_NS / 1e9, self.options.stall_timeout_s / 4)
        left_s = float("inf") if timeout_s is None else timeout_s
        progress, quiet_s = (-1, -1), 0.0
        while True:
            outcome = wait_job(self.words, ticket, int(1e9 * max(0.0, min(slice_s, left_s))))
            if outcome == jobs.ENDED:
                return
            self.check()
            if outcome == jobs.STOPPED:
                raise TeamClosed("the team was stopped during the wait; make a new one")
            left_s -= slice_s
            before, progress = progress, (self._word(jobs.FINISHED), self._word(jobs.CLAIM))
            quiet_s = quiet_s + slice_s if progress == before else 0.0
            if quiet_s >= self.options.stall_timeout_s:
                self._fail(WorkerStalled(self._describe_stall(quiet_s)), None)
            if left_s <= 0:
                raise TimeoutError(f"job {ticket} is still running after {timeout_s} s; wait again")

    def _describe_stall(self, quiet_s: float) -> str:
        running_ns, task, worker = jobs.longest_task(self.words)
        where = f"{self.name}-{worker} has been in task {task} for {running_ns / 1e9:.1f} s"
        if worker < 0:
            where = "no worker has taken one up"
        rule = f"the limit is {self.options.stall_timeout_s:g} s (stall_timeout_s)"
        return f"no task has ended for {quiet_s:.1f} s and {where}; {rule}; close the team and make a new one"

    def _fail(self, failure: TeamError, cause: BaseException | None) -> None:
        """Refuse all further work for this reason, let the workers go, and raise it."""
        self._failure = failure
        jobs.stop_workers(self.words)
        raise failure from cause


class LaneThread(WorkerTeam):
    """A single named thread for one purpose: a team of one, with the same jobs, waits and errors."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(1, name=name, **options)
