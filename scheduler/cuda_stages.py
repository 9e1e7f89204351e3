"""The two stages of prefill: weights are copied to one while the GPU computes from the other.

A stage is copied to again when what was computed from it is done, and computed from when its copies have landed: the
streams wait for each other's events, and the host for neither. Weights that are not pinned go through pinned memory of
ours, which the host fills when it is free; no call to the driver waits. The file knows bytes, and no experts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable

from trilane.cuda_threads import WAIT_NAP_S
from trilane.gpu_kernels.driver import Driver
from trilane.gpu_kernels.pinning import Pinned
from trilane.gpu_kernels.prefill_memory import BOUNCE_NBYTES, LISTS, STAGES, PrefillMemory
from trilane.prefill_batches import Copy


class Stages:
    """Copies to stages in turn.

    Parameters
    ----------
    driver : Driver
    memory : PrefillMemory
    pinned : Pinned
        What of the arena is pinned.
    check : callable
        Raises if nothing will run any more; called while the host waits.
    """

    def __init__(self, driver: Driver, memory: PrefillMemory, pinned: Pinned, check: Callable[[], None]) -> None:
        self.driver, self.memory, self.pinned, self._check = driver, memory, pinned, check
        self._next = self._next_list = self._next_bounce = 0

    def take(self, count: int) -> list[int]:
        """The stages of the next ``count`` batches, in turn."""
        first, self._next = self._next, (self._next + count) % STAGES
        return [(first + k) % STAGES for k in range(count)]

    def fill(self, stage: int, copies: Iterable[Copy]) -> None:
        """Copy to a stage once what was computed from it is done."""
        driver, memory = self.driver, self.memory
        driver.wait_event(memory.stream, memory.freed[stage])
        for copy in copies:
            self._copy(*copy)
        driver.record_event(memory.copied[stage], memory.stream)

    def wait(self, stage: int, stream: int) -> None:
        """What comes on a stream from now on finds the stage's copies."""
        self.driver.wait_event(stream, self.memory.copied[stage])

    def free(self, stage: int, stream: int) -> None:
        """When a stream has done what is on it now, the stage may be filled again."""
        self.driver.record_event(self.memory.freed[stage], stream)

    def take_list(self) -> tuple[int, int]:
        """Address of a list of batches that no pass reads any more, and the event to record when one has read it."""
        self._next_list = (self._next_list + 1) % LISTS
        address, event = self.memory.lists[self._next_list]
        self._wait_host(event)
        return address, event

    def _wait_host(self, event: int) -> None:
        while not self.driver.event_done(event):
            self._check()
            time.sleep(WAIT_NAP_S)

    def _copy(self, source: int, destination: int, nbytes: int) -> None:
        """Pieces that lie in one registration, or go through pinned memory of ours."""
        pinned = self.pinned
        while nbytes > 0:
            left = pinned.end - source
            if left > 0:
                in_segment = pinned.segment_nbytes - (source - pinned.address) % pinned.segment_nbytes
                part = min(nbytes, left, in_segment)
                self.driver.to_device(destination, source, part, self.memory.stream)
            else:
                part = min(nbytes, BOUNCE_NBYTES)
                self._copy_pageable(destination, source, part)
            source, destination, nbytes = source + part, destination + part, nbytes - part

    def _copy_pageable(self, destination: int, source: int, nbytes: int) -> None:
        self._next_bounce = (self._next_bounce + 1) % len(self.memory.bounces)
        address, event = self.memory.bounces[self._next_bounce]
        self._wait_host(event)
        ctypes.memmove(address, source, nbytes)
        self.driver.to_device(destination, address, nbytes, self.memory.stream)
        self.driver.record_event(event, self.memory.stream)
