"""Tasks that involve every worker of a team: one call on each of them, and memory touched by all in turn."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from trilane.cpu_kernels.atomics import add_at, compare_exchange_at, load_at
from trilane.cpu_kernels.float_env import TASK_SIGNATURE, call_task
from trilane.cpu_kernels.parking import wait_word
from trilane.jit import compiled, native

PAGE_NBYTES = 4096
TOUCH_ROUND_NBYTES = 256 << 20  # what a worker touches at a time: no stall, and Ctrl-C gets through


@compiled
def _run_on_worker(block, worker):
    """Block: arrivals, workers, function, its argument, abort address.

    A worker that waits here for the others cannot take a second task, so each of them takes exactly one.
    """
    add_at(block, 1)
    code = wait_word(block, load_at(block + 8), load_at(block + 32))
    if code != 0:
        return code
    return call_task(load_at(block + 16), load_at(block + 24), worker, worker)


@compiled
def _touch_stripes(block, worker):
    """Block: address, bytes, bytes of a stripe, workers.

    A page that is not present reads as zero, so "if 0, write 0" makes it present and changes nothing. (The
    compiler turns "add 0" into a load, which would only map the system's page of zeros.)
    """
    address, nbytes, stripe, num_workers = (
        load_at(block), load_at(block + 8), load_at(block + 16), load_at(block + 24)
    )  # fmt: skip
    last = address + nbytes - 8
    first_page = address - address % PAGE_NBYTES
    for begin in range(first_page + worker * stripe, address + nbytes, num_workers * stripe):
        for page in range(begin, begin + stripe, PAGE_NBYTES):
            word = max(page, address)
            if word <= last:
                compare_exchange_at(word, 0, 0)
    return 0


@functools.cache
def each_worker_task() -> Any:
    """The task behind ``WorkerTeam.run_on_each``."""

    @native(TASK_SIGNATURE)
    def each_worker(block, task, worker):
        return _run_on_worker(block, worker)

    return each_worker


@functools.cache
def first_touch_task() -> Any:
    """The task behind ``WorkerTeam.first_touch``."""

    @native(TASK_SIGNATURE)
    def first_touch(block, task, worker):
        return _touch_stripes(block, worker)

    return first_touch


def touch_blocks(address: int, nbytes: int, stripe_nbytes: int, num_workers: int) -> Iterator[np.ndarray]:
    """Blocks for :func:`first_touch_task`, one for each round over all workers; bad sizes are refused."""
    if address <= 0 or address % 8 or nbytes < 0 or stripe_nbytes <= 0 or stripe_nbytes % PAGE_NBYTES:
        raise ValueError(
            f"{nbytes} bytes at address {address:#x} in stripes of {stripe_nbytes}: the address must be a "
            f"multiple of 8, the stripe one of {PAGE_NBYTES}, and the size not negative"
        )
    round_nbytes = num_workers * stripe_nbytes * max(1, TOUCH_ROUND_NBYTES // stripe_nbytes)
    for begin in range(0, nbytes, round_nbytes):
        part = min(round_nbytes, nbytes - begin)
        yield np.array([address + begin, part, stripe_nbytes, num_workers], np.int64)
