"""``trilane replay``: what policies would have done with a trace on some machine, or whether a recording verifies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.console import open_console
from trilane.commands.model_options import Vram
from trilane.commands.numbers import number, whole
from trilane.commands.options import (
    FILE,
    FORMAT,
    MACHINE,
    MACHINE_HELP,
    SIZE,
    US,
    AsJson,
    N,
    machine_option,
    size_option,
)

if TYPE_CHECKING:
    from trilane.config import Config
    from trilane.machines import ReplayMachine
    from trilane.replay import Replay, ReplayResult
    from trilane.traces.trace import Trace

_SCHEMA = 1
_MB = 1e6


def replay(
    file: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="A trace file or .npz. Default: the bundled conversation.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            parser=whole(0, 8), metavar=N, help="Slots for so many experts a layer. Default: what the policy says."
        ),
    ] = None,
    slots_total: Annotated[
        int | None,
        typer.Option(
            parser=whole(0, 192), metavar=N, help="Slots for so many experts in all. Default: what the policy says."
        ),
    ] = None,
    vram: Vram = None,
    machine: Annotated[str | None, typer.Option(metavar=MACHINE, help=MACHINE_HELP)] = None,
    policies: Annotated[
        list[Path] | None,
        typer.Option("--policy", metavar=FILE, help="Configuration file; repeat it to compare. Default: no file."),
    ] = None,
    expert_bytes: Annotated[
        str | None,
        typer.Option(metavar=SIZE, help="Bytes of an expert, such as 13.2MB. Default: what the trace says."),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, 3),
            metavar=N,
            help="Shards of an expert, each placed by itself. Default: what the trace says.",
        ),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar=FORMAT,
            help="Weight format whose rates of a profile are used. Default: q4_k, or else the profile's first.",
        ),
    ] = None,
    gap_us: Annotated[
        float | None,
        typer.Option(parser=number(0, 60), metavar=US, help="Time between two MoE layers, us. Default: the machine's."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(parser=whole(1, 1000), metavar=N, help="Passes over the layers, the trace's first. Default: all."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, 4), metavar=N, help="Streams that tokens are put side by side in. Default: as recorded."
        ),
    ] = None,
    single_lanes: Annotated[
        bool, typer.Option("--single-lanes/--no-single-lanes", help="Also replay with each lane alone.")
    ] = True,
    references: Annotated[
        bool,
        typer.Option(
            "--references", help="Also replay a fixed rule, a static hot list, and one that knows the future."
        ),
    ] = False,
    more_vram: Annotated[
        str | None,
        typer.Option(metavar=SIZE, help="Bytes of slots more, such as 4GiB, to say what they bring. Default: none."),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar=FILE,
            help="File to draw speed by slots into: .png, .svg or .pdf (needs the extra 'plot'). Default: none.",
        ),
    ] = None,
    verify_plans: Annotated[
        bool, typer.Option("--verify", help="Check only that a recorded run's plans come out the same.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay a routing trace through the live decision code, with the times of a machine of your choice.

    Exit code 1 if --verify finds a plan that differs.
    """
    from trilane.commands.replay_chart import draw_chart, need_matplotlib, speeds_by_slots
    from trilane.errors import TraceError
    from trilane.laboratory import run_references
    from trilane.replay import Replay
    from trilane.traces.trace import STEP

    if chart is not None:
        need_matplotlib(chart)

    if sum(value is not None for value in (slots, slots_total, vram)) > 1:
        raise typer.BadParameter("give one of --slots, --slots-total and --vram", param_hint="--slots")
    room, more = size_option("--vram", vram), size_option("--more-vram", more_vram)
    nbytes, configs = size_option("--expert-bytes", expert_bytes, of_memory=False), _configs(policies or [])
    trace = _load(file, tokens, batch)
    if verify_plans:
        _verify(trace, as_json)
        return
    if not (trace.kind == STEP).any():
        raise TraceError(f"{file or 'the trace'}: it holds no whole layer-step: there is nothing to replay")
    where = machine_option(machine, format_name, gap_us)
    ready = Replay(trace, where, expert_nbytes=nbytes, num_shards=shards)
    if room is not None and 0 < room < ready.geometry.shard_nbytes.max():
        rule = f"not one slot of {ready.geometry.shard_nbytes.max()} bytes fits; give a size such as 8GiB"
        raise typer.BadParameter(f"{vram!r} is {room} bytes: {rule}", param_hint="--vram")
    size = {"per_layer": slots, "total": slots_total, "nbytes": room}
    _tell_cut(ready, size, {"--slots": slots, "--slots-total": slots_total, "--vram": vram})
    with _progress(trace.num_events * len(configs) * (4 if single_lanes else 1)) as advance:
        results = [
            ready.run(name, config, ready.slots_for(config, **size), single_lanes=single_lanes, progress=advance)
            for name, config in configs
        ]
    whole = Replay(trace, where, expert_nbytes=nbytes, num_shards=1) if references or chart else ready
    if references:
        results += run_references(whole, ready, results[0].num_slots)
    gains = [] if more is None else _what_if(ready, configs, results, more)
    if chart is not None:
        draw_chart(chart, speeds_by_slots(whole, ready, configs), f"{where.name}, {trace.meta.model or 'trace'}")
    if as_json:
        typer.echo(json.dumps(_as_dict(trace, ready, where, results) | {"more_vram": gains}, indent=1))
        return
    _print_results(trace, ready, where, results, by_default=machine is None)
    for gain in gains:
        typer.echo(
            f"{gain['name']}: {more_vram} more VRAM ({gain['num_slots']:,} slots) buys {gain['passes_a_second']:,.1f} "
            f"passes a second instead of {gain['passes_a_second_now']:,.1f}: {gain['gain']:+.1%}"
        )


