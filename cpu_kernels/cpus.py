"""Which CPUs this process may use, and how many workers that is worth.

Reads the affinity mask, cgroup cpusets and quotas (versions 1 and 2), and from sysfs the cores behind the
logical CPUs: hyperthreads, efficiency cores, NUMA nodes. All files are looked up under ``root``, so that a
test can show it any machine. Nothing here starts threads or measures: a knee is an input.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trilane.cpu_kernels.cgroups import CgroupLimits, read_cgroup_limits

EFFICIENCY_BELOW = 0.8  # a core with less than this share of the best core's capacity or clock is a slow one
DEFAULT_SPIN_US = 100.0


@dataclass(frozen=True)
class CpuBudget:
    """The CPUs that this process may use.

    Attributes
    ----------
    allowed : tuple of int
        Logical CPUs in the affinity mask and in every cpuset.
    cores : tuple of int
        One logical CPU of each allowed physical core.
    fast_cores : tuple of int
        Those of ``cores`` that are no efficiency cores; where the workers belong.
    nodes : tuple of tuple of int
        ``fast_cores`` by NUMA node; one node where the system tells of none.
    quota_cpus : float or None
        CPUs' worth of time that the cgroup grants; None is no quota.
    reasons : tuple of str
        Why the budget is smaller than the machine, one sentence each.
    limits : CgroupLimits
        What the cgroups say; ``limits.num_throttled()`` reads the throttling counter again.
    """

    allowed: tuple[int, ...]
    cores: tuple[int, ...]
    fast_cores: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    quota_cpus: float | None
    reasons: tuple[str, ...]
    limits: CgroupLimits

    @property
    def num_concurrent(self) -> int:
        """Threads that can run at once: logical CPUs, or the quota rounded down, at least 1."""
        if self.quota_cpus is None:
            return len(self.allowed)
        return max(1, min(len(self.allowed), math.floor(self.quota_cpus)))


def read_cpu_budget(root: str | Path = "/", affinity: Iterable[int] | None = None) -> CpuBudget:
    """Read what this process may use.

    Parameters
    ----------
    root : path
        Where ``/proc`` and ``/sys`` are looked up; another folder in tests.
    affinity : iterable of int, optional
        The affinity mask; the process's own by default.

    Examples
    --------
    >>> read_cpu_budget().num_concurrent >= 1
    True
    """
    root = Path(root)
    reasons: list[str] = []
    limits = read_cgroup_limits(root)
    allowed = _allowed_cpus(root, affinity, limits, reasons)
    cores = _physical_cores(root, allowed, reasons)
    fast = _fast_cores(root, cores, reasons)
    if limits.quota_cpus is not None and limits.quota_cpus < len(allowed):
        reasons.append(f"cgroup quota of {limits.quota_cpus:g} CPUs for {len(allowed)} allowed ones")
    return CpuBudget(allowed, cores, fast, _nodes(root, fast), limits.quota_cpus, tuple(reasons), limits)


def suggest_num_threads(budget: CpuBudget, knee: int | None = None) -> tuple[int, tuple[str, ...]]:
    """How many workers to start, and the reason of every step down from the number of fast cores.

    Parameters
    ----------
    budget : CpuBudget
        What the process may use.
    knee : int, optional
        Threads beyond which the measured rate of the machine no longer grows.
    """
    count, reasons = len(budget.fast_cores), list(budget.reasons)
    count = min(count, budget.num_concurrent)
    if count > 2:
        count -= 1
        reasons.append("one core left for the thread that drives the workers")
    if knee is not None and 1 <= knee < count:
        count = knee
        reasons.append(f"memory is saturated by {knee} threads on this machine")
    num_nodes = len(budget.nodes)
    if num_nodes > 1 and count > num_nodes and count % num_nodes:
        count -= count % num_nodes
        reasons.append(f"the same number of workers for each of {num_nodes} NUMA nodes")
    return count, tuple(reasons)


def suggest_spin_us(budget: CpuBudget, num_threads: int, num_drivers: int = 1) -> float:
    """How long a thread without work may spin before it parks: 0 where not every thread has a CPU."""
    return DEFAULT_SPIN_US if num_threads + num_drivers <= budget.num_concurrent else 0.0


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPU numbers of a kernel list such as ``0-3,8,10-11``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _process_affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _allowed_cpus(
    root: Path, affinity: Iterable[int] | None, limits: CgroupLimits, reasons: list[str]
) -> tuple[int, ...]:
    mask = set(_process_affinity() if affinity is None else affinity)
    online = set(parse_cpu_list(_read(root / "sys/devices/system/cpu/online") or ""))
    if online - mask:
        reasons.append(f"affinity mask of {len(mask)} of {len(online)} CPUs")
    cpuset = set(parse_cpu_list(limits.cpuset or ""))
    if cpuset and mask - cpuset and mask & cpuset:
        reasons.append(f"cgroup cpuset {limits.cpuset} inside an affinity mask of {len(mask)} CPUs")
        mask &= cpuset
    return tuple(sorted(mask)) or (0,)


def _cpu(root: Path, cpu: int, name: str) -> str | None:
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}" / name)


def _physical_cores(root: Path, allowed: tuple[int, ...], reasons: list[str]) -> tuple[int, ...]:
    """The lowest allowed CPU of each core; a CPU whose siblings are unknown is its own core."""
    first_of_core: dict[tuple[int, ...], int] = {}
    for cpu in allowed:
        text = _cpu(root, cpu, "topology/core_cpus_list") or _cpu(root, cpu, "topology/thread_siblings_list")
        first_of_core.setdefault(parse_cpu_list(text or str(cpu)), cpu)
    cores = tuple(sorted(first_of_core.values()))
    if len(cores) < len(allowed):
        reasons.append(f"{len(allowed)} logical CPUs are {len(cores)} physical cores")
    return cores


def _fast_cores(root: Path, cores: tuple[int, ...], reasons: list[str]) -> tuple[int, ...]:
    """Cores that are no efficiency cores: by core type (x86), capacity (ARM) or highest clock."""
    efficient = set(parse_cpu_list(_read(root / "sys/devices/cpu_atom/cpus") or ""))
    if not efficient & set(cores):
        efficient = _slow_by(root, cores, "cpu_capacity") or _slow_by(root, cores, "cpufreq/cpuinfo_max_freq")
    fast = tuple(cpu for cpu in cores if cpu not in efficient)
    if not fast or len(fast) == len(cores):
        return cores
    reasons.append(f"{len(cores) - len(fast)} efficiency cores left out")
    return fast


def _slow_by(root: Path, cores: tuple[int, ...], name: str) -> set[int]:
    """Cores whose number in the file ``name`` is well below the best; none where a core has no such file."""
    texts = [_cpu(root, cpu, name) for cpu in cores]
    values = [int(text) for text in texts if text and text.isdigit()]
    if len(values) < len(cores):
        return set()
    return {cpu for cpu, value in zip(cores, values, strict=True) if value < EFFICIENCY_BELOW * max(values)}


def _nodes(root: Path, cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    lists = [_read(path) for path in sorted(root.glob("sys/devices/system/node/node[0-9]*/cpulist"))]
    members = [set(parse_cpu_list(text)) for text in lists if text]
    nodes = tuple(tuple(cpu for cpu in cores if cpu in member) for member in members)
    return tuple(node for node in nodes if node) or (cores,)
