"""What the lanes cost each other: each alone, then all together, in the same rounds.

Every lane gets as many experts as it computes in about the same time alone. Where all of them together take longer
than the slowest alone, they held each other up: by sharing cores, which the cost model knows, or by sharing the
host's memory, whose joint limit is what is wanted here. Rates measured one by one are never added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trilane.cpu_kernels.arena import Arena
from trilane.probes.lane_jobs import Experts, Lanes, Share, lanes_case
from trilane.probes.timing import time_cases

LEAST_SLOWDOWN = 1.05  # less than this is no contention but the spread of the samples
SAMPLE_US = 2000.0


@dataclass(frozen=True)
class Contention:
    """Lanes alone and together.

    Attributes
    ----------
    nbytes : mapping of lane to int
        Expert bytes of each lane in one step.
    alone_us : mapping of lane to float
    together_us : float
    """

    nbytes: Mapping[str, int]
    alone_us: Mapping[str, float]
    together_us: float

    @property
    def alone_gb_s(self) -> dict[str, float]:
        """Each lane's rate with the others idle."""
        return {lane: self.nbytes[lane] / self.alone_us[lane] / 1e3 for lane in self.nbytes}

    @property
    def together_gb_s(self) -> dict[str, float]:
        """Each lane's part of the rate of all."""
        return {lane: nbytes / self.together_us / 1e3 for lane, nbytes in self.nbytes.items()}

    def joint_gb_s(self, num_cores: float, lane_cores: Mapping[str, float]) -> float | None:
        """Memory's limit with all lanes running; None where it was not the limit.

        ``num_cores`` are shared by lanes that keep ``lane_cores`` busy each; 0: they share none.
        """
        busy_us = sum(us * lane_cores.get(lane, 0.0) for lane, us in self.alone_us.items())
        shared_us = busy_us / num_cores if num_cores else 0.0
        expected_us = max(*self.alone_us.values(), shared_us)
        if self.together_us < LEAST_SLOWDOWN * expected_us:
            return None
        return sum(self.nbytes.values()) / self.together_us / 1e3

    def best(self, other: Contention | None) -> Contention:
        """The shorter times of two passes over the same shares."""
        if other is None or other.nbytes != self.nbytes:
            return self
        alone = {lane: min(us, other.alone_us[lane]) for lane, us in self.alone_us.items()}
        return Contention(self.nbytes, alone, min(self.together_us, other.together_us))


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
    cases = [lanes_case(str(part), lanes, experts, slots, part) for part in shares]
    *alone, together = (timing.median_us for timing in time_cases(cases, num_samples=num_samples, sample_us=SAMPLE_US))
    nbytes = {lane: n * experts.nbytes for lane, n in counts.items()}
    return Contention(nbytes, dict(zip(counts, alone, strict=True)), together)
