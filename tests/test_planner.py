"""The split against brute force, the plan against its cost, and compiled code against plain Python."""

import hashlib
import os
import subprocess
import sys
import time
from itertools import product

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.cost import STEP_US, TERM_NAMES, Loads, make_rates, step_us
from trilane.cpu_kernels.atomics import mono_ns
from trilane.expert import CPU, HIT, STREAM, UNPLACED, ZERO_COPY, decision, make_geometry
from trilane.plan import NUM_COPIES, NUM_EVICTIONS, NUM_FILLS, freeze_plan, make_options, make_work, single_lane_us
from trilane.planner import plan_layer
from trilane.residency import land_fill, reserve_slot, take_slots
from trilane.state import check, make_state

H200 = make_rates(
    step_fix_us=10,
    miss_fix_us=10,
    hit_us_per_byte=1e-3 / 3400,
    stream_fix_us=3,
    run_fix_us=2,
    stream_us_per_byte=1e-3 / 54.6,
    stream_tail_us=3,
    zero_copy_fix_us=2,
    zero_copy_us_per_byte=[1e-3 / x for x in (20, 41, 43, 45, 46, 47, 48, 49)],
    cpu_fix_us=10,
    cpu_us_per_byte=1e-3 / 75,
    cpu_row_us_per_byte=1e-3 / 300,
    both_us_per_byte=1e-3 / 125,
)


def settle(state, geometry, shards):
    """Make shards resident, each through a fill that lands."""
    for shard in shards:
        slots, victims = np.zeros(1, np.int32), np.zeros(1, np.int64)
        assert take_slots(state, geometry, 0, np.inf, 1, slots, victims, 0) == 1
        slot = int(slots[0])
        reserve_slot(state, 0, slot, shard)
        assert land_fill(state, geometry, slot, shard)


def plan_once(geometry, rates, options, experts, rows, *, resident=(), num_slots=400, state=None, clock=1):
    """Plan one step; returns (state, work)."""
    state = make_state(geometry, num_slots) if state is None else state
    settle(state, geometry, resident)
    work = make_work(geometry)
    plan_layer(
        state,
        geometry,
        rates,
        options,
        0,
        np.array(experts, np.int32),
        np.array(rows, np.int32),
        len(experts),
        clock,
        work,
    )
    check(state, geometry)
    assert_cost_is_the_plans(geometry, rates, rows, len(experts), work)
    return state, work


def loads_of(geometry, lanes, rows, copies=None):
    """Loads of lanes given as (experts, shards); copies counted as runs of neighbours unless given."""
    sums = {lane: [0, 0, 0] for lane in (HIT, STREAM, ZERO_COPY, CPU)}
    runs = 0
    for i, row in enumerate(lanes):
        for j, lane in enumerate(row):
            if lane < 0:
                continue
            size = int(geometry.shard_nbytes[0, j])
            sums[lane] = [a + b for a, b in zip(sums[lane], (1, size, size * int(rows[i])), strict=True)]
            runs += lane == STREAM and (j == 0 or row[j - 1] != STREAM)
    return Loads(
        *sums[HIT][1:], runs if copies is None else int(copies), *sums[STREAM][1:], *sums[ZERO_COPY], *sums[CPU]
    )


def assert_cost_is_the_plans(geometry, rates, rows, num_experts, work):
    """The predicted step is what cost.py says of the very lanes that were chosen."""
    num_shards = int(geometry.num_shards[0])
    lanes = work.lane[: num_experts * num_shards].reshape(num_experts, num_shards)
    loads = loads_of(geometry, lanes.tolist(), rows, work.counts[NUM_COPIES])
    assert work.predicted_us[STEP_US] == step_us(rates, loads)


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


RATES = st.builds(
    lambda step, hit, run, fix, link, zc, cpu, cpu_fix, both, tail, cores: make_rates(
        step_fix_us=step,
        miss_fix_us=1,
        hit_us_per_byte=hit / 100,
        run_fix_us=run,
        stream_fix_us=fix,
        stream_us_per_byte=link / 10,
        stream_tail_us=tail,
        zero_copy_fix_us=2,
        cpu_us_per_byte=cpu / 10,
        zero_copy_us_per_byte=[(zc + 6 / n) / 10 for n in range(1, 9)],
        cpu_fix_us=cpu_fix,
        cpu_shard_us=1,
        cpu_row_us_per_byte=cpu / 25,
        both_us_per_byte=both / 20,
        num_cores=cores,
        hit_cores=1,
        link_cores=1,
        cpu_cores=2,
    ),
    *[st.integers(0, 20) for _ in range(4)],
    *[st.integers(1, 30) for _ in range(3)],
    *[st.integers(0, 20) for _ in range(3)],
    st.sampled_from([0, 0, 2]),
)
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
        assert work.predicted_us[STEP_US] == pytest.approx(best, rel=1e-12)
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
        assert work.predicted_us[STEP_US] == pytest.approx(best, rel=1e-12)


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


