"""The split against brute force, and the search for the best prefix against a plain scan of all of them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import H200, RATES, loads_of, plan_once

from trilane.cost import STEP_US, Loads, step_us
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, make_geometry
from trilane.plan import NUM_COPIES, make_options


def brute_force(geometry, rates, missing, rows, lanes, mixed=False):
    """The least step over all assignments; ``missing`` is a bool for (expert, shard), the rest hits."""
    places = [(i, j) for i, row in enumerate(missing) for j, m in enumerate(row) if m]
    best = np.inf
    for choice in product(lanes, repeat=len(places)):
        if not mixed and STREAM in choice and ZERO_COPY in choice:
            continue
        table = [[HIT] * len(row) for row in missing]
        for (i, j), lane in zip(places, choice, strict=True):
            table[i][j] = lane
        best = min(best, step_us(rates, loads_of(geometry, table, rows)))
    return best


def assert_least(work, missing, best):
    """The plan takes as long as the best split of what misses, or less where a hit was left to the CPU."""
    lanes = work.lane[: len(missing) * len(missing[0])].reshape(len(missing), -1)
    if ((lanes != HIT) & ~np.array(missing)).any():
        assert work.predicted_us[STEP_US] < best
    else:
        assert work.predicted_us[STEP_US] == pytest.approx(best, rel=1e-12)


MISSING = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=3).filter(
    lambda rows: sum(map(sum, rows)) <= 7
)


def plan_missing(sizes, rates, options, missing, rows):
    geometry = make_geometry([4], [sizes])
    resident = [i * len(sizes) + j for i, row in enumerate(missing) for j, m in enumerate(row) if not m]
    _, work = plan_once(geometry, rates, options, range(len(missing)), rows, resident=resident, num_slots=60)
    return geometry, work


@settings(max_examples=80, deadline=None)
@given(RATES, MISSING)
def test_equal_shards_are_split_exactly(rates, missing):
    """One row each and equal bytes, hits anywhere: the prefix scan finds what all subsets hold, within its slack."""
    rows = [1] * len(missing)
    single_runs = all(sum(a and not b for a, b in zip(row, [False, *row], strict=False)) <= 1 for row in missing)
    geometry, work = plan_missing([40, 40, 40], rates, make_options(slack_runs=0), missing, rows)
    best = brute_force(geometry, rates, missing, rows, (STREAM, ZERO_COPY, CPU))
    if single_runs:
        assert_least(work, missing, best)
    assert work.predicted_us[STEP_US] <= best + 2 * rates.run_fix_us + 1e-9
    geometry, work = plan_missing([40, 40, 40], rates, make_options(), missing, rows)
    assert work.predicted_us[STEP_US] <= best + 3 * rates.run_fix_us + 1e-9


@settings(max_examples=80, deadline=None)
@given(RATES, MISSING, st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_few_unequal_shards_are_split_exactly(rates, missing, rows):
    geometry, work = plan_missing([40, 24, 8], rates, make_options(slack_runs=0), missing, rows[: len(missing)])
    best = brute_force(geometry, rates, missing, rows, (STREAM, ZERO_COPY, CPU))
    # The short last shard ends a copy as any other; a middle one does not fill its slot, so the copy breaks there.
    assert work.predicted_us[STEP_US] <= best + sum(map(sum, missing)) * rates.run_fix_us + 1e-9
    if rates.run_fix_us == 0:
        assert_least(work, missing, best)


@settings(max_examples=40, deadline=None)
@given(RATES, st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=3))
def test_one_kind_of_link_lane_is_enough(rates, missing):
    """Concave lane times and nothing that adds in-place reads to the device: mixing both lanes gains nothing."""
    rows = [1] * len(missing)
    geometry, work = plan_missing([40, 40], rates, make_options(slack_runs=0), missing, rows)
    mixed = brute_force(geometry, rates, missing, rows, (STREAM, ZERO_COPY, CPU), mixed=True)
    if rates.num_cores == 0 and rates.hit_us_per_byte <= rates.stream_us_per_byte:
        assert work.predicted_us[STEP_US] == pytest.approx(mixed, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(RATES, st.integers(1, 4), st.integers(2, 4))
def test_a_short_last_shard_costs_less_than_one_shard(rates, experts, shards):
    """Above the exhaustive limit: within one shard's cost of the best split of bytes (counts of full and short)."""
    sizes = [40] * (shards - 1) + [12]
    geometry = make_geometry([8], [sizes])
    rates = rates._replace(run_fix_us=0.0, num_cores=0.0)
    _, work = plan_once(geometry, rates, make_options(["stream", "cpu"]), range(experts), [1] * experts)
    best = np.inf
    for full, short in product(range(experts * (shards - 1) + 1), range(experts + 1)):
        cpu, link = full * 40 + short * 12, (experts * (shards - 1) - full) * 40 + (experts - short) * 12
        runs = 1 if link else 0
        best = min(best, step_us(rates, Loads(0, 0, runs, link, link, 0, 0, 0, full + short, cpu, cpu)))
    one = max(
        40 * rates.stream_us_per_byte,
        40 * rates.cpu_us_per_byte + rates.cpu_shard_us * experts,
        40 * rates.cpu_row_us_per_byte + rates.cpu_shard_us * experts,
    )
    assert work.predicted_us[STEP_US] <= best + one + 1e-9


