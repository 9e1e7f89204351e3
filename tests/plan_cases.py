"""Steps to plan in tests: states with what is wanted in them, rates, and the loads of lanes that were given."""

import numpy as np
from hypothesis import strategies as st

from trilane.cost import STEP_US, Loads, make_rates, step_us
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY
from trilane.plan import NUM_COPIES, make_work
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
