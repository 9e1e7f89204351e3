"""``trilane probe``: calibrate this machine, show what was measured, save the profile."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from trilane.calibrate import Calibration
    from trilane.profile import Curve, MachineProfile

BAR_WIDTH = 40


def probe(
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds instead of half a minute.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the profile here instead of in the cache folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure this machine and save its profile, which schedulers plan from."""
    from trilane.calibrate import calibrate
    from trilane.profile_cache import check_target, save_profile

    if output is not None:
        check_target(output)  # before the time is spent
    with _progress() as report:
        found = calibrate(quick=quick, on_progress=report)
    try:
        saved: Path | None = save_profile(found.profile, output)
    except OSError as error:
        if output is not None:
            raise
        saved = None
        typer.echo(f"The profile could not be saved ({error}): give a file that can be written by --output.", err=True)
    if as_json:
        typer.echo(json.dumps(_as_json(found, saved), indent=1))
    else:
        _print(found, saved)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None] | None]:
    """A progress bar on a terminal's stderr; nothing elsewhere."""
    from trilane.commands.console import open_console

    console = open_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=1.0)
        yield lambda title, part: bar.update(task, description=title, completed=part)


def _as_json(found: Calibration, saved: Path | None) -> dict[str, Any]:
    from trilane.probes.machine import describe_machine

    return {
        "machine": describe_machine().as_dict(),
        "seconds": {name: round(s, 3) for name, s in found.seconds.items()},
        "total_s": round(found.total_s, 3),
        "compile_s": round(found.compile_s, 3),
        "file": None if saved is None else str(saved),
        "profile": json.loads(found.profile.to_json()),
    }


# ------------------------------------------------------------------------------------------- for people
def _print(found: Calibration, saved: Path | None) -> None:
    from trilane.commands.console import open_console
    from trilane.probes.machine import describe_machine

    console, profile = open_console(), found.profile
    console.print(describe_machine().line)
    for title, headings, rows in (_expert_table(profile), _copy_table(profile), _cost_table(profile)):
        _print_table(console, title, headings, rows)
    for line in roofline(profile):
        console.print(line, markup=False)
    for name, reason in profile.skipped.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
    compiled = f", and {found.compile_s:.1f} s to compile, which is cached" if found.compile_s >= 0.1 else ""
    console.print(f"measured in {found.total_s:.1f} s{compiled}")
    if saved is not None:
        console.print(f"saved to {saved}", markup=False, soft_wrap=True)


def _print_table(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE if console.is_terminal else None)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _expert_table(profile: MachineProfile) -> tuple[str, list[str], list[list[str]]]:
    """Experts by format: the CPU lane by threads, its knee, and the single threads of the other lanes."""
    counts = sorted({x for curve in profile.cpu_experts.values() for x in curve.x})
    headings = ["format", *(f"{n:.0f} thread{'s' if n > 1 else ''}" for n in counts), "knee", "hit", "in place"]
    rows = []
    for name, curve in profile.cpu_experts.items():
        by_threads = dict(zip(curve.x, curve.y, strict=True))
        cells = [f"{by_threads[n]:.1f}" if n in by_threads else "-" for n in counts]
        in_place = profile.zero_copy_experts.get(name)
        hit = profile.device_experts.get(name)
        rows.append([name, *cells, f"{curve.knee():.0f}", _gb_s(hit), _gb_s(in_place.at(1) if in_place else None)])
    return "experts, GB/s", headings, rows


def _copy_table(profile: MachineProfile) -> tuple[str, list[str], list[list[str]]]:
    rows = []
    if profile.pinned_to_device is not None:
        sizes = zip(profile.pinned_to_device.x, profile.pinned_to_device.y, strict=True)
        rows += [[f"copies of {size / 1024:.0f} KiB", f"{gb_s:.1f}"] for size, gb_s in sizes]
    if profile.zero_copy is not None:
        pieces = zip(profile.zero_copy.x, profile.zero_copy.y, strict=True)
        rows += [[f"in place, {n:.0f} in flight", f"{gb_s:.1f}"] for n, gb_s in pieces]
    return "link, GB/s", ["", "GB/s"], rows


def _cost_table(profile: MachineProfile) -> tuple[str, list[str], list[list[str]]]:
    from trilane.profile import FIXED_COSTS

    names = {name: name.removesuffix("_us").replace("_", " ") for name in FIXED_COSTS}
    names |= {"handover_us": "hand-over, worker spins", "parked_us": "hand-over, worker sleeps"}
    values = {title: getattr(profile, name) for name, title in names.items()}
    return "fixed costs, us", ["", "us"], [[title, f"{us:.1f}"] for title, us in values.items() if us is not None]


def _gb_s(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def roofline(profile: MachineProfile) -> list[str]:
    """Bars of text: the CPU lane by threads against what memory gives, then lanes alone and together."""
    lines: list[str] = []
    base = next(iter(sorted(profile.cpu_experts, key=lambda name: name != "q4_k")), None)
    if base is not None and profile.host_read is not None:
        lines += _threads_picture(base, profile.cpu_experts[base], profile.host_read)
    if profile.together_gb_s:
        lines += _lanes_picture(profile.alone_gb_s, profile.together_gb_s)
    return lines


def _threads_picture(name: str, experts: Curve, read: Curve) -> list[str]:
    most = max(*experts.y, *read.y)
    lines = [f"{name} experts (#) against reading alone (.), GB/s"]
    for n in sorted({*experts.x, *read.x}):
        rate, limit = experts.at(n) if n <= experts.x[-1] else None, read.at(n)
        bar = _bar(rate or 0.0, limit, most)
        share = "" if rate is None else f"{rate:6.1f} of {limit:6.1f}  {rate / limit:4.0%}"
        lines.append(f"{n:4.0f} thread{'s' if n > 1 else ' '} |{bar}| {share or f'          {limit:6.1f}'}")
    return lines


def _lanes_picture(alone: Mapping[str, float], together: Mapping[str, float]) -> list[str]:
    most = max(alone.values())
    lines = ["lanes all together (#) against each alone (.), GB/s"]
    for lane, gb_s in alone.items():
        bar = _bar(together[lane], gb_s, most)
        lines.append(
            f"{lane.replace('_', '-'):>11s} |{bar}| {together[lane]:6.1f} of {gb_s:6.1f}  {together[lane] / gb_s:4.0%}"
        )
    return lines


def _bar(value: float, limit: float, most: float) -> str:
    filled = min(BAR_WIDTH, round(BAR_WIDTH * value / most))
    dotted = max(0, min(BAR_WIDTH, round(BAR_WIDTH * limit / most)) - filled)
    return ("#" * filled + "." * dotted).ljust(BAR_WIDTH)