def _what_if(
    ready: Replay, configs: list[tuple[str, Config]], results: list[ReplayResult], more: int
) -> list[dict[str, Any]]:
    """The same policies with so many bytes of slots more."""
    gains = []
    for (name, config), now in zip(configs, results, strict=False):
        slots = ready.slots_for(config, per_layer=None, total=None, nbytes=now.num_slots * _slot_nbytes(ready) + more)
        then = ready.run(name, config, slots, single_lanes=False)
        speeds = {"passes_a_second": 1e6 / then.mean_us, "passes_a_second_now": 1e6 / now.mean_us}
        gain = now.mean_us / then.mean_us - 1
        gains.append({"name": name, "nbytes": more, "num_slots": then.num_slots, **speeds, "gain": gain})
    return gains


def _slot_nbytes(ready: Replay) -> int:
    return int(ready.geometry.shard_nbytes.max())


def _tell_cut(ready: Replay, size: dict[str, int | None], said: dict[str, int | str | None]) -> None:
    """Say it where an option asks for more slots than there are shards."""
    from trilane.capacity import cut_text
    from trilane.config import Config

    option, value = next(((name, value) for name, value in said.items() if value is not None), ("", None))
    if value is None or ready.asked_slots(Config(), **size) <= ready.most_slots:
        return
    typer.echo(f"trilane: {cut_text(option, value, ready.meta.num_experts)}", err=True)


def _load(file: Path | None, tokens: int | None, batch: int | None) -> Trace:
    from trilane.traces.trace import as_batches
    from trilane.traces.trace_file import read_trace
    from trilane.traces.trace_import import bundled_trace

    trace = bundled_trace() if file is None else read_trace(file)
    if tokens is not None:
        trace = trace.first_passes(tokens)
    return trace if batch is None else as_batches(trace, batch)


def _configs(policies: list[Path]) -> list[tuple[str, Config]]:
    """The configurations to compare by the names of their files: files alone, whatever the environment says."""
    from trilane.config import Config
    from trilane.errors import ConfigError, Problem
    from trilane.settings.effective_config import load_config

    if not policies:
        return [("default", Config())]
    names = [path.stem for path in policies]
    unique = names if len(set(names)) == len(names) else [str(path) for path in policies]
    loaded: list[Config] = []
    problems: list[Problem] = []
    for path in policies:
        try:
            loaded.append(load_config(path, environment={}).config)
        except ConfigError as error:  # all of them are told at once
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return list(zip(unique, loaded, strict=True))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal's stderr."""
    console = open_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling, then replaying", total=total)
        yield lambda done: progress.advance(task, done)


