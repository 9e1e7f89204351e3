"""Who serves which missing shard: the split over link and CPU that makes `cost.step_us` least.

Missing shards are put in *link order* (`link_order`); the link gets a prefix and the CPU the rest, with the link's
shards streamed (what finds no slot read in place) or all read in place. The best prefix is found without trying
each. A longer prefix never makes link or device quicker and never makes the CPU slower, so each of both bounds the
step from below: at the length where they cross the search begins, and goes up and down only as far as these bounds
lie below the best. It returns what trying every length would.

Why a prefix is exact when all missing shards have the same bytes and rows: the step's cost then depends on which
shards the link gets only through their count and the number of copies, and never falls with the number of copies.
``c`` shards cover at least as many runs as it takes of the longest ones to hold ``c`` shards; the prefix that takes
the longest runs first covers just so many, so no other set of ``c`` shards is cheaper. With unequal rows and equal
runs the same holds with the experts of most rows first, as long as the device's row work does not bound the step:
of all sets of that count, the CPU then has the least row work. Using one kind of link lane is no loss where both
their times are concave in the count (a fixed cost, and a rate that does not fall with more in flight): a sum of
concave functions is least at an end.

With unequal bytes (a short last shard) or rows, up to EXHAUSTIVE_SHARDS missing shards are split by trying all
subsets (`subsets`). Above, the best prefix stays; with one row each it is within one shard's cost of the best split:
the bytes of any optimum lie between those of two neighbouring prefixes.

Two orders are tried, by reuse and with most missing shards first; the second only where the copies that it could
save might gain enough. Among splits of nearly the same time (``slack_runs`` copies' fixed cost) the one wins which
gives the link the experts with most expected reuse, since what crosses the link can stay.
"""

from __future__ import annotations

from typing import NamedTuple

from trilane.cost import Loads, both_us, cpu_us, device_us, link_us, longer, step_us, stream_us
from trilane.expert import CPU, STREAM, ZERO_COPY, decision
from trilane.link_order import block_missing, entry_of, list_entries, sort_experts, sums_before
from trilane.plan import EXHAUSTIVE_SHARDS, NUM_MISSING, allows
from trilane.state import INDEX
from trilane.subsets import is_uniform, list_shards, try_subsets

INFINITE = float("inf")


class Split(NamedTuple):
    """Of the missing shards in link order, the first are streamed, those up to ``linked`` read in place.

    If ``subset`` is not negative, its bits say instead which shards take ``subset_lane`` (`subsets`).
    """

    streamed: int
    linked: int
    subset: int
    subset_lane: int


class Prefix(NamedTuple):
    """The first ``length`` shards in link order: their bytes, rows x bytes and copies."""

    length: int
    nbytes: float
    row_nbytes: float
    runs: float


@decision(inline=True)
def choose_split(state, geometry, rates, options, step, work, num):
    """The split of what ``num`` experts miss (`find_missing`), which stays listed in its link order (`plan.Work`)."""
    total = work.counts[NUM_MISSING]
    num_shards = geometry.num_shards[step.layer]
    slots = block_missing(state, geometry, options, step, work)
    slack = options.slack_runs * rates.run_fix_us
    floor = _least_rate(rates.zero_copy_us_per_byte)
    work.scatter[0] = state.scatter[0]
    if options.by_ratio:
        return ratio_split(rates, geometry, step, work, num, slots)
    sorts_twice = allows(options, STREAM) and rates.run_fix_us != 0.0 and not _runs_equal(work, num)
    best, streamed, linked = INFINITE, 0, 0
    limit = entries = attempt = 0
    while True:  # by reuse; most missing shards first; by reuse again, if that had not been bettered
        sort_experts(step.rows, work.missing, work.reuse, work.order, num, attempt == 1)
        entries, streamable = list_entries(geometry, step, work, num)
        limit = min(streamable, slots)
        if attempt == 2:
            break
        known, known_linked, near = (best - slack, total, linked) if attempt == 1 else (INFINITE, -1, -1)
        us, by_stream, by_link = _find_prefix(
            rates, options, step, work, num_shards, total, entries, limit, floor, near, known, known_linked
        )
        if by_stream >= 0:
            best, streamed, linked = us, by_stream, by_link
        if not sorts_twice or (attempt == 1 and by_stream >= 0):
            break
        if attempt == 0 and not _may_save(
            rates, geometry, options, step, work, num, limit, linked, floor, best - slack
        ):
            break
        attempt += 1
    if total <= EXHAUSTIVE_SHARDS and (limit == total or not allows(options, STREAM)):
        if not is_uniform(geometry, step, work, num):
            list_shards(step, work, num_shards, total)
            us, subset, lane = try_subsets(rates, options, work.hits, work.few, work.subset, total, work.scatter[0])
            if us < best - slack:
                return Split(streamed, linked, subset, lane)
    return Split(streamed, linked, -1, STREAM)


