"""``trilane bench``: measure this machine with the product's own code and print a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from trilane.probes.cpu_experts import ExpertRate

bench_app = typer.Typer(no_args_is_help=True, help="Measure: kernels, steps, lanes.")
_PLAIN_WIDTH = 200  # columns of a table that goes to a file or a pipe

T = TypeVar("T")


@bench_app.callback()
def _bench() -> None:
    """Commands that measure."""


@bench_app.command("cpu")
def bench_cpu(
    formats: Annotated[
        list[str] | None, typer.Option("--format", "-f", help="Weight format; repeat it. Default: all.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option("--threads", "-t", min=1, help="Number of threads; repeat it. Default: 1 and all."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", "-s", help="ROWSxCOLUMNS; repeat it. Default: of an expert and a shard."),
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="Instruction set: avx512, avx2 or portable. Default: the best.")
    ] = None,
    ggml: Annotated[
        Path | None, typer.Option(help="ggml's CPU library or its folder, to compare with.", exists=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Speed of the CPU kernels against what memory can deliver, and against ggml where it is found."""
    from trilane.probes.cpu_experts import SHAPES, measure_cpu_experts
    from trilane.probes.ggml import find_ggml
    from trilane.probes.machine import describe_machine

    machine = describe_machine()
    names = _formats(formats)
    pairs = [_shape(text) for text in shapes] if shapes else list(SHAPES)
    counts = _threads(threads, machine.num_allowed)
    kernel_isa = _checked("--isa", _isa, isa)
    library = find_ggml(ggml)
    if ggml is not None and library is None:
        raise typer.BadParameter(f"{ggml} holds no libggml-cpu that can be loaded", param_hint="--ggml")
    rates = measure_cpu_experts(names, counts, shapes=pairs, isa=kernel_isa, ggml=library)
    found = _collected(rates, len(names) * len(pairs) * len(counts))
    if as_json:
        typer.echo(
            json.dumps({"machine": machine.as_dict(), "rows": [_row(rate) for rate in found]}, indent=1)
        )
    else:
        _print_rates(found, machine.line)
    _warn(found, library is not None)


def _checked(option: str, check: Callable[[str], T], text: str | None) -> T | None:
    """A wrong value is wrong usage: name the option, keep the text of the check."""
    try:
        return None if text is None else check(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _isa(name: str) -> str:
    from trilane.cpu_kernels.isa import check_isa

    return check_isa(name)


def _formats(names: Sequence[str] | None) -> list[str]:
    from trilane.cpu_kernels.formats import FORMATS, format_of

    return [fmt.name for name in names or FORMATS if (fmt := _checked("--format", format_of, name))]


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.lower().partition("x")
    if not (
        rows.isdigit() and columns.isdigit() and int(rows) >= 4 and int(columns) % 32 == 0 < int(columns)
    ):
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


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def _collected(rates: Any, num_expected: int) -> list[ExpertRate]:
    """All rates, with a progress line on a terminal's stderr."""
    console = _console(stderr=True)
    found: list[ExpertRate] = []
    with console.status("compiling and measuring ...") if console.is_terminal else _quiet() as status:
        for rate in rates:
            found.append(rate)
            if status is not None:
                status.update(f"{len(found)} of {num_expected}: {rate.format} {rate.gb_s:.1f} GB/s")
    return found


def _quiet() -> Any:
    from contextlib import nullcontext

    return nullcontext()


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
    from rich import box
    from rich.table import Table

    console = _console()
    table = Table(box=box.SIMPLE if console.is_terminal else None)
    for heading in ("format", "shape", "threads", "GB/s", "limit", "ratio", "ggml", "x ggml"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for rate in rates:
        row = _row(rate)
        theirs = rate.ggml_gb_s
        speeds = (f"{rate.gb_s:.1f}", f"{rate.limit_gb_s:.1f}", f"{rate.ratio:.2f}")
        compared = ("-", "-") if theirs is None else (f"{theirs:.1f}", f"{rate.gb_s / theirs:.2f}")
        table.add_row(row["format"], row["shape"], str(row["threads"]), *speeds, *compared)
    console.print(machine_line)
    console.print(table)


def _warn(rates: Sequence[ExpertRate], has_ggml: bool) -> None:
    num_disturbed = sum(rate.disturbed for rate in rates)
    if num_disturbed:
        typer.echo(f"{num_disturbed} rows are estimates: the machine was busy with other things.", err=True)
    if not has_ggml:
        typer.echo(
            "ggml was not found: pip install 'trilane[bench]', or give its library by --ggml.", err=True
        )
