"""A model's sizes from its files, whose headers say what is there, or from its config.json alone, which says how many
parameters. Nothing is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from trilane.cpu_kernels.formats import FORMATS, Format
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.errors import ModelFileError, StoreError
from trilane.file_source import FLOATS, FileLayer
from trilane.model_sizes import LayerSizes, ModelSizes, formats_text
from trilane.readers.architectures import text_config
from trilane.readers.attention import kv_of_config, kv_of_gguf
from trilane.readers.finder import ALL_ELSE, OTHER_EXPERTS, SHARED, find_experts, num_layers_of, open_model, sort_of
from trilane.readers.model_config import TOP_K_KEYS, ModelConfig, read_model_config
from trilane.readers.model_file import ModelFiles, TensorInfo
from trilane.readers.moe import MoeLayer, MoeModel, expert_tensors
from trilane.readers.names import read_checkpoint_name
from trilane.readers.safetensors import CONFIG_NAME
from trilane.store_layers import GATELESS, MATRICES, Gate, check_same_hidden, formats_by_matrix

USUAL, FALLBACK = FORMATS["q4_k"], FORMATS["q8_0"]
_LAYER = re.compile(r"layers\.(\d{1,6})\.")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_LOOKUP = ("token_embd.weight", "embed_tokens.weight")
_HEAD = ("output.weight", "lm_head.weight")


def read_sizes(path: str | Path, format_name: str | None = None) -> ModelSizes:
    """The sizes of a model.

    Parameters
    ----------
    path : str or Path
        A GGUF file or any shard of one, a safetensors file or folder, a config.json, or a folder that has only that.
    format_name : str, optional
        Format of the routed experts in the store. None: as the files have them; of a config.json Q4_K, with Q8_0 for
        matrices whose rows are no multiple of 256, or MXFP4 where the checkpoint has that.

    Raises
    ------
    ModelFileError
        A file is missing or damaged, or lacks what is needed.
    StoreError
        No experts, or experts that a store would not take.
    """
    given = Path(path)
    formats = {} if format_name is None else formats_by_matrix(format_name)
    config = _config_alone(given)
    if config is not None:
        return sizes_of_config(read_model_config(config), formats)
    files = open_model(given)
    return sizes_of_files(files, find_experts(files), formats)


def _config_alone(path: Path) -> Path | None:
    """The config.json that is meant, where there are no weights to look at."""
    if path.suffix.lower() == ".json" and not path.name.endswith(".index.json"):
        return path
    if not path.is_dir() or any(path.glob("*.gguf")) or any(path.glob("*.safetensors*")):
        return None
    if not (path / CONFIG_NAME).exists():
        raise ModelFileError(
            f"{path}: holds no .gguf file, no .safetensors file and no {CONFIG_NAME}, of which one is needed; pass a "
            "model's file or folder"
        )
    return path / CONFIG_NAME


# ------------------------------------------------------------------------------------------------- config.json
def sizes_of_config(config: ModelConfig, formats: Mapping[str, Format]) -> ModelSizes:
    """Sizes from parameters: routed experts in ``formats`` (by matrix; empty: see `read_sizes`), the rest as it is."""
    chosen, reason = (formats, "as --format says") if formats else _usual_formats(config)
    try:
        layout = ExpertLayout(
            config.hidden, config.intermediate, chosen["gate"], chosen["up"], chosen["down"], config.has_bias
        )
    except ValueError as error:
        raise StoreError(f"{config.path}: {error}") from None
    each = config.element_nbytes
    layers = tuple(
        LayerSizes(
            number, layer.num_experts, layout if layer.num_experts else None, layer.shared * each, layer.other * each
        )
        for number, layer in enumerate(config.layers)
    )
    return ModelSizes(
        name=config.path.resolve().parent.name,
        architecture=config.model_type,
        layers=layers,
        outside_nbytes=(config.embeddings + config.head + config.hidden) * each,
        lookup_nbytes=config.embeddings * each if config.head else 0,
        unused_nbytes=0,
        kv=config.kv,
        experts_per_token=config.experts_per_token,
        num_params=config.num_params(),
        num_active=config.num_params(active=True),
        notes=(f"experts in {formats_text(layout)}: {reason}", *config.notes),
    )


def _usual_formats(config: ModelConfig) -> tuple[dict[str, Format], str]:
    """Formats by matrix, and why."""
    if config.stored_format is not None:
        return dict.fromkeys(MATRICES, FORMATS[config.stored_format]), "as the checkpoint has them; see --format"
    columns = {"gate": config.hidden, "up": config.hidden, "down": config.intermediate}
    found = {name: USUAL if size % USUAL.column_multiple == 0 else FALLBACK for name, size in columns.items()}
    odd = [name for name, fmt in found.items() if fmt is FALLBACK]
    reason = "config.json names none, and most files are so; see --format"
    if odd:
        rows = f"rows of {columns[odd[0]]} weights are no multiple of {USUAL.column_multiple}"
        reason += f". {FALLBACK.name} for {', '.join(odd)}, whose {rows}"
    return found, reason


# ------------------------------------------------------------------------------------------------- model files
def sizes_of_files(files: ModelFiles, model: MoeModel, formats: Mapping[str, Format]) -> ModelSizes:
    """Sizes of a model whose headers were read; experts in ``formats``, or as the files have them."""
    sources = [FileLayer(files, layer, formats, _gate(model, layer), requantize=True) for layer in model.layers]
    check_same_hidden(sources)
    layouts = {layer.block: source.layout for layer, source in zip(model.layers, sources, strict=True)}
    counts = {layer.block: layer.num_experts for layer in model.layers}
    sorts = _sorted_nbytes(files, model)
    numbers = sorted({number for number, _ in sorts if number is not None} | set(layouts))
    layers = tuple(
        LayerSizes(n, counts.get(n, 0), layouts.get(n), sorts.get((n, SHARED), 0), sorts.get((n, ALL_ELSE), 0))
        for n in numbers
    )
    is_gguf = files.kind == "gguf"
    top_k = files.metadata.get(f"{model.architecture}.expert_used_count") if is_gguf else _top_k(files)
    kinds = " and ".join(dict.fromkeys(formats_text(layout) for layout in layouts.values()))
    notes = [f"experts in {kinds}: {'as --format says' if formats else 'as the files have them'}"]
    if any(_is_requantized(layer, formats) for layer in model.layers):
        notes.append("they are quantised in the files: loading needs requantize=True, and loses accuracy twice")
    if model.gate is None:
        notes.append("the activation is not known from the files: loading needs gate=")
    return ModelSizes(
        name=files.path.stem if files.path.is_file() else files.path.resolve().name,
        architecture=model.architecture,
        layers=layers,
        outside_nbytes=sum(sorts.get((None, sort), 0) for sort in (SHARED, ALL_ELSE)),
        lookup_nbytes=_lookup_nbytes(files.tensors.values()),
        unused_nbytes=sum(nbytes for (_, sort), nbytes in sorts.items() if sort == OTHER_EXPERTS),
        kv=kv_of_gguf(files.metadata) if is_gguf else kv_of_config(files.metadata),
        experts_per_token=top_k if type(top_k) is int and 0 < top_k <= min(counts.values()) else None,
        num_params=None,
        num_active=None,
        notes=tuple(notes),
    )


def _is_requantized(layer: MoeLayer, formats: Mapping[str, Format]) -> bool:
    """Whether weights that are quantised already would be converted."""
    stored = {name: source.format for name, source in layer.matrices.items() if source.format not in FLOATS}
    return any(formats[name].name != was for name, was in stored.items() if name in formats)


def _gate(model: MoeModel, layer: MoeLayer) -> Gate:
    """The model's, or one with as many matrices: sizes depend on nothing else of it."""
    if model.gate is not None:
        return Gate(model.gate.kind, model.gate.alpha, model.gate.limit)
    return Gate() if "gate" in layer.matrices else Gate(GATELESS)


