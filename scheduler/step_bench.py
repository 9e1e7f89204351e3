"""Measure whole layer-steps by residency and misses, and hold them against the cost model and the limit.

Every step is a real one through the scheduler: ``top_k`` experts of which a chosen number are absent. What the
model predicts before the step is compared with what the step took; the limit is what the missed bytes take at
the rates of link and CPU together. Configurations and numbers of misses take turns, so that all see the same
conditions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trilane.config import Config
from trilane.cost import Rates
from trilane.engine import ExpertScheduler
from trilane.profile import MachineProfile
from trilane.random_store import SEED, StepShape, random_store
from trilane.store import ExpertStore

__all__ = [
    "StepRow",
    "StepShape",
    "all_errors",
    "errors_of_medians",
    "limit_us",
    "measure_steps",
    "played_rates",
    "random_store",
]

# Of what one core computes: the rates of lanes that are played, so that all of them fit on two cores together.
HIT_PART, CPU_PART, LINK_PARTS = 0.3, 0.1, (0.05, 0.1, 0.2)
ZERO_COPY_PART = 0.9  # of a link: reads in place do a little worse than copies
LINK_FIX_US = 10.0


@dataclass(frozen=True)
class StepRow:
    """Steps with one number of misses under one configuration.

    Attributes
    ----------
    hits, misses : int
        Experts.
    predicted_us, measured_us, p90_us : float
        Medians over the steps, and the measured 90th percentile.
    error, p90_error : float
        Median and 90th percentile of ``|predicted - measured| / measured``, step by step.
    limit_us : float
        What the bytes take at the profile's rates: hits on the device, misses over link and CPU together.
    lanes : dict
        Mean shards of each lane.
    played : dict
        Lane -> rate in GB/s that is played.
    median_error : float
        ``|predicted - measured| / measured`` of the medians: how far off the model is, single steps aside.
    errors : tuple of float
        The errors of all steps, in order.
    """

    hits: int
    misses: int
    predicted_us: float
    measured_us: float
    p90_us: float
    error: float
    p90_error: float
    limit_us: float
    lanes: dict[str, float]
    played: dict[str, float]
    median_error: float
    errors: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON, without the single errors; what was not measured is None."""
        values = {name: value for name, value in asdict(self).items() if name != "errors"}
        return {name: None if value != value else value for name, value in values.items()}


def played_rates(profile: MachineProfile, format_name: str) -> list[dict[str, float]]:
    """Rates to play for three links, each well below what one core of this machine reaches.

    A lane that plays a rate near its own has no time left to sleep, and shows the machine and not the model.
    """
    core = profile.device_experts[format_name]
    fixed = {"hit_gb_s": HIT_PART * core, "cpu_gb_s": CPU_PART * core, "link_fix_us": LINK_FIX_US}
    links = [part * core for part in LINK_PARTS]
    return [{"link_gb_s": link, "zero_copy_gb_s": ZERO_COPY_PART * link, **fixed} for link in links]


def measure_steps(
    store: ExpertStore,
    shape: StepShape,
    configs: Sequence[Config],
    *,
    misses: Sequence[int],
    repeats: int = 15,
    profile: MachineProfile | None = None,
) -> Iterator[StepRow]:
    """Steps under each configuration with each number of misses, taking turns; rows in that order."""
    with ExitStack() as stack:
        benches = [
            _StepBench(stack.enter_context(ExpertScheduler(store, profile=profile, config=config)), shape)
            for config in configs
        ]
        for _ in range(repeats + 1):
            for count in misses:
                for bench in benches:
                    bench.step(count)
        for bench in benches:
            for count in misses:
                yield bench.row(count)


