"""The host device's scratch memory for one layer-step, allocated once and grown only for a larger batch.

Rows are grouped by expert (routing's "positions"); the scratch of expert-shard items follows that order. The
addresses of all parts are in :class:`Workspace`, so that compiled code can lay out a step without allocating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES, RECORD_NBYTES
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cpu_kernels.words import Combine, DeviceJob, LinkJob, Piece, Publish, Shard, TeamJob
from trilane.records import record

CACHE_LINE = 64


@dataclass(frozen=True)
class StepShape:
    """What a workspace must hold: hidden rows, rows x ranks, and the largest layer's experts and shards."""

    max_rows: int
    max_positions: int
    hidden: int
    max_experts: int
    max_shards: int

    @property
    def max_items(self) -> int:
        """Expert-shards that a step can touch."""
        return min(self.max_positions, self.max_experts) * self.max_shards


class Part(IntEnum):
    """Places in ``Workspace.address`` of the parts that compiled code points into."""

    SHARDS = 0
    PIECES = 1
    GATE_INPUTS = 2
    UP_INPUTS = 3
    DOWN_INPUTS = 4
    BAD_HIDDEN = 5
    BAD_ROWS = 6
    FLOATS = 7
    INT8 = 8
    PRODUCTS = 9
    RECORDS = 10
    PARTS = 11
    WEIGHTS = 12
    TEAM_BLOCK = 13
    DEVICE_BLOCK = 14
    LINK_BLOCK = 15
    PUBLISH_BLOCK = 16
    COMBINE_BLOCK = 17


@record
class Workspace(NamedTuple):
    """Blocks of words.py, and scratch. All arrays are aligned to 64 bytes."""

    address: np.ndarray  # int64, by Part
    cursor: np.ndarray  # int64[4]: next item of each lane while a step is laid out
    team_job: np.ndarray
    device_job: np.ndarray
    link_job: np.ndarray
    publish: np.ndarray
    combine: np.ndarray
    shards: np.ndarray  # int64[max_items, Shard.SIZE]
    pieces: np.ndarray  # int64[max_items, Piece.SIZE]
    gate_inputs: np.ndarray  # int64[max_positions]: record address of each grouped row
    up_inputs: np.ndarray
    down_inputs: np.ndarray  # int64[max_positions * max_shards]
    bad_hidden: np.ndarray  # int64[max_positions * max_shards]
    bad_rows: np.ndarray  # int64[max_rows]
    floats: np.ndarray  # float32 records of the hidden rows
    int8: np.ndarray  # int8 records of the hidden rows
    products: np.ndarray
    records: np.ndarray
    parts: np.ndarray
    weights: np.ndarray  # float32[max_positions]


def make_workspace(shape: StepShape) -> Workspace:
    """Allocate the scratch of steps up to ``shape``."""
    blocks = -(-shape.hidden // BLOCK)
    positions, items = max(1, shape.max_positions), max(1, shape.max_items)
    per_row = positions * shape.max_shards
    sizes = (TeamJob.SIZE, DeviceJob.SIZE, LinkJob.SIZE, Publish.SIZE, Combine.SIZE)
    parts: list[np.ndarray] = [
        aligned(items * Shard.SIZE, np.int64).reshape(items, Shard.SIZE),
        aligned(items * Piece.SIZE, np.int64).reshape(items, Piece.SIZE),
        aligned(positions, np.int64),
        aligned(positions, np.int64),
        aligned(per_row, np.int64),
        aligned(per_row, np.int64),
        aligned(max(1, shape.max_rows), np.int64),
        aligned(shape.max_rows * blocks * F32_BLOCK_NBYTES, np.uint8),
        aligned(shape.max_rows * blocks * RECORD_NBYTES, np.uint8),
        aligned(per_row * 2 * BLOCK, np.float32),
        aligned(per_row * F32_BLOCK_NBYTES, np.uint8),
        aligned(per_row * shape.hidden, np.float32),
        aligned(positions, np.float32),
    ]
    jobs: list[np.ndarray] = [aligned(size, np.int64) for size in sizes]
    address = np.array([part.ctypes.data for part in (*parts, *jobs)], np.int64)
    return Workspace._make([address, aligned(4, np.int64), *jobs, *parts])


def aligned(count: int, dtype: type) -> np.ndarray:
    """``count`` elements that start at a cache line; pages come from the system as they are touched."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(count * itemsize + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + count * itemsize].view(dtype)


def rows_per_step(layouts: Sequence[ExpertLayout], top_k: int, scratch_nbytes: int) -> int:
    """Rows of a batch that fit into ``scratch_nbytes`` of scratch, at least 1; larger batches go in parts."""
    per_row = max(layout.num_shards * (4 * layout.hidden + 8 * BLOCK + F32_BLOCK_NBYTES + 16) for layout in layouts)
    return max(1, scratch_nbytes // (top_k * per_row))
