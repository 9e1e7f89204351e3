"""How the tensors of one MoE layer fit together: stacked or single, merged or not, and in which order.

Nothing is taken on trust: all experts must be there, shapes must fit, and what two orders could explain is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from trilane.errors import StoreError
from trilane.readers.architectures import text_config
from trilane.readers.model_file import ModelFiles, TensorInfo
from trilane.readers.moe import MATRICES, MatrixSource, MoeLayer
from trilane.readers.names import BIAS, BLOCKS, SCALES, STACKED, WEIGHT

MXFP4_BLOCK = 32

Parts = dict[tuple[str, str], dict[int, TensorInfo]]  # (matrix, part) -> tensors by expert, or STACKED alone


def find_layer(files: ModelFiles, block: int, parts: Parts, interleaved: bool) -> MoeLayer:
    """The layer that ``parts`` make.

    Parameters
    ----------
    files : ModelFiles
    block : int
        Its number in the model.
    parts : mapping of (matrix, part) to tensors by expert
    interleaved : bool
        Whether rows of gate and up take turns in merged tensors.

    Raises
    ------
    StoreError
        Something is missing, or does not fit.
    """
    return _LayerParts(files, block, parts).layer(interleaved)


class _Stack(NamedTuple):
    """All experts of one tensor name: ``shape`` is that of one expert's part."""

    tensors: tuple[TensorInfo, ...]
    stacked: bool
    num_experts: int
    shape: tuple[int, ...]
    scales: tuple[TensorInfo, ...] = ()


