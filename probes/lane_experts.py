"""Experts for lanes to compute while they are timed: random ones of one size, packed as a store packs them.

One expert is made for each format, with the output that NumPy gives for one input; copies of it fill memory larger
than the caches. The file knows no lane and no thread of theirs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.activation import copy_row_f32, quantize_row, row_nbytes
from trilane.cpu_kernels.arena import Arena
from trilane.cpu_kernels.formats import Format, UInt8Array, format_of
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.host_workspace import aligned
from trilane.cpu_kernels.isa import best_isa
from trilane.cpu_kernels.layout import ExpertLayout, pack_expert
from trilane.cpu_kernels.shard_words import layer_words

HIDDEN, INTERMEDIATE = 2048, 768  # of the experts that are timed: three shards each
SHORT_INTERMEDIATE = 256  # of experts of one shard, for a quick look at formats whose weights take much room
FILL_THREADS = 4
NUM_DISTINCT = 13  # different rows in a matrix; no divisor of their number, so that shards differ


def expert_layout(format_name: str, intermediate: int = INTERMEDIATE) -> ExpertLayout:
    """The layout of the experts that are timed."""
    fmt = format_of(format_name)
    return ExpertLayout(HIDDEN, intermediate, fmt, fmt, fmt)


class MadeExpert(NamedTuple):
    """A random expert: its packed bytes, the activation record of its input, and its right output, float32."""

    format: str
    layout: ExpertLayout
    packed: UInt8Array
    record: UInt8Array
    expected: NDArray[np.float32]


def make_expert(format_name: str, intermediate: int = INTERMEDIATE) -> MadeExpert:
    """The expert of a format, always the same; to quantise it takes longer than to fill memory with copies of it."""
    fmt, rng = format_of(format_name), np.random.default_rng(1)
    x = rng.standard_normal(HIDDEN).astype(np.float32)
    layout = expert_layout(format_name, intermediate)
    gate, up = (_matrix(fmt, rng, intermediate, HIDDEN) for _ in range(2))
    down = _matrix(fmt, rng, HIDDEN, intermediate)
    packed = np.zeros(layout.expert_nbytes, np.uint8)
    pack_expert(layout, packed, gate, up, down)
    return MadeExpert(format_name, layout, packed, _record(fmt, x), _output(fmt, x, gate, up, down))


@dataclass
class Experts:
    """Copies of one expert over an arena.

    Parameters
    ----------
    made : MadeExpert
    arena : Arena
        What was in it is gone.
    """

    made: MadeExpert
    arena: Arena
    layout: ExpertLayout = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.layout = self.made.layout
        packed = self.made.packed
        self.count = self.arena.nbytes // packed.nbytes
        fill_copies(self.arena.view(0, self.count * packed.nbytes).reshape(self.count, -1), packed)
        self.words = layer_words(self.layout, GATES["silu_glu"], 1.702, 7.0, best_isa())

    @property
    def format(self) -> str:
        return self.made.format

    @property
    def nbytes(self) -> int:
        """Bytes of one expert, as its lane reads them."""
        return int(self.layout.shard_nbytes.sum())


def fill_copies(copies: UInt8Array, packed: UInt8Array) -> None:
    """Write ``packed`` to every row, by several threads: NumPy copies without the interpreter."""
    parts = np.array_split(copies, min(FILL_THREADS, len(copies)) or 1)
    with ThreadPoolExecutor(FILL_THREADS) as pool:
        list(pool.map(lambda part: np.copyto(part, packed), parts))


def _matrix(fmt: Format, rng: np.random.Generator, rows: int, columns: int) -> UInt8Array:
    """Source rows of a random matrix of few distinct rows, scaled so that outputs are about 1."""
    values = rng.standard_normal((NUM_DISTINCT, columns), np.float32) / np.sqrt(columns, dtype=np.float32)
    blocks = fmt.quantize(values.reshape(-1, fmt.block_size)).reshape(NUM_DISTINCT, -1)
    return np.resize(blocks, (rows, blocks.shape[1]))


def _output(fmt: Format, x: NDArray[np.float32], *matrices: UInt8Array) -> NDArray[np.float32]:
    gate, up, down = (fmt.dequantize_rows(matrix[:NUM_DISTINCT]) for matrix in matrices)
    columns = down.shape[1]
    g, u = np.resize(gate @ x, columns), np.resize(up @ x, columns)
    return np.resize(down @ (g / (1 + np.exp(-g)) * u), HIDDEN)


def _record(fmt: Format, x: NDArray[np.float32]) -> UInt8Array:
    record = aligned(row_nbytes(fmt.activation, len(x)), np.uint8)
    write = quantize_row if fmt.activation == "int8" else copy_row_f32
    write(int(x.ctypes.data), len(x), int(record.ctypes.data))
    return record
