"""How native threads share a job: the words they meet at, and the compiled code on both sides.

A job is ``num_tasks`` calls ``code = fn(arg, task, worker)``, tasks 0, 1, ... claimed in that order, each by
whichever worker is free. One job is in flight at a time; any thread may post the next, also one without an
interpreter. Everything is addressed by ``words``, the address of the block that :func:`make_words` makes, so
that a call from Python passes integers and allocates nothing. The file knows no threads and no experts.

The protocol. A poster wins ticket t by moving TICKET from t - 1 = FINISHED to t. It writes the job, then
CLAIM = (t, 0), then bumps SEQUENCE and wakes. A worker claims by adding 1 to CLAIM and so learns ticket and
task in one step; LIMIT = (t, num_tasks) tells whether the claim is good. So a worker that slept through the
end of a job can claim nothing stale, and nobody waits for it. Who ends the last task sets FINISHED to t.
"""

from __future__ import annotations

import ctypes

import numpy as np

from trilane.cpu_kernels.atomics import (
    WAKE_ALL,
    add_at,
    compare_exchange_at,
    exchange_at,
    fence,
    futex_wake,
    load_at,
    mono_ns,
    set_timer_slack_ns,
    sleep_ns,
    store_at,
)
from trilane.cpu_kernels.float_env import EXACT, call_task, write_float_mode
from trilane.cpu_kernels.parking import park_while, spin_while
from trilane.jit import compiled

LINE = 128  # bytes: two cache lines, because x86 cores fetch them in pairs
# Byte offsets. Words of one writer lie together: after a pause every line that is touched costs 100 ns.
SEQUENCE, SLEEPERS, STOP, DEAD, SPIN_NS, WAIT_SPIN_NS = (8 * i for i in range(6))  # workers sleep on SEQUENCE
CLAIM = LINE  # ticket << 32 | next task
TICKET, LIMIT, FUNCTION, ARG, ABORT, FAULT_WORKER, FAULT_KIND = (2 * LINE + 8 * i for i in range(7))
DONE = 3 * LINE  # tasks of this job that have ended
FINISHED, WAITERS, WAIT_REST, ERRORS = (4 * LINE + 8 * i for i in range(4))  # waiters sleep on FINISHED;
# ERRORS: the first error code of each of the last 8 jobs
LIVE, NUM_WORKERS = 5 * LINE, 5 * LINE + 8
WORKERS = 6 * LINE  # a line for each worker:
STARTED_NS, TASK, REST = 0, 8, 16  # when its task began (0: none), which one, see parking.spin_while

LOW32, TICKET_MASK = 0xFFFFFFFF, 0x7FFFFFFF
MAX_TASKS = 1 << 30
BUSY, REFUSED = -1, -2  # what post_job returns instead of a ticket
ENDED, TIMED_OUT, DIED, STOPPED = 0, 1, 2, 3  # what wait_job returns
CANCELLED = -1  # the error code of a job that was called off
DIE, STALL = 1, 2  # kinds of fault
WAIT_SLICE_NS = 50_000_000
WAKE_FANOUT = 4  # parked threads that one thread wakes; these wake the rest


