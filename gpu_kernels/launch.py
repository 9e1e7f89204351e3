"""How the kernels are launched: grids, blocks, shared memory and arguments. Kernels know bits, this file knows grids.

A :class:`Launch` is data. It stays the same while a layer, its buffers and the number of rows do, so it can be
captured in a graph; what changes from step to step lies behind the addresses in its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.gpu_kernels.words import CHUNKS, F32_BLOCK_NBYTES, SPREAD_RECORD_NBYTES, TYPES, UP_CHUNK, down_chunks

PUBLISH_THREADS = 512
EXPERTS_THREADS = COMBINE_THREADS = 256
STAGE_NBYTES = 38 << 10  # dynamic shared memory that every GPU has beside the kernels' own
WHOLE_NBYTES = 58 << 10  # for all of a block's work, of the 64 KiB that the smallest GPU gives who asks for it
WHOLE_BLOCKS = 3  # on a multiprocessor, beside each other: as many as registers leave room for
OWN_NBYTES = 5 << 10  # of a block beside its dynamic shared memory: the kernel's own, and what the GPU keeps
PLAN_ITEMS = 16  # of a single row's plan that are worked on at a time: without misses their blocks start for nothing
GROUPING_NBYTES = 28  # of each expert, in publish

Struct = NDArray[np.void]


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    kernel : str
        ``publish``, ``experts_hit``, ``experts_plan`` or ``combine``.
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
    """How much of a block's work is in shared memory at once.

    Attributes
    ----------
    whole : bool
        All of it; else ``up`` neurons, then ``down`` columns at a time.
    up, down : int
    shared_nbytes : int
    """

    whole: bool
    up: int
    down: int
    shared_nbytes: int


def _up_nbytes(layout: ExpertLayout, neurons: int) -> int:
    (gate, gate_side), (up, up_side) = layout.gate_strides(), layout.up_strides()
    return UP_CHUNK * (gate_side + up_side) + neurons * (gate + up)


def _share(layout: ExpertLayout) -> int:
    """Columns of a part that one block makes."""
    return -(-layout.hidden // (32 * CHUNKS)) * 32


def _down_nbytes(layout: ExpertLayout, columns: int) -> int:
    main, side = layout.down_strides(0)
    return _share(layout) * side + columns * main


def _row_nbytes(layout: ExpertLayout) -> int:
    """The records of one row, where gate and up take the same."""
    kinds = {fmt.activation for fmt in (layout.gate, layout.up) if fmt is not None}
    blocks = -(-layout.hidden // BLOCK)
    return 0 if len(kinds) > 1 else blocks * (SPREAD_RECORD_NBYTES if kinds == {"int8"} else F32_BLOCK_NBYTES)


def whole_nbytes(multiprocessor_nbytes: int) -> int:
    """Shared memory that a block of hits may take for all of its work, on GPUs with so much on a multiprocessor.

    Not one of a plan: rows of 2,560 in Q4_K, which need 71 KiB, were read in place at 40 GB/s so, and at 50 by tiles.
    """
    return max(WHOLE_NBYTES, multiprocessor_nbytes // WHOLE_BLOCKS - OWN_NBYTES)


def tiles_of(layout: ExpertLayout, most: int = WHOLE_NBYTES) -> Tiles:
    """All at once within ``most`` bytes, else the largest tiles within STAGE_NBYTES, and at least two neurons."""
    whole = _up_nbytes(layout, UP_CHUNK) + _down_nbytes(layout, _share(layout)) + _row_nbytes(layout)
    if whole <= most:
        return Tiles(True, UP_CHUNK, _share(layout), whole)
    up = next((n for n in (16, 8, 4) if _up_nbytes(layout, n) <= STAGE_NBYTES), 2)
    down = next((n for n in (128, 96, 64) if _down_nbytes(layout, n) <= STAGE_NBYTES), 32)
    return Tiles(False, up, down, max(_up_nbytes(layout, up), _down_nbytes(layout, down)))


def _tile_words(tiles: Tiles) -> Struct:
    words = np.zeros((), TYPES["Tiles"])
    words["whole"], words["up"], words["down"] = tiles.whole, tiles.up, tiles.down
    return words


def publish_launch(layer: Struct, step: Struct) -> Launch:
    """One block a row."""
    shared = GROUPING_NBYTES * int(layer["num_experts"])
    return Launch("publish", (int(step["num_rows"]), 1), PUBLISH_THREADS, shared, (layer, step))


def _experts_launch(
    kernel: str,
    layout: ExpertLayout,
    structs: tuple[Struct, Struct, Struct],
    blocks: int,
    more: tuple[Any, ...],
    most: int,
) -> Launch:
    tiles = tiles_of(layout, most)
    return Launch(kernel, (blocks, 1), EXPERTS_THREADS, tiles.shared_nbytes, (*structs, _tile_words(tiles), *more))


def hit_launch(
    layout: ExpertLayout,
    layer: Struct,
    step: Struct,
    progress: Struct,
    max_items: int,
    *,
    most_shared: int = WHOLE_NBYTES,
) -> Launch:
    """Blocks for up to ``max_items`` hits; what the list lacks returns at once.

    ``most_shared``: bytes of shared memory that a block may take to have all of its work there (`whole_nbytes`).
    """
    return _experts_launch("experts_hit", layout, (layer, step, progress), max_items * CHUNKS, (), most_shared)


def plan_launch(
    layout: ExpertLayout,
    layer: Struct,
    step: Struct,
    progress: Struct,
    max_items: int,
    items: int,
    updates: int,
    wait: bool = False,
) -> Launch:
    """The block that fetches a plan and its updates, both addresses, and those for up to ``max_items`` items.

    With ``wait`` the plan is waited for inside the kernel, until it is that of the step.
    """
    more = (np.uint64(items), np.uint64(updates), np.int32(max_items), np.int32(wait))
    at_once = min(max_items, PLAN_ITEMS) if int(step["num_rows"]) == 1 else max_items
    return _experts_launch("experts_plan", layout, (layer, step, progress), at_once * CHUNKS + 1, more, WHOLE_NBYTES)


def combine_launch(layer: Struct, step: Struct, hits: Struct, plan: Struct) -> Launch:
    """A block for each chunk of columns of each row; by the Progress of both lists it knows when parts are there."""
    grid = (down_chunks(int(layer["hidden"])), int(step["num_rows"]))
    return Launch("combine", grid, COMBINE_THREADS, 0, (layer, step, hits, plan))
