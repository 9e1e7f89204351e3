"""Where tables are printed: a terminal as it is, anything else as plain text of a fixed width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 200  # columns of a table that goes to a file or a pipe


def open_console(stderr: bool = False) -> Console:
    """A console on stdout, or on stderr."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)
