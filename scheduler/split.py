"""Who serves which missing shard: the split over link and CPU that makes `cost.step_us` least.

Missing shards are put in *link order*; the link gets a prefix and the CPU the rest. Every prefix length is tried,
with the link's shards streamed and with them read in place. Why this is exact when all missing shards have the
same bytes and rows: the step's cost then depends on which shards the link gets only through their count and the
number of copies, and never falls with the number of copies. ``c`` shards cover at least as many runs as it takes
of the longest ones to hold ``c`` shards; the prefix that takes the longest runs first covers just so many, so no
other set of ``c`` shards is cheaper. With unequal rows and equal runs the same holds with the experts of most rows
first, as long as the device's row work does not bound the step: of all sets of that count, the CPU then has the
least row work. Using one kind of link lane is no loss where both their times are concave in the count (a fixed
cost, and a rate that does not fall with more in flight): a sum of concave functions is least at an end.

With unequal bytes (a short last shard) or rows, up to EXHAUSTIVE_SHARDS missing shards are split by trying all
subsets. Above, the scan stays; with one row each it is within one shard's cost of the best split: the bytes of
any optimum lie between those of two neighbouring prefixes. Above COARSE_SHARDS the scan strides and refines
around its best, which loses at most a stride of shards.

Among splits of nearly the same time (``slack_runs`` copies' fixed cost) the one wins which gives the link the
experts with most expected reuse, since what crosses the link can stay. Residency is read here, never written.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import Loads, step_us
from trilane.expert import CPU, HIT, STREAM, UNPLACED, ZERO_COPY
from trilane.jit import compiled
from trilane.plan import EXHAUSTIVE_SHARDS, NUM_MISSING
from trilane.residency import slot_price

COARSE_SHARDS = 64
INFINITE = float("inf")


class Step(NamedTuple):
    """What one layer-step asks for: its unique routed experts and the rows of each."""

    layer: int
    experts: NDArray[np.int32]
    rows: NDArray[np.int32]
    num_experts: int


@compiled
def allows(options, lane):
    """Whether a miss may take the lane."""
    return (options.lanes >> lane) & 1 == 1


@compiled
def choose_split(state, geometry, rates, options, step, work):
    """Write a lane for each missing shard into ``work.side``, by link order (``work.index``)."""
    total = work.counts[NUM_MISSING]
    hits = _hit_loads(geometry, step, work)
    limit = _list_missing(state, geometry, options, step, work, False)
    by_reuse = _scan_prefixes(rates, options, work, hits, total, limit)
    streams = allows(options, STREAM)
    slack = options.slack_runs * rates.run_fix_us
    if total <= EXHAUSTIVE_SHARDS and (limit == total or not streams) and not _all_equal(geometry, step, work):
        best, subset, lane = _try_subsets(rates, options, work, hits, total)
        if best < by_reuse - slack:
            _write_subset(work, total, subset, lane)
    elif streams and slack < INFINITE and rates.run_fix_us > 0.0 and not _runs_equal(step, work):
        _list_missing(state, geometry, options, step, work, True)
        if not _scan_prefixes(rates, options, work, hits, total, limit) < by_reuse - slack:
            _list_missing(state, geometry, options, step, work, False)
            _scan_prefixes(rates, options, work, hits, total, limit)


@compiled
def _hit_loads(geometry, step, work):
    """Bytes, and rows x bytes, of the shards that hit."""
    num_shards = geometry.num_shards[step.layer]
    nbytes = 0
    row_nbytes = 0
    for i in range(step.num_experts):
        for j in range(num_shards):
            if work.lane[i * num_shards + j] == HIT:
                nbytes += geometry.shard_nbytes[step.layer, j]
                row_nbytes += geometry.shard_nbytes[step.layer, j] * step.rows[i]
    return nbytes, row_nbytes


@compiled
def _runs_equal(step, work):
    """Whether all experts that miss shards miss equally many."""
    first = work.missing[work.order[0]]
    for i in range(step.num_experts):
        if work.missing[i] != 0 and work.missing[i] != first:
            return False
    return True


@compiled
def _all_equal(geometry, step, work):
    """Whether all missing shards have the same bytes and rows."""
    num_shards = geometry.num_shards[step.layer]
    nbytes = geometry.shard_nbytes[step.layer, work.index[0] % num_shards]
    rows = step.rows[work.index[0] // num_shards]
    for i in range(1, work.counts[NUM_MISSING]):
        at = work.index[i]
        if geometry.shard_nbytes[step.layer, at % num_shards] != nbytes or step.rows[at // num_shards] != rows:
            return False
    return True


@compiled
def _list_missing(state, geometry, options, step, work, longest_first):
    """Put the missing shards in link order, with running sums; return how many of them may be streamed.

    Shards that may not be streamed (a background fill is under way, or admission refuses) come last.
    """
    _order_experts(step, work, longest_first)
    obtainable = _refuse(state, geometry, options, step, work)
    streamable = 0
    count = 0
    for blocked in range(2):
        count = _append_missing(state, geometry, step, work, blocked, count)
        if blocked == 0:
            streamable = count
    return min(streamable, obtainable)


@compiled
def _append_missing(state, geometry, step, work, blocked, count):
    """List the missing shards that are (not) blocked, expert by expert; return the new count."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    previous = -2
    for k in range(step.num_experts):
        i = work.order[k]
        if work.missing[i] == 0:
            break
        key = geometry.first_shard[layer] + step.experts[i] * num_shards
        for j in range(num_shards):
            at = i * num_shards + j
            if work.lane[at] != UNPLACED or (work.refused[i] != 0 or state.slot_of[key + j] < -1) != (blocked == 1):
                continue
            nbytes = geometry.shard_nbytes[layer, j]
            work.index[count] = at
            work.nbytes[count + 1] = work.nbytes[count] + nbytes
            work.row_nbytes[count + 1] = work.row_nbytes[count] + nbytes * step.rows[i]
            work.runs[count + 1] = work.runs[count] + (at != previous + 1 or j == 0)
            previous = at
            count += 1
    return count


