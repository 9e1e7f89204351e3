"""From the tensors of a model to its MoE layers: tensors are sorted by their names, layer by layer.

How the tensors of one layer fit together is in layer_parts.py. No weights are read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trilane.errors import StoreError
from trilane.readers.architectures import (
    GateKind,
    gate_of_config,
    gate_of_gguf,
    has_interleaved_rows,
    text_config,
)
from trilane.readers.gguf import open_gguf
from trilane.readers.layer_parts import Parts, find_layer
from trilane.readers.model_file import ModelFiles, TensorInfo
from trilane.readers.moe import LeftAlone, MoeLayer, MoeModel, expert_tensors
from trilane.readers.names import ExpertName, read_checkpoint_name, read_gguf_name
from trilane.readers.other_files import refuse_other
from trilane.readers.safetensors import open_safetensors

SHARED, OTHER_EXPERTS, ALL_ELSE = SORTS = ("shared experts", "other experts", "all else")
_SHARED = re.compile(r"_shexp|shared_expert|shared_mlp")
_PREDICTION = re.compile(r"^mtp\.|\.mtp\.")


def open_model(path: str | Path) -> ModelFiles:
    """Open a GGUF file, a safetensors file or the folder of one of the two, whichever it is."""
    given = Path(path)
    refuse_other(given)
    is_gguf = given.suffix.lower() == ".gguf" or (given.is_dir() and any(given.glob("*.gguf")))
    return open_gguf(given) if is_gguf else open_safetensors(given)


def describe_experts(path: str | Path) -> MoeModel:
    """What is known about a model's experts from its headers; ``print`` shows it.

    Raises
    ------
    StoreError
        No experts, or some that are not understood.
    ModelFileError
        A file is missing or damaged.
    """
    return find_experts(open_model(path))


def find_experts(files: ModelFiles, prefix: str | None = None) -> MoeModel:
    """The MoE layers of an opened model.

    Parameters
    ----------
    files : ModelFiles
    prefix : str, optional
        What stands before ``layers.N`` in the names of the experts that are meant; needed only for files that hold
        several models.

    Raises
    ------
    StoreError
        There are none, or some are incomplete or do not fit.
    """
    read_name = read_gguf_name if files.kind == "gguf" else read_checkpoint_name
    blocks = _group(files, read_name, num_layers_of(files), prefix)
    if not blocks:
        raise StoreError(
            f"{files.path}: none of its {len(files.tensors)} tensors is a routed expert's; is it a mixture-of-experts "
            "model? (transformers and GGUF names are understood)"
        )
    interleaved = files.kind != "gguf" and has_interleaved_rows(files.metadata)
    layers = tuple(find_layer(files, block, parts, interleaved) for block, parts in sorted(blocks.items()))
    return MoeModel(files.path, _architecture(files), _known_gate(files), layers, _left_alone(files, layers))


def _architecture(files: ModelFiles) -> str:
    metadata = files.metadata
    name = (
        metadata.get("general.architecture")
        if files.kind == "gguf"
        else text_config(metadata).get("model_type", metadata.get("model_type"))
    )
    return name if isinstance(name, str) else ""


def gate_of(files: ModelFiles) -> GateKind:
    """The activation of the model's experts; raises StoreError where it is not known."""
    if files.kind == "gguf":
        return gate_of_gguf(files.metadata.get("general.architecture"))
    return gate_of_config(files.metadata)


def _known_gate(files: ModelFiles) -> GateKind | None:
    try:
        return gate_of(files)
    except StoreError:
        return None


def num_layers_of(files: ModelFiles) -> int | None:
    """Layers of the model itself, without those of multi-token prediction behind them; None if the files do not say."""
    if files.kind == "gguf":
        architecture = _architecture(files)
        count = files.metadata.get(f"{architecture}.block_count")
        extra = files.metadata.get(f"{architecture}.nextn_predict_layers", 0)
        return count - extra if isinstance(count, int) and isinstance(extra, int) else None
    count = text_config(files.metadata).get("num_hidden_layers")
    return count if isinstance(count, int) else None


def _group(
    files: ModelFiles,
    read_name: Callable[[str], ExpertName | None],
    num_layers: int | None,
    prefix: str | None,
) -> dict[int, Parts]:
    """Tensors of routed experts by layer, matrix and part; those behind the last layer are left out."""
    blocks: dict[int, Parts] = {}
    prefixes: set[str] = set()
    for tensor in files.tensors.values():
        if _PREDICTION.search(tensor.name) or (name := read_name(tensor.name)) is None:
            continue
        is_behind = num_layers is not None and name.block >= num_layers
        if is_behind or (prefix is not None and name.prefix != prefix):
            continue
        prefixes.add(name.prefix)
        if len(prefixes) > 1:
            raise StoreError(
                f"{files.path}: has experts of several models, with names that start with {sorted(prefixes)}; choose "
                "one of them by prefix="
            )
        experts = blocks.setdefault(name.block, {}).setdefault((name.matrix, name.part), {})
        if name.expert in experts:
            raise StoreError(f"{tensor}: is the same matrix as tensor {experts[name.expert].name!r}; keep one of them")
        experts[name.expert] = tensor
    return blocks


def sort_of(files: ModelFiles, tensor: TensorInfo) -> str:
    """What a tensor is that is no routed expert of the model: one of `SORTS`."""
    read_name: Any = read_gguf_name if files.kind == "gguf" else read_checkpoint_name
    if _SHARED.search(tensor.name):
        return SHARED
    if _PREDICTION.search(tensor.name) or read_name(tensor.name) is not None:
        return OTHER_EXPERTS  # of prediction, or of another model
    return ALL_ELSE


def _left_alone(files: ModelFiles, layers: Iterable[MoeLayer]) -> tuple[LeftAlone, ...]:
    taken = expert_tensors(tuple(layers))
    sorts: dict[str, list[int]] = {sort: [] for sort in SORTS}
    for tensor in files.tensors.values():
        if tensor not in taken:
            sorts[sort_of(files, tensor)].append(tensor.nbytes)
    return tuple(LeftAlone(what, len(sizes), sum(sizes)) for what, sizes in sorts.items() if sizes)
