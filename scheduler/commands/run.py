"""``trilane run``: text from a model whose experts are in a store, streamed to the terminal."""

from __future__ import annotations

from pathlib import Path
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
from trilane.commands.numbers import number, whole
from trilane.commands.options import FILE, NUMBER, TEXT, N

MOST_THREADS = 1024  # of torch, which takes any number and ends the program with one that the system does not give


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    prompt: Annotated[
        str | None,
        typer.Option(metavar=TEXT, help="Text to go on from. Default: what is typed, line by line, or standard input."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar=FILE, help="File with one prompt a line, or 'tiny' for the twenty that come with it. Default: none."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(parser=whole(1, 128), metavar=N, help="Tokens for each prompt, at most.")
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            parser=number(0, 0.8),
            metavar=NUMBER,
            help="0 takes the likeliest token always; above, tokens are drawn.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(parser=whole(0, 1), metavar=N, help="Seed of the tokens that are drawn.")] = 0,
    slots: Slots = None,
    vram: Vram = None,
    policy: Policy = None,
    device: Device = "auto",
    format_name: Format = None,
    tokenizer: Tokenizer = None,
    torch_threads: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, 2, most=MOST_THREADS),
            metavar=N,
            help="Threads of torch. Default: 1 for small models on the host, else torch's.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every token and every logit's bits with an all-resident run.")
    ] = False,
    compile_model: Annotated[
        bool,
        typer.Option("--compile", help="On a GPU: let torch.compile join the rest of the model first; takes a minute."),
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print at the end what each lane did.")] = False,
    record: Annotated[
        Path | None, typer.Option(metavar=FILE, help="Trace file to record the routing to. Default: none.")
    ] = None,
) -> None:
    """Generate text with a model whose experts are in a store: from --prompt, from a file of prompts, or in a chat.

    Exit code 1 if --verify finds a difference.
    """
    from trilane.commands.text_extra import need_text_extra

    if sum(value is not None for value in (prompt, prompts)) > 1:
        raise typer.BadParameter("give one of --prompt and --prompts", param_hint="--prompt")
    options = cache_options(slots, vram)
    need_text_extra("trilane run")
    check_early(model, device, policy, tokenizer)
    from trilane.integrations.generation import open_text_model, set_torch_threads
    from trilane.integrations.generation.session import Session, ask, read_prompts

    given = None if prompts is None else read_prompts(prompts)
    if record is not None:
        options["record"] = {"path": str(record.absolute())}
    opened = open_text_model(
        model, slots=slots, options=options, policy=policy, device=device, formats=format_name, tokenizer=tokenizer,
        progress="auto",
    )  # fmt: skip
    set_torch_threads(opened, torch_threads)
    with opened.handle:
        opened.check_length(max_tokens)
        tell_cut(opened.handle.scheduler, slots, vram)
        session = Session(opened, max_tokens, temperature, seed, raw, verify, compile_model)
        if given is not None:
            session.run_file(given)
        elif prompt is not None:
            session.run_prompt(prompt)
        else:
            ask(session)
        if stats:
            typer.echo(f"\n{opened.handle.stats()}", err=True)
