"""The order in which missing shards are offered to the link, and what any first part of it holds.

Experts of most rows come first, then those with most expected reuse, or the most missing shards. All that may not
be streamed (a background fill is under way, or admission refuses) comes after all that may. An *entry* is what one
expert misses of either kind, so that sums are kept by expert, and shards are only looked at where a part ends inside
of one. Residency is read here, never written; nothing here knows costs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.expert import STREAM, UNPLACED, decision
from trilane.plan import NUM_MISSING
from trilane.residency import slot_price
from trilane.state import HELD, INDEX

BLOCKED = -3  # in `Work.lane` until the shard is placed: UNPLACED, and no slot may be asked for


class Step(NamedTuple):
    """What one layer-step asks for: its unique routed experts and the rows of each."""

    layer: int
    experts: NDArray[np.int32]
    rows: NDArray[np.int32]
    num_experts: int


@decision(inline=True)
def block_missing(state, geometry, options, step, work):
    """Mark what may not be streamed BLOCKED and take it out of the sums by expert; return how many slots can be had.

    Refused is an expert whose score is below the cheapest victim's. That one stands for all: taking slots asks again
    for each and falls back where it is refused.
    """
    layer = step.layer
    pool = state.pool_of[layer]
    first = geometry.first_expert[layer]
    num_shards = geometry.num_shards[layer]
    fills = state.num_filling[pool]
    asks = options.admit_by_score and options.lanes != 1 << STREAM
    price = slot_price(state, pool) if asks else 0.0
    slots = state.first_slot[pool + 1] - state.first_slot[pool] - fills
    for i in range(step.num_experts):
        expert = (first + step.experts[i]) & INDEX
        if state.flags[expert] & HELD:  # not what an earlier wave is done with
            slots -= state.resident[expert]
    if not asks and fills == 0:
        return slots
    for i in range(step.num_experts):
        refused = asks and work.worth[i] < price
        if work.missing[i] > 0 and (refused or fills > 0):
            at = i * num_shards
            _block(state.slot_of, work.lane, geometry.first_shard[layer], step.experts[i], at, num_shards, refused)
            sums = _sum_marked(work.lane, geometry.shard_nbytes[layer], at, num_shards, UNPLACED)
            work.open[i], work.open_nbytes[i], work.open_runs[i] = sums
    return slots


@decision(inline=True)
def sum_sizes(shard_nbytes, sizes, num_shards):
    """Bytes of an expert's first shards."""
    nbytes = 0
    for j in range(num_shards):
        nbytes += shard_nbytes[j]
        sizes[j + 1] = float(nbytes)


@decision(inline=True)
def _block(slot_of, lanes, first_shard, id_, at, num_shards, refused):
    """Mark an expert's missing shards BLOCKED: all if it is refused, else those that are being filled."""
    for j in range(num_shards):
        filled = slot_of[first_shard + id_ * num_shards + j] < -1
        if lanes[at + j] == UNPLACED and (refused or filled):
            lanes[at + j] = BLOCKED


@decision
def _sum_marked(lanes, shard_nbytes, at, num_shards, mark):
    """Count, bytes and runs of an expert's shards with this mark (without branches)."""
    count = nbytes = runs = before = 0
    for j in range(num_shards):
        is_in = int(lanes[(at + j) & INDEX] == mark)
        count += is_in
        nbytes += is_in * shard_nbytes[j]
        runs += is_in & (1 - before)
        before = is_in
    return count, float(nbytes), float(runs)


@decision(inline=True)
def find_missing(step, work):
    """Begin the order with the experts that miss anything; return how many they are."""
    num = 0
    for i in range(step.num_experts):
        work.order[num] = i
        num += int(work.missing[i] > 0)
    return num


@decision
def sort_experts(rows, missing, reuse, order, num, longest_first):
    """Shell sort: most rows first, then (most missing shards,) most reuse."""
    gap = 1
    while 12 * gap < num:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, num):
            i = order[k & INDEX] & INDEX
            at = k
            while at >= gap and _precedes(rows, missing, reuse, i, order[(at - gap) & INDEX] & INDEX, longest_first):
                order[at & INDEX] = order[(at - gap) & INDEX]
                at -= gap
            order[at & INDEX] = i
        gap //= 3


@decision(inline=True)
def _precedes(rows, missing, reuse, a, b, longest_first):
    if rows[a] != rows[b]:
        return rows[a] > rows[b]
    if longest_first and missing[a] != missing[b]:
        return missing[a] > missing[b]
    if reuse[a] != reuse[b]:
        return reuse[a] > reuse[b]
    return a < b


@decision(inline=True)
def list_entries(geometry, step, work, num):
    """List what the ``num`` ordered experts miss, with sums; return (entries, shards that may be streamed)."""
    num_shards = geometry.num_shards[step.layer]
    total = work.counts[NUM_MISSING]
    entry = count = streamable = 0
    nbytes = row_nbytes = runs = 0.0
    for blocked in range(2):
        for k in range(num):
            i = work.order[k] & INDEX
            number, more, starts = int(work.open[i]), work.open_nbytes[i], work.open_runs[i]
            if blocked == 1:
                sizes = geometry.shard_nbytes[step.layer]
                number, more, starts = _sum_marked(work.lane, sizes, i * num_shards, num_shards, BLOCKED)
            if number == 0:
                continue
            work.who[entry], work.mark[entry] = i, BLOCKED if blocked == 1 else UNPLACED
            entry += 1
            count += number
            nbytes += more
            row_nbytes += more * step.rows[i]
            runs += starts
            work.bound[entry] = count
            work.nbytes[entry], work.row_nbytes[entry], work.runs[entry] = nbytes, row_nbytes, runs
        if blocked == 0:
            streamable = count
        if count == total:
            break
    return entry, streamable


@decision(inline=True)
def entry_of(work, length, entry):
    """The entry in which the first ``length`` shards end, looked for from ``entry``."""
    while work.bound[entry + 1] < length:
        entry += 1
    while entry > 0 and work.bound[entry & INDEX] >= length:
        entry -= 1
    return entry


@decision(inline=True)
def sums_before(step, work, num_shards, entry, length):
    """Bytes, rows x bytes and runs of the first ``length`` shards, the last of which lies in the entry."""
    entry &= INDEX
    inside = length - work.bound[entry]
    number = work.bound[entry + 1] - work.bound[entry]
    if inside == number:
        return work.nbytes[entry + 1], work.row_nbytes[entry + 1], work.runs[entry + 1]
    i = work.who[entry] & INDEX
    if number == num_shards:
        more, starts = work.sizes[inside & INDEX], 1.0 if inside > 0 else 0.0
    else:
        more, starts = _sum_first(work.lane, work.sizes, i * num_shards, work.mark[entry], inside)
    return work.nbytes[entry] + more, work.row_nbytes[entry] + more * step.rows[i], work.runs[entry] + starts


@decision
def _sum_first(lanes, sizes, at, mark, count):
    """Bytes and runs of an expert's first ``count`` shards with this mark; there are more."""
    nbytes = runs = 0.0
    j = start = 0
    while count > 0:
        while lanes[(at + j) & INDEX] != mark:
            j += 1
        start = j
        while count > 0 and lanes[(at + j) & INDEX] == mark:
            j += 1
            count -= 1
        nbytes += sizes[j & INDEX] - sizes[start & INDEX]
        runs += 1.0
    return nbytes, runs
