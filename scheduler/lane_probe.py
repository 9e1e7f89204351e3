"""Measure a machine's lanes through the real step: each lane forced in turn on the store's own experts.

Fixed costs measured in parts are never those of the whole, so every constant of the cost model comes from
whole layer-steps: a line through the lane's own time by bytes gives its fixed cost and its rate, and what the
step takes beyond its lane is the cost of the step itself. A lane that plays a chosen rate is measured the same
way, since playing has fixed costs too; its rate is known.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trilane import __version__
from trilane.accounts import CPU_US, FETCH_US, HITS_US
from trilane.cost import Rates
from trilane.errors import ProfileError
from trilane.expert import CPU, STREAM, ZERO_COPY
from trilane.host_runner import HostRunner, StepInput
from trilane.plan import Options, make_options
from trilane.probes.machine import describe_machine
from trilane.profile import UNKNOWN_RATE, Curve, Machine, MachineProfile, play
from trilane.store import StoreLayer

log = logging.getLogger("trilane")

REPEATS = 7
MAX_EXPERTS = 6
BATCH_ROWS = 16
SEED = 7


class Line(NamedTuple):
    """``us = fix_us + nbytes / (1e3 * gb_s)``."""

    fix_us: float
    gb_s: float


class Sample(NamedTuple):
    """Medians of one kind of step: bytes moved by the lane, its own us, the whole step's us."""

    nbytes: float
    lane_us: float
    step_us: float


def layout_label(layer: StoreLayer) -> str:
    """The name under which a layer's rates are kept: its formats, gate and up before down."""
    layout = layer.layout
    names = [fmt.name for fmt in (layout.gate, layout.up, layout.down) if fmt is not None]
    return names[0] if len(set(names)) == 1 else "+".join(names)


def calibrate(runner: HostRunner) -> MachineProfile:
    """Measure every lane for each kind of layer of the runner's store; the runner is reset afterwards."""
    log.info("no machine profile: measuring the lanes (about a second)")
    profile = MachineProfile(
        machine=_this_machine(),
        num_cores=float(runner.device.budget.num_concurrent),
        hit_cores=1.0,
        link_cores=1.0,
        cpu_cores=None,
    )
    seen: set[str] = set()
    for layer, described in enumerate(runner.store.layers):
        label = layout_label(described)
        if label not in seen:
            seen.add(label)
            profile = _LaneProbe(runner, layer, label).measure(profile)
    runner.reset()
    return profile


def rates_of_layers(profile: MachineProfile, runner: HostRunner) -> list[Rates]:
    """The cost model's constants for each layer of the runner's store.

    Raises
    ------
    ProfileError
        The profile has no rate for a layer's formats.
    """
    played = {name: us for name, us in runner.device.played.given().items()}
    profile = play(profile, **played) if played else profile
    rates = []
    for layer in runner.store.layers:
        label = layout_label(layer)
        if label not in profile.cpu_experts or label not in profile.device_experts:
            known = ", ".join(sorted(profile.cpu_experts)) or "none"
            raise ProfileError(
                f"the profile has no rates for experts in {label}, only for: {known}; measure it on this store "
                "(profile=None)"
            )
        shard_nbytes, threads = int(layer.layout.shard_nbytes[0]), runner.device.num_threads
        rates.append(profile.rates(label, shard_nbytes=shard_nbytes, threads=threads))
    return rates


def _this_machine() -> Machine:
    here = describe_machine()
    return Machine(cpu=here.cpu, cores_allowed=here.num_allowed, memory_nbytes=here.memory_nbytes, version=__version__)


