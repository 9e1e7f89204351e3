"""The cost model's constants for each layer of a store, from the machine's profile and the rates that are played.

A lane can only act slower than it is: where a played rate is above what the machine reaches, the machine's counts.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from trilane.cost import Rates
from trilane.errors import ProfileError
from trilane.profile import MachineProfile, play
from trilane.store import StoreLayer

log = logging.getLogger("trilane")


def layer_formats(layer: StoreLayer) -> dict[str, float]:
    """The formats of a layer's experts and the bytes in each."""
    layout = layer.layout
    found: dict[str, float] = {}
    for fmt, rows, columns in (
        (layout.gate, layout.intermediate, layout.hidden),
        (layout.up, layout.intermediate, layout.hidden),
        (layout.down, layout.hidden, layout.intermediate),
    ):
        if fmt is not None:
            found[fmt.name] = found.get(fmt.name, 0.0) + rows * fmt.row_source_nbytes(columns)
    return found


def lacks_rates(profile: MachineProfile, runner: Any) -> str:
    """What a profile does not know of the runner's store or CPU lane, as a text that goes behind it; empty: nothing.

    A curve that was measured with other numbers of threads only says nothing of this team.
    """
    threads = runner.num_threads
    for index, layer in enumerate(runner.store.layers):
        names = layer_formats(layer)
        if not profile.knows(names):
            return f"has no rates for layer {index} in {', '.join(sorted(names))}"
        for name in sorted(names):
            counts = profile.cpu_experts[name].x
            if not counts[0] <= threads <= counts[-1]:
                return (
                    f"has the CPU lane's rates for {counts[0]:.0f} to {counts[-1]:.0f} threads, and there are {threads}"
                )
    return ""


def rates_of_layers(profile: MachineProfile, runner: Any) -> list[Rates]:
    """The cost model's constants for each layer of the runner's store.

    Raises
    ------
    ProfileError
        The profile has no rate for a layer's formats.
    """
    played, threads = runner.played.given(), runner.num_threads
    by_formats: dict[tuple, Rates] = {}  # layers of one kind share theirs
    rates = []
    for layer in runner.store.layers:
        key = (*sorted(layer_formats(layer).items()), int(layer.layout.shard_nbytes[0]))
        if key not in by_formats:
            own = layer_rates(profile, layer, threads)
            by_formats[key] = own
            if played:
                by_formats[key] = _no_faster(layer_rates(play(profile, **played), layer, threads), own)
        rates.append(by_formats[key])
    return rates


def layer_rates(profile: MachineProfile, layer: StoreLayer, threads: int) -> Rates:
    """The constants for one layer, with so many threads of the CPU lane."""
    formats = layer_formats(layer)
    if not profile.knows(formats):
        known = ", ".join(sorted(profile.cpu_experts)) or "none"
        raise ProfileError(
            f"the profile has no rates for experts in {'+'.join(formats)}, only for: {known}; measure the machine "
            "again with 'trilane probe'"
        )
    return profile.rates(formats, shard_nbytes=int(layer.layout.shard_nbytes[0]), threads=threads)


def _no_faster(played: Rates, own: Rates) -> Rates:
    """Played rates, but none above the machine's own where that is known."""
    changes = {}
    for name in ("hit_us_per_byte", "stream_us_per_byte", "cpu_us_per_byte"):
        chosen, reached = getattr(played, name), getattr(own, name)
        if chosen < reached < float("inf"):
            log.warning(
                "played %.1f GB/s for %s are more than this machine's %.1f: a lane can only act slower than it is",
                1e-3 / chosen, name.removesuffix("_us_per_byte"), 1e-3 / reached,
            )  # fmt: skip
            changes[name] = reached
    if np.isfinite(own.zero_copy_us_per_byte).all():
        size = max(own.zero_copy_us_per_byte.size, played.zero_copy_us_per_byte.size)
        curves = [
            np.pad(r.zero_copy_us_per_byte, (0, size - r.zero_copy_us_per_byte.size), "edge") for r in (played, own)
        ]
        changes["zero_copy_us_per_byte"] = np.maximum(*curves)
    return played._replace(**changes)
