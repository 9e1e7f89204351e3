"""``trilane bench``: measure this machine with the product's own code and print a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.bench_cuda import bench_lanes, run_cuda_steps
from trilane.commands.console import checked, collected, open_console, print_table
from trilane.commands.numbers import number, whole
from trilane.commands.options import DEVICE, FILE, FORMAT, GB_S, NAME, PART, US, AsJson, N, check_sizes, device_option

if TYPE_CHECKING:
    from trilane.probes.cpu_experts import ExpertRate
    from trilane.step_bench import StepRow

bench_app = typer.Typer(no_args_is_help=True, help="Measure kernels, steps and lanes on this machine.")

bench_app.command("lanes")(bench_lanes)


@bench_app.callback()
def _bench() -> None:
    """Commands that measure."""


@bench_app.command("cpu")
def bench_cpu(
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", "-f", metavar=FORMAT, help="Weight format; repeat it. Default: all."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            "--threads",
            "-t",
            parser=whole(1, 2),
            metavar=N,
            help="Number of threads; repeat it. Default: 1 and all.",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            "-s",
            metavar="ROWSxCOLUMNS",
            help="Shape of a matrix; repeat it. Default: those of an expert and a shard.",
        ),
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(metavar=NAME, help="Instruction set: avx512, avx2 or portable. Default: the best."),
    ] = None,
    ggml: Annotated[
        Path | None,
        typer.Option(
            metavar=FILE,
            exists=True,
            help="ggml's CPU library or its folder, to compare with. Default: the extra's, if it is there.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the CPU kernels against what memory can deliver, and against ggml where it is found."""
    from trilane.probes.cpu_experts import SHAPES, measure_cpu_experts
    from trilane.probes.ggml import find_ggml
    from trilane.probes.machine import describe_machine

    machine = describe_machine()
    names = _formats(formats)
    pairs = [_shape(text) for text in shapes] if shapes else list(SHAPES)
    counts = _threads(threads, machine.num_allowed)
    kernel_isa = checked("--isa", _isa, isa)
    library = find_ggml(ggml)
    if ggml is not None and library is None:
        raise typer.BadParameter(f"{ggml} holds no libggml-cpu that can be loaded", param_hint="--ggml")
    rates = measure_cpu_experts(names, counts, shapes=pairs, isa=kernel_isa, ggml=library)
    found = collected(
        rates, len(names) * len(pairs) * len(counts), lambda rate: f": {rate.format} {rate.gb_s:.1f} GB/s"
    )
    if as_json:
        typer.echo(json.dumps({"machine": machine.as_dict(), "rows": [_row(rate) for rate in found]}, indent=1))
    else:
        _print_rates(found, machine.line)
    _warn(found, library is not None)


def _isa(name: str) -> str:
    from trilane.cpu_kernels.isa import check_isa

    return check_isa(name)


def _formats(names: Sequence[str] | None) -> list[str]:
    from trilane.cpu_kernels.formats import FORMATS, format_of

    return [fmt.name for name in names or FORMATS if (fmt := checked("--format", format_of, name))]


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    if not (rows.isdigit() and columns.isdigit() and int(rows) >= 4 and int(columns) % 32 == 0 < int(columns)):
        raise typer.BadParameter(
            f"{text!r} is no shape: it must be ROWSxCOLUMNS, such as 768x2048, with 4 rows or more and a "
            "multiple of 32 columns",
            param_hint="--shape",
        )
    return int(rows), int(columns)


def _threads(counts: Sequence[int] | None, num_allowed: int) -> list[int]:
    chosen = sorted(set(counts or (1, num_allowed)))
    if chosen[-1] > num_allowed:
        raise typer.BadParameter(
            f"{chosen[-1]} threads are more than the {num_allowed} that this process can run at once: "
            "spinning threads that share a core measure the scheduler",
            param_hint="--threads",
        )
    return chosen


def _row(rate: ExpertRate) -> dict[str, Any]:
    return {
        "format": rate.format,
        "shape": "x".join(map(str, rate.shape)),
        "threads": rate.num_threads,
        "gb_s": round(rate.gb_s, 3),
        "limit_gb_s": round(rate.limit_gb_s, 3),
        "ratio": round(rate.ratio, 4),
        "ggml_gb_s": None if rate.ggml_gb_s is None else round(rate.ggml_gb_s, 3),
    }


