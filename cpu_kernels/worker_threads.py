"""The Python side of a worker's life: what is compiled before it starts, what its thread runs, its end.

Nothing here refers to a team, so a team that nobody holds any more can be collected while its threads run.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
from numba import types

from trilane.cpu_kernels import jobs
from trilane.cpu_kernels.atomics import set_thread_name


def compile_jobs() -> None:
    """Compile everything that is called later, before a thread runs or a job waits."""
    word = types.int64
    arities = {
        jobs.run_worker: 2, jobs.post_job: 4, jobs.wait_job: 3, jobs.job_done: 2, jobs.job_error: 2,
        jobs.cancel_job: 1, jobs.stop_workers: 1, jobs.longest_task: 1, set_thread_name: 1,
    }  # fmt: skip
    for function, arity in arities.items():
        function.compile((word,) * arity)


def live(block: np.ndarray, worker: int, name: str, cpu: int | None, errors: list[BaseException]) -> None:
    """What a worker's thread runs; errors before and in it are left in ``errors``."""
    try:
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})  # 0 is the calling thread
        label = np.frombuffer(name.encode()[:15].ljust(16, b"\0"), np.uint8)
        set_thread_name(label.ctypes.data)
        jobs.run_worker(block.ctypes.data, worker)
    except BaseException as error:
        errors.append(error)


def stop(block: np.ndarray, threads: list[threading.Thread], pid: int, timeout_s: float = 1.0) -> bool:
    """Tell the workers to leave and wait a while; True if all have left. A child process has none."""
    if os.getpid() != pid:
        return True
    jobs.stop_workers(block.ctypes.data)
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