def _verify(trace: Trace, as_json: bool) -> None:
    from trilane.errors import TraceError
    from trilane.verify import verify

    found = verify(trace)
    if not found.plans:
        raise TraceError("the trace holds no plan, so there is nothing to verify: record a run that does steps")
    if as_json:
        values = {"baselines": found.baselines, "plans": found.plans, "differences": found.differences}
        typer.echo(json.dumps({"schema": _SCHEMA, **values}, indent=1))
    elif found.differences:
        typer.echo(f"{found.plans:,} plans compared; the first difference: " + "; ".join(found.differences))
    else:
        typer.echo(f"{found.plans:,} plans compared in {found.baselines} stretches: all are identical")
    if found.differences:
        raise typer.Exit(1)


def _as_dict(trace: Trace, ready: Replay, machine: ReplayMachine, results: list[ReplayResult]) -> dict[str, Any]:
    meta, sizes = trace.meta, ready.geometry.shard_nbytes
    return {
        "schema": _SCHEMA,
        "trace": {
            "model": meta.model,
            "layers": meta.num_layers,
            "num_experts": list(meta.num_experts),
            "expert_nbytes": sizes.sum(axis=1).tolist(),
            "num_shards": ready.geometry.num_shards.tolist(),
        },
        "machine": {"name": machine.name, "gap_us": machine.gap_us, "source": machine.source},
        "policies": [result.to_dict() for result in results],
    }


def _print_results(
    trace: Trace, ready: Replay, machine: ReplayMachine, results: list[ReplayResult], *, by_default: bool
) -> None:
    from rich import box
    from rich.table import Table

    geometry, console = ready.geometry, open_console()
    nbytes, shards = int(geometry.shard_nbytes[0].sum()), int(geometry.num_shards[0])
    model, passes = trace.meta.model or "not named", results[0].passes
    console.print(f"trace:   {model}, {geometry.num_layers} layers, {passes:,} passes")
    console.print(f"experts: {nbytes / _MB:.2f} MB in {shards} shards (layer 0)")
    name = f"{machine.name} (the default; see --machine)" if by_default else machine.name
    console.print(f"machine: {name}, {machine.gap_us:g} us between layers; {machine.source}")
    console.print("times are modelled: the machine's rates, no measurement", style="dim")
    table = Table(box=box.SIMPLE if console.is_terminal else None)
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    columns = [_column(result, shards) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "-") for column in columns))  # references have no single lanes
    console.print(table)


def _column(result: ReplayResult, shards: int) -> dict[str, str]:
    """One policy's figures by name."""
    routed = sum(lane.nbytes for lane in result.lanes.values()) or 1
    column = {
        "slots, experts": f"{result.num_slots / shards:,.0f}",
        "hit rate": "-" if result.hit_rate is None else f"{result.hit_rate:.2%}",
        "us a pass, mean": f"{result.mean_us:,.0f}",
        "  p50": f"{result.quantile_us(0.5):,.0f}",
        "  p99": f"{result.quantile_us(0.99):,.0f}",
        "  in MoE layers": f"{result.moe_us:,.0f}",
        "passes a second": f"{1e6 / result.mean_us:,.1f}" if result.mean_us else "-",
    }
    best = result.best_single_lane
    for lane, us in result.single_lane_us.items():
        column[f"{lane} alone, us"] = f"{us:,.0f}"
    if best is not None:
        ratio = result.mean_us / result.single_lane_us[best]
        column["against best single lane"] = f"{ratio:.3f} x {best}"
    for name, share in result.lanes.items():
        column[f"{name}: experts, bytes"] = f"{share.experts:,}, {share.nbytes / routed:.1%}"
    return column | {
        "fills, shards": f"{result.fills:,}",
        "background fills": f"{result.background_fills:,}",
        "evictions, shards": f"{result.evictions:,}",
    }
