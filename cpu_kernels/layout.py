"""Where the bytes of an expert are: shard after shard, the very bytes that all lanes read.

A *shard* is 256 intermediate neurons of an expert (the last one may be shorter, in steps of 32). It holds,
each starting at a multiple of 16::

    gate main, gate side, up main, up side     rows = the shard's neurons, K = hidden
    down main, down side                       rows = hidden, K = the shard's neurons
    gate bias, up bias                         float32, one per neuron

and after the last shard the expert has its down bias (hidden float32). Shards and experts are multiples of 64
bytes long, so one copy fetches an expert or a run of its shards. Padding is at most 2 % of the source.

The file knows sizes and offsets, and packs source bytes into place. It does not know lanes, slots or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import BLOCK, Float32Array, Format, UInt8Array, align_up

SHARD_NEURONS = BLOCK
PLANE_ALIGNMENT = 16
SHARD_ALIGNMENT = 64
ABSENT = -1

# Columns of ExpertLayout.descriptor: sizes, then offsets inside the shard (ABSENT if there is no such part),
# then the strides that change from shard to shard. Columns 13 to 15 are 0.
NBYTES, OFFSET, NEURONS = 0, 1, 2
GATE_MAIN, GATE_SIDE, UP_MAIN, UP_SIDE, DOWN_MAIN, DOWN_SIDE = 3, 4, 5, 6, 7, 8
GATE_BIAS, UP_BIAS = 9, 10
DOWN_STRIDE, DOWN_SIDE_STRIDE = 11, 12
NUM_COLUMNS = 16


class ExpertSource(NamedTuple):
    """One expert as its source has it: rows of source bytes, and float32 biases (None where absent)."""

    gate: UInt8Array | None
    up: UInt8Array
    down: UInt8Array
    gate_bias: Float32Array | None = None
    up_bias: Float32Array | None = None
    down_bias: Float32Array | None = None


@dataclass(frozen=True)
class ExpertLayout:
    """Offsets and sizes of one expert of a layer (all experts of a layer share the layout).

    Parameters
    ----------
    hidden, intermediate : int
        Row length of gate and up, and of down. Multiples of 32; of 256 where the matrix is a K-quant.
    gate : Format or None
        None for experts without a gate (``relu2``).
    up, down : Format
    has_bias : bool
        Whether every matrix has a float32 bias.
    """

    hidden: int
    intermediate: int
    gate: Format | None
    up: Format
    down: Format
    has_bias: bool = False

    def __post_init__(self) -> None:
        for matrix, fmt, columns in self._matrices():
            try:
                fmt.check_columns(columns)
            except ValueError as error:
                raise ValueError(
                    f"{matrix} of an expert (hidden {self.hidden}, intermediate {self.intermediate}): {error}"
                ) from None

    def _matrices(self) -> list[tuple[str, Format, int]]:
        gate = [("gate", self.gate, self.hidden)] if self.gate is not None else []
        return [*gate, ("up", self.up, self.hidden), ("down", self.down, self.intermediate)]

    @property
    def num_shards(self) -> int:
        return -(-self.intermediate // SHARD_NEURONS)

    def shard_neurons(self, shard: int) -> int:
        """Intermediate neurons of a shard: 256, or what is left in the last one."""
        return min(SHARD_NEURONS, self.intermediate - shard * SHARD_NEURONS)

    def gate_strides(self, shard: int = 0) -> tuple[int, int]:
        """(main, side) bytes from row to row of the gate matrix; (0, 0) without a gate."""
        return _strides(self.gate, self.hidden)

    def up_strides(self, shard: int = 0) -> tuple[int, int]:
        return _strides(self.up, self.hidden)

    def down_strides(self, shard: int) -> tuple[int, int]:
        """(main, side) bytes from row to row of a shard's down matrix (the last may be narrower)."""
        return _strides(self.down, self.shard_neurons(shard))

    def _sections(self, neurons: int) -> list[tuple[int, int]]:
        """(descriptor column, bytes) of the parts of a shard, in their order in memory."""
        gate, gate_side = _strides(self.gate, self.hidden)
        up, up_side = _strides(self.up, self.hidden)
        down, down_side = _strides(self.down, neurons)
        bias = 4 if self.has_bias else 0
        gate_bias = bias if self.gate is not None else 0
        rows = (neurons,) * 4 + (self.hidden,) * 2 + (neurons,) * 2
        widths = (gate, gate_side, up, up_side, down, down_side, gate_bias, bias)
        return [(GATE_MAIN + i, n * width) for i, (n, width) in enumerate(zip(rows, widths, strict=True))]

    def _place(self, neurons: int) -> NDArray[np.int64]:
        """A descriptor row of a shard with that many neurons, at offset 0."""
        row = np.zeros(NUM_COLUMNS, np.int64)
        end = 0
        for column, nbytes in self._sections(neurons):
            row[column] = end if nbytes else ABSENT
            end = align_up(end + nbytes, PLANE_ALIGNMENT)
        row[NBYTES] = align_up(end, SHARD_ALIGNMENT)
        row[NEURONS] = neurons
        row[[DOWN_STRIDE, DOWN_SIDE_STRIDE]] = _strides(self.down, neurons)
        return row

    @cached_property
    def descriptor(self) -> NDArray[np.int64]:
        """int64 (num_shards, 16), read-only: one row per shard, columns as named at the top of the file."""
        table = np.empty((self.num_shards, NUM_COLUMNS), np.int64)
        table[:] = self._place(self.shard_neurons(0))
        table[-1] = self._place(self.shard_neurons(self.num_shards - 1))
        table[:, OFFSET] = np.cumsum(table[:, NBYTES]) - table[:, NBYTES]
        table.flags.writeable = False
        return table

    @property
    def shard_nbytes(self) -> NDArray[np.int64]:
        return self.descriptor[:, NBYTES]

    @property
    def shard_offset(self) -> NDArray[np.int64]:
        """Where each shard starts inside the expert."""
        return self.descriptor[:, OFFSET]

    @cached_property
    def _shards_end(self) -> int:
        return int(self.shard_offset[-1] + self.shard_nbytes[-1])

    @property
    def down_bias_offset(self) -> int:
        """Where the down bias starts inside the expert, -1 if there is none."""
        return self._shards_end if self.has_bias else ABSENT

    @cached_property
    def expert_nbytes(self) -> int:
        return align_up(self._shards_end + (4 * self.hidden if self.has_bias else 0), SHARD_ALIGNMENT)

    @property
    def source_nbytes(self) -> int:
        """Bytes of the expert as its source holds it: no padding, biases as float32."""
        gate_up = [fmt for fmt in (self.gate, self.up) if fmt is not None]
        rows = sum(self.intermediate * fmt.row_source_nbytes(self.hidden) for fmt in gate_up)
        rows += self.hidden * self.down.row_source_nbytes(self.intermediate)
        biases = len(gate_up) * self.intermediate + self.hidden
        return rows + (4 * biases if self.has_bias else 0)


