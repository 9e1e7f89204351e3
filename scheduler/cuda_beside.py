"""A GPU's lanes beside each other: the CPU lane's steps while copies run, then while a kernel reads in place, too.

What runs beside the steps is put on streams ahead, enough for longer than is measured, with an event behind each part;
parts that are done by the end count. Lanes that are measured one by one are never added up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trilane.cuda_copies import CopyProbe
from trilane.cuda_runner import CudaRunner
from trilane.cuda_step_probe import StepProbe, planned_with
from trilane.gpu_kernels.driver import Driver
from trilane.gpu_kernels.gpu_link import GpuLink, LinkReader, while_busy
from trilane.gpu_kernels.pinned_reader import PieceReading, PinnedReader
from trilane.plan import make_options
from trilane.stats import Total

BESIDE_S = 0.03  # of steps beside other lanes
ROUNDS = 5  # of copies and steps alone and beside each other, of which the middle figures count
AHEAD = 2.0  # times as much work as the others do in that time alone
COPIES = 8  # of a part
MOST_PARTS = 400
READING = (4, 32, 2)  # pieces in flight, blocks of each, launches of a part
MOST_SLOWDOWN = 0.9


class PutAhead:
    """Parts of work on a stream, each with an event behind it.

    Parameters
    ----------
    put : callable
        Puts one part on the stream.
    part_us : float
        What a part takes alone; sets how many are put.
    """

    def __init__(self, driver: Driver, stream: int, put: Callable[[], None], part_us: float) -> None:
        self.driver, self._events = driver, []
        for _ in range(min(MOST_PARTS, max(2, int(1e6 * AHEAD * BESIDE_S / part_us)))):
            put()
            self._events.append(driver.make_event())
            driver.record_event(self._events[-1], stream)

    def done(self) -> int:
        """Parts that are done now."""
        low, high = 0, len(self._events)
        while low < high:  # they end in order
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.driver.event_done(self._events[middle]) else (low, middle)
        return low

    @property
    def over(self) -> bool:
        """Whether all of them are done."""
        return self.driver.event_done(self._events[-1])

    def close(self) -> None:
        """Wait, and give the events back."""
        while not self.over:
            time.sleep(1e-4)
        for event in self._events:
            self.driver.destroy_event(event)


class Together(NamedTuple):
    """The CPU lane's steps beside others.

    Attributes
    ----------
    cpu_gb_s : float
        Of the steps' time, in which the lane also waits for the GPU.
    busy : float
        The part of that time in which the lane worked.
    lost : float
        The part of its own rate that it lost while it worked.
    parts_s : list of float
        Parts a second of each of the others.
    """

    cpu_gb_s: float
    busy: float
    lost: float
    parts_s: list[float]


class Beside:
    """Steps of the CPU lane alone, and beside others.

    The lane's own time counts, from when a job is posted until the last worker is done: around it a step waits for the
    GPU and for the host, which takes no memory's rate away.

    Parameters
    ----------
    layers : sequence of int
        Of one kind.
    count : int
        Experts of a step, all missing.
    nbytes : int
        Of one expert.
    """

    def __init__(self, runner: CudaRunner, layers: Sequence[int], count: int, nbytes: int) -> None:
        self.runner, self.nbytes = runner, count * nbytes
        self.experts = runner.store.layers[layers[0]].num_experts
        self.probe = StepProbe(runner, layers, count)
        self.run_alone()

    def run_alone(self) -> None:
        """Measure the steps with the others idle, by which those beside others are judged from now on."""
        before = self._count()
        self.alone_us = self.probe.us(self.experts)
        self.alone_lane_us = self._lane_us(before)

    @property
    def alone_gb_s(self) -> float:
        """The rate of steps with the others idle."""
        return 1e-3 * self.nbytes / self.alone_us

    def _count(self) -> tuple[float, float]:
        """us of the lane, and steps that had misses, so far."""
        totals = self.runner.answered_totals()
        return float(totals[Total.CPU_US]), float(totals[Total.MISS_STEPS])

    def _lane_us(self, before: tuple[float, float]) -> float:
        """us of the lane in a step since then."""
        us, steps = (now - then for now, then in zip(self._count(), before, strict=True))
        return us / max(1.0, steps)

    def run(self, *others: PutAhead) -> Together:
        """Run steps beside the others for a while."""
        counted = self._count()
        steps, begin, before = 0, time.perf_counter(), [other.done() for other in others]
        while time.perf_counter() - begin < BESIDE_S or steps == 0:
            self.probe.route(self.experts)
            self.probe.graph.run()
            steps += len(self.probe.graph.steps)
            if any(other.over for other in others):
                break
        done = [other.done() - then for other, then in zip(others, before, strict=True)]
        seconds = time.perf_counter() - begin
        lane_us = self._lane_us(counted)
        lost, busy = _part(1 - self.alone_lane_us / lane_us), min(1.0, lane_us * steps / (1e6 * seconds))
        return Together(1e-9 * steps * self.nbytes / seconds, busy, lost, [count / seconds for count in done])

    def close(self) -> None:
        self.probe.close()


@contextlib.contextmanager
def _cpu_steps(runner: CudaRunner, layers: Sequence[int], count: int, nbytes: int) -> Iterator[Beside]:
    runner.reset()
    with planned_with(runner, make_options(force="cpu")):
        beside = Beside(runner, layers, count, nbytes)
        try:
            yield beside
        finally:
            beside.close()


def _copies_ahead(copies: CopyProbe, alone_gb_s: float) -> PutAhead:
    part_us = 1e-3 * COPIES * copies.most / alone_gb_s
    return PutAhead(copies.driver, copies.stream, lambda: copies.put(copies.most, COPIES), part_us)


def measure_beside(
    runner: CudaRunner, copies: CopyProbe, layers: Sequence[int], count: int, nbytes: int
) -> dict[str, Any]:
    """The CPU lane beside copies, as fields of the profile: what both read of host memory, and what each loses.

    Others on the machine who come in between alone and beside make a loss of their own, so both are measured in rounds.
    """
    if not copies.most:
        return {}
    rounds = list[dict[str, float]]()
    with _cpu_steps(runner, layers, count, nbytes) as steps:
        for _ in range(ROUNDS):
            if rounds:
                steps.run_alone()
            alone = copies.rate(copies.most)
            with contextlib.closing(_copies_ahead(copies, alone)) as ahead:
                found = steps.run(ahead)
            copied = 1e-9 * COPIES * copies.most * found.parts_s[0]
            # While the lane worked; else they ran alone.
            beside = max(0.0, copied - alone * (1 - found.busy)) / found.busy
            both, link = beside + found.cpu_gb_s / found.busy, _part(1 - beside / alone)
            rounds.append({"both_gb_s": both, "link_slowdown": link, "cpu_slowdown": found.lost})
    return {name: float(np.median([one[name] for one in rounds])) for name in rounds[0]}


def measure_together(
    runner: CudaRunner, copies: CopyProbe, reader: PinnedReader, layers: Sequence[int], count: int, nbytes: int
) -> dict[str, dict[str, float]]:
    """All that reads host memory, alone and at once: copies, reads in place, the CPU lane; fields of the profile."""
    alone = {"stream": copies.rate(copies.most)}
    with contextlib.closing(PieceReading(reader, *READING)) as reading:
        us = float(np.median([reading.run() for _ in range(7)][1:]))
        alone["zero_copy"] = 1e-3 * reading.nbytes / us
        with (
            _cpu_steps(runner, layers, count, nbytes) as steps,
            contextlib.closing(_copies_ahead(copies, alone["stream"])) as copying,
            contextlib.closing(PutAhead(runner.driver, reader.stream, reading.start, us)) as reads,
        ):
            alone["cpu"] = steps.alone_gb_s
            found = steps.run(copying, reads)
    copied, read = found.parts_s
    together = {
        "stream": 1e-9 * COPIES * copies.most * copied, "zero_copy": 1e-9 * reading.nbytes * read,
        "cpu": found.cpu_gb_s,
    }  # fmt: skip
    return {"alone_gb_s": alone, "together_gb_s": together}


def measure_link(runner: CudaRunner, copies: CopyProbe) -> GpuLink:
    """The link's state while copies run."""
    ahead = _copies_ahead(copies, copies.rate(copies.most))
    with contextlib.closing(ahead), LinkReader(runner.driver.pci_address()) as reader:
        return while_busy(reader, iter(lambda: not ahead.over, None))


def _part(value: float) -> float:
    return min(MOST_SLOWDOWN, max(0.0, value))