def test_rows_of_a_batch_stay_with_their_expert():
    """Fault T36: each expert is read once for all its rows, and the rows weigh the arithmetic of its lane."""
    geometry = make_geometry([8], [[100_000] * 3])
    options = make_options(["stream", "cpu"])
    rates = H200._replace(cpu_row_us_per_byte=1e-3 / 20, run_fix_us=0.0)
    _, work = plan_once(geometry, rates, options, range(4), [1, 40, 2, 1])
    lanes = work.lane[:12].reshape(4, 3)
    assert (lanes[1] == STREAM).all()  # the expert of most rows is not computed on the CPU
    assert (lanes[[0, 2, 3]] == CPU).any()
    assert work.lane_nbytes.sum() == 12 * 100_000


@pytest.mark.parametrize("lane", [STREAM, ZERO_COPY, CPU])
def test_a_forced_lane_takes_every_miss(lane):
    geometry = make_geometry([8], [[1000] * 3])
    options = make_options(force=("stream", "zero_copy", "cpu")[lane - 1])
    state, work = plan_once(geometry, H200, options, [1, 2, 5], [1, 1, 1], resident=[3])
    assert work.lane[0] == HIT and (work.lane[1:9] == lane).all()
    assert work.counts[NUM_FILLS] == (0 if lane == CPU else 8)
    assert (state.resident[[1, 2, 5]] == ([1, 0, 0] if lane == CPU else [3, 3, 3])).all()


def test_neighbouring_shards_make_one_copy():
    geometry = make_geometry([8], [[1000] * 3])
    state, work = plan_once(geometry, H200, make_options(force="stream"), [4, 2], [1, 1], num_slots=6)
    assert work.run[:6].tolist() == [3, 0, 0, 3, 0, 0] and work.counts[NUM_COPIES] == 2
    _, work = plan_once(geometry, H200, make_options(force="stream"), [6], [1], state=state, clock=2)
    assert work.run[:3].tolist() == [3, 0, 0]  # the victim's slots, in rising order
    assert work.counts[NUM_EVICTIONS] == 3 and (np.diff(work.slot[:3]) == 1).all()


def test_a_copy_ends_where_a_shard_does_not_fill_its_slot():
    geometry = make_geometry([4, 4], [[500, 500], [1000, 300]])
    state, work = make_state(geometry, 8), make_work(geometry)
    one = np.array([0], np.int32), np.ones(1, np.int32), 1
    plan_layer(state, geometry, H200, make_options(force="stream"), 0, *one, 1, work)
    assert work.run[:2].tolist() == [1, 1]  # slots are as large as the other layer's shards
    plan_layer(state, geometry, H200, make_options(force="stream"), 1, *one, 2, work)
    assert work.run[:2].tolist() == [2, 0]


def test_where_no_slot_can_be_had_the_lanes_that_need_none_serve():
    geometry = make_geometry([8], [[1000] * 2])
    fast_link = H200._replace(cpu_us_per_byte=1.0)
    _, work = plan_once(geometry, fast_link, make_options(), range(4), [1] * 4, num_slots=3)
    assert (work.lane[:8] >= STREAM).all() and work.counts[NUM_FILLS] == 3
    assert (work.slot[:8] >= 0).sum() == 3
    _, work = plan_once(geometry, fast_link, make_options(["stream", "cpu"]), range(4), [1] * 4, num_slots=3)
    assert work.counts[:4].tolist() == [0, 3, 0, 5]
    _, work = plan_once(geometry, fast_link, make_options(["zero_copy"], fills=False), range(4), [1] * 4)
    assert work.counts[ZERO_COPY] == 8 and work.counts[NUM_FILLS] == 0


def scored_state(geometry, num_slots):
    """Expert 0 was used three times and fills the cache."""
    state = make_state(geometry, num_slots, eviction="decayed_frequency")
    for clock in (1, 2, 3):
        plan_once(geometry, H200, make_options(force="stream"), [0], [1], state=state, clock=clock)
    return state


