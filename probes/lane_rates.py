"""How fast each lane computes experts: a line through what one and several experts take on the product's own lane.

The slope is the rate, what is left at no bytes is the cost of a hand-over to that lane. A machine that does other
things too makes times longer and never shorter, so passes are spread over the time of a calibration and the best
of each counts. Experts of 2048 x 768.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trilane.cpu_kernels.arena import Arena
from trilane.probes.lane_experts import Experts
from trilane.probes.lane_jobs import LaneRing, Lanes, Share, lanes_case
from trilane.probes.timing import time_cases

BATCH_ROWS = 16
BIG_NBYTES = 12 << 20  # of the larger job of a pair: well above the hand-over of any lane
SAMPLE_US = 300.0
FEW_SAMPLES = 8  # of fewer than so many the lower quartile counts: one or two held-up ones move the median
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
        Of the two jobs.
    us : tuple of float
        What they took.
    """

    lane: str
    format: str
    num_threads: int
    num_rows: int
    nbytes: int
    num_experts: tuple[int, int]
    us: tuple[float, float]

    @property
    def expert_us(self) -> float:
        """What one more expert takes."""
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
        return replace(self, us=(min(self.us[0], other.us[0]), min(self.us[1], other.us[1])))


def measure_lane(
    lane: str, lanes: Lanes, experts: Experts, slots: Arena, *, num_rows: int = 1, num_samples: int = 11
) -> LaneTimes:
    """One pass of one lane alone ("hit", "stream", "zero_copy" or "cpu"); ``slots`` is where copies go."""
    counts = (1, max(2, BIG_NBYTES // experts.nbytes)) if num_rows == 1 else (1, 2)
    cases = [lanes_case(LaneRing(lanes, experts, slots, Share(num_rows=num_rows, **{lane: count}))) for count in counts]
    few, many = time_cases(cases, num_samples=num_samples, sample_us=SAMPLE_US)
    threads = lanes.num_threads if lane == "cpu" else 1
    us = (few.low_us, many.low_us) if num_samples < FEW_SAMPLES else (few.median_us, many.median_us)
    return LaneTimes(lane, experts.format, threads, num_rows, experts.nbytes, counts, us)


def measure_in_place(
    lanes: Lanes, experts: Experts, slots: Arena, in_flight: Sequence[int], *, num_samples: int = 11
) -> list[float]:
    """us of reads in place with so many experts in flight, the hand-over included."""
    cases = [lanes_case(LaneRing(lanes, experts, slots, Share(zero_copy=n))) for n in in_flight]
    return [timing.median_us for timing in time_cases(cases, num_samples=num_samples, sample_us=SAMPLE_US)]
