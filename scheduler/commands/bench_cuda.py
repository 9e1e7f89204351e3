"""``trilane bench step --device cuda`` and ``trilane bench lanes``: steps on a GPU by misses, and lane by lane."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.console import checked, collected, open_console, print_table
from trilane.commands.numbers import number, whole
from trilane.commands.options import DEVICE, FILE, FORMAT, PART, AsJson, N, check_sizes, device_option

if TYPE_CHECKING:
    from trilane.cuda_step_bench import CudaStepRow
    from trilane.lane_bench import LaneRow
    from trilane.random_store import StepShape

NUM_LAYERS = 8
SLOTS = (0.25, 0.5, 1.0)


def gpu_name() -> str:
    """The GPU's name; DeviceError says why there is none."""
    from trilane.cuda_errors import device_errors
    from trilane.gpu_kernels.driver import CudaDriver

    with device_errors():
        driver = CudaDriver()
        try:
            return driver.describe()
        finally:
            driver.close()


def run_cuda_steps(
    shape: StepShape, layers: int, slots: Sequence[float] | None, misses: Sequence[int], repeats: int,
    profile: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure and print steps on a GPU."""
    from trilane.cuda_step_bench import measure_cuda_steps
    from trilane.random_store import random_store
    from trilane.step_bench import all_errors

    parts = list(slots or SLOTS)
    gpu, store = gpu_name(), random_store(shape, layers)
    found = measure_cuda_steps(store, shape, parts, misses=misses, repeats=repeats, profile=_read(profile))
    rows = collected(found, len(parts) * len(misses))
    median, p90 = all_errors(rows)
    if as_json:
        errors = {"median_error": _known(median), "p90_error": _known(p90)}
        _print_json(gpu, shape, layers, rows, errors)
        return
    _print_machine(gpu)
    print_table(open_console(), _STEP_COLUMNS, map(_step_cells, rows), left=LEFT)
    typer.echo(f"predicted against measured, all tokens: median error {median:.1%}, p90 {p90:.1%}")


def _read(path: Path | None) -> Any:
    """The profile in a file; a scheduler checks that it is this machine's."""
    from trilane.profile_cache import read_profile

    return None if path is None else read_profile(path)


def _known(value: float) -> float | None:
    return None if value != value else value


def _print_json(gpu: str | None, shape: StepShape, layers: int, rows: Sequence[Any], more: dict[str, Any]) -> None:
    from trilane.probes.machine import describe_machine

    machine = describe_machine().as_dict() | {"gpu": gpu}
    head = {"machine": machine, "shape": asdict(shape) | {"num_layers": layers}}
    typer.echo(json.dumps(head | {"rows": [row.to_dict() for row in rows]} | more, indent=1))


def _print_machine(gpu: str | None) -> None:
    from trilane.probes.machine import describe_machine

    typer.echo(describe_machine().line + (f", {gpu}" if gpu else ""))


LEFT = ("shards", "device", "memory", "lane")
_STEP_COLUMNS = (
    "slots",
    "hits",
    "misses",
    "p50 us",
    "p90 us",
    "p99 us",
    "predicted",
    "limit",
    "error",
    "p90 error",
    "shards",
)


def _us(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"


def _shards(lanes: dict[str, float]) -> str:
    return ", ".join(f"{name} {count:.1f}" for name, count in lanes.items() if count) or "-"


def _step_cells(row: CudaStepRow) -> list[str]:
    times = (row.p50_us, row.p90_us, row.p99_us, row.predicted_us, row.limit_us)
    return [
        f"{row.slots:.0%}", str(row.hits), str(row.misses), *map(_us, times), _percent(row.error),
        _percent(row.p90_error), _shards(row.lanes),
    ]  # fmt: skip


def bench_lanes(
    device: Annotated[
        str, typer.Option(metavar=DEVICE, help="host, cuda or both; both: the GPU's where there is one.")
    ] = "both",
    hits: Annotated[int, typer.Option(parser=whole(0, 4), metavar=N, help="Resident experts of a step.")] = 4,
    misses: Annotated[int, typer.Option(parser=whole(1, 4), metavar=N, help="Missing experts of a step.")] = 4,
    slots: Annotated[
        float,
        typer.Option(
            parser=number(0, 0.25, most=1), metavar=PART, help="Part of all experts that have slots, 0 to 1 (cuda)."
        ),
    ] = 0.25,
    hidden: Annotated[int, typer.Option(parser=whole(32, 2048), metavar=N, help="Hidden size.")] = 2048,
    intermediate: Annotated[
        int, typer.Option(parser=whole(32, 768), metavar=N, help="Intermediate size of an expert.")
    ] = 768,
    experts: Annotated[int, typer.Option(parser=whole(2, 32), metavar=N, help="Experts of the layer.")] = 32,
    layers: Annotated[int, typer.Option(parser=whole(1, 8), metavar=N, help="Layers of a graph (cuda).")] = NUM_LAYERS,
    format_name: Annotated[str, typer.Option("--format", "-f", metavar=FORMAT, help="Weight format.")] = "q4_k",
    repeats: Annotated[int, typer.Option(parser=whole(1, 40), metavar=N, help="Tokens of each kind.")] = 40,
    profile: Annotated[
        Path | None,
        typer.Option(metavar=FILE, exists=True, help="Profile that splits are made with. Default: measured."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure each lane alone and all together on the same misses; on a GPU also from memory that is not pinned."""
    from trilane.lane_bench import measure_cuda_lanes, measure_host_lanes, pinned_gains
    from trilane.random_store import StepShape, random_store

    device_option(device, ("host", "cuda", "both"))
    if hits + misses > experts // 2:
        most = f"give {experts // 2} hits and misses at most, or more --experts"
        rule = f"a step of {hits + misses} of {experts} experts: {most}"
        raise typer.BadParameter(rule, param_hint="--misses")
    shape = StepShape(hidden, intermediate, experts, hits + misses, _format(format_name).name)
    check_sizes(shape.format, hidden=hidden, intermediate=intermediate)
    gpu = gpu_name() if device == "cuda" else _gpu_if_any(device)
    given, rows = _read(profile), []
    if gpu is not None:
        store = random_store(shape, layers)
        measured = measure_cuda_lanes(store, hits, misses, slots=slots, repeats=repeats, profile=given)
        rows += collected(measured, 7)
    if device != "cuda":
        host = measure_host_lanes(random_store(shape), shape, misses, repeats=max(2, repeats), profile=given)
        rows += collected(host, 4)
    gains = pinned_gains(rows)
    if as_json:
        _print_json(gpu, shape, layers, rows, {"pageable_over_pinned": gains})
        return
    _print_machine(gpu)
    headings = ("device", "memory", "lane", "p50 us", "p90 us", "missed GB/s", "shards")
    print_table(open_console(), headings, map(_lane_cells, rows), left=LEFT)
    for lane, ratio in gains.items():
        typer.echo(f"{lane}: pageable takes {ratio:.2f} x pinned")


def _gpu_if_any(device: str) -> str | None:
    """The GPU's name where one is wanted; without one, why, on stderr."""
    from trilane.errors import DeviceError

    try:
        return gpu_name() if device == "both" else None
    except DeviceError as error:
        typer.echo(f"lanes of the host device only: {error}", err=True)
        return None


def _format(name: str) -> Any:
    from trilane.cpu_kernels.formats import format_of

    return checked("--format", format_of, name)


def _lane_cells(row: LaneRow) -> list[str]:
    return [
        row.device,
        row.memory,
        row.lane,
        _us(row.p50_us),
        _us(row.p90_us),
        _us(row.missed_gb_s),
        _shards(row.shards),
    ]
