"""Options of commands that open a whole model: which one, its slots, and where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.commands.numbers import whole
from trilane.commands.options import DEVICE, FILE, FOLDER, FORMAT, SIZE, N, device_option, size_option
from trilane.devices import DEVICES

if TYPE_CHECKING:
    from trilane.engine import ExpertScheduler

MODEL_HELP = "A GGUF file, a folder of a GGUF or safetensors model, or 'tiny' for the model that comes with trilane."

Slots = Annotated[
    int | None,
    typer.Option(
        parser=whole(0, 8), metavar=N, help="Slots for so many experts a layer. Default: what the policy says."
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(metavar=SIZE, help="Slots that fit into so many bytes, such as 8GiB. Default: what the policy says."),
]
Policy = Annotated[
    Path | None,
    typer.Option(metavar=FILE, help="Configuration file. Default: the one that TRILANE_CONFIG names, if any."),
]
Device = Annotated[
    str, typer.Option(metavar=DEVICE, help="auto, host or cuda; auto: the GPU if torch sees one, else the host.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar=FORMAT, help="Weight format that a checkpoint's experts become. Default: as they are."
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(metavar=FOLDER, help="Folder with a tokenizer of transformers. Default: the model's own."),
]


def check_early(model: str, device: str, policy: Path | None = None, tokenizer: Path | None = None) -> None:
    """Refuse what can be seen before torch is loaded, which takes seconds.

    Raises
    ------
    typer.BadParameter, ModelFileError, ConfigError
    """
    from trilane.bundled_model import TINY
    from trilane.errors import ModelFileError
    from trilane.settings.effective_config import load_config

    device_option(device, DEVICES)
    if model != TINY and not Path(model).exists():
        hint = f"the bundled model is {TINY!r}" if model.lower() == TINY else "check the path"
        raise ModelFileError(f"{model}: there is no such file or folder, but MODEL must be one, or {TINY!r}; {hint}")
    if tokenizer is not None and not tokenizer.is_dir():
        raise ModelFileError(f"--tokenizer {tokenizer}: there is no such folder; give one with tokenizer.json")
    load_config(policy)


def tell_cut(scheduler: ExpertScheduler, slots: int | None, vram: str | None) -> None:
    """Say it where ``--slots`` or ``--vram`` asks for more slots than there are shards, and all have one."""
    from trilane.capacity import cut_text

    layers = scheduler.store.layers
    num_experts = [layer.num_experts for layer in layers]
    most = sum(layer.num_experts * layer.layout.num_shards for layer in layers)
    nbytes, largest = size_option("--vram", vram), max(max(layer.layout.shard_nbytes) for layer in layers)
    is_cut = (slots or 0) > max(num_experts) or (nbytes or 0) // largest > most
    if is_cut and scheduler._runner.num_slots == most:
        option, value = ("--slots", slots) if slots is not None else ("--vram", vram)
        typer.echo(f"trilane: {cut_text(option, value or 0, num_experts)}", err=True)


def cache_options(slots: int | None, vram: str | None) -> dict[str, Any]:
    """What ``--vram`` says, as configuration; both options at once are wrong usage."""
    if slots is not None and vram is not None:
        raise typer.BadParameter("give one of --slots and --vram", param_hint="--slots")
    nbytes = size_option("--vram", vram)
    return {} if nbytes is None else {"cache": {"nbytes": nbytes}}