@decision
def ratio_split(rates, geometry, step, work, num, slots):
    """FreeToken's published rule, to compare with: the link's share by the two rates alone, the rest for the CPU.

    ``floor(m * f)`` of ``m`` missing shards or one more are fetched, whichever gives the smaller
    ``max(F * (1 - f), (m - F) * f)``; ``f`` is the link's part of both rates. Last used ones go first. It knows no
    fixed costs and no limit of host memory, and is meant for experts of one shard.
    """
    sort_experts(step.rows, work.missing, work.reuse, work.order, num, False)
    streamable = list_entries(geometry, step, work, num)[1]
    total = work.counts[NUM_MISSING]
    share = rates.cpu_us_per_byte / (rates.cpu_us_per_byte + rates.stream_us_per_byte)
    fetched = int(total * share)
    now = longer(fetched * (1.0 - share), (total - fetched) * share)
    more = longer((fetched + 1) * (1.0 - share), (total - fetched - 1) * share)
    fetched = min(fetched if now <= more else fetched + 1, streamable, slots)
    return Split(fetched, fetched, -1, STREAM)


@decision(inline=True)
def _runs_equal(work, num):
    """Whether all experts that miss shards miss equally many."""
    for k in range(1, num):
        if work.missing[work.order[k] & INDEX] != work.missing[work.order[0] & INDEX]:
            return False
    return True


@decision(inline=True)
def _may_save(rates, geometry, options, step, work, num, limit, linked, floor, known):
    """Whether fewer copies could bring the step below ``known``; ``linked`` is the best length in the order by reuse.

    With equal bytes and rows, orders differ in nothing but copies. Below the least length at which the CPU is quick
    enough no order helps; from there up the link side takes no less than with the fewest copies that hold so much.
    """
    num_shards = geometry.num_shards[step.layer]
    nbytes, rows = work.sizes[1], step.rows[work.order[0] & INDEX]
    if work.sizes[num_shards] != num_shards * nbytes or rows != step.rows[work.order[num - 1] & INDEX]:
        return True
    for j in range(1, num_shards):
        if work.sizes[j] != j * nbytes:
            return True
    total = work.counts[NUM_MISSING]
    fixed = rates.step_fix_us + rates.miss_fix_us  # added as `step_us` adds it, so that both round alike
    length = linked
    serves = allows(options, CPU)  # else every order has the same length
    while serves and length > 0 and fixed + _rest_us(rates, total - length + 1, nbytes, rows) < known:
        length -= 1
    while serves and length < total and fixed + _rest_us(rates, total - length, nbytes, rows) >= known:
        length += 1
    streamed = min(length, limit)
    runs = _copies(work, _fewest_runs(work, num, num_shards, streamed), streamed)
    most = Prefix(streamed, streamed * nbytes, streamed * nbytes * rows, runs)
    prefix = Prefix(length, length * nbytes, length * nbytes * rows, most.runs)
    return fixed + _link_side_us(rates, _loads(work.hits, prefix, most, prefix), floor) < known


@decision(inline=True)
def _rest_us(rates, count, nbytes, rows):
    return cpu_us(rates, count, count * nbytes, count * nbytes * rows)


@decision(inline=True)
def _fewest_runs(work, num, num_shards, count):
    """How many runs ``count`` of the shards that may be streamed have at least: one for each expert, fullest first."""
    for length in range(num_shards + 1):
        work.lengths[length] = 0
    for k in range(num):
        work.lengths[work.open[work.order[k] & INDEX] & INDEX] += 1
    runs = 0.0
    length = num_shards
    while length > 0 and count > 0:
        for _ in range(work.lengths[length & INDEX]):
            runs += 1.0 if count > 0 else 0.0
            count -= length
        length -= 1
    return runs


@decision(inline=True)
def _find_prefix(rates, options, step, work, num_shards, total, entries, limit, floor, near, known, known_linked):
    """(cost, streamed, linked) of the cheapest prefix; streamed is -1 if none betters what is known.

    Of equal costs the longest prefix is taken (a known one had ``known_linked``), rather streamed than read in place.
    The search begins ``near`` that length, if it is not negative.
    """
    copies = _copies(work, work.runs[entries], total)
    everything = Prefix(int(total), work.nbytes[entries], work.row_nbytes[entries], copies)
    best, streamed, linked = known, -1, known_linked
    streams, reads = allows(options, STREAM), allows(options, ZERO_COPY)
    low = 0 if allows(options, CPU) else total
    while True:  # streamed as far as there are slots; then all read in place
        length = limit if streams else 0
        most = _prefix(step, work, num_shards, entry_of(work, length, 0), length)
        if options.lanes == 1 << STREAM:
            us = step_us(rates, _loads(work.hits, most, most, most))
            return us, length if us < known or known_linked < 0 else -1, length
        high = total if reads else length
        if near < 0:
            near = _guess_crossing(rates, work.hits, most, everything, floor)
        start = max(low, min(high, near))
        us, by_link = _search_from(
            rates, step, work, num_shards, everything, most, floor, low, high, start, best, linked
        )
        if by_link >= 0:
            best, streamed, linked = us, min(by_link, length), by_link
            near = linked
        if not streams or not reads:
            return best, streamed, linked
        streams = False


