"""The chart of ``trilane replay``: passes a second by slots, for policies and what they are judged by."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from trilane.config import Config
    from trilane.replay import Replay

PARTS = (0.05, 0.125, 0.25, 0.375, 0.5, 0.75)
SUFFIXES = (".png", ".svg", ".pdf")


def need_matplotlib(path: Path) -> None:
    """Refuse before anything runs what could not be drawn in the end.

    Raises
    ------
    typer.BadParameter
    """
    if path.suffix.lower() not in SUFFIXES:
        raise typer.BadParameter(f"{path} must end in one of {', '.join(SUFFIXES)}", param_hint="--chart")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: its folder does not exist", param_hint="--chart")
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is missing: pip install 'trilane[plot]'", param_hint="--chart")


def speeds_by_slots(
    whole: Replay, ready: Replay, configs: list[tuple[str, Config]]
) -> dict[str, list[tuple[float, float]]]:
    """(part of all experts in slots, passes a second) by name; a point that cannot be is left out."""
    from trilane.laboratory import run_references
    from trilane.policy import empty_state, policy_options

    found: dict[str, list[tuple[float, float]]] = {}
    for part in PARTS:
        slots = int(part * int(ready.geometry.first_shard[-1]))
        runs = [
            ready.run_state(name, empty_state(config, ready.geometry, slots), policy_options(config))
            for name, config in configs
        ]
        for result in [*runs, *run_references(whole, ready, slots)]:
            if result is not None and result.mean_us:
                found.setdefault(result.name, []).append((part, 1e6 / result.mean_us))
    return found


def draw_chart(path: Path, speeds: dict[str, list[tuple[float, float]]], title: str) -> None:
    """Draw the lines into a file, which is whole or not there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in speeds.items():
        parts, values = zip(*points, strict=True)
        axes.plot([100 * part for part in parts], values, marker="o", label=name)
    axes.set(xlabel="experts in slots, %", ylabel="passes a second (modelled)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(unfinished, dpi=150)
        os.replace(unfinished, path)
    except OSError as error:  # of the file that was asked for: nobody knows the other
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        unfinished.unlink(missing_ok=True)
