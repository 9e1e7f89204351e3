"""What the machine is: the facts that a figure means nothing without. Unknown is None, never a guess.

Reads files of the system and asks llvmlite for the CPU's features; measures nothing and starts no process.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
import psutil

from trilane.cpu_kernels.cgroups import read_memory_limit
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.isa import best_isa

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Machine:
    """Facts about a machine.

    Attributes
    ----------
    cpu : str or None
        The model's name.
    num_cpus, num_allowed : int
        Logical CPUs there are, and threads of this process that can run at once.
    isa : str
        The best instruction set that the kernels have for it.
    cache_nbytes : int or None
        The largest cache that one CPU sees.
    memory_nbytes, available_nbytes : int
        Main memory in all, and what could be had when this was read.
    memory_limit_nbytes : int or None
        What the control groups let this process use in all.
    num_numa_nodes : int or None
    huge_pages : str or None
        The system's setting for transparent huge pages: always, madvise or never.
    system, python, numba : str
    """

    cpu: str | None
    num_cpus: int
    num_allowed: int
    isa: str
    cache_nbytes: int | None
    memory_nbytes: int
    available_nbytes: int
    memory_limit_nbytes: int | None
    num_numa_nodes: int | None
    huge_pages: str | None
    system: str
    python: str
    numba: str

    @property
    def usable_memory_nbytes(self) -> int:
        """Memory in all that this process may use."""
        return min(self.memory_nbytes, self.memory_limit_nbytes or self.memory_nbytes)

    @property
    def line(self) -> str:
        """One line to print beside figures."""
        nodes = "" if self.num_numa_nodes is None else f", {self.num_numa_nodes} NUMA node(s)"
        cpus = f"{self.cpu or 'unknown CPU'}, {self.num_allowed} of {self.num_cpus} CPUs, {self.isa}"
        software = f"{self.system}, Python {self.python}, numba {self.numba}"
        return f"{cpus}, {self.memory_nbytes / 2**30:.0f} GiB{nodes}, {software}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field, and the line."""
        return {"line": self.line, **asdict(self)}


def describe_machine(root: Path = Path("/")) -> Machine:
    """Read the facts; ``root`` replaces "/" for the files of the system (tests pass a made-up one)."""
    memory = psutil.virtual_memory()
    return Machine(
        cpu=_cpu_model(root),
        num_cpus=os.cpu_count() or 1,
        num_allowed=read_cpu_budget(root).num_concurrent,
        isa=best_isa(),
        cache_nbytes=largest_cache_nbytes(root),
        memory_nbytes=memory.total,
        available_nbytes=available_nbytes(root),
        memory_limit_nbytes=read_memory_limit(root),
        num_numa_nodes=len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None,
        huge_pages=_huge_pages(root),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        numba=numba.__version__,
    )


def available_nbytes(root: Path = Path("/")) -> int:
    """Memory that this process can still get: what is free, or what its control groups leave it."""
    free, limit = psutil.virtual_memory().available, read_memory_limit(root)
    return free if limit is None else max(0, min(free, limit - psutil.Process().memory_info().rss))


def largest_cache_nbytes(root: Path = Path("/")) -> int | None:
    """Size of the largest cache of CPU 0."""
    sizes = [_size(path.read_text().strip()) for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size")]
    return max(sizes, default=0) or None


def _size(text: str) -> int:
    """``32768K`` -> bytes; what is no size counts as 0."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    return int(number) * _UNITS.get(unit, 1) if number.isdigit() else 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _cpu_model(root: Path) -> str | None:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "model name":
            return value.strip()
    return platform.processor() or None


def _huge_pages(root: Path) -> str | None:
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    _, _, rest = text.partition("[")
    return rest.partition("]")[0] or None
