"""Options of commands that open a whole model: which one, its slots, and where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trilane.commands.options import size_option

MODEL_HELP = "A GGUF file, a folder of a GGUF or safetensors model, or 'tiny' for the model that comes with trilane."

Slots = Annotated[int | None, typer.Option(min=0, help="Slots for so many experts a layer.")]
Vram = Annotated[str | None, typer.Option(help="Slots that fit into so many bytes, such as 8GiB.")]
Policy = Annotated[Path | None, typer.Option(help="Configuration file.")]
Device = Annotated[str, typer.Option(help="auto, host or cuda.")]
Format = Annotated[
    str | None, typer.Option("--format", help="Quantise a checkpoint's experts to this. Default: as they are.")
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A folder with a tokenizer of transformers. Default: the model's own.")
]


def check_files(model: str, policy: Path | None) -> None:
    """Refuse what can be seen before torch is loaded, which takes seconds.

    Raises
    ------
    ModelFileError, ConfigError
    """
    from trilane.bundled_model import TINY
    from trilane.errors import ModelFileError
    from trilane.settings.effective_config import load_config

    if model != TINY and not Path(model).exists():
        hint = f"the bundled model is {TINY!r}" if model.lower() == TINY else "check the path"
        raise ModelFileError(f"{model}: there is no such file or folder, but MODEL must be one, or {TINY!r}; {hint}")
    load_config(policy)


def cache_options(slots: int | None, vram: str | None) -> dict[str, Any]:
    """What ``--vram`` says, as configuration; both options at once are wrong usage."""
    if slots is not None and vram is not None:
        raise typer.BadParameter("give one of --slots and --vram", param_hint="--slots")
    nbytes = size_option("--vram", vram)
    return {} if nbytes is None else {"cache": {"nbytes": nbytes}}
