"""What a tensor's name says: which matrix of which layer's experts it is, or that it is none.

GGUF: ``blk.N.ffn_gate_exps.weight`` (or ``up``, ``down``, ``gate_up``; ``.bias``), and of older files
``blk.N.ffn_gate.E.weight``. Checkpoints: ``...layers.N.<block>.experts.E.gate_proj.weight`` (or ``w1``, ``w3``,
``w2`` for gate, up and down), stacked ``...experts.gate_up_proj`` and ``down_proj`` (``_bias``; ``_blocks`` and
``_scales`` of MXFP4), and granite's ``input_linear`` and ``output_linear``. Shared experts have names of their own
and are not meant.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from trilane.errors import StoreError

WEIGHT, BIAS, BLOCKS, SCALES = "weight", "bias", "blocks", "scales"
STACKED = -1


class ExpertName(NamedTuple):
    """``matrix`` is "gate", "up", "down" or "gate_up"; ``expert`` is STACKED where a tensor holds all of them."""

    prefix: str
    block: int
    matrix: str
    part: str
    expert: int


_GGUF_STACKED = re.compile(r"blk\.(\d{1,6})\.ffn_(gate_up|gate|up|down)_exps\.(\w+)")
_GGUF_SINGLE = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)\.(\d{1,6})\.(\w+)")
_LAYER = re.compile(r"(|.*?\.)layers\.(\d{1,6})\.(?:\w+\.)?experts\.(.+)")
_SINGLE = re.compile(r"(\d{1,6})\.(\w+)\.(\w+)")
_STACKED = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj)(|\.weight|\.bias|_bias|_blocks|_scales)")
_GRANITE = re.compile(r"(|.*?\.)layers\.(\d{1,6})\.block_sparse_moe\.(input_linear|output_linear)\.weight")

_MATRIX_OF = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up",
    "w1": "gate", "w3": "up", "w2": "down", "input_linear": "gate_up", "output_linear": "down",
}  # fmt: skip
_PART_OF = {"": WEIGHT, ".weight": WEIGHT, ".bias": BIAS, "_bias": BIAS, "_blocks": BLOCKS, "_scales": SCALES}


def read_gguf_name(name: str) -> ExpertName | None:
    """The meaning of a GGUF tensor's name; None if it is no routed expert's.

    Raises
    ------
    StoreError
        It is one of an expert's, but not of a sort that is understood.
    """
    if match := _GGUF_STACKED.fullmatch(name):
        block, matrix, part, expert = int(match[1]), match[2], match[3], STACKED
    elif match := _GGUF_SINGLE.fullmatch(name):
        block, matrix, part, expert = int(match[1]), match[2], match[4], int(match[3])
    else:
        return None
    if part not in (WEIGHT, BIAS):
        raise _not_understood(name)
    return ExpertName("", block, matrix, part, expert)


def read_checkpoint_name(name: str) -> ExpertName | None:
    """The meaning of the name of a checkpoint's tensor; None if it is no routed expert's.

    Raises
    ------
    StoreError
        It is one of an expert's, but not of a sort that is understood (another scheme of quantisation, mostly).
    """
    if match := _GRANITE.fullmatch(name):
        return ExpertName(match[1], int(match[2]), _MATRIX_OF[match[3]], WEIGHT, STACKED)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix, block, rest = layer[1], int(layer[2]), layer[3]
    if match := _STACKED.fullmatch(rest):
        return ExpertName(prefix, block, _MATRIX_OF[match[1]], _PART_OF[match[2]], STACKED)
    match = _SINGLE.fullmatch(rest)
    if match is None or match[2] not in _MATRIX_OF or match[3] not in (WEIGHT, BIAS):
        raise _not_understood(name)
    return ExpertName(prefix, block, _MATRIX_OF[match[2]], match[3], int(match[1]))


def _not_understood(name: str) -> StoreError:
    return StoreError(
        f"tensor {name!r}: lies among the experts, but its name is of no sort that is understood (another scheme of "
        "quantisation?); take the model in bf16, or as a GGUF file"
    )
