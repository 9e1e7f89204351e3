"""Measure a GPU's lanes for its profile: on stores of random experts, format by format, through the real step.

The first store is in the format in which one stands for all: copies, reads, fixed costs and lanes together are measured
on it, then the rates of the other formats as long as there is time. What cannot be measured is in ``skipped`` with
the reason. The host device's lanes are other ones, measured by calibrate.py: it and a GPU have a profile each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trilane.calibrate import Calibration, Skipped, compile_timer
from trilane.cpu_kernels.formats import FORMATS
from trilane.cuda_bench import BASE_PROBES, Bench, GpuProbe, measure_rates, open_bench
from trilane.cuda_errors import device_errors, open_gpu
from trilane.cuda_machine import cuda_machine
from trilane.cuda_probe import with_fields
from trilane.errors import DeviceError, ProbeError
from trilane.gpu_kernels.build import READER, Variant
from trilane.gpu_kernels.driver import Driver
from trilane.profile import MachineProfile

#: In the order in which they are measured: rates of those for which there is no time stay unknown.
ORDER = ("q4_k", "mxfp4", "q8_0", "q6_k", "bf16", "f16", "f32")
FULL_S, QUICK_S = 12.0, 2.0  # no further format that would end later, compilers not counted


def calibrate_gpu(
    *,
    quick: bool = False,
    formats: Sequence[str] = tuple(FORMATS),
    on_progress: Callable[[str, float], None] | None = None,
) -> Calibration:
    """Measure the first visible GPU.

    Parameters
    ----------
    quick : bool
        Fewer numbers of experts and blocks, and rates of as many formats as there is time for in two seconds.
    formats : sequence of str
        Weight formats to measure; all by default.
    on_progress : callable, optional
        Called with the title of each measurement before it begins, and the part of all that is done.

    Raises
    ------
    DeviceError
        There is no GPU that can be used.
    ProbeError
        A copy or a kernel gave a wrong result, or no format at all could be measured.
    """
    names = [name for name in dict.fromkeys((*ORDER, *FORMATS)) if name in formats]
    with contextlib.closing(open_gpu()) as driver, compile_timer() as compiling:
        run = _Run(driver, quick, MachineProfile(machine=cuda_machine(driver), quick=quick), on_progress)
        total = len(BASE_PROBES) + len(names) - 1
        run.format(names[0], BASE_PROBES, 0, total)
        for index, name in enumerate(names[1:]):
            run.rates(name, len(BASE_PROBES) + index, total, compiling)
        if not run.profile.device_experts:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in run.profile.skipped.items())
            raise ProbeError(f"nothing could be measured on {run.profile.machine.gpu}: {reasons}")
        return Calibration(run.profile, run.seconds, run.compile_s + compiling())


class _Run:
    """A calibration under way; its driver keeps the GPU's context while stores come and go."""

    def __init__(
        self, driver: Driver, quick: bool, profile: MachineProfile, on_progress: Callable[[str, float], None] | None
    ) -> None:
        self.driver, self.quick, self.profile, self.on_progress = driver, quick, profile, on_progress
        self.seconds: dict[str, float] = {}
        self.done: set[str] = set()  # names of probes that have run
        self.compile_s = 0.0

    def rates(self, name: str, done: int, total: int, compiling: Callable[[], float]) -> None:
        """A further format's rates, if another format would end in time."""
        title = f"experts in {name}"
        most_s = QUICK_S if self.quick else FULL_S
        taken = [s for key, s in self.seconds.items() if key.startswith("experts in")]
        begin_s = sum(self.seconds.values()) - self.compile_s - compiling()
        if begin_s + max(taken, default=0.0) > most_s:
            self._skip(title, f"{begin_s:.1f} s were over, and all should end within {most_s:.0f} s")
            return
        self.format(name, (GpuProbe(title, f"GPU: {title}", measure_rates),), done, total)

    def format(self, name: str, probes: Sequence[GpuProbe], done: int, total: int) -> None:
        """Run probes on a store of one format; one that does not fit is a reason for all of them."""
        begin = time.perf_counter()
        key = "start" if len(probes) > 1 else probes[0].name
        self._tell(probes[0].title, done / total)
        try:
            with device_errors():
                self._compile(name)
                with open_bench(name, self.quick) as bench:
                    self._took(key, begin)
                    for index, probe in enumerate(probes):
                        self._run(probe, bench, (done + index) / total)
        except (Skipped, DeviceError) as reason:
            for probe in probes:
                if probe.name not in self.done:
                    self._skip(probe.name, str(reason))

    def _run(self, probe: GpuProbe, bench: Bench, part: float) -> None:
        begin = time.perf_counter()
        self._tell(probe.title, part)
        try:
            with device_errors():
                self.profile = with_fields(self.profile, probe.measure(bench))
        except (Skipped, DeviceError) as reason:
            self._skip(probe.name, str(reason))
        self.done.add(probe.name)
        self._took(probe.name, begin)

    def _compile(self, name: str) -> None:
        """Kernels of a format into the cache, as time of the compiler."""
        begin = time.perf_counter()
        self.driver.load_kernels(Variant(name, name, name))
        self.driver.load_kernels(READER)
        self.compile_s += time.perf_counter() - begin

    def _tell(self, title: str, part: float) -> None:
        if self.on_progress is not None:
            self.on_progress(title, part)

    def _took(self, key: str, begin: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - begin

    def _skip(self, name: str, reason: str) -> None:
        self.profile = replace(self.profile, skipped={**self.profile.skipped, name: reason})
