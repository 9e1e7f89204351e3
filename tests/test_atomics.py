"""Atomics, clocks, sleeps and futexes, each against the plain meaning."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numba import config

from trilane.cpu_kernels import atomics
from trilane.cpu_kernels.atomics import (
    add32_at,
    add_at,
    atomic_add,
    atomic_compare_exchange,
    atomic_exchange,
    atomic_load,
    atomic_store,
    compare_exchange_at,
    exchange_at,
    fence,
    futex_wait,
    futex_wake,
    load32_at,
    load_at,
    mono_ns,
    pause,
    poll_wait,
    set_timer_slack_ns,
    sleep_until_ns,
    store32_at,
    store_at,
    thread_cpu_ns,
    thread_yield,
)
from trilane.jit import compiled

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@compiled
def on_array(words):
    atomic_store(words, 0, 5)
    added, exchanged = atomic_add(words, 0, 2), atomic_exchange(words, 0, 9)
    refused, taken = atomic_compare_exchange(words, 0, 8, 1), atomic_compare_exchange(words, 0, 9, 1)
    return added, exchanged, refused, taken, atomic_load(words, 0)


@compiled
def on_address(address):
    store_at(address, 5)
    added, exchanged = add_at(address, 2), exchange_at(address, 9)
    refused, taken = compare_exchange_at(address, 8, 1), compare_exchange_at(address, 9, 1)
    return added, exchanged, refused, taken, load_at(address)


@compiled
def on_half_word(address):
    store32_at(address, -3)
    return add32_at(address, 5), load32_at(address)


@compiled
def add_many(address, num_times):
    for _ in range(num_times):
        add_at(address, 1)
        fence()
        pause()
        thread_yield()


@compiled
def sleep_late_ns(duration_ns):
    set_timer_slack_ns(1)
    return sleep_until_ns(mono_ns() + duration_ns)


@compiled
def clocks():
    return mono_ns(), thread_cpu_ns()


@compiled
def spin_for(duration_ns):
    end = mono_ns() + duration_ns
    while mono_ns() < end:
        pause()


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_array_operations_return_what_was_before(dtype):
    words = np.zeros(4, dtype)
    assert on_array(words) == (5, 7, 9, 9, 1)
    assert words.tolist() == [1, 0, 0, 0]


def test_address_operations_return_what_was_before():
    words = np.full(3, 77, np.int64)
    assert on_address(words.ctypes.data + 8) == (5, 7, 9, 9, 1)
    assert words.tolist() == [77, 1, 77]


def test_half_words_leave_their_neighbour_alone():
    words = np.full(4, 77, np.int32)
    assert on_half_word(words.ctypes.data + 4) == (-3, 2)
    assert words.tolist() == [77, 2, 77, 77]


def test_no_addition_is_lost():
    words = np.zeros(1, np.int64)
    threads = [threading.Thread(target=add_many, args=(words.ctypes.data, 20_000)) for _ in range(3)]
    add_many(words.ctypes.data, 0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words[0] == 60_000


def test_the_clock_is_pythons():
    before, (now, _), after = time.monotonic_ns(), clocks(), time.monotonic_ns()
    assert before <= now <= after


def test_cpu_time_grows_while_spinning():
    before = clocks()[1]
    spin_for(2_000_000)
    assert clocks()[1] - before > 100_000


@pytest.mark.alone
def test_sleep_until_is_never_early_and_seldom_late():
    late_ns = sorted(sleep_late_ns(duration) for duration in (10_000, 100_000, 400_000, 1_000_000) * 10)
    assert late_ns[0] >= 0
    assert late_ns[len(late_ns) // 2] < 1_000_000  # a loaded machine; the benchmark states the real figure


def test_a_deadline_in_the_past_returns_at_once():
    assert sleep_late_ns(-1_000_000) >= 1_000_000


@pytest.mark.parametrize("wait", [futex_wait, poll_wait])
def test_wait_returns_at_once_if_the_word_differs(wait):
    words = np.array([5], np.int64)
    begin = time.monotonic()
    wait(words.ctypes.data, 4, -1)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("wait", [futex_wait, poll_wait])
@pytest.mark.parametrize("value", [0, 5, -1, 1 << 31, 7 << 32])
def test_wait_ends_by_its_timeout(wait, value):
    words = np.array([value], np.int64)
    begin = time.monotonic()
    wait(words.ctypes.data, value, 20_000_000)
    assert 0.015 < time.monotonic() - begin < 2


@pytest.mark.parametrize("wait", [futex_wait, poll_wait])
def test_wait_ends_by_a_wake(wait):
    words = np.zeros(1, np.int64)
    wait(words.ctypes.data, 1, 0)  # compile before the clock runs
    thread = threading.Thread(target=wait, args=(words.ctypes.data, 0, 20_000_000_000))
    thread.start()
    time.sleep(0.02)
    begin = time.monotonic()
    words[0] = 1
    futex_wake(words.ctypes.data, atomics.WAKE_ALL)
    thread.join()
    assert time.monotonic() - begin < 2


def test_wake_tells_how_many_slept():
    words = np.zeros(1, np.int64)
    assert futex_wake(words.ctypes.data, 1) == 0
    if not atomics.FUTEX_SYSCALL:
        return
    thread = threading.Thread(target=futex_wait, args=(words.ctypes.data, 0, -1))
    thread.start()
    deadline = time.monotonic() + 5
    while futex_wake(words.ctypes.data, 1) == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    thread.join(5)
    assert not thread.is_alive()
