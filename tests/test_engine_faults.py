"""Faults: workers that die or hang, Ctrl-C, exits without close, forks, steps that fail half way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_programs import slow
from expert_cases import assert_same_bits, expected, force, open_scheduler, random_routing, random_store
from numba import config

from trilane import DeviceError, WorkerError
from trilane.cpu_kernels.float_env import EXACT
from trilane.cpu_kernels.host_lanes import COPY_CHUNK_NBYTES
from trilane.state import check

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
LINUX = sys.platform.startswith("linux")
LANE_OF = {"team": "cpu", "link": "stream", "device": "stream"}


@pytest.fixture(scope="module")
def store():
    return random_store("q8_0", experts=6, hidden=256, intermediate=512)


def step_inputs(rows=2, seed=0, top_k=2):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    return x, *random_routing(rng, rows, top_k, 6, skips=False)


def assert_sound(scheduler):
    runner = scheduler._runner
    check(runner.state, runner.geometry)
    assert not runner.state.filling.any()


def assert_right(scheduler, store, seeds=range(6)):
    """Steps over all experts, so that a slot with wrong bytes would be hit."""
    for seed in seeds:
        x, ids, weights = step_inputs((1, 3, 9)[seed % 3], seed, 4)
        assert_same_bits(scheduler.forward(0, x, ids, weights), expected(store, 0, x, ids, weights))
        assert_sound(scheduler)


# -------------------------------------------------------------------------------------------- dead and hanging
@pytest.mark.alone
@pytest.mark.parametrize("rows", [2, 12])
@pytest.mark.parametrize("kind", ["die", "stall"])
@pytest.mark.parametrize("thread", ["team", "link", "device"])
def test_a_thread_that_dies_or_hangs(store, scheduler_of, thread, kind, rows):
    """WorkerError in bounded time, at once in every later call, and no slot counts as filled."""
    scheduler = scheduler_of(
        store, cache={"fraction": 1.0}, policy=force(LANE_OF[thread]), cpu={"threads": 2, "stall_timeout_s": 0.3}
    )
    x, ids, weights = step_inputs(rows)
    getattr(scheduler._runner.device, thread).inject_fault(0, kind)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        for _ in range(20):  # with two workers, the other one may have done it all
            scheduler.forward(0, x, ids, weights)
    assert time.monotonic() - begin < 6
    assert ("gone" if kind == "die" else "stall_timeout_s") in str(caught.value)
    assert_sound(scheduler)
    for call in (lambda: scheduler.forward(0, x, ids, weights), lambda: scheduler.hint(0, [1])):
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"the scheduler stopped then; make a new one"):
            call()
        assert time.monotonic() - begin < 0.1
    assert scheduler.stats().steps < 20
    state = scheduler._runner.state
    held = (state.slot_of >= 0).sum()
    assert held == 0 or thread == "team", "the failed step's fills must not count"
    begin = time.monotonic()
    scheduler.close()
    assert time.monotonic() - begin < 8


def test_a_link_that_dies_in_a_background_fill(store, scheduler_of):
    scheduler = scheduler_of(store, cache={"fraction": 1.0}, cpu={"threads": 1, "stall_timeout_s": 0.3})
    scheduler._runner.device.link.inject_fault(0, "die")
    assert scheduler.hint(0, [1, 2]) == 4
    x, ids, weights = step_inputs()
    for _ in range(2):
        with pytest.raises(WorkerError, match="gone"):
            scheduler.forward(0, x, ids, weights)
    runner = scheduler._runner
    check(runner.state, runner.geometry)
    assert (runner.state.slot_of < 0).all()


def test_a_stall_that_ends_in_time_is_none(store, scheduler_of):
    scheduler = scheduler_of(store, policy=force("cpu"), cpu={"threads": 1, "stall_timeout_s": 5.0})
    team = scheduler._runner.device.team
    team.inject_fault(0, "stall")
    threading.Timer(0.3, team.inject_fault, (0, None)).start()
    assert_right(scheduler, store)


# ------------------------------------------------------------------------------------------------------ Ctrl-C
def interrupt_after(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.alone
@pytest.mark.skipif(not LINUX, reason="needs Linux signals")
@pytest.mark.parametrize("lane", ["cpu", "stream", "zero_copy"])
def test_interrupt_in_a_wait(store, scheduler_of, lane):
    """The call ends soon, the cache holds nothing of the step, and the scheduler goes on."""
    name = {"cpu": "cpu_gb_s", "stream": "link_gb_s", "zero_copy": "zero_copy_gb_s"}[lane]
    scheduler = scheduler_of(store, cache={"fraction": 0.5}, policy=force(lane), host_device=slow(store, 0.1, name))
    x, ids, weights = step_inputs()
    ticket = scheduler.submit(0, x, ids, weights)
    interrupt_after(0.05)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scheduler.wait(ticket)
    assert time.monotonic() - begin < 1.5
    assert_sound(scheduler)
    assert (scheduler._runner.state.slot_of < 0).all()
    with pytest.raises(Exception, match="that ticket is not in flight"):
        scheduler.wait(ticket)
    assert_right(scheduler, store, range(2))


@pytest.mark.alone
@pytest.mark.skipif(not LINUX, reason="needs Linux signals")
@pytest.mark.parametrize("lane", ["stream", "cpu"])
def test_a_lane_that_is_slow_to_give_up(store, scheduler_of, monkeypatch, lane):
    """It still works on the abandoned step when the next one begins: that one waits for it."""
    monkeypatch.setattr("trilane.cpu_kernels.host_device.DRAIN_S", 0.01)
    name = {"cpu": "cpu_gb_s", "stream": "link_gb_s"}[lane]
    scheduler = scheduler_of(store, cache={"fraction": 0.5}, policy=force(lane), host_device=slow(store, 0.6, name))
    x, ids, weights = step_inputs(1)
    interrupt_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        scheduler.forward(0, x, [[0]], [[1.0]])
    assert scheduler._runner._left
    wide = step_inputs(60, top_k=4)  # needs new scratch
    assert_same_bits(scheduler.forward(0, wide[0][:1], [[3]], [[1.0]]), expected(store, 0, wide[0][:1], [[3]], [[1.0]]))
    assert not scheduler._runner._left
    assert_sound(scheduler)


@pytest.mark.alone
@pytest.mark.skipif(not LINUX, reason="needs Linux signals")
def test_interrupt_while_a_fill_gives_way(store, scheduler_of, monkeypatch):
    largest = int(store.layers[0].layout.shard_nbytes.max())
    rate = slow(
        store, 0.5 * max(1.0, largest / COPY_CHUNK_NBYTES), "link_gb_s"
    )  # half a second for what it must finish
    scheduler = scheduler_of(store, cache={"fraction": 1.0}, policy=force("cpu"), host_device={**rate, "cpu_gb_s": 50})
    assert scheduler.hint(0, [0, 1]) == 4
    x, ids, weights = step_inputs()
    interrupt_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        scheduler.forward(0, x, ids, weights)
    check(scheduler._runner.state, scheduler._runner.geometry)
    assert_right(scheduler, store, range(2))


@pytest.mark.skipif(not LINUX, reason="needs Linux signals")
@pytest.mark.parametrize("place", ["submit", "wait", "begin"])
def test_interrupt_between_two_lines(store, scheduler_of, monkeypatch, place):
    """After the lanes were started and before a ticket is held; after the ticket was given up; inside begin."""
    scheduler = scheduler_of(store, cache={"fraction": 0.5}, policy=force("stream"))
    x, ids, weights = step_inputs()
    runner = scheduler._runner

    def interrupted(*args):
        raise KeyboardInterrupt

    def begin_and_interrupt(step):
        type(runner).begin(runner, step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "submit":
            patch.setattr(runner, "begin", begin_and_interrupt)
        elif place == "wait":
            patch.setattr(runner, "finish", interrupted)
        else:
            patch.setattr(runner, "_plan_and_post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.forward(0, x, ids, weights)
    check(runner.state, runner.geometry)
    assert_right(scheduler, store)


def test_a_step_that_fails_half_way(store, scheduler_of, monkeypatch):
    """The second of several waves fails: what the first filled may stay, nothing else counts as filled."""
    scheduler = scheduler_of(store, cache={"slots": 3}, policy={"force": "stream"})
    x, ids, weights = step_inputs(3)
    runner = scheduler._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_begin_wave", lambda: (_ for _ in ()).throw(DeviceError("injected")))
        with pytest.raises(DeviceError, match="injected"):
            scheduler.forward(0, x, ids, weights)
    assert_sound(scheduler)
    assert_right(scheduler, store)


def test_an_abandoned_fill_does_not_hit(store, scheduler_of, monkeypatch):
    """The copies never happened and the slots hold garbage: the next step must not take them for hits."""
    scheduler = scheduler_of(store, cache={"fraction": 1.0}, policy=force("stream"))
    x, ids, weights = step_inputs()
    runner = scheduler._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "finish", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scheduler.forward(0, x, ids, weights)
    runner._end_leftovers()
    runner.device.slots.bytes[:] = 0x5A
    assert (runner.state.slot_of < 0).all()
    assert_right(scheduler, store)


# ----------------------------------------------------------------------------------------- programs of their own
def run_program(*arguments, timeout=120):
    here = Path(__file__).parent
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-W", "error", str(here / "engine_programs.py"), *arguments],
        capture_output=True, text=True, timeout=timeout, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "code"), [("leave_idle", 0), ("leave_in_a_step", 0), ("leave_in_a_fill", 0), ("leave_by_error", 3)]
)
def test_exit_without_close(name, code):
    """The process ends soon, with its own code and without a word."""
    begin = time.monotonic()
    result = run_program(name)
    assert result.returncode == code and result.stderr == "", result.stderr
    assert result.stdout.splitlines()[-1] == "leaving"
    assert time.monotonic() - begin < 60


@pytest.mark.skipif(not LINUX, reason="needs Linux: fork")
def test_fork():
    """The child gets an error that says what to do and may make its own; the parent goes on, step in flight and all."""
    result = run_program("fork")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("which has none of its threads; make a scheduler in the child" in line for line in lines) == 3
    assert "child's own scheduler: True" in lines and "parent: 0 True" in lines


@pytest.mark.alone
@pytest.mark.skipif(not LINUX, reason="needs Linux signals")
@pytest.mark.parametrize("seed", ["1", "2"])
def test_interrupts_at_any_moment(seed):
    result = run_program("interrupts", seed)
    assert result.returncode == 0 and result.stdout == "interrupted: True right: True\n", result.stdout + result.stderr


def test_closing_restores_nothing_of_the_callers_float_mode(store):
    """Threads and steps leave the caller's register as it was."""
    from trilane.cpu_kernels.float_env import FLUSH, set_float_mode

    before = set_float_mode(EXACT | FLUSH)
    try:
        with open_scheduler(store) as scheduler:
            scheduler.forward(0, *step_inputs())
        after = set_float_mode(EXACT | FLUSH)
        assert after & ~0x3F == EXACT | FLUSH  # the low bits tell what has happened, such as rounding
    finally:
        set_float_mode(before)
