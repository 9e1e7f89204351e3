"""The words of a store: matrices and formats of a layer, its gate, and where layers lie in the arena.

What a layer is packed from (arrays, or files) is in array_source.py and file_source.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trilane.cpu_kernels.formats import Format, format_of
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.errors import StoreError, did_you_mean

MATRICES = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")
GATELESS = "relu2"
EXPERT_ALIGNMENT = 4096


@dataclass(frozen=True)
class Gate:
    """The activation between the two matrix products.

    Attributes
    ----------
    kind : str
        ``silu_glu``, ``gelu_tanh_glu``, ``silu_glu_clamped``, ``swiglu_oai`` (gpt-oss) or ``relu2`` (no gate).
    alpha, limit : float
        Parameters of ``swiglu_oai`` (both) and ``silu_glu_clamped`` (limit).
    """

    kind: str = "silu_glu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in GATES:
            raise StoreError(
                f"gate: kind {self.kind!r} is unknown, but must be one of {', '.join(GATES)}."
                f"{did_you_mean(str(self.kind), GATES)}"
            )
        if not math.isfinite(self.alpha):
            raise StoreError(f"gate: alpha is {self.alpha}, but must be a finite number; take the model's own")
        if not self.limit > 0:
            raise StoreError(f"gate: limit is {self.limit}, but must be above 0; take the model's own")


@dataclass(frozen=True)
class StoreLayer:
    """One MoE layer of a store: ``num_experts`` experts of one layout, from ``offset`` in the arena on."""

    layout: ExpertLayout
    num_experts: int
    gate: Gate
    offset: int

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return self.layout.expert_nbytes


class LayerSource(Protocol):
    """What a layer is made of: a layout, and one expert's packed bytes at a time, from any thread."""

    layout: ExpertLayout
    num_experts: int
    gate: Gate

    def pack(self, expert: int, out: np.ndarray) -> None:
        """Write one expert's packed bytes to ``out``."""


def formats_by_matrix(formats: str | Mapping[str, str]) -> dict[str, Format]:
    """The formats that a caller gave, by matrix; names of matrices and formats are checked.

    Raises
    ------
    StoreError
        Neither a name nor a mapping, or a name that does not exist.
    """
    if not isinstance(formats, (str, Mapping)):
        raise StoreError(f"formats: {formats!r} is neither a name nor a mapping of names; pass 'q4_k', for example")
    named = dict.fromkeys(MATRICES, formats) if isinstance(formats, str) else formats
    unknown = [name for name in named if name not in MATRICES]
    if unknown:
        raise StoreError(f"formats: {unknown[0]!r} is no matrix; give formats for {', '.join(MATRICES)}")
    try:
        return {matrix: format_of(name) for matrix, name in named.items()}
    except ValueError as error:
        raise StoreError(f"formats: {error}") from None


def needed_matrices(gate: Gate) -> tuple[str, ...]:
    """The matrices of an expert with that gate."""
    return MATRICES[1:] if gate.kind == GATELESS else MATRICES


def check_same_hidden(sources: Sequence[LayerSource]) -> None:
    first = sources[0].layout.hidden
    for index, source in enumerate(sources):
        if source.layout.hidden != first:
            raise StoreError(
                f"layer {index}: hidden size {source.layout.hidden}, but layer 0 has {first} and all layers "
                "of a store must agree; make one store per hidden size"
            )
        if source.num_experts == 0:
            raise StoreError(f"layer {index}: no experts, but at least one is needed; leave the layer out")


def place_layers(sources: Sequence[LayerSource]) -> list[StoreLayer]:
    offsets, _ = layer_offsets([source.num_experts * source.layout.expert_nbytes for source in sources])
    return [
        StoreLayer(source.layout, source.num_experts, source.gate, offset)
        for source, offset in zip(sources, offsets, strict=True)
    ]


def layer_offsets(nbytes: Iterable[int]) -> tuple[list[int], int]:
    """Where layers of such sizes lie in an arena, and how many bytes it has."""
    offsets, end = [], 0
    for size in nbytes:
        offsets.append(-(-end // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end
