"""Measure this machine: run every probe, several passes spread over time, and put the results into one profile.

A probe is a row of the table `PROBES`: what it measures in one pass, and which fields of the profile follow. Each
pass returns the better of what it found and of what was known before, since other programs make times longer and
never shorter. A probe that cannot run on a machine raises `Skipped` with the reason; the profile keeps it, and
the fields stay unknown. The file knows no residency and no policy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from trilane import __version__
from trilane.config import Config
from trilane.cpu_kernels.arena import Arena, allocate_arena
from trilane.cpu_kernels.cpus import CpuBudget, read_cpu_budget, suggest_num_threads
from trilane.cpu_kernels.formats import FORMATS
from trilane.cpu_kernels.host_device import LANE_THREADS, suggest_team_size
from trilane.host_runner import HostRunner
from trilane.lane_probe import measure_fixed_costs
from trilane.probes.contention import Contention, even_share, measure_contention
from trilane.probes.copies import CopyRates, measure_copies
from trilane.probes.handover import measure_handover
from trilane.probes.host_memory import measure_read, probe_arena
from trilane.probes.lane_experts import INTERMEDIATE, SHORT_INTERMEDIATE, Experts, expert_layout, make_expert
from trilane.probes.lane_jobs import Lanes, open_lanes
from trilane.probes.lane_rates import BATCH_ROWS, LaneBench, LaneJob, LaneTimes, measure_in_place
from trilane.probes.machine import describe_machine
from trilane.profile import Curve, Machine, MachineProfile
from trilane.random_store import StepShape, random_store

BASE_FORMAT = "q4_k"  # where it is measured
COPY_NBYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
IN_FLIGHT = (1, 2, 4, 8)
TOGETHER_EXPERTS = 16
QUICK_NBYTES = 512 << 20  # of memory that the quick mode works on, at most
FORMAT_PART = 8  # of what the base format's experts take: memory of each other format's
PASSES = 7  # at most; one in the quick mode
SAMPLES = 11  # of a figure in a pass
STEP_REPEATS, QUICK_STEP_REPEATS = 9, 4
FULL_S = 25.0  # no further pass that would end later, the compiler's time not counted
STEP_EXPERTS = 16


class Skipped(Exception):
    """A probe cannot run here; the text is the reason."""


class Probe(NamedTuple):
    """A measurement: ``measure(session, previous)`` in each pass, then ``fields(session, found)`` of the profile."""

    name: str
    title: str
    measure: Callable[[Session, Any], Any]
    fields: Callable[[Session, Any], dict[str, Any]]


LaneKey = tuple[str, str, int, int]  # lane, format, threads, rows


@dataclass
class Session:
    """What the probes of one calibration share: the machine, memory to work on, running lanes, what is known."""

    quick: bool
    formats: tuple[str, ...]
    budget: CpuBudget
    profile: MachineProfile
    filled: dict[str, Experts] = field(default_factory=dict)  # by format
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @cached_property
    def thread_counts(self) -> tuple[int, ...]:
        """Team sizes to measure, rising."""
        return thread_counts(self.budget, self.quick)

    @cached_property
    def arena(self) -> Arena:
        """Where the base format's experts lie, larger than the caches."""
        arena = probe_arena(least_nbytes=128 << 20, most_nbytes=QUICK_NBYTES if self.quick else None)
        wanted = max(map(self.expert_nbytes, self.formats))
        if arena.nbytes < wanted:
            raise Skipped(f"a quarter of the free memory is {arena.nbytes} bytes, an expert {wanted}: free some")
        return arena

    @cached_property
    def slots(self) -> Arena:
        """Where copies go."""
        return allocate_arena(self.arena.nbytes // 2)

    @cached_property
    def lanes(self) -> dict[int, Lanes]:
        """Running lanes for each team size; they sleep while another is measured."""
        return {n: self.stack.enter_context(open_lanes(n, self.budget)) for n in self.thread_counts}

    @property
    def most_lanes(self) -> Lanes:
        return self.lanes[self.thread_counts[-1]]

    @property
    def base_format(self) -> str:
        """Of experts where one format stands for all."""
        return BASE_FORMAT if BASE_FORMAT in self.formats else self.formats[0]

    def intermediate_of(self, name: str) -> int:
        """Size of a format's experts: in the quick mode those of floats are one shard, of as many bytes as others."""
        is_short = self.quick and FORMATS[name].activation != "int8"
        return SHORT_INTERMEDIATE if is_short else INTERMEDIATE

    def expert_nbytes(self, name: str) -> int:
        """Bytes of one expert as it is packed."""
        return expert_layout(name, self.intermediate_of(name)).expert_nbytes

    def experts(self, name: str | None = None) -> Experts:
        """Experts in a format (None: the base format), in memory of their own."""
        name = name or self.base_format
        if name not in self.filled:
            wanted = max(self.arena.nbytes // FORMAT_PART, 2 * self.expert_nbytes(name))
            arena = self.arena if name == self.base_format else allocate_arena(wanted)
            self.filled[name] = Experts(make_expert(name, self.intermediate_of(name)), arena)
        return self.filled[name]

    @cached_property
    def lane_bench(self) -> tuple[list[LaneKey], LaneBench]:
        """Every format on the CPU lane by threads, and on the device and link threads; one row and a batch."""
        keys = sorted(self._lane_keys(), key=lambda key: (key[3], key[0], key[2]))  # formats side by side
        jobs = [LaneJob(lane, self.lanes[n], self.experts(name), rows) for lane, name, n, rows in keys]
        return keys, LaneBench(jobs, self.slots, pairs=not self.quick)

    def _lane_keys(self) -> Iterator[LaneKey]:
        most = self.thread_counts[-1]
        for name in self.formats:
            counts = self.thread_counts if name == self.base_format or not self.quick else (most,)
            batches = (most,) if self.quick else sorted({1, most})
            yield from (("cpu", name, n, 1) for n in counts)
            yield from (("cpu", name, n, BATCH_ROWS) for n in batches)
            yield from ((lane, name, most, rows) for lane, rows in (("hit", 1), ("zero_copy", 1), ("hit", BATCH_ROWS)))

    @cached_property
    def runner(self) -> HostRunner:
        """Real steps on a store of random experts, half of them resident."""
        store = random_store(StepShape(num_experts=STEP_EXPERTS, format=self.base_format))
        config = Config(cache={"fraction": 0.5}, cpu={"threads": suggest_team_size(self.budget)[0]})
        runner = HostRunner(store, config)
        self.stack.callback(runner.close)
        return runner


@dataclass(frozen=True)
class Calibration:
    """A profile and how it came about: s of each probe, and of compiling within them."""

    profile: MachineProfile
    seconds: dict[str, float]
    compile_s: float

    @property
    def total_s(self) -> float:
        """All of it but the compiling."""
        return sum(self.seconds.values()) - self.compile_s


def this_machine() -> Machine:
    """What a profile that is measured now is valid for."""
    here = describe_machine()
    return Machine(
        cpu=here.cpu, cores_allowed=here.num_allowed, memory_nbytes=here.usable_memory_nbytes, version=__version__
    )


def thread_counts(budget: CpuBudget, quick: bool) -> tuple[int, ...]:
    """Team sizes to measure: powers of two up to all workers that the budget allows; fewer in the quick mode."""
    most = suggest_num_threads(budget)[0]
    usual = {1, suggest_team_size(budget)[0], most}
    if quick:
        return tuple(sorted(usual | {max(1, most // 2)}))
    return tuple(sorted(usual | {1 << k for k in range(most.bit_length()) if 1 << k <= most}))


# --------------------------------------------------------------------------------------------- the probes
def _measure_read(session: Session, previous: dict[int, float] | None) -> dict[int, float]:
    counts = sorted({*session.thread_counts, session.budget.num_concurrent})
    if not previous:
        session.experts()  # pages that nobody wrote are all one page
    found = {rate.num_threads: rate.gb_s for rate in measure_read(counts, arena=session.arena, num_samples=SAMPLES)}
    return {n: max(gb_s, (previous or {}).get(n, 0.0)) for n, gb_s in found.items()}


def _read_fields(session: Session, found: dict[int, float]) -> dict[str, Any]:
    return {"host_read": _curve(found)}


def _measure_experts(session: Session, previous: dict[LaneKey, LaneTimes] | None) -> dict[LaneKey, LaneTimes]:
    keys, bench = session.lane_bench
    times = zip(keys, bench.measure(SAMPLES), strict=True)
    return {key: found.best((previous or {}).get(key)) for key, found in times}


def _expert_fields(session: Session, found: dict[LaneKey, LaneTimes]) -> dict[str, Any]:
    def curves(lane: str, rows: int) -> dict[str, Curve]:
        by_format: dict[str, dict[int, float]] = {}
        for (key_lane, name, n, key_rows), times in found.items():
            if (key_lane, key_rows) == (lane, rows):
                by_format.setdefault(name, {})[n] = times.gb_s
        return {name: _curve(by_format[name]) for name in session.formats if name in by_format}

    def flat(lane: str, rows: int) -> dict[str, float]:
        return {name: curve.y[0] for name, curve in curves(lane, rows).items()}

    in_place = {name: Curve((1.0,), (gb_s,)) for name, gb_s in flat("zero_copy", 1).items()}
    return {
        "cpu_experts": curves("cpu", 1),
        "cpu_rows": curves("cpu", BATCH_ROWS),
        "device_experts": flat("hit", 1),
        "device_rows": flat("hit", BATCH_ROWS),
        "zero_copy_experts": in_place,
    }


def _measure_copies(session: Session, previous: CopyRates | None) -> CopyRates:
    sizes = [size for size in COPY_NBYTES if size <= session.slots.nbytes // 2]
    if not sizes:
        raise Skipped(f"{session.slots.nbytes} bytes of memory are too few to copy into: free some")
    found = measure_copies(session.most_lanes, session.arena, session.slots, sizes)
    if previous is None:
        return found
    return replace(found, gb_s=tuple(map(max, found.gb_s, previous.gb_s)))


def _copy_fields(session: Session, found: CopyRates) -> dict[str, Any]:
    return {"pinned_to_device": _curve(dict(zip(found.nbytes, found.gb_s, strict=True)))}


class InPlace(NamedTuple):
    """us of reads in place, by experts in flight, and bytes of one."""

    nbytes: int
    us: tuple[float, ...]


def _measure_in_place(session: Session, previous: InPlace | None) -> InPlace:
    experts = session.experts()
    us = measure_in_place(session.most_lanes, experts, session.slots, IN_FLIGHT)
    return InPlace(experts.nbytes, tuple(map(min, us, previous.us)) if previous else tuple(us))


def _in_place_fields(session: Session, found: InPlace) -> dict[str, Any]:
    """Rates once the hand-over, which the line through the two largest counts shows, is taken off."""
    slope = (found.us[-1] - found.us[-2]) / (IN_FLIGHT[-1] - IN_FLIGHT[-2])
    fix = min(max(0.0, found.us[-1] - slope * IN_FLIGHT[-1]), found.us[0] / 2)
    rates = {n: n * found.nbytes / (us - fix) / 1e3 for n, us in zip(IN_FLIGHT, found.us, strict=True)}
    return {"zero_copy": _curve(rates), "zero_copy_nbytes": float(found.nbytes)}


def _measure_handover(session: Session, previous: tuple[float, float | None] | None) -> tuple[float, float | None]:
    parked = measure_handover(1, parked=True, num_samples=60).first_us
    spinning = None
    if session.budget.num_concurrent > 1:  # on one CPU a worker that spins keeps the post from being made
        spinning = measure_handover(1, parked=False, num_samples=200).first_us
    if previous is None:
        return parked, spinning
    return min(parked, previous[0]), None if spinning is None else min(spinning, previous[1] or spinning)


def _handover_fields(session: Session, found: tuple[float, float | None]) -> dict[str, Any]:
    return {"parked_us": found[0], "handover_us": found[1]}


def _measure_together(session: Session, previous: Contention | None) -> Contention:
    if session.budget.num_concurrent < 2:
        raise Skipped("one CPU: lanes can only take turns")
    _need(session, "experts")
    experts, threads = session.experts(), suggest_team_size(session.budget)[0]
    known = session.profile
    rates = {
        "hit": known.device_experts[experts.format],
        "zero_copy": known.zero_copy_experts[experts.format].at(1),
        "cpu": known.cpu_experts[experts.format].at(threads),
    }
    share = even_share(rates, TOGETHER_EXPERTS)
    return measure_contention(session.lanes[threads], experts, session.slots, share).best(previous)


def _together_fields(session: Session, found: Contention) -> dict[str, Any]:
    rates = {"alone_gb_s": found.alone_gb_s, "together_gb_s": found.together_gb_s}
    if suggest_team_size(session.budget)[0] + LANE_THREADS > session.budget.num_concurrent:
        return rates  # what lanes lose are cores, and these are counted as such
    slowdowns = {"hit_slowdown": found.slowdown("hit"), "link_slowdown": found.slowdown("zero_copy")}
    return {**rates, **slowdowns, "both_gb_s": found.joint_gb_s()}


def _measure_steps(session: Session, previous: dict[str, float] | None) -> dict[str, float]:
    _need(session, "experts", "copies", "in_place")
    repeats = QUICK_STEP_REPEATS if session.quick else STEP_REPEATS
    costs = measure_fixed_costs(session.runner, session.profile, repeats)
    return {name: min(us, (previous or {}).get(name, us)) for name, us in costs.items()}


def _step_fields(session: Session, found: dict[str, float]) -> dict[str, Any]:
    return {**found, "copy_fix_us": 0.0}


def _need(session: Session, *names: str) -> None:
    missing = [name for name in names if name in session.profile.skipped]
    if missing:
        raise Skipped(f"it needs the rates of {' and '.join(missing)}, which were not measured")


PROBES = (
    Probe("host_read", "host memory, read by threads", _measure_read, _read_fields),
    Probe("experts", "experts by format and threads", _measure_experts, _expert_fields),
    Probe("copies", "copies over the link by size", _measure_copies, _copy_fields),
    Probe("in_place", "reads in place by pieces in flight", _measure_in_place, _in_place_fields),
    Probe("handover", "hand-over to a worker", _measure_handover, _handover_fields),
    Probe("together", "all lanes together", _measure_together, _together_fields),
    Probe("steps", "fixed costs of whole steps", _measure_steps, _step_fields),
)


def _curve(points: dict[int, float]) -> Curve:
    xs = sorted(points)
    return Curve(tuple(float(x) for x in xs), tuple(points[x] for x in xs))


# ------------------------------------------------------------------------------------------- all together
def calibrate(
    *,
    quick: bool = False,
    formats: Sequence[str] = tuple(FORMATS),
    budget: CpuBudget | None = None,
    on_progress: Callable[[str, float], None] | None = None,
    most_s: float | None = None,
) -> Calibration:
    """Measure the machine.

    Parameters
    ----------
    quick : bool
        One pass and fewer thread counts: a few seconds instead of half a minute.
    formats : sequence of str
        Weight formats to measure; all by default.
    budget : CpuBudget, optional
        The CPUs to use; those that this process may use by default.
    on_progress : callable, optional
        Called with the title of each measurement before it begins, and the part of all that is done.
    most_s : float, optional
        No further pass that would end later, the compiler's time not counted; 25 by default. The first is
        always made, and is the quick mode's only one.

    Raises
    ------
    ProbeError
        A kernel or a lane gave a wrong result.
    """
    budget = budget or read_cpu_budget()
    session = Session(quick, tuple(formats), budget, _empty_profile(budget, quick))
    seconds = dict.fromkeys((probe.name for probe in PROBES), 0.0)
    with session.stack, compile_timer() as compiling:
        found: dict[str, Any] = {}
        rounds = 1 if quick else PASSES
        for index in range(rounds * len(PROBES)):
            done, turn = divmod(index, len(PROBES))
            taken_s = sum(seconds.values()) - compiling()
            if turn == 0 and done and taken_s * (done + 1) / done > (FULL_S if most_s is None else most_s):
                break  # another pass would take too long: a busy machine
            probe = PROBES[turn]
            if on_progress is not None:
                on_progress(probe.title, index / (rounds * len(PROBES)))
            begin = time.perf_counter()
            _run(session, probe, found)
            seconds[probe.name] += time.perf_counter() - begin
    return Calibration(session.profile, seconds, compiling())


def _empty_profile(budget: CpuBudget, quick: bool) -> MachineProfile:
    return MachineProfile(
        machine=this_machine(),
        num_cores=float(budget.num_concurrent),
        hit_cores=1.0,
        link_cores=1.0,
        cpu_cores=None,
        quick=quick,
    )


def _run(session: Session, probe: Probe, found: dict[str, Any]) -> None:
    """One pass of a probe into the session's profile, or the reason why there is none."""
    if probe.name in session.profile.skipped:
        return
    try:
        found[probe.name] = probe.measure(session, found.get(probe.name))
    except Skipped as reason:
        skipped = {**session.profile.skipped, probe.name: str(reason)}
        session.profile = replace(session.profile, skipped=skipped)
    else:
        session.profile = replace(session.profile, **probe.fields(session, found[probe.name]))


@contextlib.contextmanager
def compile_timer() -> Iterator[Callable[[], float]]:
    """Seconds for which the compiler was at work within the block, cached code that was loaded included."""
    from numba.core import event

    with event.install_timer("numba:compiler_lock", lambda seconds: None) as listener:
        yield lambda: float(listener.duration) if listener.done else 0.0
