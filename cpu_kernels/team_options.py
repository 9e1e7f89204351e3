"""How large a team is and how long its threads spin: "auto" becomes numbers, and bad values are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trilane.cpu_kernels.cpus import read_cpu_budget, suggest_num_threads, suggest_spin_us

WAIT_SPIN_FACTOR = 10  # who waits for a job spins longer than a worker: a job takes some 100 us
MAX_THREADS = 1024
MAX_NUMBER = 1e9  # an hour in us, years in s


@dataclass(frozen=True)
class TeamOptions:
    """Options of a team with every "auto" resolved; ``reasons`` says why there are no more threads."""

    num_threads: int
    spin_us: float
    wait_spin_us: float
    stall_timeout_s: float
    reasons: tuple[str, ...] = ()


def resolve_options(
    num_threads: Any, spin_us: Any, wait_spin_us: Any, stall_timeout_s: Any, num_others: int
) -> TeamOptions:
    """Check what a team was asked for and fill in what was left to it (see ``WorkerTeam``)."""
    reasons: tuple[str, ...] = ()
    budget = read_cpu_budget() if "auto" in (num_threads, spin_us) else None
    if num_threads == "auto" and budget:
        num_threads, reasons = suggest_num_threads(budget)
    count = _checked_count(num_threads)
    if spin_us == "auto" and budget:
        spin_us = suggest_spin_us(budget, count, num_others)
    spin = _checked_number("spin_us", spin_us, zero=True)
    wait_spin = WAIT_SPIN_FACTOR * spin if wait_spin_us == "auto" else wait_spin_us
    return TeamOptions(
        num_threads=count,
        spin_us=spin,
        wait_spin_us=_checked_number("wait_spin_us", wait_spin, zero=True),
        stall_timeout_s=_checked_number("stall_timeout_s", stall_timeout_s),
        reasons=reasons,
    )


def _checked_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_THREADS:
        raise ValueError(f"num_threads is {value!r}; it must be 1 to {MAX_THREADS}, or 'auto'")
    return value


def _checked_number(name: str, value: Any, zero: bool = False) -> float:
    """A positive number (or zero, if allowed) that is finite; the error names what it is."""
    if not isinstance(value, (int, float)) or not (value > 0 or zero and value == 0) or value > MAX_NUMBER:
        rule = "a number, at least 0" if zero else "a positive number"
        raise ValueError(f"{name} is {value!r}; it must be {rule}")
    return float(value)
