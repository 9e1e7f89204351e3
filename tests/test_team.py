"""The team of workers: every task once, every end defined, nothing allocated, no spin without a core."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numba import config
from numba.core.runtime import _nrt_python, rtsys

from trilane.cpu_kernels import jobs
from trilane.cpu_kernels.float_env import EXACT, FLUSH, set_float_mode
from trilane.cpu_kernels.jobs import job_done, job_error, post_job, wait_job
from trilane.cpu_kernels.parking import RESTED_WAITS, spin_while
from trilane.cpu_kernels.team import (
    LaneThread,
    TaskFailed,
    TeamClosed,
    TeamError,
    WorkerDied,
    WorkerStalled,
    WorkerTeam,
)
from trilane.jit import compiled

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
if not config.DISABLE_JIT:
    import team_tasks as tasks
LINUX = sys.platform.startswith("linux")


@pytest.fixture
def team():
    with WorkerTeam(2, stall_timeout_s=20) as team:
        yield team


def block(*words, size=0):
    return np.array([*words, *[0] * (size - len(words))], np.int64)


# -------------------------------------------------------------------------------------------- jobs
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 3, 64, 1000])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_runs_once(num_threads, num_tasks):
    counts = block(size=1000)
    with WorkerTeam(num_threads) as team:
        team.run(tasks.count(), counts.ctypes.data, num_tasks)
    assert counts.tolist() == [1] * num_tasks + [0] * (1000 - num_tasks)


def test_no_task_is_lost_or_doubled_over_many_small_jobs():
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 12, 3000)
    counts = block(size=12)
    with WorkerTeam(3, spin_us=20) as team:
        for size in sizes:
            team.run(tasks.count(), counts.ctypes.data, int(size))
    assert counts.tolist() == [int((sizes > task).sum()) for task in range(12)]


def test_tasks_begin_in_order():
    log = block(size=101)
    with LaneThread("lane") as lane:
        lane.run(tasks.log_order(), log.ctypes.data, 100)
    assert log.tolist() == [100, *range(100)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_task_may_wait_for_earlier_ones(num_threads):
    with WorkerTeam(num_threads) as team:
        words = block(6, 0, team.abort_address, 0)
        team.run(tasks.produce_and_consume(), words.ctypes.data, 20)
    assert words[3] == 14


def test_a_posted_job_can_be_waited_for_later_and_again(team):
    counts = block(size=8)
    ticket = team.post(tasks.count(), counts.ctypes.data, 8)
    team.wait(ticket)
    team.wait(ticket)
    assert counts.sum() == 8 and job_done(team.words, ticket)


def test_post_waits_for_the_job_before(team):
    words, counts = block(50_000_000, 0), block(size=4)
    first = team.post(tasks.nap(), words.ctypes.data, 2)
    second = team.post(tasks.count(), counts.ctypes.data, 4)
    assert words[1] == 2 and second == first + 1
    team.wait(second)
    team.wait(first)


def test_two_threads_may_use_one_team(team):
    counts = block(size=4)

    def drive():
        for _ in range(200):
            team.run(tasks.count(), counts.ctypes.data, 4)

    others = [threading.Thread(target=drive) for _ in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert counts.tolist() == [400] * 4


@compiled
def drive_natively(words, function, arg, num_jobs):
    for _ in range(num_jobs):
        ticket = post_job(words, function, arg, 4)
        if ticket < 0 or wait_job(words, ticket, -1) != 0 or job_error(words, ticket) != 0:
            return ticket
    return 0


def test_code_without_an_interpreter_can_drive_it(team):
    counts = block(size=4)
    assert drive_natively(team.words, tasks.count(), counts.ctypes.data, 500) == 0
    assert counts.tolist() == [500] * 4


def test_native_posts_are_told_that_a_job_runs_or_the_team_is_closed(team):
    words = block(100_000_000, 0)
    ticket = post_job(team.words, tasks.nap(), words.ctypes.data, 1)
    assert post_job(team.words, tasks.nap(), words.ctypes.data, 1) == jobs.BUSY
    assert wait_job(team.words, ticket, 1_000_000) == jobs.TIMED_OUT
    team.close()
    assert post_job(team.words, tasks.nap(), words.ctypes.data, 1) == jobs.REFUSED
    assert wait_job(team.words, ticket + 1, -1) == jobs.STOPPED


def test_tickets_go_on_where_their_packed_part_wraps_round(team):
    counts = block(size=4)
    near = (1 << 31) - 3
    for word in (jobs.TICKET, jobs.FINISHED):
        team._block[word // 8] = near
    for i in range(6):
        assert team.post(tasks.count(), counts.ctypes.data, 4) == near + 1 + i
        team.wait(near + 1 + i)
    assert counts.tolist() == [6] * 4


# ------------------------------------------------------------------------------------ every worker
def test_run_on_each_calls_every_worker_once():
    counts = block(size=5)
    with WorkerTeam(5) as team:
        for _ in range(20):
            team.run_on_each(tasks.count(), counts.ctypes.data)
    assert counts.tolist() == [20] * 5


def written_nbytes(address):
    """Bytes that are present in the mapping that holds ``address``; the system's page of zeros counts not."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= address < last
        elif inside and head == "Anonymous:":
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not LINUX, reason="needs linux: reads /proc")
@pytest.mark.parametrize("round_nbytes", [8192, 256 << 20])
def test_first_touch_makes_all_pages_present(team, monkeypatch, round_nbytes):
    monkeypatch.setattr("trilane.cpu_kernels.spread.TOUCH_ROUND_NBYTES", round_nbytes)
    nbytes = 2 << 20
    fresh = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fresh.madvise(mmap.MADV_DONTFORK)  # keeps it apart from its neighbours in smaps
    address = np.frombuffer(fresh, np.uint8).ctypes.data
    before = written_nbytes(address)
    team.first_touch(address, nbytes, stripe_nbytes=8192)
    assert written_nbytes(address) - before == nbytes


