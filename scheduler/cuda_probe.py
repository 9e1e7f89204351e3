"""Measure a GPU's lanes through the real step: each lane forced in turn on the store's own experts.

Fixed costs are those of whole steps. A line through the times by missing experts gives a lane's fixed cost and its
rate; what two lanes take beyond a step without misses is the miss's, as far as they have it in common. Last, the CPU
lane beside copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from trilane.cuda_beside import measure_beside
from trilane.cuda_copies import CopyProbe
from trilane.cuda_machine import cuda_machine
from trilane.cuda_runner import CudaRunner
from trilane.cuda_step_probe import StepProbe, hit_us, lane_us, layers_like, planned_with
from trilane.gpu_kernels.driver import Encoded
from trilane.gpu_pause import make_pause
from trilane.layer_rates import layer_formats
from trilane.plan import make_options
from trilane.profile import Curve, MachineProfile

MAX_EXPERTS = 8
PAUSE_US = 50.0  # before a step with misses
BATCH_ROWS = 16


class Line(NamedTuple):
    """``us = fix_us + nbytes / (1e3 * gb_s)``."""

    fix_us: float
    gb_s: float


class Kind(NamedTuple):
    """Layers of one kind and what is measured on them.

    Attributes
    ----------
    layers : tuple of int
    formats : frozenset of str
        Formats whose rates they give.
    nbytes : int
        Of one expert.
    counts : tuple of int
        Experts of a step, rising.
    """

    layers: tuple[int, ...]
    formats: frozenset[str]
    nbytes: int
    counts: tuple[int, ...]


class KindTimes(NamedTuple):
    """What the steps of a kind took.

    Attributes
    ----------
    us : dict
        By lane (hit, zero_copy, cpu, stream): us of a step by number of experts; as many as could be measured.
    row_us : tuple
        us of the CPU lane with one expert for one row, and for ``rows`` of them.
    threads : int
        Workers of the CPU lane.
    """

    kind: Kind
    us: dict[str, list[float]]
    row_us: tuple[float, float]
    rows: int
    threads: int

    def line(self, lane: str) -> Line | None:
        """The line through a lane's times; None where there are none."""
        us = self.us.get(lane)
        return fit(self.kind.counts[: len(us)], self.kind.nbytes, us) if us else None

    def known(self, lane: str) -> Line:
        """A lane's line; the line of reads in place where it has none."""
        return self.line(lane) or fit(self.kind.counts, self.kind.nbytes, self.us["zero_copy"])


def calibrate_cuda(runner: CudaRunner) -> MachineProfile:
    """Measure every lane for each kind of layer of the runner's store."""
    with contextlib.closing(CopyProbe(runner)) as copies:
        profile = MachineProfile(machine=cuda_machine(runner.driver), pinned_to_device=copies.curve())
        seen: set[str] = set()
        for layer, described in enumerate(runner.store.layers):
            new = set(layer_formats(described)) - seen
            if not new:
                continue
            kind = kind_of(runner, layer, new)
            times = measure_kind(runner, kind, streams=not seen)
            profile = with_fields(profile, rate_fields(times))
            if not seen:
                beside = measure_beside(runner, copies, kind.layers, kind.counts[-1], kind.nbytes)
                in_place = Curve((1.0,), (times.known("zero_copy").gb_s,))
                profile = with_fields(profile, {"zero_copy": in_place, **step_fields(times), **beside})
            seen |= new
    runner.reset()
    return profile


