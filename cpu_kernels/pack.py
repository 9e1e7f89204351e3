"""Packing at the speed of a copy: the same bytes as :func:`trilane.cpu_kernels.layout.pack_expert`, compiled.

A layout becomes a *program* once, a table of strided copies from source rows into the planes of the shards; one
call without the interpreter lock then packs a whole expert. Rows of the down matrix go tile by tile, so that a
tile is still in the cache when the next shard takes its columns. Biases are small, and packed by NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.emit import I8X16, I8X32, Emitter, V, emitted, i64
from trilane.cpu_kernels.formats import BLOCK, Float32Array, Format, UInt8Array
from trilane.cpu_kernels.layout import (
    DOWN_MAIN,
    GATE_BIAS,
    GATE_MAIN,
    NBYTES,
    OFFSET,
    SHARD_ALIGNMENT,
    SHARD_NEURONS,
    UP_BIAS,
    UP_MAIN,
    ExpertLayout,
)
from trilane.cpu_kernels.vectors import Vec
from trilane.cpu_kernels.words import copy_bytes
from trilane.jit import compiled

TILE_ROWS = 128  # of down: about 100 KB of source rows, which stay in a core's cache
LONGEST_INLINE = 256  # bytes of a piece
GATE, UP, DOWN = 0, 1, 2  # the matrix of a record
# Columns of a program. A record copies ``rows`` rows of ``pieces`` pieces of ``piece`` bytes.
MATRIX, SOURCE, SOURCE_STRIDE, TARGET, TARGET_STRIDE, ROWS, PIECES, SOURCE_STEP, TARGET_STEP, PIECE = range(10)
NUM_COLUMNS = 10


def _records(fmt: Format, columns: int, source: tuple[int, int], target: tuple[int, int]) -> list[list[int]]:
    """The copies of one row of a matrix: (offset, stride) of source and of the main and side planes.

    A record lacks its matrix and number of rows. Whole rows are one piece where nothing is regrouped.
    """
    start, stride = source
    main, side = target
    blocks = columns // fmt.block_size
    if fmt.side_nbytes == 0:
        width = fmt.row_source_nbytes(columns)
        return [[start, stride, main, fmt.main_stride(columns), 1, 0, 0, width]]
    main_piece, side_piece = (n * fmt.block_size // BLOCK for n in (fmt.main_nbytes, fmt.side_nbytes))
    first, second = start + (fmt.main_bytes.start or 0), start + (fmt.side_bytes.start or 0)
    return [
        [first, stride, main, fmt.main_stride(columns), blocks, fmt.block_nbytes, main_piece, main_piece],
        [second, stride, side, fmt.side_stride(columns), blocks, fmt.block_nbytes, side_piece, side_piece],
    ]


def _tiled(matrix: int, records: list[list[int]], first_row: int, rows: int) -> list[list[int]]:
    """Records of ``rows`` rows from ``first_row`` of the record's matrix on."""
    return [
        [matrix, start + first_row * stride, stride, target + first_row * target_stride, target_stride, rows, *rest]
        for start, stride, target, target_stride, *rest in records
    ]


def make_program(layout: ExpertLayout) -> NDArray[np.int64]:
    """int64 (records, 10): the copies that pack one expert of the layout."""
    table: list[list[int]] = []
    down: list[list[list[int]]] = []
    for shard, row in enumerate(layout.descriptor):
        neurons, base = layout.shard_neurons(shard), int(row[OFFSET])
        for matrix, fmt, column in ((GATE, layout.gate, GATE_MAIN), (UP, layout.up, UP_MAIN)):
            if fmt is not None:
                stride = fmt.row_source_nbytes(layout.hidden)
                source = (shard * SHARD_NEURONS * stride, stride)
                target = (base + int(row[column]), base + int(row[column + 1]))
                table += _tiled(matrix, _records(fmt, layout.hidden, source, target), 0, neurons)
        stride = layout.down.row_source_nbytes(layout.intermediate)
        source = (layout.down.row_source_nbytes(shard * SHARD_NEURONS), stride)
        target = (base + int(row[DOWN_MAIN]), base + int(row[DOWN_MAIN + 1]))
        down.append(_records(layout.down, neurons, source, target))
    for first in range(0, layout.hidden, TILE_ROWS):
        rows = min(TILE_ROWS, layout.hidden - first)
        for records in down:
            table += _tiled(DOWN, records, first, rows)
    return np.array(table, np.int64)


