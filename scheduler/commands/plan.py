"""``trilane plan``: whether a model fits into a machine's memory, how many slots it gets, and what speed to expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.numbers import whole
from trilane.commands.options import (
    FILE,
    FORMAT,
    MACHINE,
    MACHINE_HELP,
    SIZE,
    AsJson,
    N,
    machine_option,
    size_option,
)

if TYPE_CHECKING:
    from trilane.capacity import Capacity, HostMemory, Vram
    from trilane.expected_speed import Outlook, Routing
    from trilane.machines import ReplayMachine
    from trilane.model_sizes import ModelSizes

_SCHEMA = 1


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, a folder of a GGUF or safetensors model, a config.json, or 'tiny' for the model that "
            "comes with trilane.",
        ),
    ],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar=FORMAT,
            help="Weight format of the routed experts. Default: the files'; of config.json q4_k.",
        ),
    ] = None,
    context: Annotated[int, typer.Option(parser=whole(1, 8192), metavar=N, help="Tokens in the KV cache.")] = 8192,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar=SIZE,
            help="Device memory that is free, such as 24GiB. Default: --machine's, else what is free here.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar=SIZE, help="Host memory that is free, such as 64GiB. Default: what is free here."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(parser=whole(0, 8), metavar=N, help="Slots for so many experts a layer. Default: all that fit."),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            metavar=SIZE, help="Device memory to leave to others, such as 1GiB. Default: 512MiB, as schedulers do."
        ),
    ] = None,
    machine: Annotated[str | None, typer.Option(metavar=MACHINE, help=MACHINE_HELP)] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar=FILE, help="Routing trace of this model. Default: routing is assumed, and said to be."),
    ] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Also say what speed to expect.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say before anything is loaded whether a model fits, where its bytes go, how many slots it gets, and how fast.

    Exit code 1 if it does not fit.
    """
    from trilane.capacity import RESERVE_NBYTES, Capacity
    from trilane.commands.plan_tables import print_plan

    room, memory_size, left = size_option("--vram", vram), size_option("--ram", ram), size_option("--reserve", reserve)
    sizes = _sizes(model, format_name)
    where = machine_option(machine)
    routings = _routings(sizes, trace) if speed else []
    kept = RESERVE_NBYTES if left is None else left
    capacity = Capacity(sizes, _memory(memory_size), _vram(room, machine), context, kept, slots)
    outlook = _outlook(capacity, where, routings) if speed else None
    if as_json:
        typer.echo(json.dumps(_as_dict(capacity, outlook), indent=1))
    else:
        print_plan(capacity, outlook, by_default=machine is None)
    if capacity.shortages:
        raise typer.Exit(1)


def _sizes(model: Path, format_name: str | None) -> ModelSizes:
    from trilane.bundled_model import TINY, tiny_path
    from trilane.commands.console import checked
    from trilane.cpu_kernels.formats import format_of
    from trilane.find_sizes import read_sizes

    checked("--format", format_of, format_name)
    return read_sizes(tiny_path() if str(model) == TINY else model, format_name)


def _memory(nbytes: int | None) -> HostMemory:
    from trilane.capacity import HostMemory, memory_here

    return memory_here() if nbytes is None else HostMemory(nbytes, None, nbytes, "as --ram says")


def _vram(nbytes: int | None, machine: str | None) -> Vram:
    """What --vram says; a bundled machine's that is named; what is free here; the default machine's."""
    from trilane.capacity import Vram, vram_here, vram_of
    from trilane.machines import DEFAULT_MACHINE, bundled_machines

    if nbytes is not None:
        return Vram(nbytes, "as --vram says")
    if machine in bundled_machines():
        return vram_of(str(machine))
    here = vram_here()
    if here.free_nbytes is None and machine is None:
        there = vram_of(DEFAULT_MACHINE)
        return Vram(there.free_nbytes, f"{here.source}: {there.source}, the default of --machine")
    return here


def _routings(sizes: ModelSizes, trace: Path | None) -> list[Routing]:
    from trilane.expected_speed import routings_for
    from trilane.traces.trace_file import read_trace

    return routings_for(sizes, None if trace is None else read_trace(trace))


def _outlook(capacity: Capacity, machine: ReplayMachine, routings: list[Routing]) -> Outlook:
    from trilane.expected_speed import look_ahead, machine_for, slots_to_compare

    layout = capacity.sizes.moe_layers[0].layout
    where = machine if layout is None else machine_for(machine, layout.up.name)
    slots = slots_to_compare(capacity.num_shards, capacity.num_slots)
    return look_ahead(routings, where, slots, capacity.read_nbytes)


def _as_dict(capacity: Capacity, outlook: Outlook | None) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "fits": not capacity.shortages,
        "model": _model_dict(capacity.sizes),
        "memory": _memory_dict(capacity),
        "notes": list(capacity.notes),
        "shortages": [vars(shortage) for shortage in capacity.shortages],
        "speed": None if outlook is None else _speed_dict(capacity, outlook),
    }


def _model_dict(sizes: ModelSizes) -> dict[str, Any]:
    from trilane.model_sizes import formats_text

    layers = [
        {
            "layer": layer.number,
            "num_experts": layer.num_experts,
            "expert_nbytes": 0 if layer.layout is None else layer.layout.expert_nbytes,
            "formats": None if layer.layout is None else formats_text(layer.layout),
            "experts_nbytes": layer.experts_nbytes,
            "shared_nbytes": layer.shared_nbytes,
            "other_nbytes": layer.other_nbytes,
        }
        for layer in sizes.layers
    ]
    names = ("name", "architecture", "num_params", "num_active", "experts_per_token", "store_nbytes", "shared_nbytes")
    more = ("trunk_nbytes", "outside_nbytes", "lookup_nbytes", "unused_nbytes", "num_expert_weights")
    return {name: getattr(sizes, name) for name in (*names, *more)} | {"layers": layers}


def _memory_dict(capacity: Capacity) -> dict[str, Any]:
    names = ("context", "kv_nbytes", "prefill_nbytes", "reserve_nbytes", "room_nbytes", "slot_nbytes", "num_slots")
    found = {name: getattr(capacity, name) for name in (*names, "experts_a_layer")}
    return {"ram": vars(capacity.memory), "vram": vars(capacity.vram), **found}


def _speed_dict(capacity: Capacity, outlook: Outlook) -> dict[str, Any]:
    found = outlook.to_dict()
    for row in found["by_slots"]:
        row["experts_a_layer"] = row["num_slots"] / capacity.layer_slots
        row["vram_nbytes"] = capacity.vram_nbytes(row["num_slots"])
    return found
