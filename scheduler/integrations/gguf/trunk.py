"""All tensors of a GGUF file but the experts, as float tensors by the names that transformers has for them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import FORMATS
from trilane.errors import ModelFileError, StoreError
from trilane.integrations.gguf.architectures import Architecture, name_in_transformers
from trilane.readers.model_file import ModelFiles, TensorInfo
from trilane.readers.names import read_gguf_name

_LATENT = re.compile(r"(blk\.\d+\.attn_)([kv])_b\.weight")


def read_tensor(files: ModelFiles, tensor: TensorInfo) -> NDArray[np.float32]:
    """A tensor in float32, in its shape.

    Raises
    ------
    StoreError
        Its type is not known here, and the package that knows all types is not installed.
    """
    raw = files.files[tensor.path].read(tensor.offset, tensor.nbytes, tensor)
    known = FORMATS.get(tensor.format)
    if known is not None:
        return known.dequantize_rows(raw.reshape(-1, known.block_nbytes)).reshape(tensor.shape)
    if importlib.util.find_spec("gguf") is None:
        raise StoreError(
            f"{tensor}: {tensor.format} is not among {', '.join(FORMATS)}; install the package gguf, which reads all "
            "types, or take the model in one of these"
        )
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        floats = dequantize(raw, GGMLQuantizationType[tensor.format.upper()])
    except NotImplementedError:
        raise StoreError(f"{tensor}: {tensor.format} cannot be dequantised; take the model in another type") from None
    return floats.astype(np.float32, copy=False).reshape(tensor.shape)


def read_trunk(
    files: ModelFiles, row: Architecture, config: Any, dtype: torch.dtype
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Everything but the routed experts.

    Raises
    ------
    ModelFileError
        A tensor that is not known, so that leaving it out would give wrong results.
    StoreError
        A type that is not known.
    """
    trunk: dict[str, torch.Tensor] = {}
    for name, tensor in files.tensors.items():
        if read_gguf_name(name) is not None:
            continue
        if match := _LATENT.fullmatch(name):
            if match[2] == "k":
                trunk[_target(files, row, f"{match[1]}kv_b.weight", config)] = _latent(files, match[1], dtype)
            continue
        target = _target(files, row, name, config)
        if target is None:
            continue
        values = read_tensor(files, tensor)
        if row.permuted and name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _halves(values, _heads(config, name))
        if name.endswith("ffn_gate_inp_shexp.weight"):
            values = values.reshape(1, -1)
        trunk[target] = torch.from_numpy(np.array(values, np.float32)).to(dtype)
    return trunk


def _target(files: ModelFiles, row: Architecture, name: str, config: Any) -> Any:
    try:
        return name_in_transformers(row, name, config.num_hidden_layers)
    except KeyError:
        raise ModelFileError(
            f"{files.path}: tensor {name!r} has no counterpart in transformers' {row.model_type}, and leaving it out "
            "would give wrong results; is the file of another architecture than its metadata says?"
        ) from None


def _latent(files: ModelFiles, stem: str, dtype: torch.dtype) -> torch.Tensor:
    """kv_b (heads * (nope + v), latent) of the two matrices that newer files split it into."""
    keys, values = (read_tensor(files, files.tensors[f"{stem}{one}_b.weight"]) for one in "kv")
    joined = np.concatenate((keys.transpose(0, 2, 1), values), axis=1)  # keys lie (heads, latent, nope)
    return torch.from_numpy(joined.reshape(-1, joined.shape[-1])).to(dtype)


def _heads(config: Any, name: str) -> int:
    return config.num_attention_heads if name.endswith("attn_q.weight") else config.num_key_value_heads


def _halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a head that stand pairwise (0, half, 1, half + 1, ...) in two halves, as transformers rotates them."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def check_trunk(files: ModelFiles, trunk: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare with the parameters that the model has.

    Raises
    ------
    ModelFileError
        One is missing or of another shape: transformers would fill it with random numbers.
    """
    for name, parameter in expected.items():
        found = trunk.get(name)
        if found is None:
            raise ModelFileError(
                f"{files.path}: has no tensor for {name}, which the model needs; the file is incomplete"
            )
        if found.shape != parameter.shape:
            raise ModelFileError(
                f"{files.path}: its tensor for {name} has shape {tuple(found.shape)}, but by its metadata it must have "
                f"{tuple(parameter.shape)}; the file is damaged, convert it again"
            )