@pytest.mark.parametrize(
    "lanes, lane", [(["stream", "zero_copy"], ZERO_COPY), (["stream", "cpu"], CPU), (["stream"], STREAM)]
)
def test_admission_by_score_keeps_the_better_expert(lanes, lane):
    geometry = make_geometry([8], [[1000] * 2])
    state = scored_state(geometry, 2)
    options = make_options(lanes, admit="score")
    _, work = plan_once(geometry, H200, options, [1], [1], state=state, clock=4)
    assert (work.lane[:2] == lane).all()
    assert state.resident[0] == (0 if lane == STREAM else 2)  # a forced lane has no other way
    if lane != STREAM:
        for clock in (5, 6, 7):
            _, work = plan_once(geometry, H200, options, [1], [1], state=state, clock=clock)
        assert state.resident[1] == 2 or lane == CPU  # used often enough by now


def test_admission_is_asked_for_each_victim():
    """The first victim is worth less than the newcomer, the next one more."""
    geometry = make_geometry([8], [[1000]])
    state = make_state(geometry, 2, eviction="decayed_frequency")
    for clock, expert in ((1, 0), (1, 0), (1, 0), (1, 0), (2, 1)):
        plan_once(geometry, H200, make_options(force="stream"), [expert], [1], state=state, clock=clock)
    options = make_options(["stream", "zero_copy"], admit="score", fills=False)
    rates = H200._replace(zero_copy_us_per_byte=np.array([1.0]))
    _, work = plan_once(geometry, rates, options, [2, 3], [1, 1], state=state, clock=3)
    assert sorted(work.lane[:2].tolist()) == [STREAM, ZERO_COPY] and state.resident[0] == 1


@pytest.mark.parametrize("experts, what", [([1, 1], "twice"), ([8], "outside"), ([-1], "outside")])
def test_what_the_caller_should_have_dropped_is_refused(experts, what):
    with pytest.raises(ValueError, match=what):
        plan_once(make_geometry([8], [[10]]), H200, make_options(), experts, [1] * len(experts))


@pytest.mark.parametrize("change", [{"lanes": []}, {"lanes": ["gpu"]}, {"force": "hit"}, {"admit": "maybe"}])
def test_options_without_sense_are_refused(change):
    with pytest.raises(ValueError, match="use one"):
        make_options(**change)


def test_an_empty_step_and_an_all_hit_step_are_plans_too():
    geometry = make_geometry([8], [[1000] * 2])
    _, work = plan_once(geometry, H200, make_options(), [], [])
    assert not work.counts[:8].any() and work.predicted_us[STEP_US] == 10
    _, work = plan_once(geometry, H200, make_options(), [1], [1], resident=[2, 3])
    assert (work.lane[:2] == HIT).all() and work.predicted_us[STEP_US] < 11


def test_a_frozen_plan_compares_and_reads():
    geometry = make_geometry([8], [[900_000] * 3])
    ids, rows = np.array([2, 5], np.int32), np.array([1, 3], np.int32)
    plans = []
    for _ in range(2):
        _, work = plan_once(geometry, H200, make_options(["stream", "cpu"]), ids, rows, resident=[6])
        plans.append(freeze_plan(geometry, H200, 0, ids, rows, 2, 1, work))
    assert plans[0] == plans[1] and hash(plans[0]) == hash(plans[1])
    text = str(plans[0])
    assert "hit@0" in text and "cpu" in text and "expert 5 rows 3" in text and "one lane alone: stream" in text
    assert tuple(name for name, _ in plans[0].predicted_us) == TERM_NAMES
    alone = single_lane_us(geometry, H200, 0, rows, 2, work)
    assert dict(plans[0].predicted_us)["step"] <= min(alone["stream"], alone["cpu"]) + H200.run_fix_us
    _, work = plan_once(geometry, H200, make_options(force="stream"), [1], [1], num_slots=1)
    text = str(freeze_plan(geometry, H200, 0, np.array([1]), rows, 1, 1, work))
    assert "unplaced" in text
    work.lane[:] = -1
    assert "skip" in str(freeze_plan(geometry, H200, 0, np.array([1]), rows, 1, 1, work))


def test_fast_lanes_do_not_starve_the_cache():
    """Faults T25 and T30: whatever the split, a step with misses fills slots, also under uniform routing."""
    geometry = make_geometry([32], [[900_000] * 3])
    rng = np.random.default_rng(0)
    state, work = make_state(geometry, 24, eviction="decayed_frequency"), make_work(geometry)
    best_single = total = fills = 0.0
    for clock in range(300):
        ids = rng.choice(32, 4, replace=False).astype(np.int32)
        plan_layer(state, geometry, H200, make_options(), 0, ids, np.ones(4, np.int32), 4, clock, work)
        total += work.predicted_us[STEP_US]
        fills += work.counts[NUM_FILLS]
        best_single += min(single_lane_us(geometry, H200, 0, np.ones(4), 4, work).values())
    check(state, geometry)
    assert total <= 1.02 * best_single
    assert fills > 300


