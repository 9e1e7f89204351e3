"""The command line: ``trilane``. Parses, prints and sets exit codes; the work is done elsewhere.

Exit codes: 0 done, 1 it failed (one line says why), 2 wrong usage. Everything heavy is imported inside the
commands, so that ``trilane --help`` is quick.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from trilane import __version__
from trilane.commands.bench import bench_app
from trilane.commands.config import show_config
from trilane.commands.identity import identity
from trilane.commands.interrupt import run_program
from trilane.commands.plan import plan
from trilane.commands.probe import probe
from trilane.commands.record import record
from trilane.commands.replay import replay
from trilane.commands.run import run
from trilane.commands.serve import serve

app = typer.Typer(
    name="trilane",
    help="Schedule offloaded mixture-of-experts models over three lanes: stream, zero-copy, CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("probe")(probe)
app.command("plan")(plan)
app.add_typer(bench_app, name="bench")
app.command("config")(show_config)
app.command("replay")(replay)
app.command("record")(record)
app.command("run")(run)
app.command("serve")(serve)
app.command("identity")(identity)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trilane {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


_REMEDIES = {
    errno.ENOENT: "check the name; what does not begin with / is looked for in the current folder",
    errno.EACCES: "name a file that this user may use, or change its permissions",
    errno.EPERM: "name a file that this user may use, or change its permissions",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "a part of the name is a file and not a folder: check it",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "make room on that disk, or name a file on another",
    errno.EFBIG: "the limit of a file's size is reached: raise it, or name another file",
    errno.EROFS: "name a file where this user may write",
}


def os_error_text(error: OSError) -> str:
    """What failed and, where it is known, what helps."""
    reason = error.strerror or str(error)
    text = f"{error.filename}: {reason}" if error.filename is not None else reason
    remedy = _REMEDIES.get(error.errno or 0)
    return text if remedy is None else f"{text}: {remedy}"


def main() -> None:
    """Run the command line; errors that users can cause are one line each, without a traceback."""
    _open_closed_streams()
    run_program("trilane", app, lambda error: os_error_text(error) if isinstance(error, OSError) else str(error))


def _open_closed_streams() -> None:
    """Stand in for streams that a shell closed (``>&-``, ``<&-``), where Python has None."""
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
