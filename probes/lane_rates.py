"""How fast each lane computes experts: a line through what one and several experts take on the product's own lane.

The slope is the rate, what is left at no bytes is the cost of a hand-over to that lane. A quick look takes one job so
long that the hand-over does not matter: the difference of two times has the noise of both. A machine that does other
things too makes times longer and never shorter, and it does so for milliseconds to seconds: jobs of all lanes, formats
and team sizes take turns, so that the samples of each are spread over the time of a calibration, and the best one
counts. Experts of 2048 x 768.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from trilane.cpu_kernels.arena import Arena
from trilane.probes.lane_experts import Experts
from trilane.probes.lane_jobs import LaneRing, Lanes, Share, lanes_case
from trilane.probes.timing import time_cases

BATCH_ROWS = 16
BIG_NBYTES = 12 << 20  # of the larger job of a pair: well above the hand-over of any lane
THREAD_NBYTES = 6 << 20  # of a job that stands alone, for each of its threads
SAMPLE_US = 300.0
ONE_STEP_US = 50.0  # shorter than any job: each sample is one
FASTER_THAN_MEAN = 2.0  # a slope is at most so much better than the whole job: one bad sample gives no endless rate


@dataclass(frozen=True)
class LaneTimes:
    """One lane computing one and several experts.

    Attributes
    ----------
    lane, format : str
    num_threads : int
        Of the lane.
    num_rows : int
        Activation rows of each expert; with many of them arithmetic is the limit and bytes x rows count.
    nbytes : int
        Of an expert.
    num_experts : tuple of int
        Of the small and the large job, or of one that stands alone.
    us : tuple of float
        What they took.
    """

    lane: str
    format: str
    num_threads: int
    num_rows: int
    nbytes: int
    num_experts: tuple[int, ...]
    us: tuple[float, ...]

    @property
    def expert_us(self) -> float:
        """What one more expert takes."""
        if len(self.us) == 1:
            return self.us[0] / self.num_experts[0]
        (few, many), (short, long) = self.num_experts, self.us
        return max((long - short) / (many - few), long / many / FASTER_THAN_MEAN)

    @property
    def gb_s(self) -> float:
        """Expert bytes x rows, in 1e9 bytes a second."""
        return self.nbytes * self.num_rows / self.expert_us / 1e3

    @property
    def fix_us(self) -> float:
        """What a job takes beside its experts."""
        return max(0.0, self.us[0] - self.num_experts[0] * self.expert_us)

    def best(self, other: LaneTimes | None) -> LaneTimes:
        """The shorter times of two passes."""
        if other is None:
            return self
        return replace(self, us=tuple(map(min, self.us, other.us)))


class LaneJob(NamedTuple):
    """What is measured of a lane: "hit", "stream", "zero_copy" or "cpu", with its threads, experts and rows of each."""

    lane: str
    lanes: Lanes
    experts: Experts
    num_rows: int


class LaneBench:
    """Jobs that are timed in turns.

    Parameters
    ----------
    jobs : sequence of LaneJob
        Neighbours should have other experts, or one finds in a cache what the other has read.
    slots : Arena
        Where copies go.
    pairs : bool
        Whether each lane has a small and a large job, or one alone.
    """

    def __init__(self, jobs: Sequence[LaneJob], slots: Arena, pairs: bool = True) -> None:
        self.jobs = list(jobs)
        self._counts = [_pair(job) if pairs else _one(job) for job in self.jobs]
        rounds = zip(*self._counts, strict=True)  # all small jobs, then all large ones
        shares = [(job, n) for counts in rounds for job, n in zip(self.jobs, counts, strict=True)]
        self._cases = [lanes_case(_ring(job, n, slots)) for job, n in shares]

    def measure(self, num_samples: int) -> list[LaneTimes]:
        """One pass, with so many samples of each job; in the order of the jobs."""
        timings = time_cases(self._cases, num_samples=num_samples, sample_us=ONE_STEP_US)
        us = np.reshape([timing.best_us for timing in timings], (-1, len(self.jobs))).T.tolist()
        return [_lane_times(*found) for found in zip(self.jobs, self._counts, us, strict=True)]


def _pair(job: LaneJob) -> tuple[int, ...]:
    """Experts of a small and a large job."""
    return (1, max(2, BIG_NBYTES // job.experts.nbytes)) if job.num_rows == 1 else (1, 2)


def _one(job: LaneJob) -> tuple[int, ...]:
    """Experts of a job that stands alone; where arithmetic is the limit one is enough for each two threads."""
    wanted = THREAD_NBYTES // job.experts.nbytes if job.num_rows == 1 else 1
    return (max(2, min(job.experts.count, wanted * _num_threads(job))),)


def _num_threads(job: LaneJob) -> int:
    return job.lanes.num_threads if job.lane == "cpu" else 1


def _ring(job: LaneJob, count: int, slots: Arena) -> LaneRing:
    return LaneRing(job.lanes, job.experts, slots, Share(num_rows=job.num_rows, **{job.lane: count}))


def _lane_times(job: LaneJob, counts: tuple[int, ...], us: Sequence[float]) -> LaneTimes:
    experts = job.experts
    return LaneTimes(job.lane, experts.format, _num_threads(job), job.num_rows, experts.nbytes, counts, tuple(us))


def measure_in_place(
    lanes: Lanes, experts: Experts, slots: Arena, in_flight: Sequence[int], *, num_samples: int = 11
) -> list[float]:
    """us of reads in place with so many experts in flight, the hand-over included."""
    cases = [lanes_case(LaneRing(lanes, experts, slots, Share(zero_copy=n))) for n in in_flight]
    return [timing.median_us for timing in time_cases(cases, num_samples=num_samples, sample_us=SAMPLE_US)]