@compiled
def _refuse(state, geometry, options, step, work):
    """Mark experts whose score is below the cheapest victim's; return how many slots can be had.

    The cheapest victim stands for all: taking slots asks again for each and falls back where it is refused.
    """
    pool = state.pool_of[step.layer]
    first = geometry.first_expert[step.layer]
    price = slot_price(state, pool)
    asks = options.admit_by_score and options.lanes != 1 << STREAM
    slots = state.first_slot[pool + 1] - state.first_slot[pool] - state.num_filling[pool]
    for i in range(step.num_experts):
        expert = first + step.experts[i]
        work.refused[i] = asks and state.score[expert] < price
        slots -= state.resident[expert]
    return slots


@compiled
def _order_experts(step, work, longest_first):
    """Shell sort of the experts: those that miss nothing last, else most rows, (longest run,) most reuse first."""
    n = step.num_experts
    for i in range(n):
        work.order[i] = i
    gap = 1
    while gap < n // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, n):
            i = work.order[k]
            at = k
            while at >= gap and _precedes(step, work, i, work.order[at - gap], longest_first):
                work.order[at] = work.order[at - gap]
                at -= gap
            work.order[at] = i
        gap //= 3


@compiled
def _precedes(step, work, a, b, longest_first):
    if (work.missing[a] == 0) != (work.missing[b] == 0):
        return work.missing[b] == 0
    if step.rows[a] != step.rows[b]:
        return step.rows[a] > step.rows[b]
    if longest_first and work.missing[a] != work.missing[b]:
        return work.missing[a] > work.missing[b]
    if work.reuse[a] != work.reuse[b]:
        return work.reuse[a] > work.reuse[b]
    return a < b


@compiled
def _prefix_us(rates, work, hits, total, streamed, linked):
    """The step's cost if the first ``streamed`` shards are streamed, up to ``linked`` read in place, the rest CPU."""
    nbytes = work.nbytes
    rows = work.row_nbytes
    return step_us(rates, Loads(
        hits[0], hits[1], work.runs[streamed], nbytes[streamed], rows[streamed],
        linked - streamed, nbytes[linked] - nbytes[streamed], rows[linked] - rows[streamed],
        total - linked, nbytes[total] - nbytes[linked], rows[total] - rows[linked]))