def _strides(fmt: Format | None, num_columns: int) -> tuple[int, int]:
    return (fmt.main_stride(num_columns), fmt.side_stride(num_columns)) if fmt is not None else (0, 0)


def _view(shard: UInt8Array, offset: int, rows: int, stride: int, width: int) -> UInt8Array:
    """(rows, width) view of a plane of a shard; an absent plane is (rows, 0)."""
    if offset < 0:
        return np.empty((rows, 0), np.uint8)
    return shard[offset : offset + rows * stride].reshape(rows, stride)[:, :width]


def shard_planes(layout: ExpertLayout, expert: UInt8Array, shard: int) -> list[tuple[Format, UInt8Array, UInt8Array]]:
    """Views (format, main rows, side rows) of the matrices of a shard: [gate,] up, down.

    ``expert`` is the packed expert, uint8 of ``layout.expert_nbytes``; writing to a view writes to it.
    """
    row = layout.descriptor[shard]
    data = expert[row[OFFSET] : row[OFFSET] + row[NBYTES]]
    neurons, planes = int(row[NEURONS]), []
    for column, fmt, rows, columns in (
        (GATE_MAIN, layout.gate, neurons, layout.hidden),
        (UP_MAIN, layout.up, neurons, layout.hidden),
        (DOWN_MAIN, layout.down, layout.hidden, neurons),
    ):
        if fmt is None:
            continue
        main = _view(data, row[column], rows, fmt.main_stride(columns), fmt.row_main_nbytes(columns))
        side = _view(data, row[column + 1], rows, fmt.side_stride(columns), fmt.row_side_nbytes(columns))
        planes.append((fmt, main, side))
    return planes


def _bias_view(layout: ExpertLayout, expert: UInt8Array, shard: int, column: int) -> Float32Array:
    row = layout.descriptor[shard]
    start = int(row[OFFSET] + row[column])
    return expert[start : start + 4 * int(row[NEURONS])].view(np.float32)


def _shard_source(layout: ExpertLayout, source: ExpertSource, shard: int) -> list[UInt8Array]:
    """The source rows of a shard, [gate,] up, down: rows of gate and up, columns of down."""
    first, neurons = shard * SHARD_NEURONS, layout.shard_neurons(shard)
    start = layout.down.row_source_nbytes(first)
    stop = start + layout.down.row_source_nbytes(neurons)
    parts = [m[first : first + neurons] for m in (source.gate, source.up) if m is not None]
    return [*parts, source.down[:, start:stop]]


