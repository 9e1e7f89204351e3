"""How fast host memory gives experts to the CPU lane and to the link: each alone, then both at once.

Method: the product's team computes experts out of memory larger than the caches while the copy engine fetches other
experts of the same pinned memory; the link is never idle from before the first until after the last sample.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import NamedTuple

PIECE_NBYTES = 4 << 20
QUEUED = 8  # copies of a batch; two batches are under way
SLOTS_NBYTES = 64 << 20
NAP_S = 50e-6


class JointRate(NamedTuple):
    """GB/s of the CPU lane and of the link, alone and together."""

    cpu_alone: float
    link_alone: float
    cpu_together: float
    link_together: float

    @property
    def both(self):
        """GB/s of the two at once."""
        return self.cpu_together + self.link_together


class _Link(threading.Thread):
    """Copies from an arena to a GPU without a pause, and counts them; two streams take turns."""

    def __init__(self, driver, arena, target):
        super().__init__(daemon=True)
        self.driver, self.arena, self.target = driver, arena, target
        self.streams, self.copied, self.stop, self.at = [driver.make_stream(), driver.make_stream()], 0, False, 0

    def run(self):
        self.driver.make_current()
        self._put(self.streams[0])
        turn = 0
        while not self.stop:
            self._put(self.streams[1 - turn])
            self._finish(self.streams[turn])
            turn = 1 - turn
        self._finish(self.streams[turn])

    def _put(self, stream):
        for _ in range(QUEUED):
            self.at = (self.at + 7 * PIECE_NBYTES) % (self.arena.nbytes - PIECE_NBYTES) // 4096 * 4096
            place = self.target + self.at % (SLOTS_NBYTES - PIECE_NBYTES)
            self.driver.to_device(place, self.arena.address + self.at, PIECE_NBYTES, stream)

    def _finish(self, stream):
        while not self.driver.finished(stream):
            time.sleep(NAP_S)
        self.copied += QUEUED * PIECE_NBYTES


@contextlib.contextmanager
def _copying(driver, arena, target):
    link = _Link(driver, arena, target)
    link.start()
    try:
        yield link
    finally:
        link.stop = True
        link.join()
        for stream in link.streams:
            driver.destroy_stream(stream)


def measure_joint_rate(driver, num_threads, format_name="q4_k", seconds=0.4, most_nbytes=None):
    """Rates of ``num_threads`` of the CPU lane and of the link, see :class:`JointRate`."""
    from trilane.cpu_kernels.arena import allocate_arena
    from trilane.cpu_kernels.cpus import read_cpu_budget
    from trilane.probes.host_memory import probe_arena
    from trilane.probes.lane_experts import Experts, make_expert
    from trilane.probes.lane_jobs import LaneRing, Share, lanes_case, open_lanes
    from trilane.probes.timing import time_cases

    experts = Experts(make_expert(format_name), probe_arena(most_nbytes=most_nbytes))
    arena = experts.arena
    problem = driver.register(arena.address, arena.nbytes)
    if problem:
        raise RuntimeError(f"{arena.nbytes} bytes cannot be pinned: {problem}")
    target = driver.allocate(SLOTS_NBYTES)
    try:
        with open_lanes(num_threads, read_cpu_budget()) as lanes:
            ring = LaneRing(lanes, experts, allocate_arena(1 << 20), Share(cpu=8))
            samples = max(3, int(seconds / 2e-3))

            def cpu_gb_s():
                return time_cases([lanes_case(ring)], num_samples=samples, sample_us=2000.0)[0].gb_s

            alone = cpu_gb_s()
            with _copying(driver, arena, target) as link:
                link_alone = _rate_while(link, lambda: time.sleep(seconds))[1]
                together, link_together = _rate_while(link, cpu_gb_s)
        return JointRate(alone, link_alone, together, link_together)
    finally:
        driver.free(target)
        driver.unregister(arena.address)


def _rate_while(link, work):
    """The result of ``work`` and the link's GB/s during it."""
    copied, begin = link.copied, time.perf_counter()
    while link.copied == copied:  # from the end of one batch of copies ...
        time.sleep(NAP_S)
    copied, begin = link.copied, time.perf_counter()
    found = work()
    now = link.copied
    while link.copied == now:  # ... to the end of another
        time.sleep(NAP_S)
    return found, (link.copied - copied) / (time.perf_counter() - begin) / 1e9
