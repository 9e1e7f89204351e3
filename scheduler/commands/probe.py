"""``trilane probe``: calibrate this machine and its GPU, show what was measured, save the profiles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.options import DEVICE, FILE, AsJson, device_option
from trilane.devices import DEVICES

if TYPE_CHECKING:
    from trilane.calibrate import Calibration

HOST_S = 14.0  # for the host's passes where a GPU is measured, too
HOST_PART = 0.6  # of the bar

Report = Callable[[str, float], None]


def probe(
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a few seconds instead of half a minute.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar=FILE,
            help="File for the profile; a GPU's goes beside the host's. Default: one in the cache folder.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(metavar=DEVICE, help="auto, host or cuda; auto: the host, then the GPU if there is one."),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure this machine and save its profile, which schedulers plan from; that of its GPU, too."""
    names = _devices(device_option(device, DEVICES))
    targets = _targets(names, output)
    found: dict[str, Calibration] = {}
    saved: dict[str, Path | None] = {}
    reasons: dict[str, str] = {}
    with _progress() as report:
        for name in names:
            measured = _measure(name, names, quick, report)
            if isinstance(measured, str):
                reasons[name] = measured
            else:
                found[name], saved[name] = measured, _save(measured, targets[name])
    if as_json:
        typer.echo(json.dumps(_as_json(found, saved, reasons), indent=1))
    else:
        _print(found, saved, reasons)


def _devices(device: str) -> list[str]:
    """What to measure, in order; DeviceError where a GPU is asked for by name and there is none."""
    from trilane.cuda_errors import open_gpu
    from trilane.errors import DeviceError
    from trilane.gpu_kernels.driver import DriverMissing

    if device == "host":
        return ["host"]
    try:
        open_gpu().close()
    except DeviceError as error:
        if device == "cuda":
            raise
        if isinstance(error.__cause__, DriverMissing):
            return ["host"]
    return ["cuda"] if device == "cuda" else ["host", "cuda"]


def _targets(names: list[str], output: Path | None) -> dict[str, Path | None]:
    """The file of each profile; wrong ones are refused before time is spent."""
    from trilane.profile_cache import check_target

    if output is None:
        return dict.fromkeys(names)
    check_target(output)
    beside = output.with_name(f"{output.stem}-cuda{output.suffix}")
    targets = {name: output if name == names[0] else beside for name in names}
    for target in targets.values():
        check_target(target)
    return dict(targets)


def _measure(name: str, names: list[str], quick: bool, report: Report | None) -> Calibration | str:
    """One device's calibration; or why a GPU has none, where the host has one."""
    from trilane.calibrate import calibrate
    from trilane.errors import TrilaneError

    alone = len(names) == 1
    if name == "host":
        most_s = None if alone else HOST_S
        return calibrate(quick=quick, on_progress=_part(report, 0.0, 1.0 if alone else HOST_PART), most_s=most_s)
    from trilane.cuda_calibrate import calibrate_gpu

    try:
        return calibrate_gpu(quick=quick, on_progress=_part(report, 0.0 if alone else HOST_PART, 1.0))
    except TrilaneError as error:
        if alone:
            raise
        return str(error)


def _part(report: Report | None, begin: float, end: float) -> Report | None:
    """A report for a part of the bar."""
    return None if report is None else lambda title, part: report(title, begin + (end - begin) * part)


def _save(found: Calibration, target: Path | None) -> Path | None:
    """Save a profile; None where the cache folder cannot be written."""
    from trilane.profile_cache import save_profile

    try:
        return save_profile(found.profile, target)
    except OSError as error:
        if target is not None:
            raise
        typer.echo(f"The profile could not be saved ({error}): give a file that can be written by --output.", err=True)
        return None


@contextlib.contextmanager
def _progress() -> Iterator[Report | None]:
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


def _as_json(found: dict[str, Calibration], saved: dict[str, Path | None], reasons: dict[str, str]) -> dict[str, Any]:
    """The first device's figures at the top; those of a GPU that was measured after the host in "cuda"."""
    from trilane.probes.machine import describe_machine

    parts = {name: _part_json(part, saved[name]) for name, part in found.items()}
    parts |= {name: {"not_measured": reason} for name, reason in reasons.items()}
    first, *rest = parts
    return {"machine": describe_machine().as_dict(), **parts[first], **{name: parts[name] for name in rest}}


def _part_json(found: Calibration, saved: Path | None) -> dict[str, Any]:
    return {
        "seconds": {name: round(s, 3) for name, s in found.seconds.items()},
        "total_s": round(found.total_s, 3),
        "compile_s": round(found.compile_s, 3),
        "file": None if saved is None else str(saved),
        "profile": json.loads(found.profile.to_json()),
    }


def _print(found: dict[str, Calibration], saved: dict[str, Path | None], reasons: dict[str, str]) -> None:
    from trilane.commands.console import open_console
    from trilane.commands.probe_tables import print_calibration
    from trilane.probes.machine import describe_machine

    console = open_console()
    console.print(describe_machine().line)
    for name, part in found.items():
        if part.profile.machine.gpu is not None:
            console.print(f"\n{part.profile.machine.gpu}, driver {part.profile.machine.driver}", markup=False)
        print_calibration(console, part, saved[name])
    for name, reason in reasons.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