class _LayerParts:
    def __init__(self, files: ModelFiles, block: int, parts: Parts) -> None:
        self._files, self._block = files, block
        self._weights = {m: self._stack(m, WEIGHT, found, 2) for (m, part), found in parts.items() if part == WEIGHT}
        for (matrix, part), found in parts.items():
            if part == BLOCKS:
                self._weights[matrix] = self._mxfp4_stack(matrix, found, parts)
        self._biases = {m: self._stack(m, BIAS, found, 1) for (m, part), found in parts.items() if part == BIAS}
        self._check_parts(parts)
        self._check_matrices()

    def _error(self, text: str) -> StoreError:
        return StoreError(f"{self._files.path}, layer {self._block}: {text}")

    def _stack(self, matrix: str, part: str, experts: Mapping[int, TensorInfo], rank: int) -> _Stack:
        whole = experts.get(STACKED)
        if whole is None:
            return self._singles(matrix, part, experts, rank)
        if len(experts) > 1:
            raise self._error(f"{matrix} {part} is there both stacked and expert by expert; keep one of them")
        if len(whole.shape) != rank + 1:
            raise self._error(f"{whole} must have {rank + 1} dimensions, the experts first; write it so")
        return _Stack((whole,), True, whole.shape[0], whole.shape[1:])

    def _singles(self, matrix: str, part: str, experts: Mapping[int, TensorInfo], rank: int) -> _Stack:
        missing = next((e for e in range(len(experts)) if e not in experts), None)
        if missing is not None:
            raise self._error(f"{matrix} {part} of expert {missing} is missing; the files are incomplete")
        tensors = tuple(experts[e] for e in range(len(experts)))
        first = tensors[0]
        for tensor in tensors:
            if len(tensor.shape) != rank or (tensor.shape, tensor.format) != (first.shape, first.format):
                raise self._error(f"{tensor} must be like {first}, with {rank} dimensions; write all experts alike")
        return _Stack(tensors, False, len(tensors), first.shape)

    def _mxfp4_stack(self, matrix: str, experts: Mapping[int, TensorInfo], parts: Parts) -> _Stack:
        """Blocks (num_experts, rows, K / 32, 16) and scales (num_experts, rows, K / 32), both bytes."""
        if (matrix, SCALES) not in parts or (matrix, WEIGHT) in parts:
            raise self._error(f"{matrix} has MXFP4 blocks, which need scales and no other weights; mend the files")
        blocks = self._stack(matrix, BLOCKS, experts, 3)
        scales = self._stack(matrix, SCALES, parts[matrix, SCALES], 2)
        rows, num_blocks, width = blocks.shape
        kinds = (blocks.tensors[0].format, scales.tensors[0].format)
        fits = (scales.shape, scales.num_experts) == ((rows, num_blocks), blocks.num_experts)
        if width != MXFP4_BLOCK // 2 or not fits or kinds != ("u8", "u8"):
            raise self._error(
                f"{blocks.tensors[0]} and {scales.tensors[0]} must be u8 of shapes (experts, rows, K / 32, 16) and "
                "(experts, rows, K / 32); write them so"
            )
        return blocks._replace(shape=(rows, num_blocks * MXFP4_BLOCK), scales=scales.tensors)

    def _check_parts(self, parts: Parts) -> None:
        for matrix, part in parts:
            if part == SCALES and (matrix, BLOCKS) not in parts:
                raise self._error(f"{matrix} has scales, but no MXFP4 blocks; the files are incomplete")
        if self._biases and set(self._biases) != set(self._weights):
            raise self._error(
                f"biases of {_listed(self._biases)} beside weights of {_listed(self._weights)}, but all matrices have "
                "one or none; the files are incomplete"
            )
        counts = {name: stack.num_experts for name, stack in (*self._weights.items(), *self._biases.items())}
        if len(set(counts.values())) > 1:
            raise self._error(f"numbers of experts differ: {counts}; the files are not of one model")

    def _check_matrices(self) -> None:
        names = set(self._weights)
        if "down" not in names or not names & {"up", "gate_up"}:
            raise self._error(f"has {_listed(names)}, but needs down and up, or gate_up; the files are incomplete")
        if "gate_up" in names and names & {"gate", "up"}:
            raise self._error("gate_up is there beside gate or up; keep one of them")
        if "gate_up" in self._biases and self._files.kind != "gguf" and not self._files.metadata:
            raise self._error(
                "gate_up has a bias, and only config.json can say whether its rows take turns; put it beside the file"
            )

    def _is_transposed(self) -> bool:
        """Whether the tensors are (columns, rows): only stacked ones of checkpoints can be."""
        down = self._weights["down"]
        if self._files.kind == "gguf" or not down.stacked or down.scales:
            return False
        if "gate_up" in self._weights:
            first, last = down.shape
            return self._weights["gate_up"].shape == (last, 2 * first)
        rows, columns = self._weights["up"].shape
        return bool(rows == text_config(self._files.metadata).get("hidden_size") != columns)

    def layer(self, interleaved: bool) -> MoeLayer:
        """The layer, its shapes checked."""
        transposed = self._is_transposed()
        shape = self._weights["down"].shape
        hidden, intermediate = reversed(shape) if transposed else shape
        sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        sizes["gate_up"] = (2 * intermediate, hidden)
        matrices: dict[str, MatrixSource] = {}
        biases: dict[str, MatrixSource] = {}
        for name, stack in self._weights.items():
            matrices |= _split(name, self._source(stack, sizes[name], transposed), interleaved)
        for name, stack in self._biases.items():
            biases |= _split(name, self._source(stack, sizes[name][:1], False), interleaved)
        return MoeLayer(self._block, self._weights["down"].num_experts, hidden, intermediate, matrices, biases)

    def _source(self, stack: _Stack, size: tuple[int, ...], transposed: bool) -> MatrixSource:
        wanted = tuple(reversed(size)) if transposed else size
        if stack.shape != wanted:
            raise self._error(
                f"{stack.tensors[0]} has {stack.shape} for an expert, but {wanted} is needed, after the shape of down; "
                "the files are of no order that is understood"
            )
        columns = size[1] if len(size) == 2 else 1
        return MatrixSource(
            stack.tensors,
            stack.stacked,
            stack.num_experts,
            size[0],
            columns,
            transposed=transposed,
            scales=stack.scales,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _split(name: str, whole: MatrixSource, interleaved: bool) -> dict[str, MatrixSource]:
    """gate_up as its two halves, anything else as it is."""
    if name != "gate_up":
        return {name: whole}
    rows = whole.rows // 2
    starts, step = ((0, 1), 2) if interleaved else ((0, rows), 1)
    return {
        matrix: replace(whole, rows=rows, first_row=start, row_step=step)
        for matrix, start in zip(MATRICES, starts, strict=False)
    }
