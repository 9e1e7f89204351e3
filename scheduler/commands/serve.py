"""``trilane serve``: an OpenAI-compatible endpoint over a model whose experts are in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from trilane.commands.model_options import (
    MODEL_HELP,
    Device,
    Format,
    Policy,
    Slots,
    Tokenizer,
    Vram,
    cache_options,
    check_early,
    tell_cut,
)
from trilane.commands.numbers import whole
from trilane.commands.options import NAME, N


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at; 0.0.0.0 for all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            parser=whole(0, 8000, most=65535),
            metavar=N,
            help="Port to listen at; 0: a free one, which is printed.",
        ),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(metavar=NAME, help="What requests call the model. Default: the file's or folder's name."),
    ] = None,
    slots: Slots = None,
    vram: Vram = None,
    policy: Policy = None,
    device: Device = "auto",
    format_name: Format = None,
    tokenizer: Tokenizer = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print also what transformers and the server log, each request for one.")
    ] = False,
) -> None:
    """Serve a model to OpenAI's clients, at /v1, with the scheduler's counters for Prometheus at /metrics.

    The server is that of transformers. It has no keys and no TLS: put a proxy before it where others can reach it.
    """
    from trilane.commands.text_extra import need_serve_extra

    options = cache_options(slots, vram)
    need_serve_extra("trilane serve")
    check_early(model, device, policy, tokenizer)
    from trilane.integrations.generation import open_text_model, quiet_transformers
    from trilane.integrations.serving import open_socket, served_name
    from trilane.integrations.serving import serve as serve_model

    called = served_name(model, name)
    with open_socket(host, port) as taken, quiet_transformers(verbose=verbose):
        opened = open_text_model(
            model, slots=slots, options=options, policy=policy, device=device, formats=format_name,
            tokenizer=tokenizer, progress="auto",
        )  # fmt: skip
        with opened.handle:
            tell_cut(opened.handle.scheduler, slots, vram)
            try:
                serve_model(
                    opened, called, taken, lambda url: typer.echo(f"{called}: {url}/v1, metrics at {url}/metrics"),
                    verbose=verbose,
                )  # fmt: skip
            finally:
                typer.echo(f"\n{opened.handle.stats()}", err=True)