class ExpertPacker:
    """Packs the matrices of experts of one layout; any number of threads may use one."""

    def __init__(self, layout: ExpertLayout) -> None:
        ends = [int(row[OFFSET] + row[NBYTES]) for row in layout.descriptor]
        self.layout = layout
        self._program = make_program(layout)
        # Parts fill their 16-byte steps, so that only the ends of shards and of the expert can have padding.
        self._ends = np.array([*ends, layout.expert_nbytes], np.int64)

    def pack(self, out: UInt8Array, gate: int, up: int, down: int) -> None:
        """Write the matrices of one expert, and zeros where nothing lies.

        Parameters
        ----------
        out : (expert_nbytes,) uint8, contiguous
        gate, up, down : int
            Addresses of contiguous source rows, (rows, row_source_nbytes) bytes each; 0 for an absent gate.
        """
        assert out.dtype == np.uint8 and out.shape == (self.layout.expert_nbytes,) and out.flags.c_contiguous
        run_program(self._program, self._ends, gate, up, down, address_of(out))


def pack_biases(layout: ExpertLayout, out: UInt8Array, biases: list[Float32Array | None]) -> None:
    """Write the float32 biases of gate (None without one), up and down behind matrices that are packed already."""
    gate, up, down = biases
    for shard, row in enumerate(layout.descriptor):
        first, neurons = shard * SHARD_NEURONS, layout.shard_neurons(shard)
        for column, bias in ((GATE_BIAS, gate), (UP_BIAS, up)):
            if bias is not None:
                start = int(row[OFFSET] + row[column])
                out[start : start + 4 * neurons].view(np.float32)[:] = bias[first : first + neurons]
    assert down is not None
    start = layout.down_bias_offset
    out[start : start + 4 * layout.hidden].view(np.float32)[:] = down


def address_of(array: NDArray[Any]) -> int:
    """Address of an array's first element (``ctypes.data`` takes ten times as long)."""
    return int(array.__array_interface__["data"][0])


@emitted(None, i64)
def _zero16(e: Emitter, target: V) -> None:
    e.store(target, e.const(I8X16, 0))


@emitted(None, i64, i64)
def _copy16(e: Emitter, target: V, source: V) -> None:
    e.store(target, e.load(I8X16, source))


@emitted(None, i64, i64)
def _copy32(e: Emitter, target: V, source: V) -> None:
    e.store(target, e.load(I8X32, source))


@emitted(None, i64, i64)
def _copy2(e: Emitter, target: V, source: V) -> None:
    e.store(target, e.load(Vec("i8", 2), source))


@emitted(None, i64, i64)
def _copy1(e: Emitter, target: V, source: V) -> None:
    e.store(target, e.load(Vec("i8", 1), source))


@compiled
def run_program(program, ends, gate, up, down, out):
    """Zero what lies before each of ``ends``, then run the copies of ``program``; all else are addresses."""
    for end in ends:
        for k in range(SHARD_ALIGNMENT // 16):
            _zero16(out + end - SHARD_ALIGNMENT + 16 * k)
    for record in program:
        matrix = record[MATRIX]
        source = record[SOURCE] + (gate if matrix == GATE else (up if matrix == UP else down))
        target = out + record[TARGET]
        rows, source_stride, target_stride = record[ROWS], record[SOURCE_STRIDE], record[TARGET_STRIDE]
        pieces, piece = record[PIECES], record[PIECE]
        if pieces == 1 and piece == source_stride and piece == target_stride:
            copy_bytes(target, source, rows * piece)
            continue
        source_step, target_step = record[SOURCE_STEP], record[TARGET_STEP]
        for _ in range(rows):
            if piece == 32:  # a loop for each small size: a call costs more than to move so few bytes
                for k in range(pieces):
                    _copy32(target + k * target_step, source + k * source_step)
            elif piece == 16:
                for k in range(pieces):
                    _copy16(target + k * target_step, source + k * source_step)
            elif piece == 2:
                for k in range(pieces):
                    _copy2(target + k * target_step, source + k * source_step)
            elif piece == 1:
                for k in range(pieces):
                    _copy1(target + k * target_step, source + k * source_step)
            elif piece <= LONGEST_INLINE and piece % 16 == 0:
                for k in range(pieces):
                    for byte in range(0, piece, 16):
                        _copy16(target + k * target_step + byte, source + k * source_step + byte)
            else:
                for k in range(pieces):
                    copy_bytes(target + k * target_step, source + k * source_step, piece)
            source += source_stride
            target += target_stride
