"""Each term of the cost model against its formula, and the step against its terms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trilane import cost
from trilane.cost import Loads, beside_us, make_rates, step_us

NOTHING = Loads(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_rates_refuse_unknown_names():
    with pytest.raises(ValueError, match="cpu_fixed_us"):
        make_rates(cpu_fixed_us=3.0)


def test_terms_follow_their_formulas():
    r = make_rates(
        hit_fix_us=1,
        hit_us_per_byte=0.1,
        hit_row_us_per_byte=0.2,
        stream_fix_us=2,
        run_fix_us=3,
        stream_us_per_byte=0.5,
        stream_tail_us=4,
        zero_copy_fix_us=5,
        zero_copy_us_per_byte=[1.0, 0.5],
        cpu_fix_us=6,
        cpu_us_per_byte=0.25,
        cpu_row_us_per_byte=0.01,
        cpu_shard_us=7,
        both_us_per_byte=0.125,
        num_cores=2,
        hit_cores=1,
        link_cores=1,
        cpu_cores=2,
    )
    assert cost.hits_us(r, 100, 100) == 1 + 20
    assert cost.hits_us(r, 100, 10) == 1 + 10
    assert cost.stream_us(r, 2, 100) == 2 + 6 + 50
    assert cost.zero_copy_us(r, 1, 100, 100) == 5 + 100
    assert cost.zero_copy_us(r, 9, 100, 100) == 5 + 50  # the last entry holds beyond
    assert cost.zero_copy_us(r, 9, 100, 1000) == 5 + 200
    assert cost.link_us(r, 10.0, 20.0) == 34
    assert cost.link_us(r, 0.0, 20.0) == 20
    assert cost.cpu_us(r, 2, 100, 100) == 6 + 14 + 25
    assert cost.cpu_us(r, 2, 100, 10000) == 6 + 14 + 100
    assert cost.both_us(r, 100, 300) == 50
    assert cost.shared_us(r, 10.0, 20.0, 5.0, 30.0) == (10 + 20 + 5 + 60) / 2
    on_device = r._replace(zero_copy_on_device=True)
    assert cost.shared_us(on_device, 10.0, 20.0, 5.0, 30.0) == (10 + 20 + 60) / 2
    assert cost.shared_us(make_rates(), 10.0, 20.0, 5.0, 30.0) == 0


def test_idle_lanes_cost_nothing_even_at_an_unknown_rate():
    unknown = make_rates(
        hit_us_per_byte=math.inf,
        stream_us_per_byte=math.inf,
        zero_copy_us_per_byte=math.inf,
        cpu_us_per_byte=math.inf,
        both_us_per_byte=math.inf,
        step_fix_us=2.0,
        num_cores=1,
        hit_cores=1,
        link_cores=1,
        cpu_cores=1,
    )
    assert cost.step_us(unknown, NOTHING) == 2.0


def test_a_step_without_misses_pays_no_hand_over():
    r = make_rates(step_fix_us=2, miss_fix_us=10, hit_us_per_byte=1.0)
    assert cost.step_us(r, NOTHING._replace(hit_nbytes=5)) == 7
    assert cost.step_us(r, NOTHING._replace(hit_nbytes=5, cpu_shards=1, cpu_nbytes=1)) == 17


def test_link_and_cpu_together_are_bound_by_host_memory():
    """Fault T03: lanes that are fast alone share the host's memory, and the joint limit counts."""
    r = make_rates(stream_us_per_byte=0.01, cpu_us_per_byte=0.01, both_us_per_byte=0.04)
    split = NOTHING._replace(stream_runs=1, stream_nbytes=500, cpu_shards=1, cpu_nbytes=500)
    assert cost.step_us(r, split) == 40
    assert cost.step_us(r, NOTHING._replace(stream_runs=1, stream_nbytes=1000)) == 10


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 10).map(float), min_size=len(cost.Rates._fields), max_size=len(cost.Rates._fields)),
    st.lists(st.integers(0, 10**7), min_size=11, max_size=11),
)
def test_the_step_is_its_longest_term(values, numbers):
    names = list(cost.Rates._fields)
    r = make_rates(**dict(zip(names, values, strict=True)))
    r = r._replace(**{name: getattr(r, name) / 11 for name in ("hit_slowdown", "link_slowdown", "cpu_slowdown")})
    loads = Loads(*numbers)
    terms = np.full(cost.NUM_TERMS, np.nan)
    cost.write_terms(r, loads, terms)
    alone = cost.link_us(r, terms[1], terms[2])
    link, cpu = beside_us(alone, r.link_slowdown, terms[3]), beside_us(terms[3], r.cpu_slowdown, alone)
    fixed = r.step_fix_us + (r.miss_fix_us if numbers[3] + numbers[6] + numbers[9] else 0.0)
    longest = max(terms[cost.DEVICE_US], link, cpu, terms[cost.BOTH_US], terms[cost.SHARED_US])
    assert terms[cost.STEP_US] == cost.step_us(r, loads) == fixed + longest


def test_a_lane_beside_the_cpu_lane_is_slower_until_that_is_done():
    assert beside_us(100.0, 0.0, 50.0) == 100.0
    assert beside_us(0.0, 0.5, 50.0) == 0.0
    assert beside_us(100.0, 0.5, 40.0) == pytest.approx(120.0)  # 20 of it by then, the rest at its own rate
    assert beside_us(10.0, 0.5, 40.0) == pytest.approx(20.0)  # it ends before the CPU lane does
    assert beside_us(10.0, 0.5, float("inf")) == pytest.approx(20.0)


def test_contention_lengthens_device_and_link_but_not_a_step_without_cpu_work():
    rates = make_rates(hit_us_per_byte=1.0, stream_us_per_byte=1.0, cpu_us_per_byte=1.0)
    slowed = rates._replace(hit_slowdown=0.5, link_slowdown=0.25)
    alone = Loads(100.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0, 0.0, 0.0)
    assert step_us(slowed, alone) == step_us(rates, alone) == 100.0
    both = alone._replace(cpu_shards=1, cpu_nbytes=40.0)
    assert step_us(rates, both) == 100.0 and step_us(slowed, both) == pytest.approx(120.0)
    streamed = both._replace(hit_nbytes=0.0, stream_runs=1.0, stream_nbytes=100.0)
    assert step_us(slowed._replace(hit_slowdown=0.0), streamed) == pytest.approx(110.0)
    waits = rates._replace(cpu_slowdown=0.5)
    assert step_us(waits, streamed._replace(cpu_nbytes=90.0)) == pytest.approx(140.0)  # 50 of it beside the link
    assert step_us(waits, streamed) == 100.0 and step_us(waits, alone) == 100.0