def test_a_slow_link_gets_little():
    """Fault T13: with a link far below the CPU, one shard or none of a step is streamed."""
    geometry = make_geometry([128], [[900_000] * 3])
    slow = H200._replace(stream_us_per_byte=1e-3 / 3, zero_copy_us_per_byte=np.array([1e-3 / 3]))
    _, work = plan_once(geometry, slow, make_options(), range(3), [1] * 3)
    assert work.counts[STREAM] + work.counts[ZERO_COPY] <= 1


now_ns = time.perf_counter_ns if numba.config.DISABLE_JIT else mono_ns


@decision
def plan_many(state, geometry, rates, options, ids, rows, work, elapsed_ns):
    """Plan one step for each row of ``ids``, going round the layers; ns of each."""
    for k in range(ids.shape[0]):
        start = now_ns()
        plan_layer(
            state,
            geometry,
            rates,
            options,
            k % geometry.num_layers,
            ids[k],
            rows,
            ids.shape[1],
            state.clock[0] + 1,
            work,
        )
        elapsed_ns[k] = now_ns() - start


def test_planning_is_fast():
    geometry = make_geometry([128] * 4, [[900_000] * 8] * 4)
    state, work = make_state(geometry, 256), make_work(geometry)
    ids = ((np.arange(4000)[:, None] // 4 * 8 + np.arange(8)) % 128).astype(np.int32)
    elapsed = np.zeros(len(ids), np.int64)
    rows = np.ones(8, np.int32)
    plan_many(state, geometry, H200, make_options(), ids[:40], rows, work, elapsed)
    plan_many(state, geometry, H200, make_options(), ids, rows, work, elapsed)
    if not numba.config.DISABLE_JIT:
        assert np.median(elapsed) < 30_000  # a bound for a loaded machine; the benchmark gives the figure
    check(state, geometry)
    assert work.counts[:4].sum() == 64 and UNPLACED not in work.lane[:64]


@decision
def allocate(n):
    return np.zeros(n).sum()


def test_a_decision_function_that_allocates_does_not_compile():
    """So that all which compile, as the planner does, allocate nothing."""
    if numba.config.DISABLE_JIT:
        assert allocate(3) == 0
    else:
        with pytest.raises(numba.core.errors.TypingError, match="zeros"):
            allocate(3)


def random_digest(num_steps):
    """A hash over everything that thousands of random plans wrote."""
    rng = np.random.default_rng(11)
    digest = hashlib.blake2b()
    for pool, eviction, admit in product(("shared", "layer"), ("lru", "decayed_frequency"), ("always", "score")):
        geometry = make_geometry([12, 9], [[900, 900, 130], [700, 700]])
        state, work = make_state(geometry, 25, pool=pool, eviction=eviction, half_life_steps=0.7), make_work(geometry)
        for clock in range(0, 3 * num_steps, 3):
            layer = int(rng.integers(2))
            n = int(rng.integers(0, 9))
            ids = rng.choice(12 if layer == 0 else 9, n, replace=False).astype(np.int32)
            rows = rng.integers(1, rng.choice([2, 9]), n).astype(np.int32)
            lanes = [name for name in ("stream", "zero_copy", "cpu") if rng.random() < 0.8] or ["cpu"]
            options = make_options(lanes, admit=admit, slack_runs=float(rng.integers(2)))
            noise = rng.random(8) * 10
            rates = make_rates(
                step_fix_us=noise[0],
                run_fix_us=noise[1],
                stream_us_per_byte=noise[2] / 50,
                zero_copy_us_per_byte=noise[3:5] / 50,
                cpu_us_per_byte=noise[5] / 50,
                cpu_row_us_per_byte=noise[6] / 99,
                both_us_per_byte=noise[7] / 99,
                num_cores=float(rng.integers(3)),
                cpu_cores=2.0,
                link_cores=1.0,
            )
            plan_layer(state, geometry, rates, options, layer, ids, rows, n, clock, work)
            for array in (
                work.lane,
                work.slot,
                work.victim,
                work.run,
                work.counts,
                work.predicted_us,
                state.slot_of,
                state.score,
                state.heap[: state.heap_size[0]],
                state.unit,
            ):
                digest.update(np.ascontiguousarray(array).tobytes())
        check(state, geometry)
    return digest.hexdigest()


def test_compiled_and_plain_python_agree_to_the_last_bit():
    code = "import test_planner; print(test_planner.random_digest(250))"
    results = set()
    for disabled in ("0", "1"):
        env = {**os.environ, "NUMBA_DISABLE_JIT": disabled, "PYTHONWARNINGS": "error"}
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=os.path.dirname(__file__),
            env=env,
            text=True,
            capture_output=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        results.add(run.stdout)
    assert len(results) == 1, results
