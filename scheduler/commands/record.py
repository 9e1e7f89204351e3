"""``trilane record``: record a program's routing to a trace file, import a trace, or show what a file holds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilane.commands.console import open_console
from trilane.commands.numbers import whole
from trilane.commands.options import FILE, NAME, SIZE, TEXT, AsJson, N, size_option

if TYPE_CHECKING:
    from trilane.traces.trace_summary import TraceSummary

VARIABLE = "TRILANE_RECORD_PATH"
_SCHEMA = 1


def record(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Trace file; a recording of the same model is appended to.")
    ],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM...", help="Program to run with its arguments, after --.")
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option("--import", metavar=FILE, help="Trace file or .npz to take the trace from. Default: none."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Only show what FILE holds.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar=NAME, help="Model of an imported trace. Default: what the file says.")
    ] = None,
    expert_bytes: Annotated[
        str | None,
        typer.Option(
            metavar=SIZE, help="Bytes of an expert of an imported trace, such as 13.2MB. Default: what the file says."
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, 3), metavar=N, help="Shards of an expert of an imported trace. Default: what the file says."
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar=TEXT, help="Where an imported trace is from. Default: what the file says.")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(metavar=TEXT, help="Terms of an imported trace. Default: what the file says.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Keep the router weights of an imported trace.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Record which experts a program routes to: trilane record FILE -- PROGRAM.

    Any program that makes an ExpertScheduler is recorded. Its exit code is passed on.
    """
    ways = sum((bool(command), import_file is not None, show))
    if ways != 1:
        raise typer.BadParameter("give one of: -- PROGRAM, --import FILE, --show", param_hint="COMMAND")
    described = {"model": model, "expert_bytes": expert_bytes, "shards": shards, "source": source, "licence": licence}
    if import_file is None and any(value is not None for value in described.values()):
        raise typer.BadParameter("model, sizes, source and licence describe an imported trace", param_hint="--import")
    code = 0
    if command:
        code = _run(file, command)
    elif import_file is not None:
        _import(file, import_file, model, expert_bytes, shards, source, licence, weights)
    _print_summary(file, as_json)
    raise typer.Exit(code)


def _run(file: Path, command: list[str]) -> int:
    """Run the program with recording switched on; its exit code."""
    from trilane.errors import TraceError

    _check_target(file)
    before = file.stat().st_size if file.exists() else -1
    try:
        code = subprocess.run(command, env=os.environ | {VARIABLE: str(file.resolve())}, check=False).returncode
    except OSError as error:
        raise TraceError(f"{command[0]}: it cannot be run ({error.strerror}); give a program after --") from None
    if not file.exists() or file.stat().st_size == before:
        ended = f"the program ended with exit code {code} and" if code else "the program"
        typer.echo(f"trilane: nothing was recorded: {ended} ran no layer-step of an ExpertScheduler", err=True)
        raise typer.Exit(code or 1)
    return code if code >= 0 else 128 - code  # as a shell reports a signal


def _check_target(file: Path) -> None:
    """Refuse before the program runs what its recording would be refused for."""
    from trilane.errors import TraceError
    from trilane.traces.block_file import MAGIC, check_regular

    check_regular(file)
    folder = file.resolve().parent
    if not folder.is_dir():
        raise TraceError(f"{file}: its folder does not exist; make it, or record to another file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise TraceError(f"{file}: this user may not write there; change its permissions, or record to another file")
    if file.exists():
        with file.open("rb") as opened:
            head = opened.read(len(MAGIC))
        if head and head != MAGIC[: len(head)]:
            raise TraceError(f"{file}: it is no trace file, and a recording would not be appended; name another")


def _import(
    file: Path,
    import_file: Path,
    model: str | None,
    expert_bytes: str | None,
    shards: int | None,
    source: str | None,
    licence: str | None,
    weights: bool,
) -> None:
    from dataclasses import replace

    from trilane.replay import shards_of
    from trilane.traces.trace_file import append_trace, read_trace

    if file.exists() and file.samefile(import_file):
        raise typer.BadParameter(
            f"{import_file} is the file that it would be added to: name another", param_hint="--import"
        )
    trace = read_trace(import_file)
    said = trace.meta
    meta = replace(
        said,
        model=said.model if model is None else model,
        source=said.source if source is None else source,
        licence=said.licence if licence is None else licence,
    )
    if expert_bytes is not None or shards is not None:
        nbytes = size_option("--expert-bytes", expert_bytes, of_memory=False)
        meta = replace(meta, shard_nbytes=tuple(shards_of(meta, nbytes, shards)))
    was_there = file.exists()
    try:
        append_trace(file, replace(trace, meta=meta, weights=trace.weights if weights else None))
    except OSError as error:
        if not was_there:  # without its events it is of no use
            file.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from error


def _print_summary(file: Path, as_json: bool) -> None:
    from trilane.traces.trace_file import read_trace
    from trilane.traces.trace_summary import summarise

    summary = summarise(read_trace(file))
    nbytes = file.stat().st_size
    if as_json:
        typer.echo(json.dumps({"schema": _SCHEMA, "file": str(file), "nbytes": nbytes, **summary.to_dict()}, indent=1))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = open_console()
    table = Table(box=box.SIMPLE if console.is_terminal else None, show_header=False)
    for name, text in _lines(summary, nbytes):
        table.add_row(name, Text(text))
    console.print(table)


def _lines(summary: TraceSummary, nbytes: int) -> list[tuple[str, str]]:
    """What people see."""

    def span(pair: tuple[int, int]) -> str:
        return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"

    repeat = "-" if summary.repeat_rate is None else f"{summary.repeat_rate:.1%}"
    rates = ", ".join(f"{slots}: {rate:.1%}" for slots, rate in summary.lru_hit_rates.items())
    return [
        ("model", summary.model or "not named"),
        ("source", summary.source or ("recorded live" if summary.baselines else "not named")),
        ("licence", summary.licence or "not named"),
        ("file", f"{nbytes:,} bytes, {nbytes / max(1, summary.rows):.2f} a row of a layer"),
        ("passes over the layers", f"{summary.passes:,}"),
        ("layer-steps", f"{summary.steps:,} of {summary.layers} layers, {summary.rows:,} rows"),
        ("experts", f"{span(summary.num_experts)} a layer, {span(summary.top_k)} a row"),
        ("requests, hints", f"{summary.requests:,}, {summary.hints:,}"),
        ("live stretches", f"{summary.baselines} (their plans can be verified)" if summary.baselines else "none"),
        ("same expert as a token before", repeat),
        ("hit rate of LRU by slots a layer", rates or "-"),
    ]