def _print_rates(rates: Sequence[ExpertRate], machine_line: str) -> None:
    headings = ("format", "shape", "threads", "GB/s", "limit", "ratio", "ggml", "x ggml")
    console = open_console()
    console.print(machine_line)
    print_table(console, headings, map(_rate_cells, rates), left=("format",))


def _rate_cells(rate: ExpertRate) -> list[str]:
    row, theirs = _row(rate), rate.ggml_gb_s
    speeds = (f"{rate.gb_s:.1f}", f"{rate.limit_gb_s:.1f}", f"{rate.ratio:.2f}")
    compared = ("-", "-") if theirs is None else (f"{theirs:.1f}", f"{rate.gb_s / theirs:.2f}")
    return [row["format"], row["shape"], str(row["threads"]), *speeds, *compared]


def _warn(rates: Sequence[ExpertRate], has_ggml: bool) -> None:
    num_disturbed = sum(rate.disturbed for rate in rates)
    if num_disturbed:
        typer.echo(f"{num_disturbed} rows are estimates: the machine was busy with other things.", err=True)
    if not has_ggml:
        typer.echo("ggml was not found: pip install 'trilane[bench]', or give its library by --ggml.", err=True)


@bench_app.command("step")
def bench_step(
    misses: Annotated[
        list[int] | None,
        typer.Option(
            "--misses",
            "-m",
            parser=whole(0, 2),
            metavar=N,
            help="Missing experts of a step; repeat it. Default: 0 to --top-k.",
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(parser=whole(32, 2048), metavar=N, help="Hidden size.")] = 2048,
    intermediate: Annotated[
        int, typer.Option(parser=whole(32, 768), metavar=N, help="Intermediate size of an expert.")
    ] = 768,
    experts: Annotated[int, typer.Option(parser=whole(2, 32), metavar=N, help="Experts of the layer.")] = 32,
    top_k: Annotated[int, typer.Option(parser=whole(1, 8), metavar=N, help="Experts of a token.")] = 8,
    format_name: Annotated[str, typer.Option("--format", "-f", metavar=FORMAT, help="Weight format.")] = "q4_k",
    played: Annotated[
        bool, typer.Option("--played", help="Play three links, a device and a CPU lane that this machine can hold.")
    ] = False,
    link_gb_s: Annotated[
        list[float] | None,
        typer.Option(
            "--link-gb-s",
            parser=number(0, 25, above=True),
            metavar=GB_S,
            help="Speed of a link that is played, GB/s; repeat it to compare. Default: the machine's own.",
        ),
    ] = None,
    link_fix_us: Annotated[
        float,
        typer.Option(
            parser=number(0, 10), metavar=US, help="Time of each copy over a played link beside its bytes, us."
        ),
    ] = 10.0,
    hit_gb_s: Annotated[
        float | None,
        typer.Option(
            parser=number(0, 800, above=True),
            metavar=GB_S,
            help="Speed of a device that is played, GB/s. Default: the machine's own.",
        ),
    ] = None,
    cpu_gb_s: Annotated[
        float | None,
        typer.Option(
            parser=number(0, 60, above=True),
            metavar=GB_S,
            help="Speed of a CPU lane that is played, GB/s. Default: the machine's own.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(parser=whole(2, 40), metavar=N, help="Steps of each kind.")] = 40,
    device: Annotated[str, typer.Option(metavar=DEVICE, help="host or cuda.")] = "host",
    layers: Annotated[int, typer.Option(parser=whole(1, 8), metavar=N, help="Layers of a graph (cuda).")] = 8,
    slots: Annotated[
        list[float] | None,
        typer.Option(
            "--slots",
            parser=number(0, 0.25, most=1),
            metavar=PART,
            help="Part of all experts that have slots, 0 to 1 (cuda); repeat it. Default: 0.25, 0.5 and 1.",
        ),
    ] = None,
    profile_path: Annotated[
        Path | None,
        typer.Option("--profile", metavar=FILE, exists=True, help="Profile to predict with (cuda). Default: measured."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure whole layer-steps by residency and misses, beside their prediction and the limit of bytes over rates."""
    from trilane.config import Config
    from trilane.probes.machine import describe_machine
    from trilane.start_profile import start_profile
    from trilane.step_bench import (
        ZERO_COPY_PART,
        StepShape,
        all_errors,
        errors_of_medians,
        measure_steps,
        played_rates,
        random_store,
    )

    names = _formats([format_name])
    if top_k > experts // 2:
        rule = (
            f"{top_k} of {experts} experts, of which half are resident: give {experts // 2} at most, or more --experts"
        )
        raise typer.BadParameter(rule, param_hint="--top-k")
    counts = misses or list(range(top_k + 1))
    if max(counts) > top_k:
        rule = f"{max(counts)} misses of a token's {top_k} experts: give {top_k} at most, or a larger --top-k"
        raise typer.BadParameter(rule, param_hint="--misses")
    check_sizes(names[0], hidden=hidden, intermediate=intermediate)
    shape = StepShape(hidden, intermediate, experts, top_k, names[0])
    if device_option(device, ("host", "cuda")) == "cuda":
        if played or link_gb_s or hit_gb_s is not None or cpu_gb_s is not None:
            rule = "rates are played on the host device only: leave out --device cuda, or the rates"
            raise typer.BadParameter(rule, param_hint="--device")
        return run_cuda_steps(shape, layers, slots, counts, repeats, profile_path, as_json)
    for option, value in (("--slots", slots), ("--profile", profile_path)):
        if value is not None:
            rule = "is for --device cuda; on the host device half of the experts have slots: leave it out"
            raise typer.BadParameter(rule, param_hint=option)
    profile = start_profile(None, Config())
    given = {"hit_gb_s": hit_gb_s, "cpu_gb_s": cpu_gb_s}
    links = [
        {"link_gb_s": x, "zero_copy_gb_s": ZERO_COPY_PART * x, "link_fix_us": link_fix_us} for x in link_gb_s or ()
    ]
    rates = played_rates(profile, names[0]) if played else [{**given, **link} for link in links or [{}]]
    configs = [Config(cache={"fraction": 0.5}, host_device=rate) for rate in rates]
    store = random_store(shape)
    rows = list(measure_steps(store, shape, configs, misses=counts, repeats=repeats, profile=profile))
    errors = {"": errors_of_medians(rows), "_single_step": all_errors(rows)}
    machine = describe_machine()
    if as_json:
        found = {
            "machine": machine.as_dict(),
            "shape": asdict(shape),
            "rows": [row.to_dict() for row in rows],
            **{f"median{kind}_error": median for kind, (median, _) in errors.items()},
            **{f"p90{kind}_error": p90 for kind, (_, p90) in errors.items()},
        }
        typer.echo(json.dumps(found, indent=1))
    else:
        _print_steps(rows, machine.line, errors[""], errors["_single_step"])


def _print_steps(
    rows: Sequence[StepRow], machine_line: str, medians: tuple[float, float], single: tuple[float, float]
) -> None:
    from rich.table import Table

    console = open_console()
    console.print(machine_line, highlight=False)
    table = Table()
    for name in (
        "link GB/s",
        "hits",
        "misses",
        "predicted us",
        "measured us",
        "p90 us",
        "limit us",
        "error",
        "single",
        "lanes",
    ):
        table.add_column(name, justify="left" if name == "lanes" else "right")
    for row in rows:
        link = row.played.get("link_gb_s")
        lanes = ", ".join(f"{name} {count:.1f}" for name, count in row.lanes.items() if count)
        table.add_row(
            "own" if link is None else f"{link:g} played", str(row.hits), str(row.misses),
            *(f"{us:.0f}" for us in (row.predicted_us, row.measured_us, row.p90_us, row.limit_us)),
            f"{row.median_error:.1%}", f"{row.error:.1%}", lanes,
        )  # fmt: skip
    console.print(table)
    for title, (median, p90) in (("median steps", medians), ("single steps", single)):
        console.print(f"predicted against measured, {title}: median error {median:.1%}, p90 {p90:.1%}", highlight=False)
