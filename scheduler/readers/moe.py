"""What a model file says about its experts: for each MoE layer, where each matrix of each expert lies.

Names differ from writer to writer; what is the same for all is here: a matrix is stacked (experts first) or one
tensor an expert, stands alone or merged with another, its rows one after another, every second one, or as columns.
It reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trilane.readers.architectures import GateKind
from trilane.readers.model_file import TensorInfo

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class MatrixSource:
    """One matrix of all experts of a layer.

    Attributes
    ----------
    tensors : tuple of TensorInfo
        One stacked tensor (num_experts, ...), or one for each expert.
    stacked : bool
        Which of the two.
    num_experts, rows, columns : int
        Of the matrix that is meant. A bias has one column.
    first_row, row_step : int
        Which rows of the tensor are meant where it holds two matrices.
    transposed : bool
        The tensor has columns where rows are meant.
    scales : tuple of TensorInfo
        Scales of MXFP4 weights that are kept apart from their blocks; else empty.
    """

    tensors: tuple[TensorInfo, ...]
    stacked: bool
    num_experts: int
    rows: int
    columns: int
    first_row: int = 0
    row_step: int = 1
    transposed: bool = False
    scales: tuple[TensorInfo, ...] = ()

    @property
    def format(self) -> str:
        return "mxfp4" if self.scales else self.tensors[0].format


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer as the files have it.

    Attributes
    ----------
    block : int
        Its number in the model, counting all layers.
    num_experts, hidden, intermediate : int
    matrices : mapping of str to MatrixSource
        "up", "down", and "gate" where there is one.
    biases : mapping of str to MatrixSource
        The same names, or none.
    """

    block: int
    num_experts: int
    hidden: int
    intermediate: int
    matrices: Mapping[str, MatrixSource]
    biases: Mapping[str, MatrixSource] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of gate (if there is one), up and down."""
        return tuple(self.matrices[name].format for name in MATRICES if name in self.matrices)

    def __str__(self) -> str:
        bias = ", biases" if self.biases else ""
        return (
            f"layer {self.block}: {self.num_experts} experts of {self.hidden} x {self.intermediate}, "
            f"{'/'.join(self.formats)}{bias}"
        )


@dataclass(frozen=True)
class LeftAlone:
    """Tensors of one sort that are not routed experts, and stay where they are."""

    what: str
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class MoeModel:
    """The MoE layers that were found in a model's files, and what was left alone.

    Attributes
    ----------
    path : Path
        What was opened.
    architecture : str
        GGUF's architecture or transformers' model_type; "" if the files do not say.
    gate : GateKind or None
        None if it is not known for the architecture.
    layers : tuple of MoeLayer
        In the order of the model.
    left_alone : tuple of LeftAlone
    """

    path: Path
    architecture: str
    gate: GateKind | None
    layers: tuple[MoeLayer, ...]
    left_alone: tuple[LeftAlone, ...]

    @property
    def expert_nbytes(self) -> int:
        """Bytes of all routed experts in the files."""
        return sum(tensor.nbytes for tensor in expert_tensors(self.layers))

    def __str__(self) -> str:
        gate = self.gate.kind if self.gate else "not known"
        lines = [f"{self.path}: {self.architecture or 'no architecture given'}, gate {gate}"]
        lines += [f"  {text}" for text in _grouped(self.layers)]
        lines += [f"  left alone: {a.what}, {a.num_tensors} tensors, {a.nbytes / 1e9:.2f} GB" for a in self.left_alone]
        return "\n".join(lines)


def expert_tensors(layers: tuple[MoeLayer, ...]) -> set[TensorInfo]:
    """All tensors that hold routed experts."""
    sources = [source for layer in layers for source in (*layer.matrices.values(), *layer.biases.values())]
    return {tensor for source in sources for tensor in (*source.tensors, *source.scales)}


def _grouped(layers: tuple[MoeLayer, ...]) -> list[str]:
    """A line for each run of layers that differ in their number alone."""
    runs: list[tuple[int, int, str]] = []
    for layer in layers:
        text = str(layer).partition(": ")[2]
        if runs and runs[-1][2] == text and runs[-1][1] == layer.block - 1:
            runs[-1] = (runs[-1][0], layer.block, text)
        else:
            runs.append((layer.block, layer.block, text))
    return [f"layers {a} to {b}: {text}" if a < b else f"layer {a}: {text}" for a, b, text in runs]
