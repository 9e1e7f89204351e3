"""Measure layer-steps on a GPU by slots and misses, and lanes one by one: predicted, measured, and the limit.

All layers of a store are one CUDA graph; every one of its steps has the same number of hits and of misses, each time of
other experts. A step's time is the GPU's time of the graph over its layers. What a step with misses was predicted
to take is what its plan says; one without is not planned, and gets the cost model's figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.config import Config
from trilane.cost import STEP_US, Loads, step_us
from trilane.cpu_kernels.cpus import read_cpu_budget, suggest_num_threads, suggest_spin_us
from trilane.engine import ExpertScheduler
from trilane.expert import LANE_NAMES
from trilane.plan import make_options
from trilane.profile import MachineProfile
from trilane.random_store import SEED, StepShape
from trilane.step_bench import limit_us
from trilane.store import ExpertStore
from trilane.token_graphs import TokenGraphs

SETTLING = 12  # tokens that may be needed until enough experts are wholly resident and wholly absent
PAUSE_US = 20e3  # more than choosing a token's experts takes
AT_ONCE = 8  # experts of such a token, at least
MISSED = LANE_NAMES[1:]


def awake() -> dict[str, float]:
    """Options of section cpu by which workers spin through the pauses between two tokens that measuring makes.

    An engine's tokens follow each other at once. Nothing where processors are too few to spin at all.
    """
    budget = read_cpu_budget()
    threads, _ = suggest_num_threads(budget)
    return {"spin_us": PAUSE_US} if suggest_spin_us(budget, threads) else {}


class StepSample(NamedTuple):
    """One token: us of a layer-step, measured and predicted, and the mean shards of a step by lane."""

    us: float
    predicted_us: float
    shards: dict[str, float]


@dataclass(frozen=True)
class CudaStepRow:
    """Steps with one number of misses at one number of slots.

    Attributes
    ----------
    slots : float
        Part of all experts that have slots.
    hits, misses : int
        Experts.
    p50_us, p90_us, p99_us : float
        Measured; NaN where there are not as many experts resident or absent.
    predicted_us : float
        Median.
    limit_us : float
        What the bytes take at the profile's rates alone: hits on the GPU, misses over link and CPU lane together.
    error, p90_error : float
        Median and 90th percentile of ``|predicted - measured| / measured`` over the tokens.
    lanes : dict
        Mean shards of each lane.
    errors : tuple of float
        The errors of all tokens.
    """

    slots: float
    hits: int
    misses: int
    p50_us: float
    p90_us: float
    p99_us: float
    predicted_us: float
    limit_us: float
    error: float
    p90_error: float
    lanes: dict[str, float]
    errors: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON, without the single errors; what was not measured is None."""
        values = {name: value for name, value in asdict(self).items() if name != "errors"}
        return {name: None if value != value else value for name, value in values.items()}


