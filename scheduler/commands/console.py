"""What commands share: tables (a terminal as it is, anything else as plain text of a fixed width), options that are
checked, and the line that tells how far a measurement is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_PLAIN_WIDTH = 200  # columns of a table that goes to a file or a pipe


def open_console(stderr: bool = False) -> Console:
    """A console on stdout, or on stderr."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def print_table(
    console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[str], title: str = ""
) -> None:
    """A table with the columns ``left`` on the left and the others, numbers, on the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE if console.is_terminal else None)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def collected(rows: Iterable[T], num_expected: int, describe: Callable[[T], str] = lambda row: " rows") -> list[T]:
    """All rows, with a progress line on a terminal's stderr; ``describe`` says what comes behind the count."""
    console, found = open_console(stderr=True), []
    with console.status("compiling and measuring ...") if console.is_terminal else nullcontext() as status:
        for row in rows:
            found.append(row)
            if status is not None:
                status.update(f"{len(found)} of {num_expected}{describe(row)}")
    return found


def checked(option: str, check: Callable[[str], T], text: str | None) -> T | None:
    """A wrong value is wrong usage: name the option, keep the text of the check."""
    try:
        return None if text is None else check(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