def _top_k(files: ModelFiles) -> object:
    part = text_config(files.metadata)
    return next((part[key] for key in TOP_K_KEYS if key in part), None)


def _sorted_nbytes(files: ModelFiles, model: MoeModel) -> dict[tuple[int | None, str], int]:
    """Bytes of all but the routed experts, by layer (None: in none) and sort; layers for prediction are not used."""
    taken, last = expert_tensors(model.layers), num_layers_of(files)
    prefix = "" if files.kind == "gguf" else _prefix(taken)
    found: dict[tuple[int | None, str], int] = {}
    for tensor in files.tensors.values():
        if tensor in taken:
            continue
        number = _layer_of(files, tensor, prefix)
        is_behind = number is not None and last is not None and number >= last
        sort = OTHER_EXPERTS if is_behind else sort_of(files, tensor)
        key = (None if sort == OTHER_EXPERTS else number, sort)
        found[key] = found.get(key, 0) + tensor.nbytes
    return found


def _prefix(taken: Iterable[TensorInfo]) -> str:
    """What stands before ``layers.N`` in the names of a checkpoint's experts."""
    name = read_checkpoint_name(next(iter(taken)).name)
    return name.prefix if name is not None else ""


def _layer_of(files: ModelFiles, tensor: TensorInfo, prefix: str) -> int | None:
    pattern = _GGUF_LAYER if files.kind == "gguf" else _LAYER
    match = pattern.match(tensor.name.removeprefix(prefix)) if tensor.name.startswith(prefix) else None
    return None if match is None else int(match[1])


def _lookup_nbytes(tensors: Iterable[TensorInfo]) -> int:
    """Of a table of embeddings beside which the last matrix stands by itself."""
    known = list(tensors)
    has_head = any(tensor.name.endswith(_HEAD) and "blk." not in tensor.name for tensor in known)
    return sum(tensor.nbytes for tensor in known if tensor.name.endswith(_LOOKUP)) if has_head else 0
