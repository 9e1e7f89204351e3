"""Options that commands share: sizes with units, and the machine whose times are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trilane.machines import ReplayMachine

MACHINE_HELP = (
    "A bundled machine (a wrong name lists them), 'this' for what trilane probe measured here, or the JSON file of a "
    "profile. Default: rtx3090-ddr4."
)
# What a value is, for usage lines: one word for each kind. Numbers of a unit are called by it.
N, NUMBER, PART, SIZE, GB_S, US = "N", "NUMBER", "PART", "SIZE", "GB/S", "US"
TEXT, NAME, FILE, FOLDER, FORMAT, DEVICE, MACHINE = "TEXT", "NAME", "FILE", "FOLDER", "FORMAT", "DEVICE", "MACHINE"
METAVARS = frozenset({N, NUMBER, PART, SIZE, GB_S, US, TEXT, NAME, FILE, FOLDER, FORMAT, DEVICE, MACHINE})

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


LEAST_MEMORY = 1 << 20  # bytes: who gives fewer of a whole memory, and no unit, forgot it


def size_option(option: str, text: str | None, *, of_memory: bool = True) -> int | None:
    """Bytes from a text such as "8GiB"; a wrong one is wrong usage.

    ``of_memory``: it says how large a memory is, where a small number without a unit can only be a slip.
    """
    from trilane.config import MAX_NBYTES, parse_nbytes

    if text is None:
        return None
    try:
        nbytes = parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text[:60]!r} {error}", param_hint=option) from None
    if of_memory and 0 < nbytes < LEAST_MEMORY and text.strip().isdigit():
        rule = f"is {nbytes} bytes, too few for a memory: write the unit, such as {nbytes}GiB"
        raise typer.BadParameter(f"{text!r} {rule}", param_hint=option)
    if nbytes > MAX_NBYTES:
        raise typer.BadParameter(
            f"{text[:60]!r} is more than any memory has: give a size such as 16GiB", param_hint=option
        )
    return nbytes


def device_option(name: str, devices: Sequence[str]) -> str:
    """The device's name, if it is one of those; else wrong usage."""
    if name not in devices:
        known = f"{', '.join(devices[:-1])} or {devices[-1]}"
        raise typer.BadParameter(f"{name[:60]!r} is no device to choose here: use {known}", param_hint="--device")
    return name


def check_sizes(format_name: str, **sizes: int) -> None:
    """Refuse sizes of an expert that its weight format cannot hold, as wrong usage."""
    from trilane.cpu_kernels.formats import format_of

    block = format_of(format_name).block_size
    for name, size in sizes.items():
        if size % block:
            rule = f"{size} must be a multiple of {block} for {format_name}: give {-(-size // block) * block}"
            raise typer.BadParameter(rule, param_hint=f"--{name}")


def machine_option(name: str | None, format_name: str | None = None, gap_us: float | None = None) -> ReplayMachine:
    """The machine that ``--machine`` names; the default one without a name.

    Raises
    ------
    ProfileError, OSError
        There is none of that name, its file is no profile, or this machine has not been measured.
    """
    from dataclasses import replace

    from trilane.machines import DEFAULT_MACHINE, THIS_MACHINE, load_machine

    if name == THIS_MACHINE:
        here = _this_machine(format_name)
        return here if gap_us is None else replace(here, gap_us=gap_us)
    return load_machine(DEFAULT_MACHINE if name is None else name, format_name=format_name, gap_us=gap_us)


def _this_machine(format_name: str | None) -> ReplayMachine:
    """The machine that we run on, by its saved profile."""
    from trilane.calibrate import this_machine
    from trilane.errors import ProfileError
    from trilane.machines import profile_machine
    from trilane.profile_cache import find_profile

    profile, found = find_profile(this_machine())
    if profile is None:
        raise ProfileError(f"machine 'this': {found}; run 'trilane probe' first, or name another machine")
    return profile_machine(profile, Path(found), format_name)