class LayerSteps:
    """Tokens of which every layer-step has a chosen number of hits and misses.

    Parameters
    ----------
    scheduler : ExpertScheduler
        On a GPU, its slots in one pool a layer, so that no layer takes another's.
    """

    def __init__(self, scheduler: ExpertScheduler) -> None:
        self.scheduler, self.runner, self.store = scheduler, scheduler._runner, scheduler.store
        self.own_options = self.runner.options._replace(background=False)  # what is resident is decided here
        self.runner.use_options(self.own_options)
        self.rng = np.random.default_rng(SEED)
        self.x = self.rng.standard_normal(self.store.hidden).astype(np.float32)
        self._graphs: dict[int, TokenGraphs] = {}

    def force(self, lane: str | None) -> None:
        """Send misses to one lane from now on; None: what the configuration says."""
        options = self.own_options if lane is None else make_options(force=lane, admit="always")
        self.runner.use_options(options)

    def graphs(self, top_k: int) -> TokenGraphs:
        """The graphs for so many experts a step."""
        if top_k not in self._graphs:
            self._graphs[top_k] = TokenGraphs(self.scheduler, top_k, self.x, ahead=1)
        return self._graphs[top_k]

    def resident(self) -> list[NDArray[np.bool_]]:
        """For each layer, bool (experts, shards): what is in slots, once the last step is counted."""
        first, shards = self.runner.geometry.first_shard, self.runner.geometry.num_shards
        with self.runner.threads.holding():
            here = np.asarray(self.runner.state.slot_of >= 0)
        return [here[a:b].reshape(-1, n).copy() for a, b, n in zip(first[:-1], first[1:], shards, strict=True)]

    def choose(self, hits: int, misses: int) -> NDArray[np.int32] | None:
        """Ids (layers, hits + misses) of experts that are wholly resident and wholly absent.

        None: too few are, or so few of the slots are taken that the hits would always be the same.
        """
        rows = []
        for here in self.resident():
            whole, absent = np.flatnonzero(here.all(1)), np.flatnonzero(~here.any(1))
            wanted = max(hits, self.room // 2) if hits else 0
            if len(whole) < wanted or len(absent) < misses:
                return None
            rows.append(np.concatenate([self.rng.choice(whole, hits, False), self.rng.choice(absent, misses, False)]))
        return np.array(rows, np.int32)

    def _settle(self, top_k: int) -> None:
        """One token that makes its experts wholly resident: first those of which a part is, then absent ones."""
        rows = []
        for here in self.resident():
            rank = np.where(here.all(1), 2, np.where(here.any(1), 0, 1)) + self.rng.random(len(here))
            rows.append(np.argsort(rank)[:top_k])
        before = self.runner.options
        self.force("zero_copy")
        self.graphs(top_k).run(np.array([rows], np.int32))
        with self.runner.threads.holding():
            pass
        self.runner.use_options(before)

    @property
    def room(self) -> int:
        """Experts of a layer that its slots hold."""
        layer = self.store.layers[0]
        return min(layer.num_experts, self.runner.num_slots // len(self.store.layers) // layer.layout.num_shards)

    def prepare(self, hits: int, misses: int) -> NDArray[np.int32] | None:
        """Ids for a token; experts are moved to slots until there are enough. None: there never will be."""
        experts = self.store.layers[0].num_experts
        if hits > self.room or hits + misses > experts or (misses > experts - self.room and self.room == experts):
            return None
        for _ in range(SETTLING):
            ids = self.choose(hits, misses)
            if ids is not None:
                return ids
            self._settle(max(1, min(self.room, max(hits + misses, AT_ONCE))))
        return None

    def sample(self, hits: int, misses: int) -> StepSample | None:
        """One token; None where so many hits or misses cannot be."""
        ids = self.prepare(hits, misses)
        if ids is None:
            return None
        with self.scheduler.request() as request:
            us = float(self.graphs(hits + misses).run(ids[None]).us[0]) / len(ids)
            with self.runner.threads.holding():
                predicted = self._predicted_us(hits, misses)
        shards = {name: lane.shards / len(ids) for name, lane in request.stats.lanes.items()}
        wanted = misses * self.store.layers[0].layout.num_shards
        found = sum(shards[name] for name in MISSED)
        assert abs(found - wanted) < 1e-6, f"{found} shards missed in a step, and not {wanted}"
        return StepSample(us, predicted, shards)

    def _predicted_us(self, hits: int, misses: int) -> float:
        if misses:
            return float(self.runner.journal.predicted_us[: len(self.store.layers), STEP_US].mean())
        nbytes = float(hits * self.expert_nbytes)
        loads = Loads(nbytes, nbytes, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0, 0.0)
        return float(step_us(self.runner.rates[0], loads))

    @property
    def expert_nbytes(self) -> int:
        """Bytes of an expert of the first layer."""
        return int(self.store.layers[0].layout.shard_nbytes.sum())

    def median_us(self, hits: int, misses: int, lane: str | None = None, tokens: int = 20) -> float:
        """Median us of a layer-step, misses on one lane or as configured; NaN where it cannot be."""
        self.force(lane)
        samples = [self.sample(hits, misses) for _ in range(tokens + 2)][2:]
        found = [sample.us for sample in samples if sample is not None]
        return float(np.median(found)) if found else float("nan")

    def close(self) -> None:
        """Give the graphs back."""
        for graphs in self._graphs.values():
            graphs.close()
        self._graphs = {}


def measure_cuda_steps(
    store: ExpertStore,
    shape: StepShape,
    slots: Sequence[float],
    *,
    misses: Sequence[int],
    repeats: int = 40,
    profile: MachineProfile | None = None,
) -> Iterator[CudaStepRow]:
    """Steps at each part of slots with each number of misses, which take turns; rows in that order.

    Parameters
    ----------
    slots : sequence of float
        Parts of all experts that have slots, 0 to 1.
    repeats : int
        Tokens of each kind; two more come first and do not count.
    profile : MachineProfile, optional
        None: the GPU's lanes are measured once.
    """
    for part in slots:
        config = Config(cache={"fraction": part, "pool": "layer"}, cpu=awake())
        with ExpertScheduler(store, profile=profile, config=config, device="cuda") as scheduler:
            profile, steps = scheduler.profile, LayerSteps(scheduler)
            try:
                samples: dict[int, list[StepSample | None]] = {count: [] for count in misses}
                for _ in range(repeats + 2):
                    for count in misses:
                        samples[count].append(steps.sample(shape.top_k - count, count))
                for count in misses:
                    found = [sample for sample in samples[count][2:] if sample is not None]
                    yield _row(part, shape.top_k - count, count, found, steps)
            finally:
                steps.close()


def _row(part: float, hits: int, misses: int, samples: Sequence[StepSample], steps: LayerSteps) -> CudaStepRow:
    nbytes, nan = steps.expert_nbytes, float("nan")
    limit = limit_us(steps.runner.rates[0], hits * nbytes, misses * nbytes)
    if not samples:
        return CudaStepRow(part, hits, misses, nan, nan, nan, nan, limit, nan, nan, {}, ())
    us, predicted = (np.array([getattr(sample, name) for sample in samples]) for name in ("us", "predicted_us"))
    errors = np.abs(predicted - us) / us
    p50, p90, p99 = (float(value) for value in np.quantile(us, [0.5, 0.9, 0.99]))
    lanes = {name: float(np.mean([sample.shards[name] for sample in samples])) for name in LANE_NAMES}
    return CudaStepRow(
        part, hits, misses, p50, p90, p99, float(np.median(predicted)), limit, float(np.median(errors)),
        float(np.quantile(errors, 0.9)), lanes, tuple(errors.tolist()),
    )  # fmt: skip
