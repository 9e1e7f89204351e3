"""How prefill's kernels are launched, and the list of batches that the host writes for them.

A pass is: rows and grouping, then batches of experts, then the sum of each token's experts. Launches of a batch know no
caller's array, so they can be kept. The file knows grids and offsets, and neither streams nor who is resident.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.gpu_kernels.launch import Launch, Struct
from trilane.gpu_kernels.words import F32_BLOCK_NBYTES, HEADER_NBYTES, RECORD_NBYTES, ROW_TILE

ROWS_THREADS = EXPERTS_THREADS = COMBINE_THREADS = 256
GROUP_THREADS = 512
GROUP_NBYTES = 8  # of each expert, in shared memory
WARPS = EXPERTS_THREADS // 32
COLUMNS = EXPERTS_THREADS // 4  # of a block of prefill_down
HIDDEN_BLOCKS = 4  # of prefill_hidden, for each part of an expert
X_NBYTES = 96  # of what a lane multiplies one block with, at most
DOWN_ROWS = SHARDS_AT_ONCE = 8  # in shared memory at once
MOST_SPLITS, MOST_GRID_ROWS = 16, 65535  # parts of an expert; blockIdx.y
SPAN_FACTOR = 4  # a part has so many times the average rows of an expert: skewed experts are split, others are not


class Parts(NamedTuple):
    """How an expert's rows go to thread blocks: ``splits`` parts of ``span`` rows, the last one with the rest."""

    splits: int
    span: int


def parts_of(num_rows: int, top_k: int, num_experts: int) -> Parts:
    """Parts for a step in which an expert may have anything from no row to all of them."""
    average = -(-num_rows * top_k // num_experts)
    splits = max(1, min(MOST_SPLITS, MOST_GRID_ROWS // num_experts))
    span = -(-max(SPAN_FACTOR * average, -(-num_rows // splits)) // ROW_TILE) * ROW_TILE
    return Parts(max(1, -(-num_rows // span)), span)


def step_sizes(hidden: int, max_rows: int, max_positions: int) -> dict[str, int]:
    """Bytes of the ``Step`` fields that prefill writes."""
    blocks = -(-hidden // BLOCK)
    return {
        "records": max_rows * blocks * RECORD_NBYTES, "floats": max_rows * blocks * F32_BLOCK_NBYTES,
        "row_bad": 4 * max_rows, "token_of": 4 * max_positions, "position_of": 4 * max_positions,
    }  # fmt: skip


def prefill_sizes(hidden: int, num_experts: int, num_shards: int, max_positions: int) -> dict[str, int]:
    """Bytes of the ``Prefill`` fields for layers of up to that many experts and shards."""
    parts = max_positions * num_shards
    return {
        "source": 8 * num_experts * num_shards, "first": 4 * num_experts, "rows": 4 * num_experts,
        "order": 4 * num_experts, "batch": 4 * (num_experts + 2), "hidden": F32_BLOCK_NBYTES * parts,
        "hidden_bad": 4 * parts, "outs": 4 * hidden * max_positions,
    }  # fmt: skip


def batches_nbytes(num_experts: int, num_shards: int) -> int:
    """Bytes of a list of batches: header, addresses of copied shards, experts by batch, where each batch starts."""
    return HEADER_NBYTES + 8 * num_experts * num_shards + 4 * num_experts + 4 * (num_experts + 2)


def write_batches(block: NDArray[np.uint8], staged: NDArray[np.uint64], batches: list[NDArray[np.int64]]) -> None:
    """Write a list of batches.

    Parameters
    ----------
    block : uint8 (at least :func:`batches_nbytes`,)
    staged : uint64 (experts, shards)
        Where a shard is copied to; 0: not at all.
    batches : list of int arrays
        The experts of each batch; an expert occurs once at most.
    """
    num_experts = len(staged)
    order = np.zeros(num_experts, np.int32)
    starts = np.cumsum([0, *map(len, batches)]).astype(np.int32)
    order[: starts[-1]] = np.concatenate(batches) if batches else []
    header = np.zeros(HEADER_NBYTES // 4, np.int32)
    header[:2] = len(batches), np.count_nonzero(staged)
    whole = b"".join(part.tobytes() for part in (header, staged, order, starts))
    block[: len(whole)] = np.frombuffer(whole, np.uint8)


def begin_launches(layer: Struct, step: Struct, prefill: Struct, batches: int) -> list[Launch]:
    """Rows to records, then grouping; ``batches`` is the address of the list."""
    shared = GROUP_NBYTES * int(layer["num_experts"])
    return [
        Launch("prefill_rows", (int(step["num_rows"]), 1), ROWS_THREADS, 0, (layer, step)),
        Launch("prefill_group", (1, 1), GROUP_THREADS, shared, (layer, step, prefill, np.uint64(batches))),
    ]


def batch_launches(
    layout: ExpertLayout, layer: Struct, step: Struct, prefill: Struct, batch: int, num_experts: int, parts: Parts
) -> list[Launch]:
    """The experts of a batch: gate and up, hidden values to records, down."""
    more: tuple[Any, ...] = (np.int32(batch), np.int32(parts.splits), np.int32(parts.span))
    up_nbytes = 4 * ROW_TILE + ROW_TILE * 32 * X_NBYTES
    down_nbytes = DOWN_ROWS * SHARDS_AT_ONCE * 4 * X_NBYTES
    return [
        Launch(kernel, (blocks, num_experts * parts.splits), EXPERTS_THREADS, shared, (layer, step, prefill, *more))
        for kernel, blocks, shared in (
            ("prefill_up", layout.num_shards * (BLOCK // WARPS), up_nbytes),
            ("prefill_hidden", HIDDEN_BLOCKS, 0),
            ("prefill_down", -(-layout.hidden // COLUMNS), down_nbytes),
        )
    ]


def sum_launch(layer: Struct, step: Struct, prefill: Struct) -> Launch:
    """The output: each token's experts in rank order."""
    grid = (-(-int(layer["hidden"]) // COMBINE_THREADS), int(step["num_rows"]))
    return Launch("prefill_combine", grid, COMBINE_THREADS, 0, (layer, step, prefill))