def pack_expert(
    layout: ExpertLayout,
    out: UInt8Array,
    gate: UInt8Array | None,
    up: UInt8Array,
    down: UInt8Array,
    gate_bias: Float32Array | None = None,
    up_bias: Float32Array | None = None,
    down_bias: Float32Array | None = None,
) -> None:
    """Write one expert into ``out`` from source bytes.

    Parameters
    ----------
    layout : ExpertLayout
    out : (expert_nbytes,) uint8, contiguous
        Every byte is written, padding as 0.
    gate, up : (intermediate, row_source_nbytes of hidden) uint8
        ``gate`` is None exactly if the layout has no gate.
    down : (hidden, row_source_nbytes of intermediate) uint8
    gate_bias, up_bias : (intermediate,) float32, or None if the layout has no bias
    down_bias : (hidden,) float32, or None if the layout has no bias

    Raises
    ------
    ValueError
        If a part is missing, not wanted, or of another shape or type.
    """
    source = ExpertSource(gate, up, down, gate_bias, up_bias, down_bias)
    _check_buffer(layout, out)
    _check_source(layout, source)
    out[-SHARD_ALIGNMENT:] = 0
    for shard in range(layout.num_shards):
        _pack_shard(layout, out, source, shard)
    if down_bias is not None:
        start = layout.down_bias_offset
        out[start : start + 4 * layout.hidden].view(np.float32)[:] = down_bias


def _pack_shard(layout: ExpertLayout, out: UInt8Array, source: ExpertSource, shard: int) -> None:
    # Sizes are multiples of 32, so parts fill their 16-byte steps and only the shard's end can have padding.
    end = int(layout.shard_offset[shard] + layout.shard_nbytes[shard])
    out[end - SHARD_ALIGNMENT : end] = 0
    parts = _shard_source(layout, source, shard)
    for (fmt, main, side), part in zip(shard_planes(layout, out, shard), parts, strict=True):
        fmt.split(part, main, side)
    neurons = slice(shard * SHARD_NEURONS, shard * SHARD_NEURONS + layout.shard_neurons(shard))
    for column, bias in ((GATE_BIAS, source.gate_bias), (UP_BIAS, source.up_bias)):
        if bias is not None:
            _bias_view(layout, out, shard, column)[:] = bias[neurons]


def unpack_expert(layout: ExpertLayout, packed: UInt8Array) -> ExpertSource:
    """The inverse of :func:`pack_expert`: source bytes and biases of a packed expert (copies)."""
    _check_buffer(layout, packed)
    shards = [
        [fmt.join(main, side) for fmt, main, side in shard_planes(layout, packed, shard)]
        for shard in range(layout.num_shards)
    ]
    *gate_up, down = zip(*shards, strict=True)
    *gate, up = (np.concatenate(rows) for rows in gate_up)
    source = ExpertSource(gate[0] if gate else None, up, np.concatenate(down, axis=1))
    if not layout.has_bias:
        return source
    start = layout.down_bias_offset
    return source._replace(
        gate_bias=_unpack_bias(layout, packed, GATE_BIAS) if gate else None,
        up_bias=_unpack_bias(layout, packed, UP_BIAS),
        down_bias=packed[start : start + 4 * layout.hidden].view(np.float32).copy(),
    )


def _unpack_bias(layout: ExpertLayout, packed: UInt8Array, column: int) -> Float32Array:
    return np.concatenate([_bias_view(layout, packed, j, column) for j in range(layout.num_shards)])


def _check_buffer(layout: ExpertLayout, packed: UInt8Array) -> None:
    if packed.dtype != np.uint8 or packed.shape != (layout.expert_nbytes,) or not packed.flags.c_contiguous:
        raise ValueError(
            f"a packed expert must be contiguous uint8 of shape ({layout.expert_nbytes},), "
            f"not {packed.dtype} of shape {packed.shape}: take expert_nbytes from the layout"
        )


def _wanted_shapes(layout: ExpertLayout) -> list[tuple[int, ...] | None]:
    """The shape that each part of an ExpertSource must have, None where it must be absent."""
    hidden, intermediate, gate, bias = layout.hidden, layout.intermediate, layout.gate, layout.has_bias
    return [
        (intermediate, gate.row_source_nbytes(hidden)) if gate is not None else None,
        (intermediate, layout.up.row_source_nbytes(hidden)),
        (hidden, layout.down.row_source_nbytes(intermediate)),
        (intermediate,) if bias and gate is not None else None,
        (intermediate,) if bias else None,
        (hidden,) if bias else None,
    ]


def _check_source(layout: ExpertLayout, source: ExpertSource) -> None:
    wanted = _wanted_shapes(layout)
    for name, shape, part in zip(ExpertSource._fields, wanted, source, strict=True):
        if (shape is None) != (part is None):
            rule = "must be absent (None)" if shape is None else f"must be given, of shape {shape}"
            raise ValueError(f"{name} {rule} for this layout: {layout}")
        if part is None:
            continue
        dtype = np.float32 if name.endswith("bias") else np.uint8
        if part.dtype != dtype or part.shape != shape:
            raise ValueError(
                f"{name} is {part.dtype} of shape {part.shape} but must be {np.dtype(dtype)} of shape {shape}"
            )
