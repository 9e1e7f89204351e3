"""``trilane identity``: whether slots, lanes and threads change a bit of what a model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilane.commands.model_options import MODEL_HELP, Device, check_early
from trilane.commands.numbers import whole
from trilane.commands.options import FILE, N

WARM_TOKENS = 16  # of the quick way


def identity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "tiny",
    prompts: Annotated[
        Path,
        typer.Option(metavar=FILE, help="File with one prompt a line, or 'tiny' for the twenty that come with it."),
    ] = Path("tiny"),
    max_tokens: Annotated[
        int, typer.Option(parser=whole(1, 128), metavar=N, help="Tokens for each prompt, at most.")
    ] = 128,
    quick: Annotated[
        bool, typer.Option("--quick", help="Try one size and one thread only, with short warm runs.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Check that slots, lanes and threads change no bit of what a model writes.

    Prompts are decoded with every expert in a slot, then with few slots, each lane alone and all, 1 and 2 threads, cold
    and warm: every token and every bit of every logit must be the same. Exit code 1 at the first difference.
    """
    from trilane.commands.text_extra import need_text_extra

    need_text_extra("trilane identity")
    check_early(model, device)
    import torch

    from trilane.errors import TrilaneError
    from trilane.integrations.generation import open_text_model
    from trilane.integrations.generation.proof import all_settings, decode_resident, prove
    from trilane.integrations.generation.session import read_prompts

    torch.set_num_threads(1)  # beside the team of workers more would only wait; and sums depend on their number
    texts, opened = read_prompts(prompts), open_text_model(model, device=device, progress="auto")
    settings = all_settings((0.25,), threads=(1,)) if quick else all_settings()
    with opened.handle as handle:
        opened.check_length(max_tokens)
        ids, mask = opened.encode(texts)
        typer.echo(
            f"{model}: {len(texts)} prompts, {max_tokens} tokens each, greedily; first with all experts in slots"
        )
        wanted = decode_resident(handle, ids, mask, max_tokens)
        count = 0
        for outcome in prove(handle, ids, mask, wanted, settings, WARM_TOKENS if quick else None):
            count += 1
            rate = outcome.stats.hit_rate or 0.0
            told = f"{outcome.num_identical} of {outcome.num_prompts} identical"
            typer.echo(f"{outcome.setting!s:40s} {told}, hits {rate:5.1%}, {outcome.seconds:5.1f} s")
            if outcome.differences:
                raise TrilaneError(f"{outcome.setting}: {outcome.differences[0]}")
    logits = max_tokens * len(texts) * wanted[0].logits.shape[-1]
    typer.echo(
        f"{len(texts)} of {len(texts)} prompts identical to all-resident under all {count} settings: up to "
        f"{max_tokens} tokens and {logits:,} logits a setting, bit by bit"
    )
