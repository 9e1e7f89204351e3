"""``trilane config``: check a configuration, and show what applies and who set it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.console import open_console
from trilane.commands.options import AsJson

if TYPE_CHECKING:
    from trilane.errors import ConfigError
    from trilane.settings.effective_config import EffectiveConfig

_SCHEMA = 1


def show_config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="YAML file. Default: the one that TRILANE_CONFIG names, if any."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.OPTION=VALUE", help="Option that goes before all else; repeat it. Default: none."
        ),
    ] = None,
    as_json: AsJson = False,
    example: Annotated[bool, typer.Option("--example", help="Print a commented file with every option.")] = False,
) -> None:
    """Check a configuration and show what applies, and whether file, variable or --set said so.

    Exit code 1 if anything is wrong; all of it is listed, with its line.
    """
    from trilane.errors import ConfigError
    from trilane.settings.config_reference import example_text
    from trilane.settings.effective_config import load_config

    if example:
        if file is not None or settings:
            raise typer.BadParameter("prints every option's default: leave out FILE and --set", param_hint="--example")
        typer.echo(example_text(), nl=False)
        return
    try:
        found = load_config(file, arguments=settings or [])
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(json.dumps(_problems(error), indent=1))
        raise typer.Exit(1) from None
    for warning in found.warnings:
        typer.echo(f"trilane: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(_as_dict(found), indent=1, default=str))
    else:
        _print_options(found)


def _problems(error: ConfigError) -> dict[str, Any]:
    problems = [{"where": each.where, "path": each.path, "message": each.message} for each in error.problems]
    return {"schema": _SCHEMA, "problems": problems}


def _as_dict(found: EffectiveConfig) -> dict[str, Any]:
    from trilane.settings.config_reference import all_options

    options = [
        {
            "path": option.path,
            "value": found.value(option.path),
            "origin": vars(found.origins[option.path]),
            "default": option.default,
            "limits": option.limits,
            "description": option.description,
        }
        for option in all_options()
    ]
    return {"schema": _SCHEMA, "options": options, "warnings": found.warnings}


def _print_options(found: EffectiveConfig) -> None:
    from trilane.settings.config_reference import all_options, value_text

    headings = ("option", "value", "from", "meaning")
    rows = [
        (
            option.path,
            value_text(found.value(option.path)),
            str(found.origins[option.path]),
            f"{option.description} ({option.limits})",
        )
        for option in all_options()
    ]
    console = open_console()
    if not console.is_terminal:  # one line an option, however long, for grep and the like
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        for row in (headings, *rows):
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, overflow="fold")  # names are whole on narrow terminals, too
    for row in rows:
        table.add_row(*map(Text, row), style=None if row[2] == "default" else "bold")
    console.print(table)
