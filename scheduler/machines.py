"""Machines that replay can act as: those of data/machines.csv, or any measured profile as JSON.

A row of the table becomes a `MachineProfile` whose lanes run side by side; what the table does not have (fixed costs
of a step, of hits, of in-place reads) counts 0. ``gap_us`` is the time between two MoE layers, in which the link idles.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from trilane.cost import Rates
from trilane.errors import ProfileError, did_you_mean
from trilane.profile import Curve, Machine, MachineProfile, load_profile

TABLE = "machines.csv"
DEFAULT_MACHINE = "rtx3090-ddr4"
THIS_MACHINE = "this"  # whose profile is that of the machine that replays
USUAL_FORMAT = "q4_k"  # whose rates of a profile are used where nothing is said
FORMAT = "any"  # a machine of the table has one rate for all weight formats
MAX_PROFILE_NBYTES = 1 << 22


@dataclass(frozen=True)
class ReplayMachine:
    """A machine to replay on.

    Attributes
    ----------
    name : str
    profile : MachineProfile
    gap_us : float
        Time between two MoE layers.
    format : str
        Name under which the profile has its expert rates.
    source : str
        Where its numbers come from.
    in_place_by_expert : bool
        Its in-place rates are by whole experts in flight, whatever their size.
    """

    name: str
    profile: MachineProfile
    gap_us: float
    format: str
    source: str
    in_place_by_expert: bool = False

    @property
    def resumes_fills(self) -> bool:
        """Whether a background fill goes on while steps run: the host device's gives way to each and is given up."""
        return bool(self.profile.machine.gpu)

    def rates(self, shard_nbytes: Sequence[int]) -> Rates:
        """The cost model's constants for experts of such shards."""
        profile = self.profile
        if self.in_place_by_expert:
            profile = replace(profile, zero_copy_nbytes=float(sum(shard_nbytes)))
        threads = int(profile.cpu_experts[self.format].x[-1])
        return profile.rates(self.format, shard_nbytes=int(shard_nbytes[0]), threads=threads)


def bundled_machines() -> dict[str, Mapping[str, str]]:
    """The rows of the bundled table by name."""
    text = (files("trilane") / "data" / TABLE).read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: row for row in rows}


def table_machine(name: str) -> ReplayMachine:
    """A machine of the table.

    Raises
    ------
    ProfileError
        The table does not have it.
    """
    rows = bundled_machines()
    if name not in rows:
        known = ", ".join(rows)
        others = f"'{THIS_MACHINE}', or a profile's file"
        raise ProfileError(f"machine {name!r}: unknown; use {known}, {others}.{did_you_mean(name, rows)}")
    row = rows[name]
    value = {column: float(text) for column, text in row.items() if column not in ("name", "source")}
    profile = MachineProfile(
        machine=Machine(gpu=name),
        pinned_to_device=Curve((1.0,), (value["dma_gb_s"],)),
        copy_fix_us=value["dma_fix_us"],
        zero_copy=Curve((1.0, 2.0, 8.0), (value["zc1_gb_s"], value["zc2_gb_s"], value["zc8_gb_s"])),
        cpu_experts={FORMAT: Curve((1.0,), (value["cpu_gb_s"],))},
        cpu_fix_us=value["cpu_fix_us"],
        device_experts={FORMAT: value["vram_gb_s"]},
        both_gb_s=value["both_gb_s"],
    )
    return ReplayMachine(name, profile, value["gap_us"], FORMAT, row["source"], in_place_by_expert=True)


def load_machine(name: str, *, format_name: str | None = None, gap_us: float | None = None) -> ReplayMachine:
    """A machine by its name in the table, or from the file of a profile.

    Parameters
    ----------
    name : str
    format_name : str, optional
        Weight format whose rates of a profile are used; None: Q4_K, or else the first that it has.
    gap_us : float, optional
        Instead of the machine's own; a profile has none, so there it is 0.

    Raises
    ------
    ProfileError, OSError
    """
    path = Path(name)
    if path.suffix == ".json" or (path.is_file() and name not in bundled_machines()):
        machine = _file_machine(path, format_name)
    elif format_name is not None:
        raise ProfileError(f"machine {name!r}: it has one rate for all formats; leave out --format")
    else:
        machine = table_machine(name)
    return machine if gap_us is None else replace(machine, gap_us=gap_us)


def _file_machine(path: Path, format_name: str | None) -> ReplayMachine:
    if path.stat().st_size > MAX_PROFILE_NBYTES:
        raise ProfileError(f"{path}: {path.stat().st_size} bytes are no machine profile")
    try:
        profile = load_profile(path.read_text(errors="replace"))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
    return profile_machine(profile, path, format_name)


def profile_machine(profile: MachineProfile, path: Path, format_name: str | None = None) -> ReplayMachine:
    """A measured profile, which is the one of ``path``, as a machine to replay on; see `load_machine`."""
    formats = [name for name in profile.cpu_experts if name in profile.device_experts]
    if not formats:
        raise ProfileError(f"{path}: the profile has no weight format with rates of both CPU and device")
    chosen = (USUAL_FORMAT if USUAL_FORMAT in formats else formats[0]) if format_name is None else format_name
    if chosen not in formats:
        raise ProfileError(f"{path}: the profile has no rates of {chosen!r}; it has {', '.join(formats)}")
    return ReplayMachine(path.stem, profile, 0.0, chosen, f"measured profile, rates of {chosen} (see --format)")