def test_many_shards_are_split_as_well_as_by_a_full_scan():
    geometry = make_geometry([64], [[900_000] * 8])
    for experts in (1, 5, 8, 31, 64):
        _, work = plan_once(
            geometry, H200, make_options(["stream", "cpu"], slack_runs=0), range(experts), [1] * experts, num_slots=600
        )
        total = experts * 8
        size = 900_000
        best = min(
            step_us(
                H200,
                Loads(
                    0,
                    0,
                    -(-link // 8),
                    link * size,
                    link * size,
                    0,
                    0,
                    0,
                    total - link,
                    (total - link) * size,
                    (total - link) * size,
                ),
            )
            for link in range(total + 1)
        )
        assert work.predicted_us[STEP_US] == pytest.approx(best)


def plain_order(missing, rows, longest_first):
    """Places (expert, shard) in link order, where nothing was used before and nothing is blocked."""
    counts = [sum(row) for row in missing]
    experts = sorted(range(len(missing)), key=lambda i: (-rows[i], -counts[i] if longest_first else 0, i))
    return [(i, j) for i in experts for j, m in enumerate(missing[i]) if m]


def plain_scan(geometry, rates, missing, rows, lanes, limit, places):
    """(cost, lanes) of the best prefix: all are tried, the longest first, streamed before read in place."""
    best, chosen = np.inf, None
    for length in range(len(places), -1, -1):
        for kind in (STREAM, ZERO_COPY):
            streamed = min(length, limit) if kind == STREAM else 0
            given_ = [STREAM] * streamed + [ZERO_COPY] * (length - streamed) + [CPU] * (len(places) - length)
            if not set(given_) <= set(lanes):
                continue
            table = [[HIT] * len(row) for row in missing]
            for (i, j), lane in zip(places, given_, strict=True):
                table[i][j] = lane
            us = step_us(rates, loads_of(geometry, table, rows))
            if us < best or chosen is None:
                best, chosen = us, table
    return best, chosen


@settings(max_examples=100, deadline=None)
@given(
    RATES,
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=2, max_size=6).filter(
        lambda rows: sum(map(sum, rows)) > 8
    ),
    st.lists(st.sampled_from([1, 1, 1, 4]), min_size=6, max_size=6),
    st.sampled_from([[40] * 5, [40, 40, 40, 40, 8]]),
    st.sampled_from([(STREAM, ZERO_COPY, CPU), (STREAM, CPU), (STREAM, ZERO_COPY), (ZERO_COPY, CPU), (CPU,)]),
    st.integers(0, 30),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_the_search_finds_what_a_scan_of_prefixes_finds(rates, missing, rows, sizes, lanes, slots, slack, on_device):
    """The same cost, the same lanes and the same choice of order, also where slots are short or lanes share cores."""
    rates = rates._replace(zero_copy_on_device=on_device)
    rows, geometry = rows[: len(missing)], make_geometry([6], [sizes])
    scans = [
        plain_scan(geometry, rates, missing, rows, lanes, slots, plain_order(missing, rows, longest_first))
        for longest_first in (False, True)
    ]
    expected = scans[1] if STREAM in lanes and scans[1][0] < scans[0][0] - slack * rates.run_fix_us else scans[0]
    resident = [i * 5 + j for i, row in enumerate(missing) for j, m in enumerate(row) if not m]
    names = [("stream", "zero_copy", "cpu")[lane - 1] for lane in lanes]
    options = make_options(names, slack_runs=slack, fills=False)
    _, work = plan_once(
        geometry, rates, options, range(len(missing)), rows, resident=resident, num_slots=len(resident) + slots
    )
    assert work.lane[: 5 * len(missing)].reshape(-1, 5).tolist() == expected[1]
    if work.counts[NUM_COPIES] == loads_of(geometry, expected[1], rows).stream_runs:  # a short shard ends a copy
        assert work.predicted_us[STEP_US] == expected[0]


def test_a_search_over_rates_without_bounds_ends():
    """Where nothing is known of any lane the link gets all, as with a scan; where the link is unknown, the CPU."""
    geometry = make_geometry([4], [[40] * 3])
    unknown = H200._replace(stream_us_per_byte=np.inf, zero_copy_us_per_byte=np.array([np.inf]))
    _, work = plan_once(geometry, unknown, make_options(), range(4), [1] * 4)
    assert work.counts[CPU] == 12
    _, work = plan_once(geometry, unknown._replace(cpu_us_per_byte=np.inf), make_options(), range(4), [1] * 4)
    assert work.counts[STREAM] == 12
    _, work = plan_once(geometry, H200._replace(cpu_us_per_byte=np.inf), make_options(), range(4), [1] * 4)
    assert work.counts[CPU] == 0


def test_memory_that_limits_all_lanes_leaves_the_link_what_it_can_take():
    """On such a plateau all splits take as long; the link gets most, since what crosses it can stay."""
    geometry = make_geometry([8], [[900_000] * 8])
    rates = H200._replace(both_us_per_byte=1e-3 / 80, run_fix_us=0.0)
    _, work = plan_once(geometry, rates, make_options(["stream", "cpu"]), range(8), [1] * 8)
    link = work.counts[STREAM]
    both = 64 * 900_000 * 1e-3 / 80
    assert 6 + link * 900_000 * 1e-3 / 54.6 <= both < 6 + (link + 1) * 900_000 * 1e-3 / 54.6
    assert work.predicted_us[STEP_US] == pytest.approx(20 + both)


@pytest.mark.parametrize("link_gb_s", [5.0, 25.0, 50.0, 200.0])
@pytest.mark.parametrize("slots", [2, 60])
def test_the_fixed_rule_fetches_by_the_two_rates_alone(link_gb_s, slots):
    """``floor(m f)`` or one more, whichever takes less; no fixed cost counts, and no more than slots can be had for."""
    cpu_gb_s = 80.0
    geometry, options = make_geometry([8], [[900_000]]), make_options(["stream", "cpu"], split="ratio")
    rates = H200._replace(stream_us_per_byte=1e-3 / link_gb_s, cpu_us_per_byte=1e-3 / cpu_gb_s, stream_fix_us=1e6)
    for missing in range(1, 9):
        _, work = plan_once(geometry, rates, options, range(missing), [1] * missing, num_slots=slots)
        times = {n: max(n / link_gb_s, (missing - n) / cpu_gb_s) for n in range(missing + 1)}
        floor = int(missing * link_gb_s / (link_gb_s + cpu_gb_s))
        wanted = min((floor, floor + 1), key=lambda n: times.get(n, np.inf))
        assert work.counts[STREAM] == min(wanted, slots)
        assert work.counts[STREAM] + work.counts[CPU] == missing