def kind_of(runner: CudaRunner, layer: int, formats: Iterable[str], quick: bool = False) -> Kind:
    """The kind of a layer; fewer numbers of experts in the quick mode."""
    described = runner.store.layers[layer]
    most = max(1, min(MAX_EXPERTS, described.num_experts))
    counts = {1, most} if quick else {1, max(1, most // 4), max(1, most // 2), most}
    nbytes = int(described.layout.shard_nbytes.sum())
    return Kind(tuple(layers_like(runner, layer)), frozenset(formats), nbytes, tuple(sorted(counts)))


def measure_kind(runner: CudaRunner, kind: Kind, streams: bool) -> KindTimes:
    """Steps of a kind on each lane; streamed ones too if ``streams``, where slots are too few for all experts."""
    pause = make_pause(runner.driver, runner.device.work_stream, PAUSE_US)
    us = _misses_us(runner, kind, streams, pause)
    us["hit"] = hit_us(runner, kind.layers, kind.counts)
    # Others on the machine make times longer and never shorter, for a while: the better of two passes counts.
    again = _misses_us(runner, kind, streams, pause)
    us |= {lane: list(map(min, us[lane], times)) for lane, times in again.items()}
    rows = min(BATCH_ROWS, runner.max_rows(1))
    return KindTimes(kind, us, _row_us(runner, kind, rows), rows, runner.num_threads)


def _misses_us(runner: CudaRunner, kind: Kind, streams: bool, pause: Encoded) -> dict[str, list[float]]:
    """us of steps by lane and number of missing experts, each behind a pause."""
    us = {lane: lane_us(runner, kind.layers, kind.counts, lane, pause=pause) for lane in ("zero_copy", "cpu")}
    if streams and (streamed := lane_us(runner, kind.layers, kind.counts, "stream", fills=True, pause=pause)):
        us["stream"] = streamed
    return us


def _row_us(runner: CudaRunner, kind: Kind, rows: int) -> tuple[float, float]:
    """us of the CPU lane with one expert, for one row and for many."""
    us = []
    runner.reset()
    with planned_with(runner, make_options(force="cpu")):
        for count in (1, rows):
            with contextlib.closing(StepProbe(runner, kind.layers, 1, count)) as probe:
                us.append(probe.us(runner.store.layers[kind.layers[0]].num_experts))
    return us[0], us[1]


def with_fields(profile: MachineProfile, fields: dict[str, Any]) -> MachineProfile:
    """A profile with these fields; mappings get entries, everything else is replaced."""
    merged: dict[str, Any] = {
        name: {**getattr(profile, name), **value} if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return replace(profile, **merged)


def rate_fields(times: KindTimes) -> dict[str, Any]:
    """Rates of the formats of a kind: in place, on the CPU lane beside the GPU, and in slots."""
    kind, threads, cpu = times.kind, (float(times.threads),), times.known("cpu")
    rows_gb_s = 1e-3 * kind.nbytes * (times.rows - 1) / max(1e-3, times.row_us[1] - times.row_us[0])
    rates: dict[str, Any] = {
        "zero_copy_experts": Curve((1.0,), (times.known("zero_copy").gb_s,)),
        "cpu_experts": Curve(threads, (cpu.gb_s,)),
        "cpu_rows": Curve(threads, (max(rows_gb_s, cpu.gb_s),)),
        "device_experts": times.known("hit").gb_s,
    }
    return {name: dict.fromkeys(sorted(kind.formats), rate) for name, rate in rates.items()}


def step_fields(times: KindTimes) -> dict[str, Any]:
    """The fixed costs of steps, and what one expert asks of them."""
    kind, hits, in_place = times.kind, times.known("hit"), times.known("zero_copy")
    lines = {lane: line for lane in ("zero_copy", "cpu", "stream") if (line := times.line(lane)) is not None}
    by_hits = times.us["hit"]
    return {
        **fixed_costs(hits, lines),
        "hit_step_us": Curve(tuple(map(float, kind.counts[: len(by_hits)])), tuple(by_hits)) if by_hits else None,
        "round_trip_us": max(0.0, times.us["zero_copy"][0] - hits.fix_us - 1e-3 * kind.nbytes / in_place.gb_s),
    }


def fixed_costs(hits: Line, lines: dict[str, Line]) -> dict[str, float]:
    """The step's, the miss's and each lane's fixed costs in us, by their names in the profile.

    A lane begins while hits are computed, so what a step with misses takes beyond its lane holds the publishing and
    the sum, but not the hits.
    """
    beyond = {lane: max(0.0, line.fix_us - hits.fix_us) for lane, line in lines.items()}
    miss = min(beyond["zero_copy"], beyond["cpu"])
    stream = beyond.get("stream", beyond["zero_copy"])
    return {
        "step_fix_us": hits.fix_us, "miss_fix_us": miss, "zero_copy_fix_us": beyond["zero_copy"] - miss,
        "cpu_fix_us": beyond["cpu"] - miss, "stream_fix_us": max(0.0, stream - miss),
    }  # fmt: skip


def fit(counts: Sequence[int], nbytes: int, us: Sequence[float]) -> Line:
    """The line through times by experts, nearest in proportion; with one point, all of it is rate.

    A hundredth of the time of many large experts is more than what a lane begins with, so small times say that.
    """
    sizes = nbytes * np.array(counts, float)
    if len(counts) > 1:
        slope, fix = np.polyfit(sizes, np.array(us), 1, w=1 / np.array(us))
        if slope > 0 and fix >= 0:
            return Line(float(fix), float(1e-3 / slope))
    return Line(0.0, float(1e-3 * sizes.sum() / np.sum(us)))
