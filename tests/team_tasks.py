"""Tasks for the team's tests, and programs that they run in a process of their own."""

from __future__ import annotations

import functools
import os
import sys
import time

import numpy as np
from numba import types

from trilane.cpu_kernels.atomics import add_at, load_at, mono_ns, sleep_ns, store_at
from trilane.cpu_kernels.parking import wait_word
from trilane.jit import native

TASK = native(types.int64(types.int64, types.int64, types.int64))


@functools.cache
def count():
    """Add 1 to word ``task`` of the block."""

    @TASK
    def count(block, task, worker):
        add_at(block + 8 * task, 1)
        return 0

    return count.address


@functools.cache
def log_order():
    """Word 0 counts the calls; word 1 + n is the task of call n."""

    @TASK
    def log_order(block, task, worker):
        store_at(block + 8 + 8 * add_at(block, 1), task)
        return 0

    return log_order.address


@functools.cache
def nap():
    """Sleep for word 0 ns, then count in word 1."""

    @TASK
    def nap(block, task, worker):
        sleep_ns(load_at(block))
        add_at(block + 8, 1)
        return 0

    return nap.address


@functools.cache
def fail_at():
    """Task number word 0 returns word 1; the others count in word 2."""

    @TASK
    def fail_at(block, task, worker):
        if task == load_at(block):
            return load_at(block + 8)
        add_at(block + 16, 1)
        return 0

    return fail_at.address


@functools.cache
def hang():
    """Run until word 0 is set, whatever the team says."""

    @TASK
    def hang(block, task, worker):
        while load_at(block) == 0:
            sleep_ns(1_000_000)
        return 0

    return hang.address


@functools.cache
def produce_and_consume():
    """Words: tasks that produce, produced, abort address; the other tasks wait and count in word 3."""

    @TASK
    def produce_and_consume(block, task, worker):
        num_producers = load_at(block)
        if task < num_producers:
            sleep_ns(200_000)
            add_at(block + 8, 1)
            return 0
        code = wait_word(block + 8, num_producers, load_at(block + 16))
        if code == 0:
            add_at(block + 24, 1)
        return code

    return produce_and_consume.address


@functools.cache
def fail_or_wait():
    """Task 0 fails with 7; the others wait for word 0, which never comes. Word 1: abort address."""

    @TASK
    def fail_or_wait(block, task, worker):
        if task == 0:
            sleep_ns(1_000_000)
            return 7
        return wait_word(block, 1, load_at(block + 8))

    return fail_or_wait.address


@functools.cache
def underflow():
    """Store whether a denormal product is kept in word ``task``."""

    @TASK
    def underflow(block, task, worker):
        product = np.float32(task + 1) * np.float32(1e-38) * np.float32(1e-3)
        store_at(block + 8 * task, np.int64(product > np.float32(0)))
        return 0

    return underflow.address


@functools.cache
def when():
    """Store the time in word ``task``."""

    @TASK
    def when(block, task, worker):
        store_at(block + 8 * task, mono_ns())
        return 0

    return when.address


# ---------------------------------------------------------------- programs: python team_tasks.py NAME
def interrupt_short_tasks():
    _interrupted(nap_ns=5_000_000, num_tasks=100_000)


def interrupt_long_task():
    _interrupted(nap_ns=1_500_000_000, num_tasks=1)


def _interrupted(nap_ns, num_tasks):
    from trilane.cpu_kernels.team import WorkerTeam

    block = np.array([nap_ns, 0], np.int64)
    counts = np.zeros(8, np.int64)
    with WorkerTeam(2) as team:
        tasks = nap(), count()
        print("ready", flush=True)
        try:
            team.run(tasks[0], block.ctypes.data, num_tasks)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        team.run(tasks[1], counts.ctypes.data, 8)
        print("usable" if counts.tolist() == [1] * 8 else counts, block[1] < num_tasks or num_tasks == 1)


def exit_idle():
    from trilane.cpu_kernels.team import WorkerTeam

    team = WorkerTeam(2, spin_us=1e6).start()
    team.run(count(), np.zeros(8, np.int64).ctypes.data, 8)
    print("leaving", flush=True)


def exit_while_working():
    from trilane.cpu_kernels.team import WorkerTeam

    global kept
    kept = np.array([2_000_000, 0], np.int64), WorkerTeam(2).start()
    kept[1].post(nap(), kept[0].ctypes.data, 1_000_000)
    time.sleep(0.05)
    print("leaving", flush=True)


def exit_while_hanging():
    from trilane.cpu_kernels.team import WorkerTeam

    global kept
    kept = np.zeros(1, np.int64), WorkerTeam(2).start()
    kept[1].post(hang(), kept[0].ctypes.data, 2)
    print("leaving", flush=True)


def exit_by_error():
    exit_idle()
    sys.exit(3)


def fork():
    from trilane.cpu_kernels.team import TeamForked, WorkerTeam

    counts = np.zeros(8, np.int64)
    team = WorkerTeam(2).start()
    team.run(count(), counts.ctypes.data, 8)
    child = os.fork()
    if child == 0:
        try:
            team.run(count(), counts.ctypes.data, 8)
        except TeamForked as error:
            print("child:", error, flush=True)
        assert team.close()
        with WorkerTeam(2) as own:
            own.run(count(), counts.ctypes.data, 8)
        print("child's own team:", counts.tolist(), flush=True)
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    team.run(count(), counts.ctypes.data, 8)
    print("parent:", status, counts.tolist(), flush=True)
    team.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