@pytest.mark.parametrize(("skip", "nbytes"), [(0, 1 << 16), (8, 50_000), (24, 12), (0, 3), (0, 0)])
def test_first_touch_keeps_contents(team, skip, nbytes):
    memory = np.random.default_rng(2).integers(0, 256, (1 << 16) + 64).astype(np.uint8)
    copy = memory.copy()
    team.first_touch(memory.ctypes.data + skip, nbytes, stripe_nbytes=4096)
    assert np.array_equal(memory, copy)


@pytest.mark.parametrize(("address", "nbytes", "stripe"), [(4, 9, 4096), (8, -1, 4096), (8, 9, 100), (0, 9, 4096)])
def test_first_touch_refuses_what_it_cannot_do(team, address, nbytes, stripe):
    with pytest.raises(ValueError, match="multiple of 8"):
        team.first_touch(address, nbytes, stripe)


# ------------------------------------------------------------------------------------------ errors
def test_an_error_code_is_raised_and_the_team_stays_usable(team):
    words = block(3, 42, 0)
    with pytest.raises(TaskFailed, match="code 42") as caught:
        team.run(tasks.fail_at(), words.ctypes.data, 5000)
    assert caught.value.code == 42 and words[2] < 5000
    words[:] = (-1, 0, 0)
    team.run(tasks.fail_at(), words.ctypes.data, 10)
    assert words[2] == 10


def test_an_error_ends_waits_inside_other_tasks():
    with WorkerTeam(4, stall_timeout_s=20) as team:
        words = block(0, team.abort_address)
        with pytest.raises(TaskFailed, match="code 7"):
            team.run(tasks.fail_or_wait(), words.ctypes.data, 20)


def test_a_timeout_leaves_the_job_running(team):
    words = block(100_000_000, 0)
    ticket = team.post(tasks.nap(), words.ctypes.data, 2)
    with pytest.raises(TimeoutError, match="still running"):
        team.wait(ticket, timeout_s=0.01)
    team.wait(ticket)
    assert words[1] == 2


@pytest.mark.parametrize(("fault", "error"), [("die", WorkerDied), ("stall", WorkerStalled)])
def test_a_lost_worker_raises_soon_and_the_team_refuses_with_the_reason(fault, error):
    with WorkerTeam(2, stall_timeout_s=0.4, name="fragile") as team:
        counts = block(size=4)
        team.run(tasks.count(), counts.ctypes.data, 4)
        for worker in (0, 1):  # whichever claims the only task suffers
            team.inject_fault(worker, fault)
            begin = time.monotonic()
            try:
                for _ in range(200):
                    team.run(tasks.count(), counts.ctypes.data, 1)
                    time.sleep(0.001)
            except TeamError as raised:
                first = raised
                break
        assert time.monotonic() - begin < 5
        assert type(first) is error and "fragile-" in str(first) and "make a new one" in str(first)
        for use in (
            lambda: team.post(tasks.count(), counts.ctypes.data, 1),
            team.check,
            lambda: team.wait(1),
        ):
            with pytest.raises(error) as again:
                use()
            assert str(again.value) == str(first)
        assert team.close()