class _StepBench:
    def __init__(self, scheduler: ExpertScheduler, shape: StepShape) -> None:
        self.scheduler, self.shape = scheduler, shape
        self.rng = np.random.default_rng(SEED)
        self.hidden = self.rng.standard_normal((1, shape.hidden)).astype(np.float32)
        self.out = np.empty_like(self.hidden)
        self.weights = np.full((1, shape.top_k), 1 / shape.top_k, np.float32)
        self.samples: dict[int, list[tuple[float, float, np.ndarray]]] = {}
        runner = scheduler._runner
        runner.use_options(runner.options._replace(background=False))  # what is resident is decided here
        self._fill()

    def _fill(self) -> None:
        """Make half of the experts resident, or as many as there are slots for."""
        state = self.scheduler._runner.state
        experts = min(self.shape.num_experts // 2, len(state.owner) // self._num_shards)
        self.scheduler.hint(0, range(experts))
        self.scheduler._runner.settle_fills(let_end=True)

    @property
    def _num_shards(self) -> int:
        return int(self.scheduler._runner.geometry.num_shards[0])

    def _choose(self, misses: int) -> np.ndarray | None:
        """Experts of which so many are wholly absent and the others wholly resident; None if there are none."""
        slots = self.scheduler._runner.state.slot_of.reshape(-1, self._num_shards)
        here, absent = np.flatnonzero((slots >= 0).all(1)), np.flatnonzero((slots < 0).all(1))
        hits = self.shape.top_k - misses
        if len(here) < hits or len(absent) < misses:
            return None
        return np.concatenate([self.rng.choice(here, hits, False), self.rng.choice(absent, misses, False)])

    def step(self, misses: int) -> None:
        experts = self._choose(misses)
        if experts is None:
            self.samples.setdefault(misses, [])
            return
        self.scheduler.forward(0, self.hidden, experts[None], self.weights, out=self.out)
        explanation = self.scheduler.explain(0)
        assert explanation is not None
        predicted = dict(explanation.plan.predicted_us)["step"]
        observed = dict(explanation.outcome.observed_us)["step"]
        lanes = np.array([lane for expert in explanation.plan.experts for lane in expert.lanes])
        counts = np.bincount(lanes[lanes >= 0], minlength=4)
        self.samples.setdefault(misses, []).append((predicted, observed or np.nan, counts))

    def row(self, misses: int) -> StepRow:
        samples = self.samples[misses][1:]
        if not samples:
            nan = float("nan")
            played = dict(self.scheduler.stats().played)
            hits = self.shape.top_k - misses
            return StepRow(hits, misses, nan, nan, nan, nan, nan, nan, {}, played, nan, ())
        predicted, observed = (np.array([s[k] for s in samples]) for k in (0, 1))
        errors = np.abs(predicted - observed) / observed
        counts = np.mean([s[2] for s in samples], axis=0)
        return StepRow(
            hits=self.shape.top_k - misses,
            misses=misses,
            predicted_us=float(np.median(predicted)),
            measured_us=float(np.median(observed)),
            p90_us=float(np.quantile(observed, 0.9)),
            error=float(np.median(errors)),
            p90_error=float(np.quantile(errors, 0.9)),
            limit_us=self._limit_us(misses),
            lanes=dict(zip(("hit", "stream", "zero_copy", "cpu"), counts.tolist(), strict=True)),
            played=dict(self.scheduler.stats().played),
            median_error=float(abs(np.median(predicted) - np.median(observed)) / np.median(observed)),
            errors=tuple(errors.tolist()),
        )

    def _limit_us(self, misses: int) -> float:
        runner = self.scheduler._runner
        nbytes = int(runner.store.layers[0].layout.shard_nbytes.sum())
        return limit_us(runner.rates[0], (self.shape.top_k - misses) * nbytes, misses * nbytes)


def limit_us(rates: Rates, hit_nbytes: int, missed_nbytes: int) -> float:
    """What the bytes of a step take at the rates alone: no fixed cost, no uneven split.

    Hits on the device, misses over link and CPU together; where lanes share cores, not less than the core time
    of the cheapest way.
    """
    hit = hit_nbytes * rates.hit_us_per_byte
    link = min(rates.stream_us_per_byte, float(rates.zero_copy_us_per_byte[-1]))
    together = 1 / (1 / link + 1 / rates.cpu_us_per_byte)
    longest = max(hit, missed_nbytes * max(together, rates.both_us_per_byte))
    if rates.num_cores == 0:
        return longest
    cheapest = min(link * rates.link_cores, rates.cpu_us_per_byte * rates.cpu_cores)
    return max(longest, (hit * rates.hit_cores + missed_nbytes * cheapest) / rates.num_cores)


def all_errors(rows: Sequence[Any]) -> tuple[float, float]:
    """Median and 90th percentile of the ``errors``, of single steps, of all rows; NaN without any."""
    errors = np.array([error for row in rows for error in row.errors])
    if not len(errors):
        return float("nan"), float("nan")
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


def errors_of_medians(rows: Sequence[StepRow]) -> tuple[float, float]:
    """Median and 90th percentile, over the kinds of steps, of how far off the prediction is from the median step."""
    errors = [row.median_error for row in rows if row.errors]
    return float(np.median(errors)), float(np.quantile(errors, 0.9))
