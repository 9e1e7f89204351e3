"""Plans against their cost and their options, and compiled code against plain Python."""

import hashlib
import time
from itertools import product

import numba
import numpy as np
import pytest
from decision_runs import run_python
from plan_cases import H200, plan_once

from trilane.cost import STEP_US, TERM_NAMES, Loads, make_rates, step_us
from trilane.cpu_kernels.atomics import mono_ns
from trilane.eviction import release_step
from trilane.expert import CPU, HIT, STREAM, UNPLACED, ZERO_COPY, decision, make_geometry
from trilane.plan import (
    NUM_COPIES,
    NUM_EVICTIONS,
    NUM_FILLS,
    NUM_MISSING,
    freeze_plan,
    make_options,
    make_work,
    single_lane_us,
)
from trilane.planner import learn_step, note_step, plan_background, plan_layer
from trilane.residency import drop_fill, land_fill
from trilane.state import check, make_state


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


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_reads_the_union_of_its_experts_once(rows):
    """Fault T36: batches of 1, 2 and 4; what the lanes read is the union, whatever the number of rows behind it."""
    geometry, rng = make_geometry([16], [[100_000] * 3]), np.random.default_rng(rows)
    for clock in range(8):
        ids, counts = np.unique([rng.choice(16, 4, replace=False) for _ in range(rows)], return_counts=True)
        _, work = plan_once(geometry, H200, make_options(), ids, counts, resident=range(3), clock=clock)
        assert work.lane_nbytes.sum() == len(ids) * 300_000
        assert work.lane_row_nbytes.sum() == rows * 4 * 300_000


def test_lanes_that_slow_each_other_down_share_no_more_than_helps():
    """Fault T03: link 25 and CPU 65 GB/s alone, 58 together: a split by these rates loses to the CPU."""
    geometry, six = make_geometry([64], [[900_000] * 3]), (range(6), [1] * 6)
    alone = H200._replace(
        stream_us_per_byte=1e-3 / 25, zero_copy_us_per_byte=np.array([1e-3 / 25]), cpu_us_per_byte=1e-3 / 65,
        cpu_row_us_per_byte=0.0, both_us_per_byte=0.0,
    )  # fmt: skip
    together = alone._replace(both_us_per_byte=1e-3 / 58, link_slowdown=0.4)  # as a pair: the link falls to 15
    _, naive = plan_once(geometry, alone, make_options(), *six)
    _, work = plan_once(geometry, together, make_options(), *six)
    nbytes = naive.lane_nbytes
    load = Loads(
        0.0, 0.0, float(naive.counts[NUM_COPIES]), nbytes[STREAM], nbytes[STREAM], int(naive.counts[ZERO_COPY]),
        nbytes[ZERO_COPY], nbytes[ZERO_COPY], int(naive.counts[CPU]), nbytes[CPU], nbytes[CPU],
    )  # fmt: skip
    assert step_us(together, load) > 1.04 * work.predicted_us[STEP_US]
    assert work.predicted_us[STEP_US] <= min(single_lane_us(geometry, together, 0, np.ones(6), 6, work).values())
    assert work.counts[STREAM] + work.counts[ZERO_COPY] < naive.counts[STREAM] + naive.counts[ZERO_COPY]


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


def test_tiny_work_is_not_handed_to_threads():
    """Fault T45: what the team's hand-over costs more than it saves is left to the lane that begins at once."""
    geometry = make_geometry([8], [[2_000] * 3])
    _, work = plan_once(geometry, H200, make_options(), range(3), [1] * 3)
    assert work.counts[CPU] == 0 and work.counts[STREAM] + work.counts[ZERO_COPY] == 9


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
    steps = 400 if numba.config.DISABLE_JIT else 4000  # enough to evict, where no time is taken
    ids = ((np.arange(steps)[:, None] // 4 * 8 + np.arange(8)) % 128).astype(np.int32)
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


def test_a_step_that_nobody_planned_teaches_what_a_planned_one_does():
    geometry, rows = make_geometry([8] * 3, [[500, 400]] * 3), np.ones(3, np.int32)
    options, rng = (
        make_options(admit="score", background=True, coming_from=2, coming_layers=1),
        np.random.default_rng(2),
    )
    planned, noted = (make_state(geometry, 48, eviction="predicted", half_life_steps=2.0) for _ in range(2))
    work = make_work(geometry)
    for clock in range(1, 90):
        layer, ids = (clock - 1) % 3, np.sort(rng.choice(8, 3, False)).astype(np.int32)
        plan_layer(planned, geometry, H200, options, layer, ids, rows, 3, clock, work)
        learn_step(planned, geometry, options, layer, ids, 3)
        missing = int(work.counts[NUM_MISSING])
        if missing:
            plan_layer(noted, geometry, H200, options, layer, ids, rows, 3, clock, work)
            learn_step(noted, geometry, options, layer, ids, 3)
        else:
            note_step(noted, geometry, options, layer, ids, 3, clock)
    for state in (planned, noted):
        release_step(state, geometry)
        check(state, geometry)
    assert missing == 0
    for name, one, other in zip(planned._fields, planned, noted, strict=True):
        if name != "held" and not name.startswith(("heap", "near")):  # whose places may differ
            assert np.array_equal(one, other), name


def land_background(state, geometry, options, most, work):
    """Reserve background fills, and land all but the last."""
    num = plan_background(state, geometry, options, most, work)
    for k in range(num):
        end = drop_fill if k == num - 1 and num > 1 else land_fill
        assert end(state, geometry, int(work.fill_slot[k]), int(work.fill_shard[k]))


def random_digest(num_steps):
    """A hash over everything that thousands of random plans wrote."""
    rng = np.random.default_rng(11)
    digest = hashlib.blake2b()
    evictions = ("lru", "decayed_frequency", "predicted")
    for pool, eviction, admit in product(("shared", "layer"), evictions, ("always", "score")):
        geometry = make_geometry([12, 9], [[900, 900, 130], [700, 700]])
        state, work = make_state(geometry, 25, pool=pool, eviction=eviction, half_life_steps=0.7), make_work(geometry)
        fills = make_work(geometry)
        for clock in range(0, 3 * num_steps, 3):
            layer = int(rng.integers(2))
            n = int(rng.integers(0, 9))
            ids = rng.choice(12 if layer == 0 else 9, n, replace=False).astype(np.int32)
            rows = rng.integers(1, rng.choice([2, 9]), n).astype(np.int32)
            lanes = [name for name in ("stream", "zero_copy", "cpu") if rng.random() < 0.8] or ["cpu"]
            options = make_options(lanes, admit=admit, slack_runs=float(rng.integers(2)), background=True)
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
            learn_step(state, geometry, options, layer, ids, n)
            if clock % 4 == 0:
                land_background(state, geometry, options, int(rng.integers(1, 4)), fills)
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
                state.boost,
                state.past,
                state.alike,
                state.near_rate,
                state.ahead,
                state.coming_score[: state.num_coming[0]],
            ):
                digest.update(np.ascontiguousarray(array).tobytes())
        check(state, geometry)
    return digest.hexdigest()


def test_compiled_and_plain_python_agree_to_the_last_bit():
    code = "import test_planner; print(test_planner.random_digest(250))"
    results = {run_python(code, plain=plain) for plain in (False, True)}
    assert len(results) == 1, results
