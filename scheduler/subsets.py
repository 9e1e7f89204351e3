"""The best split of a few missing shards, by trying every subset: exact where bytes or rows are unequal.

Sums of all subsets are built one from the other, so that a subset costs one `cost.step_us` a lane. Nothing here
knows residency.
"""

from __future__ import annotations

from trilane.cost import Loads, step_us
from trilane.expert import CPU, STREAM, UNPLACED, ZERO_COPY, decision
from trilane.link_order import entry_of, sums_before
from trilane.plan import allows
from trilane.state import INDEX

INFINITE = float("inf")


@decision(inline=True)
def is_uniform(geometry, step, work, num):
    """Whether all missing shards have the same bytes and rows."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    nbytes = 0
    for k in range(num):
        i = work.order[k] & INDEX
        if step.rows[i] != step.rows[work.order[0] & INDEX]:
            return False
        for j in range(num_shards):
            if work.lane[i * num_shards + j] <= UNPLACED:
                if nbytes != 0 and geometry.shard_nbytes[layer, j] != nbytes:
                    return False
                nbytes = geometry.shard_nbytes[layer, j]
    return True


@decision(inline=True)
def list_shards(step, work, num_shards, total):
    """Write into ``work.few`` what lies before each shard in link order: bytes, rows x bytes, runs."""
    entry = 0
    for length in range(total + 1):
        entry = entry_of(work, length, entry)
        sums = sums_before(step, work, num_shards, entry, length)
        work.few[0, length], work.few[1, length], work.few[2, length] = sums


@decision
def try_subsets(rates, options, hits, few, sums, total, scatter):
    """(cost, subset, its lane) over all subsets for the link; bit ``total - 1 - i`` is shard ``i`` in link order.

    Larger numbers come first and ties keep the first, so that the link gets the shards with most reuse.
    """
    _sum_subsets(few, sums, total)
    best = INFINITE
    best_subset, best_lane = -1, STREAM
    for subset in range((1 << total) - 1, -1, -1):
        if subset != (1 << total) - 1 and not allows(options, CPU):
            break
        for lane in range(STREAM, ZERO_COPY + 1):
            if subset != 0 and not allows(options, lane):
                continue
            us = _subset_us(rates, hits, few[0, total], few[1, total], sums, total, subset, lane, scatter)
            if us < best or best_subset < 0:
                best, best_subset, best_lane = us, subset, lane
    return best, best_subset, best_lane


@decision(inline=True)
def _sum_subsets(few, sums, total):
    """Bytes, rows x bytes, runs and count of every subset, each from the one without its highest bit."""
    for k in range(4):
        sums[k, 0] = 0.0
    for bit in range(total):
        i = total - 1 - bit
        joins = bit > 0 and few[2, i + 2] == few[2, i + 1]  # shard i + 1 continues shard i
        for rest in range(1 << bit):
            subset = rest | (1 << bit)
            sums[0, subset] = sums[0, rest] + few[0, i + 1] - few[0, i]
            sums[1, subset] = sums[1, rest] + few[1, i + 1] - few[1, i]
            sums[2, subset] = sums[2, rest] + (0.0 if joins and (rest >> (bit - 1)) & 1 else 1.0)
            sums[3, subset] = sums[3, rest] + 1.0


@decision(inline=True)
def _subset_us(rates, hits, nbytes, rows, sums, total, subset, lane, scatter):
    size, row_size, count = sums[0, subset], sums[1, subset], int(sums[3, subset])
    streamed = lane == STREAM
    return step_us(
        rates,
        Loads(
            hits[0],
            hits[1],
            sums[2, subset] + (count - sums[2, subset]) * scatter if streamed else 0.0,
            size if streamed else 0.0,
            row_size if streamed else 0.0,
            0 if streamed else count,
            0.0 if streamed else size,
            0.0 if streamed else row_size,
            total - count,
            nbytes - size,
            rows - row_size,
        ),
    )
