"""What the lanes cost each other: each alone, then all together, in the same rounds.

Every lane gets as many experts as it computes in about the same time alone. Rates measured one by one are never
added up: threads that fill the memory's queues take bandwidth from a lane of one thread. Where lanes have to share
cores, what they lose is the cores', which the cost model counts by itself, and memory cannot be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trilane.cpu_kernels.arena import Arena
from trilane.probes.lane_experts import Experts
from trilane.probes.lane_jobs import LaneRing, Lanes, Share, lanes_case
from trilane.probes.timing import time_cases

LEAST_SLOWDOWN = 0.05  # less than this is no contention but the spread of the samples
MOST_SLOWDOWN = 0.95
SAMPLE_US = 2000.0


@dataclass(frozen=True)
class Contention:
    """Lanes alone and together; the mappings are by lane: hit, zero_copy, cpu.

    Attributes
    ----------
    nbytes : mapping to int
        Expert bytes of each lane in one step.
    alone_us, together_us : mapping to float
        What each lane took by its own clock, the others idle and all running.
    """

    nbytes: Mapping[str, int]
    alone_us: Mapping[str, float]
    together_us: Mapping[str, float]

    @property
    def alone_gb_s(self) -> dict[str, float]:
        """Each lane's rate with the others idle."""
        return {lane: nbytes / self.alone_us[lane] / 1e3 for lane, nbytes in self.nbytes.items()}

    @property
    def together_gb_s(self) -> dict[str, float]:
        """Each lane's rate with all running."""
        return {lane: nbytes / self.together_us[lane] / 1e3 for lane, nbytes in self.nbytes.items()}

    def slowdown(self, lane: str) -> float:
        """The part of its rate that a lane loses while the CPU lane runs; 0 where it is within the spread."""
        alone, together, cpu = self.alone_us[lane], self.together_us[lane], self.together_us["cpu"]
        lost = 1 - alone / together if together <= cpu else (together - alone) / cpu
        return 0.0 if lost < LEAST_SLOWDOWN else min(lost, MOST_SLOWDOWN)

    def joint_gb_s(self) -> float | None:
        """Memory's limit with all lanes running; None where even the CPU lane, the fastest, lost nothing."""
        lost = 1 - self.alone_us["cpu"] / self.together_us["cpu"]
        return None if lost < LEAST_SLOWDOWN else sum(self.together_gb_s.values())

    def best(self, other: Contention | None) -> Contention:
        """The shorter times of two passes over the same shares."""
        if other is None or other.nbytes != self.nbytes:
            return self
        alone, together = (
            {lane: min(us, theirs[lane]) for lane, us in mine.items()}
            for mine, theirs in ((self.alone_us, other.alone_us), (self.together_us, other.together_us))
        )
        return Contention(self.nbytes, alone, together)


def even_share(gb_s: Mapping[str, float], num_experts: int) -> Share:
    """About ``num_experts`` experts over lanes, so that each would take equally long alone; one at least."""
    whole = sum(gb_s.values())
    return Share(**{lane: max(1, round(num_experts * rate / whole)) for lane, rate in gb_s.items()})


def measure_contention(
    lanes: Lanes, experts: Experts, slots: Arena, share: Share, *, num_samples: int = 11
) -> Contention:
    """Time ``share`` with all its lanes at once, and each lane's part of it alone."""
    counts = {lane: n for lane in ("hit", "zero_copy", "cpu") if (n := getattr(share, lane))}
    shares = [*(Share(**{lane: n}) for lane, n in counts.items()), Share(**counts)]
    rings = [LaneRing(lanes, experts, slots, part) for part in shares]
    time_cases([lanes_case(ring) for ring in rings], num_samples=num_samples, sample_us=SAMPLE_US)
    *alone, together = (ring.lane_us() for ring in rings)
    nbytes = {lane: n * experts.nbytes for lane, n in counts.items()}
    return Contention(nbytes, {lane: us for times in alone for lane, us in times.items()}, together)