@decision(inline=True)
def _guess_crossing(rates, hits, most, everything, floor):
    """About the length from which up the link side takes no less time than the CPU, were both straight lines."""
    link = _link_side_us(rates, _loads(hits, everything, most, everything), floor)
    cpu = cpu_us(rates, everything.length, everything.nbytes, everything.row_nbytes)
    link_fix = rates.stream_fix_us + rates.stream_tail_us if most.length > 0 else rates.zero_copy_fix_us
    if not link + cpu < INFINITE:
        return 0 if link == INFINITE else everything.length
    whole = longer(link - link_fix, 0.0) + longer(cpu - rates.cpu_fix_us, 0.0)
    return int(everything.length * (longer(cpu - link_fix, 0.0) / whole if cpu - link_fix < whole else 1.0))


@decision(inline=True)
def _search_from(rates, step, work, num_shards, everything, most, floor, low, high, start, known, known_linked):
    """(cost, length) of the best length from ``low`` to ``high``; the length is -1 if none betters what is known.

    Upwards the link side only grows, downwards the CPU, so each way from ``start`` ends where that alone takes as
    long as the best. Of equal costs the longer prefix is better; that of the known one is ``known_linked``.
    """
    fixed = rates.step_fix_us + rates.miss_fix_us
    best, linked = known, known_linked
    found = -1
    entry = 0
    length, way = start, 1
    while length >= low:
        if length > high:
            length, way = start - 1, -1
            continue
        entry = entry_of(work, length, entry)
        loads = _loads(work.hits, _prefix(step, work, num_shards, entry, length), most, everything)
        if way > 0 and fixed + _link_side_us(rates, loads, floor) > best:
            length, way = start - 1, -1
            continue
        if way < 0:
            cpu = fixed + cpu_us(rates, loads.cpu_shards, loads.cpu_nbytes, loads.cpu_row_nbytes)
            both = fixed + both_us(rates, loads.stream_nbytes + loads.zero_copy_nbytes, loads.cpu_nbytes)
            if longer(cpu, both) > best or (longer(cpu, both) == best and length <= linked):
                length = -1 if cpu >= best else 0  # where memory is the limit only the CPU alone is left
                continue
        us = step_us(rates, loads)
        if us < best or (us == best and length > linked):
            best, linked, found = us, length, length
        length += way
    return best, found


@decision(inline=True)
def _prefix(step, work, num_shards, entry, length):
    nbytes, row_nbytes, runs = sums_before(step, work, num_shards, entry, length)
    return Prefix(int(length), nbytes, row_nbytes, _copies(work, runs, length))


@decision(inline=True)
def _copies(work, runs, length):
    """Copies that so many shards in so many runs will take: slots of late victims are seldom neighbours."""
    return runs + (length - runs) * work.scatter[0]


@decision(inline=True)
def learn_scatter(state, num_shards, runs, copies):
    """Move `State.scatter` on by the plan's streamed shards: copies that their runs did not need."""
    if num_shards > runs:
        state.scatter[0] += ((copies - runs) / (num_shards - runs) - state.scatter[0]) / 16.0


@decision(inline=True)
def _loads(hits, prefix, most, everything):
    """Loads where the link gets a prefix, streams at ``most`` so much of it, and the CPU gets the rest."""
    fits = prefix.length <= most.length
    nbytes = prefix.nbytes if fits else most.nbytes
    row_nbytes = prefix.row_nbytes if fits else most.row_nbytes
    return Loads(
        hits[0],
        hits[1],
        prefix.runs if fits else most.runs,
        nbytes,
        row_nbytes,
        prefix.length - (prefix.length if fits else most.length),
        prefix.nbytes - nbytes,
        prefix.row_nbytes - row_nbytes,
        everything.length - prefix.length,
        everything.nbytes - prefix.nbytes,
        everything.row_nbytes - prefix.row_nbytes,
    )


@decision(inline=True)
def _link_side_us(rates, loads, floor):
    """What link and device take at least: never less for a longer prefix, since in-place reads get the best rate."""
    stream = stream_us(rates, loads.stream_runs, loads.stream_nbytes)
    in_place = 0.0 if loads.zero_copy_shards == 0 else rates.zero_copy_fix_us + loads.zero_copy_nbytes * floor
    return longer(link_us(rates, stream, in_place), device_us(rates, loads, in_place))


@decision(inline=True)
def _least_rate(curve):
    least = curve[0]
    for k in range(1, curve.size):
        least = curve[k] if curve[k] < least else least
    return least
