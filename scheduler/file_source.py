"""A layer of a store whose experts lie in model files: taken as they are, or converted on the way.

Bytes that are of the wanted format already go from the file into the arena by compiled code, through a buffer of a
tile. Others are read and converted for one expert at a time, so that a thread needs room for one expert beside the
store. All are read by calls: a file that changes meanwhile is an error, and no file page becomes the process's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import FORMATS, Float32Array, Format, UInt8Array
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cpu_kernels.pack import DONE, ExpertPacker, Rows, address_of, pack_biases
from trilane.cpu_kernels.quantize import quantize_matrix
from trilane.errors import ModelFileError, StoreError
from trilane.readers.finder import gate_of
from trilane.readers.model_file import ModelFile, ModelFiles, TensorInfo
from trilane.readers.moe import MatrixSource, MoeLayer, MoeModel
from trilane.store_layers import GATELESS, MATRICES, Gate

PIECE_WEIGHTS = 1 << 18  # a megabyte of floats
FLOATS: Mapping[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def choose_gate(files: ModelFiles, model: MoeModel, gate: str | Gate | None) -> Gate:
    """The gate that a caller gave, else the one that the model's architecture is known to have."""
    if isinstance(gate, Gate):
        return gate
    if gate is None:
        found = gate_of(files)
        return Gate(found.kind, found.alpha, found.limit)
    known = model.gate  # its numbers, where the caller names the same kind
    return Gate(gate, known.alpha, known.limit) if known is not None and known.kind == gate else Gate(gate)


def choose_layers(model: MoeModel, blocks: Iterable[int]) -> MoeModel:
    """The model with some of its layers alone, in the order of the model."""
    wanted = set(blocks)
    found = {layer.block for layer in model.layers}
    if not wanted or wanted - found:
        raise StoreError(
            f"layers: {sorted(wanted - found) or 'none'}, but layers with experts are {_runs(found)}; choose among them"
        )
    return replace(model, layers=tuple(layer for layer in model.layers if layer.block in wanted))


