"""A profile for people: tables of rates and costs, and pictures of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trilane.commands.console import print_table

if TYPE_CHECKING:
    from rich.console import Console

    from trilane.calibrate import Calibration
    from trilane.profile import Curve, MachineProfile

BAR_WIDTH = 40
COPY_WAYS = {
    "pinned_to_device": "pinned to GPU", "pinned_to_host": "GPU to pinned",
    "pageable_to_device": "pageable to GPU", "pageable_to_host": "GPU to pageable",
}  # fmt: skip


def print_calibration(console: Console, found: Calibration, saved: Path | None) -> None:
    """Tables and pictures of a profile, what is not in it, and where it is."""
    profile = found.profile
    for title, headings, rows in (
        _expert_table(profile), _copy_table(profile), _block_table(profile), _hit_table(profile), _cost_table(profile),
    ):  # fmt: skip
        if rows:
            print_table(console, headings, rows, left=headings[:1], title=title)
    for line in roofline(profile):
        console.print(line, markup=False)
    for name, reason in profile.skipped.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
    compiled = f", and {found.compile_s:.1f} s to compile, which is cached" if found.compile_s >= 0.1 else ""
    console.print(f"measured in {found.total_s:.1f} s{compiled}")
    if saved is not None:
        console.print(f"saved to {saved}", markup=False, soft_wrap=True)


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
    """Copies by size, each way that was measured, then reads in place by pieces in flight."""
    ways = [name for name in COPY_WAYS if getattr(profile, name) is not None]
    curves = [dict(zip(curve.x, curve.y, strict=True)) for name in ways if (curve := getattr(profile, name))]
    rows = [
        [f"copies of {size / 1024:.0f} KiB", *(_gb_s(rates.get(size)) for rates in curves)]
        for size in sorted({size for rates in curves for size in rates})
    ]
    headings = [COPY_WAYS[name] for name in ways] if profile.machine.gpu else ["GB/s"] * len(ways)
    if profile.zero_copy is not None:
        pieces = zip(profile.zero_copy.x, profile.zero_copy.y, strict=True)
        rest = [""] * (len(ways) - 1)
        rows += [[f"in place, {n:.0f} in flight", f"{gb_s:.1f}", *rest] for n, gb_s in pieces]
    return f"link{_link_state(profile)}, GB/s", ["", *(headings or ["GB/s"])], rows


def _link_state(profile: MachineProfile) -> str:
    """Width and generation while it copied, and the generation that it could have."""
    width, generation, most = profile.link_width, profile.link_generation, profile.machine.link_max_generation
    if width is None and generation is None:
        return ""
    lanes = "" if width is None else f" x{width:.0f}"
    speed = "" if generation is None else f" Gen{generation:.0f}"
    return f" while it copies:{lanes}{speed}" + ("" if most is None else f", at most Gen{most}")


def _block_table(profile: MachineProfile) -> tuple[str, list[str], list[list[str]]]:
    """Reads in place by pieces in flight and thread blocks of each."""
    counts = sorted({x for curve in profile.zero_copy_blocks.values() for x in curve.x})
    rows = [
        [f"{blocks} blocks a piece", *(f"{curve.at(n):.1f}" for n in counts)]
        for blocks, curve in profile.zero_copy_blocks.items()
    ]
    return "reads in place, GB/s", ["", *(f"{n:.0f} in flight" for n in counts)], rows


def _hit_table(profile: MachineProfile) -> tuple[str, list[str], list[list[str]]]:
    """Whole steps by resident experts."""
    curve = profile.hit_step_us
    points = [] if curve is None else zip(curve.x, curve.y, strict=True)
    rows = [[f"{n:.0f} expert{'s' if n > 1 else ''}, all in slots", f"{us:.1f}"] for n, us in points]
    return "whole steps, us", ["", "us"], rows


def _cost_table(profile: MachineProfile) -> tuple[str, list[str], list[list[str]]]:
    from trilane.profile import FIXED_COSTS

    names = {name: name.removesuffix("_us").replace("_", " ") for name in FIXED_COSTS}
    names |= {"round_trip_us": "round trip of a miss"}
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