def test_a_fault_can_be_taken_back(team):
    counts = block(size=8)
    for worker in (0, 1):
        team._block[jobs.FAULT_KIND // 8] = jobs.STALL
        team._block[jobs.FAULT_WORKER // 8] = worker + 1
        ticket = team.post(tasks.count(), counts.ctypes.data, 8)
        time.sleep(0.02)
        team.inject_fault(worker, None)
        team.wait(ticket)
    assert counts.tolist() == [2] * 8


def test_a_hanging_task_is_a_stall_and_close_says_that_it_goes_on():
    words = block(0)
    team = WorkerTeam(2, stall_timeout_s=0.2, name="worker").start()
    with pytest.raises(WorkerStalled, match=r"worker-\d has been in task \d for .*stall_timeout_s"):
        team.run(tasks.hang(), words.ctypes.data, 2)
    assert not team.close(timeout_s=0.05)
    words[0] = 1
    assert team.close()


def test_a_long_job_is_no_stall_as_long_as_tasks_end():
    words = block(60_000_000, 0)
    with WorkerTeam(1, stall_timeout_s=0.4) as team:
        team.run(tasks.nap(), words.ctypes.data, 10)
    assert words[1] == 10


def test_close_during_a_wait_raises_in_the_waiter(team):
    words = block(5_000_000, 0)
    ticket = team.post(tasks.nap(), words.ctypes.data, 100_000)
    threading.Timer(0.05, team.close).start()
    with pytest.raises(TeamClosed):
        team.wait(ticket)


def test_a_closed_team_says_so():
    team = WorkerTeam(1)
    assert team.close() and team.close()
    for use in (lambda: team.run(tasks.count(), 0, 0), team.start, team.check):
        with pytest.raises(TeamClosed, match="make a new one"):
            use()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"num_threads": 0}, "1 to 1024"),
        ({"num_threads": 2.0}, "1 to 1024"),
        ({"num_threads": True}, "1 to 1024"),
        ({"num_threads": 1, "spin_us": -1}, "spin_us is -1"),
        ({"num_threads": 1, "wait_spin_us": float("nan")}, "wait_spin_us is nan"),
        ({"num_threads": 1, "stall_timeout_s": 0}, "stall_timeout_s is 0"),
        ({"num_threads": 1, "stall_timeout_s": "long"}, "stall_timeout_s is 'long'"),
    ],
)
def test_bad_options_are_named(options, rule):
    with pytest.raises(ValueError, match=rule):
        WorkerTeam(**options)


def test_bad_jobs_are_named(team):
    with pytest.raises(ValueError, match="num_tasks is -1"):
        team.post(tasks.count(), 0, -1)
    with pytest.raises(ValueError, match="ticket 5 was never posted"):
        team.wait(5)


def test_without_compiled_code_it_says_so():
    code = "from trilane.cpu_kernels.team import WorkerTeam; WorkerTeam(1).start()"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "TeamError: workers need compiled code, but NUMBA_DISABLE_JIT is set" in done.stderr


@pytest.mark.skipif(not LINUX, reason="needs linux: pins threads")
def test_pinning(team):
    cpu = max(os.sched_getaffinity(0))
    with WorkerTeam(2, affinity=[cpu]) as pinned:
        assert {tuple(os.sched_getaffinity(thread.native_id)) for thread in pinned._threads} == {(cpu,)}
    with pytest.raises(WorkerDied, match="did not start") as caught:
        WorkerTeam(1, affinity=[100_000]).start()
    assert isinstance(caught.value.__cause__, (OSError, ValueError, OverflowError))


@pytest.mark.skipif(not LINUX, reason="needs linux: reads /proc")
def test_threads_have_names(team):
    with LaneThread("copy") as lane:
        names = [Path(f"/proc/self/task/{t.native_id}/comm").read_text() for t in [*team._threads, *lane._threads]]
    assert names == ["worker-0\n", "worker-1\n", "copy-0\n"]


