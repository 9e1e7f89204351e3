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
around its best, which loses at most a stride of shards (nothing where the cost has one valley).

Among splits of nearly the same time (``slack_runs`` copies' fixed cost) the one wins which gives the link the
experts with most expected reuse, since what crosses the link can stay. Residency is read here, never written.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import Loads, cpu_us, step_us, zero_copy_us
from trilane.expert import CPU, STREAM, UNPLACED, ZERO_COPY, decision
from trilane.plan import EXHAUSTIVE_SHARDS, NUM_MISSING
from trilane.residency import slot_price
from trilane.state import HELD, INDEX

COARSE_SHARDS = 16
INFINITE = float("inf")


class Step(NamedTuple):
    """What one layer-step asks for: its unique routed experts and the rows of each."""

    layer: int
    experts: NDArray[np.int32]
    rows: NDArray[np.int32]
    num_experts: int


@decision(inline=True)
def allows(options, lane):
    """Whether a miss may take the lane."""
    return (options.lanes >> lane) & 1 == 1


@decision(inline=True)
def choose_split(state, geometry, rates, options, step, work):
    """Write a lane for each missing shard into ``work.side``, by link order (`plan.Work`)."""
    total = work.counts[NUM_MISSING]
    slots = _refuse(state, geometry, options, step, work)
    slack = options.slack_runs * rates.run_fix_us
    best = INFINITE
    streamed = linked = limit = stretches = 0
    _sum_sizes(geometry.shard_nbytes[step.layer], work.sizes, geometry.num_shards[step.layer])
    for attempt in range(3):  # by reuse; longest runs first; by reuse again, if that had not been bettered
        limit, stretches = _list_missing(state, geometry, step, work, slots, attempt == 1)
        if attempt == 2:
            break
        num_shards = geometry.num_shards[step.layer]
        us, by_stream, by_link = _scan_prefixes(rates, options, step, work, num_shards, total, limit, stretches)
        better = attempt == 0 or us < best - slack
        if better:
            best, streamed, linked = us, by_stream, by_link
        if attempt == 0:
            if not allows(options, STREAM) or rates.run_fix_us == 0.0 or _runs_equal(step, work):
                break
        elif better:
            break
    _write_prefix(options, work, total, streamed, linked)
    if total <= EXHAUSTIVE_SHARDS and (limit == total or not allows(options, STREAM)):
        if not _all_equal(geometry, step, work):
            _spread_sums(geometry, step, work, stretches)
            us, subset, lane = try_subsets(
                rates, options, work.hits, work.nbytes, work.row_nbytes, work.runs, work.subset, total
            )
            if us < best - slack:
                _write_subset(work, total, subset, lane)


@decision(inline=True)
def _sum_sizes(shard_nbytes, sizes, num_shards):
    nbytes = 0
    for j in range(num_shards):
        nbytes += shard_nbytes[j]
        sizes[j + 1] = float(nbytes)


@decision(inline=True)
def _spread_sums(geometry, step, work, stretches):
    """Sums of what lies before each stretch become sums of what lies before each shard (in place, so backwards)."""
    num_shards = geometry.num_shards[step.layer]
    for stretch in range(stretches - 1, -1, -1):
        for length in range(work.bound[stretch + 1], work.bound[stretch], -1):
            nbytes, rows, runs = _sums_before(step, work, num_shards, stretch, length)
            work.nbytes[length], work.row_nbytes[length], work.runs[length] = nbytes, rows, runs


@decision(inline=True)
def _runs_equal(step, work):
    """Whether all experts that miss shards miss equally many."""
    first = work.missing[work.order[0]]
    for i in range(step.num_experts):
        if work.missing[i] != 0 and work.missing[i] != first:
            return False
    return True


@decision(inline=True)
def _all_equal(geometry, step, work):
    """Whether all missing shards have the same bytes and rows."""
    num_shards = geometry.num_shards[step.layer]
    nbytes = geometry.shard_nbytes[step.layer, work.entry[0] - work.who[0] * num_shards]
    rows = step.rows[work.who[0]]
    stretch = 0
    while work.bound[stretch] < work.counts[NUM_MISSING]:
        first = work.entry[stretch] - work.who[stretch] * num_shards
        for j in range(first, first + work.bound[stretch + 1] - work.bound[stretch]):
            if geometry.shard_nbytes[step.layer, j] != nbytes or step.rows[work.who[stretch]] != rows:
                return False
        stretch += 1
    return True


@decision(inline=True)
def _list_missing(state, geometry, step, work, slots, longest_first):
    """Put the missing shards in link order, with sums; return how many may be streamed, and all stretches.

    Shards that may not be streamed (a background fill is under way, or admission refuses) come last; ``slots``
    can be had.
    """
    _order_experts(step.rows, work.missing, work.reuse, work.order, step.num_experts, longest_first)
    streamable = count = stretch = 0
    for blocked in range(2):
        count, stretch = _append_missing(state, geometry, step, work, blocked, count, stretch)
        if blocked == 0:
            streamable = count
        if count == work.counts[NUM_MISSING]:
            break
    return min(streamable, slots), stretch


@decision(inline=True)
def _append_missing(state, geometry, step, work, blocked, count, stretch):
    """List the missing shards that are (not) blocked, expert by expert; return the new counts of both lists."""
    layer = step.layer
    num_shards = geometry.num_shards[layer]
    none_fills = state.num_filling[state.pool_of[layer]] == 0
    nbytes, row_nbytes, runs = work.nbytes[stretch], work.row_nbytes[stretch], work.runs[stretch]
    for k in range(step.num_experts):
        i = work.order[k] & INDEX
        if work.missing[i] == 0:
            break
        key = geometry.first_shard[layer] + step.experts[i] * num_shards
        rows = float(step.rows[i])
        refused = work.refused[i] != 0
        whole = none_fills and work.missing[i] == num_shards
        if whole and refused != (blocked == 1):
            continue
        previous = -1
        j = 0
        while j < num_shards:
            at = i * num_shards
            end = num_shards if whole else _stretch_end(state, work, key, at, j, num_shards, refused, blocked)
            if end == j:
                j += 1
                continue
            work.entry[stretch], work.who[stretch], work.shard[stretch] = at + j, i, key + j
            stretch += 1
            count += end - j
            nbytes += work.sizes[end] - work.sizes[j]
            row_nbytes += (work.sizes[end] - work.sizes[j]) * rows
            runs += 1.0 if j != previous else 0.0
            work.bound[stretch] = count
            work.nbytes[stretch], work.row_nbytes[stretch], work.runs[stretch] = nbytes, row_nbytes, runs
            previous = j = end
    return count, stretch


@decision(inline=True)
def _stretch_end(state, work, key, first, j, num_shards, refused, blocked):
    """End of the stretch of missing shards that are (not) blocked, all or none of them being filled."""
    start = j
    filled = state.slot_of[key + j] < -1
    while (
        j < num_shards
        and work.lane[first + j] == UNPLACED
        and (state.slot_of[key + j] < -1) == filled
        and (refused or filled) == (blocked == 1)
    ):
        j += 1
    return max(j, start)


@decision(inline=True)
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
        if state.flags[expert] & HELD:  # not what an earlier wave is done with
            slots -= state.resident[expert]
    return slots


@decision
def _order_experts(rows, missing, reuse, order, num_experts, longest_first):
    """Shell sort: experts that miss nothing last, else most rows, (longest run,) most reuse first."""
    for i in range(num_experts):
        order[i] = i
    gap = 1
    while 12 * gap < num_experts:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(gap, num_experts):
            i = order[k & INDEX] & INDEX
            at = k
            while at >= gap and _precedes(rows, missing, reuse, i, order[(at - gap) & INDEX] & INDEX, longest_first):
                order[at & INDEX] = order[(at - gap) & INDEX]
                at -= gap
            order[at & INDEX] = i
        gap //= 3


@decision(inline=True)
def _precedes(rows, missing, reuse, a, b, longest_first):
    if (missing[a] == 0) != (missing[b] == 0):
        return missing[b] == 0
    if rows[a] != rows[b]:
        return rows[a] > rows[b]
    if longest_first and missing[a] != missing[b]:
        return missing[a] > missing[b]
    if reuse[a] != reuse[b]:
        return reuse[a] > reuse[b]
    return a < b


@decision(inline=True)
def _sums_before(step, work, num_shards, stretch, length):
    """Bytes, rows x bytes and runs of the first ``length`` shards, the last of which lies in the stretch."""
    stretch &= INDEX
    i = work.who[stretch] & INDEX
    j = (work.entry[stretch] - i * num_shards) & INDEX
    inside = length - work.bound[stretch]
    more = work.sizes[(j + inside) & INDEX] - work.sizes[j]
    runs = work.runs[stretch + 1] if inside > 0 else work.runs[stretch]
    return work.nbytes[stretch] + more, work.row_nbytes[stretch] + more * step.rows[i], runs


@decision(inline=True)
def _stretch_of(work, length):
    """The stretch in which the first ``length`` shards end."""
    stretch = 0
    while work.bound[stretch + 1] < length:
        stretch += 1
    return stretch


@decision(inline=True)
def _scan_prefixes(rates, options, step, work, num_shards, total, limit, stretches):
    """(cost, streamed, linked) of the cheapest prefix split; ties give the link more."""
    hits = work.hits[0], work.hits[1]
    all_ = work.nbytes[stretches], work.row_nbytes[stretches]
    most = _sums_before(step, work, num_shards, _stretch_of(work, limit), limit)
    if options.lanes == 1 << STREAM:
        loads = Loads(*hits, most[2], most[0], most[1], 0, 0.0, 0.0, 0, 0.0, 0.0)
        return step_us(rates, loads), limit, limit
    best, streamed, linked = INFINITE, -1, -1
    low, high = 0, total
    stride = (total + COARSE_SHARDS - 1) // COARSE_SHARDS
    while True:
        us, by_stream, by_link = _scan_range(
            rates, options, step, work, num_shards, total, limit, hits, all_, most, low, high, stride, best
        )
        if by_link >= 0 and (us < best or linked < 0):
            best, streamed, linked = us, by_stream, by_link
        if stride == 1:
            return best, streamed, linked
        low, high, stride = max(0, linked - stride + 1), min(total, linked + stride - 1), 1


@decision(inline=True)
def _scan_range(rates, options, step, work, num_shards, total, limit, hits, all_, most, low, high, stride, known):
    """(cost, streamed, linked) of prefixes from ``high`` down, every ``stride``-th and ``low`` itself.

    The lengths are -1 if none is below the ``known`` cost. A shorter prefix only adds to the CPU, so the scan ends
    where the CPU alone takes as long as the best. ``hits``, ``all_`` missing shards and the ``most`` that may be
    streamed are given as bytes, rows x bytes (and runs).
    """
    fixed = rates.step_fix_us + rates.miss_fix_us
    best = known
    best_streamed = best_linked = -1
    length = high
    stretch = _stretch_of(work, high)
    while length >= low and (length == total or allows(options, CPU)):
        while stretch > 0 and work.bound[stretch & INDEX] >= length:
            stretch -= 1
        nbytes, rows, runs = _sums_before(step, work, num_shards, stretch, length)
        cpu = total - length, all_[0] - nbytes, all_[1] - rows
        is_first = known == INFINITE and best_linked < 0
        if not is_first and fixed + cpu_us(rates, *cpu) >= best:
            break
        if allows(options, STREAM):
            if length <= limit:
                us = step_us(rates, Loads(*hits, runs, nbytes, rows, 0, 0.0, 0.0, *cpu))
                if us < best or is_first:
                    best, best_streamed, best_linked = us, length, length
                    is_first = False
            elif allows(options, ZERO_COPY):
                in_place = length - limit, nbytes - most[0], rows - most[1]
                us = step_us(rates, Loads(*hits, most[2], most[0], most[1], *in_place, *cpu))
                if us < best or is_first:
                    best, best_streamed, best_linked = us, limit, length
                    is_first = False
        if length == 0 or allows(options, ZERO_COPY):
            # Mostly the reads alone take longer than the best, which is soon told.
            if is_first or fixed + zero_copy_us(rates, length, nbytes, 0.0) < best:
                us = step_us(rates, Loads(*hits, 0.0, 0.0, 0.0, length, nbytes, rows, *cpu))
                if us < best or is_first:
                    best, best_streamed, best_linked = us, 0, length
        length = length - stride if length == low or length - stride >= low else low
    return best, best_streamed, best_linked


@decision(inline=True)
def _write_prefix(options, work, total, streamed, linked):
    rest = UNPLACED if options.lanes == 1 << STREAM else CPU
    for i in range(total):
        work.side[i] = STREAM if i < streamed else (ZERO_COPY if i < linked else rest)


@decision
def try_subsets(rates, options, hits, nbytes, rows, runs, sums, total):
    """(cost, subset, its lane) over all subsets for the link; bit ``total - 1 - i`` is shard ``i`` in link order.

    Larger numbers come first and ties keep the first, so that the link gets the shards with most reuse.
    """
    _sum_subsets(nbytes, rows, runs, sums, total)
    best = INFINITE
    best_subset, best_lane = -1, STREAM
    for subset in range((1 << total) - 1, -1, -1):
        if subset != (1 << total) - 1 and not allows(options, CPU):
            break
        for lane in range(STREAM, ZERO_COPY + 1):
            if subset != 0 and not allows(options, lane):
                continue
            us = _subset_us(rates, hits, nbytes[total], rows[total], sums, total, subset, lane)
            if us < best or best_subset < 0:
                best, best_subset, best_lane = us, subset, lane
    return best, best_subset, best_lane


@decision(inline=True)
def _sum_subsets(nbytes, rows, runs, sums, total):
    """Bytes, rows x bytes, runs and count of every subset, each from the one without its highest bit."""
    for k in range(4):
        sums[k, 0] = 0.0
    for bit in range(total):
        i = total - 1 - bit
        joins = bit > 0 and runs[i + 2] == runs[i + 1]  # shard i + 1 continues shard i
        for rest in range(1 << bit):
            subset = rest | (1 << bit)
            sums[0, subset] = sums[0, rest] + nbytes[i + 1] - nbytes[i]
            sums[1, subset] = sums[1, rest] + rows[i + 1] - rows[i]
            sums[2, subset] = sums[2, rest] + (0.0 if joins and (rest >> (bit - 1)) & 1 else 1.0)
            sums[3, subset] = sums[3, rest] + 1.0


@decision(inline=True)
def _subset_us(rates, hits, nbytes, rows, sums, total, subset, lane):
    size, row_size, count = sums[0, subset], sums[1, subset], int(sums[3, subset])
    streamed = lane == STREAM
    return step_us(
        rates,
        Loads(
            hits[0],
            hits[1],
            sums[2, subset] if streamed else 0.0,
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


@decision(inline=True)
def _write_subset(work, total, subset, lane):
    for i in range(total):
        work.side[i] = lane if (subset >> (total - 1 - i)) & 1 else CPU