@compiled
def _scan_prefixes(rates, options, work, hits, total, limit):
    """Write the cheapest prefix split into ``work.side`` and return its cost; ties give the link more."""
    if options.lanes == 1 << STREAM:
        _write_prefix(work, total, limit, limit, UNPLACED)
        return _prefix_us(rates, work, hits, limit, limit, limit)
    stride = (total + COARSE_SHARDS - 1) // COARSE_SHARDS
    best, streamed, linked = _scan_range(rates, options, work, hits, total, limit, 0, total, stride)
    if stride > 1:
        low = max(0, linked - stride)
        high = min(total, linked + stride)
        best, streamed, linked = _scan_range(rates, options, work, hits, total, limit, low, high, 1)
    _write_prefix(work, total, streamed, linked, CPU)
    return best


@compiled
def _scan_range(rates, options, work, hits, total, limit, low, high, stride):
    """(cost, streamed, linked) of the cheapest prefix; lengths from ``high`` down, and ``low`` itself."""
    best = INFINITE
    best_streamed = -1
    best_linked = -1
    length = high
    while length >= low:
        on_cpu = length < total
        if not on_cpu or allows(options, CPU):
            streamed = min(length, limit)
            if allows(options, STREAM) and (streamed == length or allows(options, ZERO_COPY)):
                us = _prefix_us(rates, work, hits, total, streamed, length)
                if us < best or best_linked < 0:
                    best, best_streamed, best_linked = us, streamed, length
            if (length == 0 or allows(options, ZERO_COPY)):
                us = _prefix_us(rates, work, hits, total, 0, length)
                if us < best or best_linked < 0:
                    best, best_streamed, best_linked = us, 0, length
        length = length - stride if length == low or length - stride >= low else low
    return best, best_streamed, best_linked


@compiled
def _write_prefix(work, total, streamed, linked, rest):
    for i in range(total):
        work.side[i] = STREAM if i < streamed else (ZERO_COPY if i < linked else rest)


@compiled
def _try_subsets(rates, options, work, hits, total):
    """(cost, subset, its lane) over all subsets for the link; bit ``total - 1 - i`` is shard ``i`` in link order.

    Larger numbers come first and ties keep the first, so that the link gets the shards with most reuse.
    """
    _sum_subsets(work, total)
    best = INFINITE
    best_subset = -1
    best_lane = STREAM
    for subset in range((1 << total) - 1, -1, -1):
        if subset != (1 << total) - 1 and not allows(options, CPU):
            break
        for lane in (STREAM, ZERO_COPY):
            if subset != 0 and not allows(options, lane):
                continue
            us = _subset_us(rates, work, hits, total, subset, lane)
            if us < best or best_subset < 0:
                best, best_subset, best_lane = us, subset, lane
    return best, best_subset, best_lane


@compiled
def _sum_subsets(work, total):
    """Bytes, rows x bytes and runs of every subset, each from the one without its highest bit."""
    work.subset[:, 0] = 0
    for bit in range(total):
        i = total - 1 - bit
        nbytes = work.nbytes[i + 1] - work.nbytes[i]
        row_nbytes = work.row_nbytes[i + 1] - work.row_nbytes[i]
        joins = bit > 0 and work.runs[i + 2] == work.runs[i + 1]  # shard i + 1 continues shard i
        for rest in range(1 << bit):
            subset = rest | (1 << bit)
            work.subset[0, subset] = work.subset[0, rest] + nbytes
            work.subset[1, subset] = work.subset[1, rest] + row_nbytes
            work.subset[2, subset] = work.subset[2, rest] + (not (joins and rest >> (bit - 1) & 1))


@compiled
def _subset_us(rates, work, hits, total, subset, lane):
    nbytes = work.subset[0, subset]
    rows = work.subset[1, subset]
    count = 0
    rest = subset
    while rest:
        rest &= rest - 1
        count += 1
    on_cpu = total - count
    if lane == STREAM:
        return step_us(rates, Loads(hits[0], hits[1], work.subset[2, subset], nbytes, rows, 0, 0, 0,
                                    on_cpu, work.nbytes[total] - nbytes, work.row_nbytes[total] - rows))
    return step_us(rates, Loads(hits[0], hits[1], 0, 0, 0, count, nbytes, rows,
                                on_cpu, work.nbytes[total] - nbytes, work.row_nbytes[total] - rows))


@compiled
def _write_subset(work, total, subset, lane):
    for i in range(total):
        work.side[i] = lane if subset >> (total - 1 - i) & 1 else CPU
