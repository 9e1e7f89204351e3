"""Packing at the speed of a copy: the same bytes as :func:`trilane.cpu_kernels.layout.pack_expert`, compiled.

A layout becomes a *program* once, a table of strided copies from source rows into the planes of the shards; one
call without the interpreter lock then packs a whole expert. It goes tile by tile of the source. A tile is read from
its file into a buffer that stays in the core's cache, or straight to its place where nothing is regrouped, or lies
in memory already. Biases are small, and packed by NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.emit import I8X16, I8X32, Emitter, V, emitted, i64
from trilane.cpu_kernels.file_read import read_all
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

TILE_NBYTES = 128 << 10  # of source rows, which stay in a core's cache
LONGEST_INLINE = 256  # bytes of a piece
GATE, UP, DOWN = 0, 1, 2  # the matrix of a record
# Columns of a program. A record copies ``rows`` rows of ``pieces`` pieces of ``piece`` bytes.
MATRIX, SOURCE, SOURCE_STRIDE, TARGET, TARGET_STRIDE, ROWS, PIECES, SOURCE_STEP, TARGET_STEP, PIECE = range(10)
NUM_COLUMNS = 10
# Columns of the tiles: the source bytes that some records take.
TILE_MATRIX, TILE_SOURCE, TILE_LENGTH, FIRST_RECORD, END_RECORD = range(5)
IN_MEMORY = -1  # instead of a file's descriptor
DONE = 0


class Rows(NamedTuple):
    """Where the contiguous rows of one matrix lie: an address, or a place in an open file."""

    place: int = 0
    fd: int = IN_MEMORY


class Outcome(NamedTuple):
    """Of a packing: DONE, or what :func:`~trilane.cpu_kernels.file_read.read_all` said, of which matrix."""

    code: int
    matrix: int


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


def _tile_rows(stride: int) -> int:
    return max(1, TILE_NBYTES // stride)


class _Table:
    """Records and tiles of a program while it is made."""

    def __init__(self) -> None:
        self.records: list[list[int]] = []
        self.tiles: list[list[int]] = []

    def add(self, matrix: int, stride: int, records: list[list[int]], rows: range) -> None:
        """Take tiles of all columns of ``rows``; each record's source counts from row 0 on."""
        for first in range(rows.start, rows.stop, _tile_rows(stride)):
            count = min(_tile_rows(stride), rows.stop - first)
            begin = len(self.records)
            self.records += _tiled(matrix, records, first, count)
            self.tiles.append([matrix, first * stride, count * stride, begin, len(self.records)])


def make_program(layout: ExpertLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 (records, 10), the copies that pack one expert of the layout, and int64 (tiles, 5), what they read."""
    table, down = _Table(), []
    for shard, row in enumerate(layout.descriptor):
        neurons, base, first = layout.shard_neurons(shard), int(row[OFFSET]), shard * SHARD_NEURONS
        for matrix, fmt, column in ((GATE, layout.gate, GATE_MAIN), (UP, layout.up, UP_MAIN)):
            if fmt is not None:
                stride = fmt.row_source_nbytes(layout.hidden)
                target = (base + int(row[column]), base + int(row[column + 1]))
                records = _records(fmt, layout.hidden, (0, stride), target)
                for record in records:  # rows of the matrix, of which the shard's first has the target's place
                    record[2] -= first * record[3]
                table.add(matrix, stride, records, range(first, first + neurons))
        stride = layout.down.row_source_nbytes(layout.intermediate)
        source = (layout.down.row_source_nbytes(first), stride)
        target = (base + int(row[DOWN_MAIN]), base + int(row[DOWN_MAIN + 1]))
        down += _records(layout.down, neurons, source, target)
    table.add(DOWN, layout.down.row_source_nbytes(layout.intermediate), down, range(layout.hidden))
    return np.array(table.records, np.int64), np.array(table.tiles, np.int64)


class ExpertPacker:
    """Packs the matrices of experts of one layout; any number of threads may use one."""

    def __init__(self, layout: ExpertLayout) -> None:
        ends = [int(row[OFFSET] + row[NBYTES]) for row in layout.descriptor]
        self.layout = layout
        self._program, self._tiles = make_program(layout)
        self._buffer_nbytes = int(self._tiles[:, TILE_LENGTH].max())
        # Parts fill their 16-byte steps, so that only the ends of shards and of the expert can have padding.
        self._ends = np.array([*ends, layout.expert_nbytes], np.int64)

    def pack(self, out: UInt8Array, gate: Rows, up: Rows, down: Rows) -> Outcome:
        """Write the matrices of one expert, and zeros where nothing lies.

        Parameters
        ----------
        out : (expert_nbytes,) uint8, contiguous
        gate, up, down : Rows
            Source rows, (rows, row_source_nbytes) bytes each; of an absent gate, anything.

        Returns
        -------
        Outcome
            Unless its code is DONE, ``out`` holds only a part of the expert.
        """
        assert out.dtype == np.uint8 and out.shape == (self.layout.expert_nbytes,) and out.flags.c_contiguous
        buffer = np.empty(self._buffer_nbytes, np.uint8)
        rows = np.array([gate, up, down], np.int64)
        code, matrix = run_tiles(
            self._program, self._tiles, self._ends, rows, address_of(buffer), address_of(out)
        )  # fmt: skip
        return Outcome(code, matrix)


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
def run_tiles(program, tiles, ends, rows, buffer, out):
    """Zero what lies before each of ``ends``, then get each tile and run its copies; (code, matrix).

    ``rows`` is int64 (3, 2), a :class:`Rows` for each matrix; ``buffer`` and ``out`` are addresses.
    """
    for end in ends:
        for k in range(SHARD_ALIGNMENT // 16):
            _zero16(out + end - SHARD_ALIGNMENT + 16 * k)
    for tile in tiles:
        matrix, start, nbytes = tile[TILE_MATRIX], tile[TILE_SOURCE], tile[TILE_LENGTH]
        first, place, fd = tile[FIRST_RECORD], rows[matrix, 0], rows[matrix, 1]
        source, code = place, 0
        if fd != IN_MEMORY:
            if _is_plain(program[first]):
                code = read_all(fd, out + program[first, TARGET], nbytes, place + start)
            else:
                code = read_all(fd, buffer, nbytes, place + start)
                source = buffer - start
        if code != 0:
            return code, matrix
        if fd == IN_MEMORY or not _is_plain(program[first]):
            for number in range(first, tile[END_RECORD]):
                _run_record(program[number], source, out)
    return DONE, 0


@compiled
def _is_plain(record):
    """Whether a record moves whole rows as they are; it is the only one of its tile then."""
    return record[PIECES] == 1 and record[PIECE] == record[SOURCE_STRIDE] and record[PIECE] == record[TARGET_STRIDE]


@compiled
def _run_record(record, source, out):
    """The copies of one record; ``source`` is the address of the matrix's first row."""
    source += record[SOURCE]
    target = out + record[TARGET]
    rows, source_stride, target_stride = record[ROWS], record[SOURCE_STRIDE], record[TARGET_STRIDE]
    pieces, piece = record[PIECES], record[PIECE]
    if _is_plain(record):
        copy_bytes(target, source, rows * piece)
        return
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