def make_words(num_workers: int, spin_ns: int, wait_spin_ns: int) -> np.ndarray:
    """A block for ``num_workers``: zeroed int64, its first word at a multiple of ``LINE`` bytes."""
    nbytes = WORKERS + num_workers * LINE
    raw = np.zeros((nbytes + LINE) // 8, np.int64)
    skip = -raw.ctypes.data % LINE // 8
    words = raw[skip : skip + nbytes // 8]
    words[NUM_WORKERS // 8] = num_workers
    words[SPIN_NS // 8], words[WAIT_SPIN_NS // 8] = spin_ns, wait_spin_ns
    return words


# ------------------------------------------------------------------------------------- who posts and waits
def last_ticket(words: int) -> int:
    """The ticket of the last job that was posted, by whomever; 0 before the first. Not compiled: interrupts call it."""
    return ctypes.c_int64.from_address(words + TICKET).value


@compiled
def post_job(words, function, arg, num_tasks):
    """Post a job of ``num_tasks`` calls of the task at address ``function``.

    Returns
    -------
    int64 : its ticket, or BUSY while a job is in flight, or REFUSED by a team that is stopped or broken.
    """
    if load_at(words + STOP) != 0 or load_at(words + DEAD) != 0:
        return REFUSED
    ticket = load_at(words + FINISHED) + 1
    if compare_exchange_at(words + TICKET, ticket - 1, ticket) != ticket - 1:
        return BUSY
    packed = (ticket & TICKET_MASK) << 32
    store_at(words + FUNCTION, function)
    store_at(words + ARG, arg)
    store_at(words + ABORT, 0)
    store_at(words + DONE, 0)
    store_at(words + LIMIT, packed | num_tasks)
    store_at(words + CLAIM, packed)
    if num_tasks == 0:
        _finish(words)
        return ticket
    add_at(words + SEQUENCE, 1)
    fence()
    if load_at(words + SLEEPERS) > 0:
        futex_wake(words + SEQUENCE, min(WAKE_FANOUT, num_tasks))
    return ticket


@compiled
def job_done(words, ticket):
    """Whether the job has ended."""
    return load_at(words + FINISHED) >= ticket


@compiled
def job_error(words, ticket):
    """First error code of an ended job, 0 if none; kept for the last 8 jobs."""
    return load_at(words + ERRORS + 8 * (ticket & 7))


@compiled
def wait_job(words, ticket, timeout_ns):
    """Wait for a job: a bounded spin, then asleep; a negative timeout waits for ever.

    Returns
    -------
    int64 : ENDED, TIMED_OUT, DIED (a worker is gone) or STOPPED (the team was closed).
    """
    deadline = mono_ns() + timeout_ns if timeout_ns >= 0 else np.int64(1 << 62)
    spin_ns = load_at(words + WAIT_SPIN_NS)
    while True:
        finished = load_at(words + FINISHED)
        if finished >= ticket:
            return ENDED
        if load_at(words + DEAD) != 0:
            return DIED
        if load_at(words + STOP) != 0:
            return STOPPED
        left = deadline - mono_ns()
        if left <= 0:
            return TIMED_OUT
        if spin_ns > 0:
            spin_while(words + FINISHED, finished, min(spin_ns, left), words + WAIT_REST)
            spin_ns = 0
        else:
            park_while(words + FINISHED, finished, words + WAITERS, min(left, WAIT_SLICE_NS))


@compiled
def cancel_job(words):
    """Call the job in flight off: tasks that have not begun are skipped, waits inside tasks end."""
    compare_exchange_at(words + ABORT, 0, CANCELLED)


@compiled
def stop_workers(words):
    """Let every worker leave as soon as its task has ended; jobs are refused from now on."""
    store_at(words + STOP, 1)
    cancel_job(words)
    add_at(words + SEQUENCE, 1)
    fence()
    futex_wake(words + SEQUENCE, WAKE_ALL)
    futex_wake(words + FINISHED, WAKE_ALL)


@compiled
def longest_task(words):
    """The task that has been running longest: (ns, task, worker), or (0, -1, -1) where none runs."""
    now, longest, task, worker = mono_ns(), np.int64(0), np.int64(-1), np.int64(-1)
    for k in range(load_at(words + NUM_WORKERS)):
        started = load_at(words + WORKERS + k * LINE + STARTED_NS)
        if started != 0 and now - started > longest:
            longest, task, worker = now - started, load_at(words + WORKERS + k * LINE + TASK), k
    return longest, task, worker


# ------------------------------------------------------------------------------------------ who works
@compiled
def _finish(words):
    """End the job in flight. FINISHED comes last: from there on the next job may be posted."""
    ticket = load_at(words + TICKET)
    store_at(words + ERRORS + 8 * (ticket & 7), load_at(words + ABORT))
    exchange_at(words + FINISHED, ticket)
    fence()
    if load_at(words + WAITERS) > 0:
        futex_wake(words + FINISHED, WAKE_ALL)


@compiled
def _suffer_fault(words):
    """The one seam for faults: die (True), or hang until the fault is taken back or the team is stopped."""
    if load_at(words + FAULT_KIND) == DIE:
        return True
    while load_at(words + FAULT_WORKER) != 0 and load_at(words + STOP) == 0:
        sleep_ns(1_000_000)
    return False


@compiled
def _run_task(words, mine, task, worker):
    """Run one claimed task; False if the worker dies of it."""
    store_at(mine + TASK, task)
    store_at(mine + STARTED_NS, mono_ns())
    if load_at(words + FAULT_WORKER) == worker + 1 and _suffer_fault(words):
        return False
    if load_at(words + ABORT) == 0:
        code = call_task(load_at(words + FUNCTION), load_at(words + ARG), task, worker)
        if code != 0:
            compare_exchange_at(words + ABORT, 0, code)
    store_at(mine + STARTED_NS, 0)
    return True


@compiled
def _run_tasks(words, mine, worker):
    """Claim and run tasks until none is left; False if the worker dies.

    A worker counts its own tasks and adds them up once: one word that all write after each task would be in their way.
    """
    done, num_tasks = 0, np.int64(0)
    while True:
        claim = add_at(words + CLAIM, 1)
        limit = load_at(words + LIMIT)
        if claim >> 32 != limit >> 32 or claim & LOW32 >= limit & LOW32:
            break
        num_tasks = limit & LOW32
        if not _run_task(words, mine, claim & LOW32, worker):
            return False
        done += 1
    if done > 0 and add_at(words + DONE, done) + done == num_tasks:
        _finish(words)  # else the job may be gone by now
    return True


@compiled
def _await_post(words, mine, seen):
    """Wait until SEQUENCE moves on from ``seen``; its new value."""
    spin_while(words + SEQUENCE, seen, load_at(words + SPIN_NS), mine + REST)
    parked = False
    while load_at(words + SEQUENCE) == seen:
        parked = True
        park_while(words + SEQUENCE, seen, words + SLEEPERS, -1)
    if parked and load_at(words + SLEEPERS) > 0:
        _wake_more(words)
    return load_at(words + SEQUENCE)


@compiled
def _wake_more(words):
    """A woken worker wakes others if there are tasks for them: the poster woke only the first few."""
    unclaimed = (load_at(words + LIMIT) & LOW32) - (load_at(words + CLAIM) & LOW32)
    if unclaimed > 1:
        futex_wake(words + SEQUENCE, min(WAKE_FANOUT, unclaimed - 1))


@compiled
def run_worker(words, worker):
    """The life of a worker: returns when the team is stopped, or when the fault seam kills it."""
    mine = words + WORKERS + worker * LINE
    set_timer_slack_ns(1)
    add_at(words + LIVE, 1)
    seen, alive = np.int64(0), True
    while alive and load_at(words + STOP) == 0:
        seen = _await_post(words, mine, seen)
        write_float_mode(EXACT)
        alive = _run_tasks(words, mine, worker)
    add_at(words + LIVE, -1)
    if not alive:
        add_at(words + DEAD, 1)
        futex_wake(words + FINISHED, WAKE_ALL)