def _runs(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "0 to 2, 5"."""
    ordered = sorted(numbers)
    starts = [n for n in ordered if n - 1 not in numbers]
    ends = [n for n in ordered if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


class FileLayer:
    """One MoE layer of a model file; packs one expert at a time.

    Parameters
    ----------
    files, layer, formats, gate, requantize
        What to load, and how.
    release : bool
        Take pages of the files out of the system's cache again, where they were not in it before.

    Raises
    ------
    StoreError
        A format that is not supported, a conversion that was not asked for, or shapes that no layout takes.
    """

    def __init__(
        self,
        files: ModelFiles,
        layer: MoeLayer,
        formats: Mapping[str, Format],
        gate: Gate,
        requantize: bool,
        release: bool = False,
    ) -> None:
        self.gate, self.num_experts, self._release = gate, layer.num_experts, release
        self._files, self._layer = files, layer
        self._check_gate()
        self._matrices = {
            name: MatrixReader(files, source, formats.get(name), requantize) for name, source in layer.matrices.items()
        }
        self._biases = {name: BiasReader(files, source) for name, source in layer.biases.items()}
        self.layout = self._make_layout()
        self._packer = ExpertPacker(self.layout)
        self._used = sorted({tensor.path for matrix in self._matrices.values() for tensor in matrix.tensors})

    def _check_gate(self) -> None:
        has_gate = "gate" in self._layer.matrices
        if has_gate == (self.gate.kind == GATELESS):
            rule = "has no gate matrix" if has_gate else "needs a gate matrix"
            raise StoreError(
                f"{self._files.path}, {self._layer}: gate kind {self.gate.kind!r} {rule}, but the layer has "
                f"{', '.join(sorted(self._layer.matrices))}; pass the model's own gate="
            )

    def _make_layout(self) -> ExpertLayout:
        formats = {name: matrix.format for name, matrix in self._matrices.items()}
        try:
            return ExpertLayout(
                self._layer.hidden, self._layer.intermediate, formats.get("gate"), formats["up"], formats["down"],
                bool(self._biases),
            )  # fmt: skip
        except ValueError as error:
            raise StoreError(f"{self._files.path}, layer {self._layer.block}: {error}") from None

    def pack(self, expert: int, out: UInt8Array) -> None:
        """Write one expert's packed bytes to ``out``."""
        for path in self._used:
            self._files.files[path].check_unchanged()
        fetched = [matrix for matrix in self._matrices.values() if matrix.prefetch(expert)]
        converted = {name: m.rows(expert) for name, m in self._matrices.items() if not m.is_direct}
        rows = [
            Rows(address_of(converted[name])) if name in converted else self._rows_in_file(name, expert)
            for name in MATRICES
        ]
        outcome = self._packer.pack(out, *rows)
        if outcome.code != DONE:
            raise self._matrices[MATRICES[outcome.matrix]].read_error(expert, outcome.code)
        if self._biases:
            biases = [self._biases[name].values(expert) if name in self._biases else None for name in MATRICES]
            pack_biases(self.layout, out, biases)
        if self._release:
            for matrix in fetched:
                matrix.release(expert)

    def _rows_in_file(self, name: str, expert: int) -> Rows:
        return self._matrices[name].place(expert) if name in self._matrices else Rows()


def _unsupported(tensor: TensorInfo) -> StoreError:
    return StoreError(
        f"{tensor}: experts in {tensor.format} cannot be used; supported are {', '.join(FORMATS)}. Take the model in "
        "one of these (a quantisation such as Q4_K_S, Q6_K or Q8_0), or load other layers by layers="
    )


class MatrixReader:
    """One matrix of a layer's experts, as contiguous rows of the wanted format."""

    def __init__(self, files: ModelFiles, source: MatrixSource, wanted: Format | None, requantize: bool) -> None:
        self._files, self._source = files, source
        self.tensors = (*source.tensors, *source.scales)
        if source.format not in FORMATS:
            raise _unsupported(source.tensors[0])
        self._stored = FORMATS[source.format]
        self.format = self._stored if wanted is None else wanted
        if self.format is not self._stored and source.format not in FLOATS and not requantize:
            raise StoreError(
                f"{source.tensors[0]}: is quantised already, and {self.format.name} is wanted; pass requantize=True "
                "if losing accuracy twice is all right, or formats=None to use it as it is"
            )

    def _part(self, tensors: tuple[TensorInfo, ...], expert: int) -> tuple[TensorInfo, int, int]:
        """The tensor, and the offset and length in its file, of one expert's bytes."""
        if not self._source.stacked:
            return tensors[expert], tensors[expert].offset, tensors[expert].nbytes
        (tensor,) = tensors
        nbytes = tensor.nbytes // self._source.num_experts
        return tensor, tensor.offset + expert * nbytes, nbytes

    def _bytes(self, tensors: tuple[TensorInfo, ...], expert: int) -> UInt8Array:
        tensor, offset, nbytes = self._part(tensors, expert)
        return self._files.files[tensor.path].read(offset, nbytes, tensor)

    @property
    def is_direct(self) -> bool:
        """Whether the file's own bytes are what is wanted, in one piece for each expert."""
        source = self._source
        in_pieces = source.scales or source.transposed or source.row_step != 1
        return self.format is self._stored and not in_pieces

    def place(self, expert: int) -> Rows:
        """Where one expert's rows lie in their file; only if they are direct."""
        tensor, offset, _ = self._part(self._source.tensors, expert)
        first = self._source.first_row * self._stored.row_source_nbytes(self._source.columns)
        return Rows(offset + first, self._files.files[tensor.path].fd)

    def read_error(self, expert: int, code: int) -> ModelFileError:
        """The error of a read of one expert that ended with ``code``."""
        tensor, _, _ = self._part(self._source.tensors, expert)
        return self._files.files[tensor.path].read_error(code, tensor)

    def rows(self, expert: int) -> UInt8Array:
        """(rows, row bytes) uint8, contiguous: converted, where they are not direct."""
        source = self._source
        if source.scales:
            found = self._join_mxfp4(expert)
        elif source.format in FLOATS and (source.transposed or self.format is not self._stored):
            return self._quantize(self._floats(expert))
        else:
            width = self._stored.row_source_nbytes(source.columns)
            found = self._take(self._bytes(source.tensors, expert).reshape(-1, width))
        return np.ascontiguousarray(found) if self.format is self._stored else self._requantize(found)

    def _requantize(self, rows: UInt8Array) -> UInt8Array:
        """Converted in pieces: the floats of a whole matrix would need more room than an expert."""
        columns = self._source.columns
        out = np.empty((len(rows), self.format.row_source_nbytes(columns)), np.uint8)
        step = max(1, PIECE_WEIGHTS // columns)
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            out[piece] = self._quantize(self._stored.dequantize_rows(rows[piece]))
        return out

    def _take(self, rows: NDArray[np.generic]) -> UInt8Array:
        """The rows that are meant, of a tensor that may hold another matrix too."""
        source = self._source
        stop = source.first_row + source.rows * source.row_step
        return rows[source.first_row : stop : source.row_step]  # type: ignore[return-value]

    def _floats(self, expert: int) -> NDArray[np.generic]:
        source = self._source
        values = self._bytes(source.tensors, expert).view(FLOATS[source.format])
        if source.transposed:
            return self._take(values.reshape(source.columns, -1).T)
        return self._take(values.reshape(-1, source.columns))

    def _quantize(self, values: NDArray[np.generic]) -> UInt8Array:
        try:
            return quantize_matrix(values, self.format)
        except ValueError as error:
            raise StoreError(f"{self._source.tensors[0]}: {error}") from None

    def _join_mxfp4(self, expert: int) -> UInt8Array:
        """Blocks and scales, kept apart in gpt-oss checkpoints, as GGUF blocks: a scale and 16 bytes.

        A byte of the checkpoint holds two neighbouring weights; byte k of a GGUF block holds weights k and k + 16.
        """
        rows, num_blocks = -1, self._source.columns // 32
        nibbles = self._take(self._bytes(self._source.tensors, expert).reshape(rows, num_blocks * 16))
        scales = self._take(self._bytes(self._source.scales, expert).reshape(rows, num_blocks))
        pairs = nibbles.reshape(len(nibbles), num_blocks, 16)
        weights = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), num_blocks, 32)
        joined = np.empty((len(pairs), num_blocks, 17), np.uint8)
        joined[:, :, 0] = scales
        joined[:, :, 1:] = weights[:, :, :16] | weights[:, :, 16:] << 4
        return joined.reshape(len(pairs), -1)

    def _places(self, expert: int) -> Iterator[tuple[ModelFile, int, int]]:
        """(file, offset, length) of all bytes of one expert."""
        for tensors in filter(None, (self._source.tensors, self._source.scales)):
            tensor, offset, nbytes = self._part(tensors, expert)
            yield self._files.files[tensor.path], offset, nbytes

    def prefetch(self, expert: int) -> bool:
        """Have the system begin to read one expert's bytes, if they are not in memory; whether some were not."""
        return any([file.prefetch(offset, nbytes) for file, offset, nbytes in self._places(expert)])

    def release(self, expert: int) -> None:
        """Have the system's cache give up one expert's bytes."""
        for file, offset, nbytes in self._places(expert):
            file.release(offset, nbytes)


class BiasReader:
    """A bias of a layer's experts, as float32."""

    def __init__(self, files: ModelFiles, source: MatrixSource) -> None:
        if source.format not in FLOATS:
            raise _unsupported(source.tensors[0])
        self._files, self._source = files, source

    def values(self, expert: int) -> Float32Array:
        """(rows,) float32 of one expert."""
        source = self._source
        tensor = source.tensors[0 if source.stacked else expert]
        fmt = FORMATS[source.format]
        width = tensor.nbytes // (source.num_experts if source.stacked else 1)
        start = tensor.offset + (expert * width if source.stacked else 0)
        blocks = self._files.files[tensor.path].read(start, width, tensor).reshape(-1, fmt.block_nbytes)
        stop = source.first_row + source.rows * source.row_step
        return fmt.dequantize(blocks).reshape(-1)[source.first_row : stop : source.row_step]