# -------------------------------------------------------------------------------- cost and manners
def test_posts_allocate_nothing(team):
    counts = block(size=4)
    address, function = counts.ctypes.data, tasks.count()
    team.run(function, address, 4)
    _nrt_python.memsys_enable_stats()
    before = rtsys.get_allocation_stats()
    for _ in range(1000):
        team.run(function, address, 4)
    assert rtsys.get_allocation_stats() == before


def test_a_callers_flush_to_zero_reaches_no_result():
    kept = block(size=64)
    before = set_float_mode(EXACT | FLUSH)
    try:
        with WorkerTeam(2) as team:  # threads inherit the mode of their creator
            team.run(tasks.underflow(), kept.ctypes.data, 64)
    finally:
        set_float_mode(before)
    assert kept.all()


def test_no_spin_where_threads_outnumber_cpus():
    num_cpus = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
    team = WorkerTeam(num_cpus)
    assert team.options.spin_us == team.options.wait_spin_us == 0


@pytest.mark.alone
def test_a_waiter_of_a_full_machine_sleeps():
    num_cpus = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
    with WorkerTeam(num_cpus) as team:
        words = block(300_000_000, 0)
        cpu_s = time.process_time()
        team.run(tasks.nap(), words.ctypes.data, 1)
        assert time.process_time() - cpu_s < 0.1


@pytest.mark.alone
def test_idle_workers_sleep(team):
    time.sleep(0.01)
    cpu_s = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - cpu_s < 0.1


def test_a_spinner_that_shares_its_core_rests():
    words, rest = block(0), block(0)
    spin_while(words.ctypes.data, 1, 1000, rest.ctypes.data)
    assert rest[0] == 0
    rest[0] = 2
    begin = time.monotonic()
    for left in (1, 0):
        spin_while(words.ctypes.data, 0, 10_000_000_000, rest.ctypes.data)
        assert rest[0] == left
    assert time.monotonic() - begin < 5


@pytest.mark.alone
@pytest.mark.skipif(not LINUX, reason="needs linux: pins threads")
def test_a_spinner_notices_that_it_shares_its_core():
    words, rest = block(0), block(0)
    mask = os.sched_getaffinity(0)
    spinner = threading.Thread(target=spin_while, args=(words.ctypes.data, 0, 5_000_000_000, rest.ctypes.data))
    try:
        os.sched_setaffinity(0, {min(mask)})  # the new thread inherits it
        spinner.start()
        end = time.monotonic() + 4
        while rest[0] == 0 and time.monotonic() < end:
            pass  # the competitor
    finally:
        os.sched_setaffinity(0, mask)
        words[0] = 1
        spinner.join()
    assert rest[0] == RESTED_WAITS


# ---------------------------------------------------------------------------------------- the ends
def test_a_team_that_nobody_holds_is_stopped():
    team = WorkerTeam(2).start()
    threads = team._threads
    del team
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def start_program(name):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", tasks.__file__, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["interrupt_short_tasks", "interrupt_long_task"])
def test_ctrl_c_ends_a_wait_and_leaves_the_team_usable(name):
    with start_program(name) as program:
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.3)
        begin = time.monotonic()
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begin < 1
        rest, errors = program.stdout.read(), program.stderr.read()  # communicate() loses what readline() read ahead
    assert rest == "usable True\n" and not errors


@pytest.mark.alone
@pytest.mark.parametrize("name", ["exit_idle", "exit_while_working", "exit_while_hanging", "exit_by_error"])
def test_exit_without_close(name):
    with start_program(name) as program:
        assert program.stdout.readline() == "leaving\n"
        begin = time.monotonic()
        _, errors = program.communicate(timeout=20)
    assert time.monotonic() - begin < 3
    assert program.returncode == (3 if name == "exit_by_error" else 0) and not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs linux: forks")
def test_fork_is_an_error_in_the_child_and_nothing_to_the_parent():
    with start_program("fork") as program:
        output, errors = program.communicate(timeout=60)
    child, own, parent = output.splitlines()
    assert child.startswith("child: the workers belong to process") and "make a new team" in child
    assert own == f"child's own team: {[2] * 8}"  # its copy of the counts
    assert parent == f"parent: 0 {[2] * 8}" and not errors
