"""What a layer-step costs beside its bytes: each lane forced in turn through the real step.

Fixed costs measured in parts are never those of the whole, so they come from whole layer-steps of known rates:
what a lane takes beyond its bytes is that lane's, and what a step takes beyond its lane is the step's. Kinds of
steps take turns, and of each the faster half counts: what disturbs a step makes it longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trilane.accounts import CPU_US, FETCH_US, HITS_US
from trilane.cost import Rates
from trilane.host_runner import HostRunner, StepInput
from trilane.layer_rates import layer_rates
from trilane.plan import Options, make_options
from trilane.profile import FIXED_COSTS, MachineProfile

REPEATS = 9  # of each kind of steps
MAX_EXPERTS = 6
SEED = 7
PLACES = {"hit": HITS_US, "stream": FETCH_US, "zero_copy": FETCH_US, "cpu": CPU_US}


class Sample(NamedTuple):
    """Steps of one kind: bytes moved by the lane, its own us, the whole step's us."""

    nbytes: float
    lane_us: float
    step_us: float


def measure_fixed_costs(runner: HostRunner, profile: MachineProfile, repeats: int = REPEATS) -> dict[str, float]:
    """Fixed costs in us by their names in `MachineProfile`, from steps of the runner's first layer.

    ``profile`` has the rates of all lanes. The runner is reset afterwards.
    """
    probe = _LaneProbe(runner, layer_rates(profile, runner.store.layers[0], runner.device.num_threads))
    before = runner.options
    try:
        samples = probe.measure(repeats)
    finally:
        runner.use_options(before)
    runner.reset()
    return fixed_costs(samples)


def fixed_costs(samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """The cheapest hand-over is the step's cost; what a lane takes beyond it, and beyond its bytes, is its own.

    ``lane_us`` of the samples is what lanes took beyond their bytes.
    """
    beyond_step = {lane: _median(s.step_us for s in found) for lane, found in samples.items()}
    step_fix = min(beyond_step.values())
    costs = {"step_fix_us": step_fix}
    for lane, found in samples.items():
        name = "hit_fix_us" if lane == "hit" else f"{lane}_fix_us"
        own = _median(s.lane_us for s in found)
        if lane == "stream":  # the device computes the last shard after it landed
            costs |= {"stream_fix_us": own, "stream_tail_us": beyond_step[lane] - step_fix}
        else:
            costs[name] = own + beyond_step[lane] - step_fix
    assert set(costs) <= set(FIXED_COSTS)
    return costs


def _median(values: Iterable[float]) -> float:
    return float(max(0.0, np.median(list(values))))


class _LaneProbe:
    """Forced steps of the first layer."""

    def __init__(self, runner: HostRunner, rates: Rates) -> None:
        self.runner, self.rates = runner, rates
        described = runner.store.layers[0]
        self.num_experts, self.num_shards = described.num_experts, described.layout.num_shards
        self.expert_nbytes = int(described.layout.shard_nbytes.sum())
        self.shard_nbytes = int(described.layout.shard_nbytes[0])
        self.rng = np.random.default_rng(SEED)
        self.hidden = self.rng.standard_normal((1, runner.store.hidden)).astype(np.float32)
        self.out = np.empty_like(self.hidden)

    def measure(self, repeats: int) -> dict[str, list[Sample]]:
        """Samples of each lane, one for each number of experts; of streaming and hits where there are slots."""
        slots = self.runner.num_slots_of(0)
        most = max(1, min(MAX_EXPERTS, self.num_experts // 2))
        kept = min(most, slots // (2 * self.num_shards))
        kinds = [(lane, n) for lane in ("cpu", "zero_copy") for n in _counts(most)]
        kinds += [("stream", n) for n in _counts(kept)] if kept else []
        times: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for repeat in range(repeats + 1):  # the first round only warms up
            hits = [("hit", n) for n in _counts(kept)] if kept else []
            for lane, n in kinds:
                self._note(times, repeat, lane, n, self._miss(lane, n))
            resident = self._fill(slots) if hits else 0
            for lane, n in hits:
                self._note(times, repeat, lane, n, self._hit(min(n, resident), resident))
        samples: dict[str, list[Sample]] = {}
        for (lane, n), taken in times.items():
            samples.setdefault(lane, []).append(self._sample(lane, n, np.array(taken)))
        return samples

    def _note(self, times: dict, repeat: int, lane: str, n: int, took: tuple[float, float]) -> None:
        if repeat:
            times.setdefault((lane, n), []).append(took)

    def _miss(self, lane: str, n: int) -> tuple[float, float]:
        self.runner.reset()
        options = make_options(force=lane)
        return self._step(self.rng.choice(self.num_experts, n, replace=False), options, lane)

    def _fill(self, slots: int) -> int:
        """Make experts resident; how many are."""
        self.runner.reset()
        resident = min(self.num_experts, slots // self.num_shards)
        for expert in range(resident):
            self._step(np.array([expert]), make_options(force="stream"), "stream")
        return resident

    def _hit(self, n: int, resident: int) -> tuple[float, float]:
        return self._step(self.rng.choice(resident, n, replace=False), make_options(force="stream"), "hit")

    def _step(self, experts: np.ndarray, options: Options, lane: str) -> tuple[float, float]:
        """Run one step; us of its lane and of all of it."""
        runner, stride = self.runner, self.hidden.strides[0]
        runner.take_routing(experts[None], np.ones((1, len(experts)), np.float32))
        step = StepInput(
            0, 1, len(experts), self.hidden.ctypes.data, stride, "f32", self.out.ctypes.data, stride, "f32"
        )
        if options != runner.options:
            runner.use_options(options)
        runner.begin(step)
        runner.finish()
        return float(runner.lane_us[PLACES[lane]]), runner.step_us

    def _sample(self, lane: str, n: int, taken: np.ndarray) -> Sample:
        """What steps of a kind took beyond the bytes of their lane, and beyond their lane."""
        lane_us = taken[:, 0]
        half = taken[np.argsort(lane_us)][: len(taken) // 2 + 1]
        nbytes = n * self.expert_nbytes
        own = float(np.median(half[:, 0])) - nbytes * self._us_per_byte(lane, n)
        beyond = float(np.quantile(taken[:, 1] - lane_us, 0.25))
        if lane == "stream":
            beyond -= self.shard_nbytes * self.rates.hit_us_per_byte
        return Sample(nbytes, own, beyond)

    def _us_per_byte(self, lane: str, n: int) -> float:
        rates = self.rates
        if lane == "zero_copy":
            return float(rates.zero_copy_us_per_byte[min(n * self.num_shards, len(rates.zero_copy_us_per_byte)) - 1])
        by_lane = {"hit": rates.hit_us_per_byte, "stream": rates.stream_us_per_byte, "cpu": rates.cpu_us_per_byte}
        return by_lane[lane]


def _counts(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), most})
