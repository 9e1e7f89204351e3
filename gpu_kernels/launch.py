"""How the kernels are launched: grids, blocks, shared memory and arguments. Kernels know bits, this file knows grids.

A :class:`Launch` is data. It stays the same while a layer, its buffers and the number of rows do, so it can be
captured in a graph; what changes from step to step lies behind the addresses in its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.layout import ExpertLayout
from trilane.gpu_kernels.words import DOWN_CHUNK, FUSED_ROWS, UP_CHUNK, UP_CHUNKS, down_chunks

PUBLISH_THREADS = 512
EXPERTS_THREADS = COMBINE_THREADS = 256
APPLY_THREADS = 256
STAGE_NBYTES = 38 << 10  # dynamic shared memory that every GPU has beside the kernels' own
GROUPING_NBYTES = 20  # of each expert, in publish

Struct = NDArray[np.void]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    kernel : str
        ``publish``, ``experts_hit``, ``experts_plan``, ``apply`` or ``combine``.
    grid : (int, int)
        Thread blocks.
    threads : int
        Of a block.
    shared_nbytes : int
        Dynamic shared memory.
    arguments : tuple
        0-d NumPy arrays and scalars, each passed by value with its own size.
    """

    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_nbytes: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Tiles:
    """How much of a chunk goes through shared memory at once: neurons, columns, bytes."""

    up: int
    down: int
    shared_nbytes: int


def _up_nbytes(layout: ExpertLayout, neurons: int) -> int:
    (gate, gate_side), (up, up_side) = layout.gate_strides(), layout.up_strides()
    return UP_CHUNK * (gate_side + up_side) + neurons * (gate + up)


def _down_nbytes(layout: ExpertLayout, columns: int) -> int:
    main, side = layout.down_strides(0)
    return DOWN_CHUNK * side + columns * main


def tiles_of(layout: ExpertLayout) -> Tiles:
    """The largest tiles within STAGE_NBYTES; rows too long for it get what two neurons need."""
    up = next((n for n in (16, 8, 4) if _up_nbytes(layout, n) <= STAGE_NBYTES), 2)
    down = next((n for n in (128, 96, 64) if _down_nbytes(layout, n) <= STAGE_NBYTES), 32)
    return Tiles(up, down, max(_up_nbytes(layout, up), _down_nbytes(layout, down)))


def publish_launch(layer: Struct, step: Struct) -> Launch:
    """One block a row."""
    shared = GROUPING_NBYTES * int(layer["num_experts"])
    return Launch("publish", (int(step["num_rows"]), 1), PUBLISH_THREADS, shared, (layer, step))


def _experts_launch(
    kernel: str, layout: ExpertLayout, structs: tuple[Struct, Struct, Struct], items: int, max_items: int, more: int
) -> Launch:
    tiles = tiles_of(layout)
    grid = max_items * (UP_CHUNKS + down_chunks(layout.hidden)) + more
    numbers = np.array([max_items, tiles.up, tiles.down], np.int32)
    arguments = (*structs, np.uint64(items), *numbers)
    return Launch(kernel, (grid, 1), EXPERTS_THREADS, tiles.shared_nbytes, arguments)


def hit_launch(
    layout: ExpertLayout, layer: Struct, step: Struct, progress: Struct, items: int, max_items: int
) -> Launch:
    """Blocks for ``max_items`` items of the hits' WorkList at address ``items``, and for rows without misses."""
    rows = min(int(step["num_rows"]), FUSED_ROWS)
    combining = down_chunks(layout.hidden) * rows
    return _experts_launch("experts_hit", layout, (layer, step, progress), items, max_items, combining)


def plan_launch(
    layout: ExpertLayout, layer: Struct, step: Struct, progress: Struct, items: int, max_items: int
) -> Launch:
    """Blocks for ``max_items`` items of a plan's WorkList; what it lacks returns at once."""
    return _experts_launch("experts_plan", layout, (layer, step, progress), items, max_items, 0)


def apply_launch(step: Struct, updates: int) -> Launch:
    """One block for the Updates at that address."""
    return Launch("apply", (1, 1), APPLY_THREADS, 0, (step, np.uint64(updates)))


def combine_launch(layer: Struct, step: Struct) -> Launch:
    """A block for each chunk of columns of each row."""
    grid = (down_chunks(int(layer["hidden"])), int(step["num_rows"]))
    return Launch("combine", grid, COMBINE_THREADS, 0, (layer, step))