class _LaneProbe:
    """Forced steps of one layer."""

    def __init__(self, runner: HostRunner, layer: int, label: str) -> None:
        self.runner, self.layer, self.label = runner, layer, label
        described = runner.store.layers[layer]
        self.num_experts = described.num_experts
        self.num_shards = described.layout.num_shards
        self.expert_nbytes = int(described.layout.shard_nbytes.sum())
        self.rng = np.random.default_rng(SEED)
        self.hidden = self.rng.standard_normal((BATCH_ROWS, runner.store.hidden)).astype(np.float32)
        self.out = np.empty_like(self.hidden)

    def measure(self, profile: MachineProfile) -> MachineProfile:
        """The profile with this layer's rates, and the fixed costs if it is the first layer measured."""
        samples = {"cpu": self._samples("cpu", CPU_US), "zero_copy": self._samples("zero_copy", FETCH_US, keep=False)}
        samples |= self._slot_samples()
        fits = {lane: _fit(found) for lane, found in samples.items()}
        rows, threads = self._batch_gb_s(), self.runner.device.num_threads
        device = fits.get("hit", fits["zero_copy"])  # without slots nothing ever hits: any finite rate will do
        profile = replace(
            profile,
            cpu_experts={**profile.cpu_experts, self.label: Curve((float(threads),), (fits["cpu"].gb_s,))},
            cpu_rows={**profile.cpu_rows, self.label: Curve((float(threads),), (rows,))},
            device_experts={**profile.device_experts, self.label: device.gb_s},
            device_rows={**profile.device_rows, self.label: rows / threads},
        )
        if profile.step_fix_us is None:
            profile = self._with_fixed_costs(profile, samples, fits)
        return self._with_contention(profile)

    def _with_fixed_costs(
        self, profile: MachineProfile, samples: dict[str, list[Sample]], fits: dict[str, Line]
    ) -> MachineProfile:
        """The cheapest hand-over is the step's cost; what a lane takes beyond it is that lane's."""
        beyond = {lane: _beyond_lane_us(found) for lane, found in samples.items()}
        step_fix = min(beyond.values())
        fix = {lane: fits[lane].fix_us + beyond[lane] - step_fix for lane in fits}
        stream = fits.get("stream")
        return replace(
            profile,
            step_fix_us=step_fix,
            cpu_fix_us=fix["cpu"],
            zero_copy=Curve((1.0,), (fits["zero_copy"].gb_s,)),
            zero_copy_fix_us=fix["zero_copy"],
            hit_fix_us=fix.get("hit", 0.0),
            pinned_to_device=None if stream is None else Curve((1.0,), (stream.gb_s,)),
            copy_fix_us=self.runner.device.played.link_fix_us or 0.0,
            stream_fix_us=None if stream is None else stream.fix_us,
            stream_tail_us=None if stream is None else beyond["stream"] - step_fix,
        )

    def _with_contention(self, profile: MachineProfile) -> MachineProfile:
        """Steps that the model splits over lanes: where they take longer than it says, lanes hold each other up."""
        runner = self.runner
        if runner.device.played.given():
            return profile  # lanes that sleep do not
        before, runner.rates = runner.rates, [self._rates(profile)] * runner.store.num_layers
        try:
            rates = []
            for _ in range(REPEATS):
                runner.reset()
                self._step(self.rng.choice(self.num_experts, self._most(), replace=False), 1, runner.options)
                rates.append(self._joint_gb_s(profile))
        finally:
            runner.rates = before
        both = float(np.median(rates[1:]))
        return replace(profile, both_gb_s=min(both, profile.both_gb_s or both)) if both < UNKNOWN_RATE else profile

    def _joint_gb_s(self, profile: MachineProfile) -> float:
        """Missed bytes over what the last step took beyond its fixed costs; infinite unless two lanes shared it."""
        counts = self.runner.journal.counts[self.layer]
        if not counts[CPU] or not counts[STREAM] + counts[ZERO_COPY]:
            return UNKNOWN_RATE
        us = self.runner.step_us - (profile.step_fix_us or 0.0)
        return 1e-3 * self._most() * self.expert_nbytes / max(us, 1.0)

    def _rates(self, profile: MachineProfile) -> Rates:
        nbytes = int(self.runner.store.layers[self.layer].layout.shard_nbytes[0])
        return profile.rates(self.label, shard_nbytes=nbytes, threads=self.runner.device.num_threads)

    def _slot_samples(self) -> dict[str, list[Sample]]:
        """Streaming and hits, where there are slots for them."""
        slots = self.runner.num_slots_of(self.layer)
        most = min(self._most(), slots // (2 * self.num_shards))
        if most < 1:
            return {}
        stream = self._samples("stream", FETCH_US, most=most)
        return {"stream": stream, "hit": self._hit_samples(slots, most)}

    def _most(self) -> int:
        return max(1, min(MAX_EXPERTS, self.num_experts // 2))

    def _samples(self, lane: str, place: int, *, most: int | None = None, keep: bool = True) -> list[Sample]:
        """Steps with 1 to ``most`` missing experts, all on one lane."""
        options = make_options(force=lane, fills=keep)
        return [self._sample(n, place, options) for n in _counts(most or self._most())]

    def _hit_samples(self, slots: int, most: int) -> list[Sample]:
        """Steps whose experts are all resident: others than those of the step before, so that none is warm."""
        resident = min(self.num_experts, slots // self.num_shards)
        self.runner.reset()
        options = make_options(force="stream")
        for expert in range(resident):
            self._step(np.array([expert]), 1, options)
        return [self._sample(n, HITS_US, options, among=resident) for n in _counts(min(most, resident))]

    def _sample(self, num: int, place: int, options: Options, among: int | None = None) -> Sample:
        lane, step = [], []
        for repeat in range(REPEATS + 1):
            if among is None:
                self.runner.reset()
            experts = self.rng.choice(among or self.num_experts, num, replace=False)
            self._step(experts, 1, options)
            if repeat:
                lane.append(float(self.runner.lane_us[place]))
                step.append(self.runner.step_us)
        return Sample(num * self.expert_nbytes, float(np.median(lane)), float(np.median(step)))

    def _batch_gb_s(self) -> float:
        """GB/s of bytes x rows where arithmetic is the limit: one expert on many rows, on the CPU lane."""
        options, times = make_options(force="cpu"), []
        for _ in range(3):
            self.runner.reset()
            self._step(self.rng.choice(self.num_experts, 1), BATCH_ROWS, options)
            times.append(float(self.runner.lane_us[CPU_US]))
        return 1e-3 * self.expert_nbytes * BATCH_ROWS / min(times)

    def _step(self, experts: np.ndarray, rows: int, options: Options) -> None:
        runner = self.runner
        ids = np.broadcast_to(experts, (rows, len(experts)))
        runner.take_routing(ids, np.ones(ids.shape, np.float32))
        stride = self.hidden.strides[0]
        step = StepInput(
            self.layer, rows, len(experts), self.hidden.ctypes.data, stride, "f32",
            self.out.ctypes.data, stride, "f32",
        )  # fmt: skip
        before = runner.use_options(options)
        try:
            runner.begin(step)
            runner.finish()
        finally:
            runner.use_options(before)


def _counts(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), most})


def _fit(samples: Sequence[Sample]) -> Line:
    """The line through the lane's us by bytes; with one point, all of it is rate."""
    nbytes, us = np.array([s.nbytes for s in samples]), np.array([s.lane_us for s in samples])
    if len(samples) > 1:
        slope, fix = np.polyfit(nbytes, us, 1)
        if slope > 0 and fix >= 0:
            return Line(float(fix), float(1e-3 / slope))
    return Line(0.0, float(1e-3 * nbytes.sum() / us.sum()))


def _beyond_lane_us(samples: Sequence[Sample]) -> float:
    return float(max(0.0, np.median([s.step_us - s.lane_us for s in samples])))
