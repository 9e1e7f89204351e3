"""Learned rates and the guard on a synthetic device, whose true rates are not those that plans begin with."""

import numpy as np
import pytest
from plan_cases import H200

from trilane.cost import Loads, cpu_us, step_us, stream_us
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, make_geometry
from trilane.guard import begin_window, guard_step, make_guard
from trilane.observed import (
    FORGET_AFTER,
    MOST,
    WARM_UP,
    make_observed,
    observe_lane,
    pass_step,
    scale_rates,
)
from trilane.plan import NUM_COPIES, make_options, make_work
from trilane.planner import plan_layer
from trilane.state import make_state

GEOMETRY = make_geometry([64], [[900_000] * 3])
BOTH = make_options(["stream", "cpu"])


class Device:
    """Plans steps of four misses with what it believes, and takes what the true rates say."""

    def __init__(self, believed, *, learns=True, guards=False, quarrels=False):
        self.believed, self.learns = believed, learns
        self.observed, self.guard = make_observed(), make_guard(BOTH.lanes) if guards else None
        self.rates, self.quarrels = believed, quarrels
        self.state, self.work, self.clock = make_state(GEOMETRY, 60), make_work(GEOMETRY), 0

    def step(self, true, spike=1.0):
        """The step's true us."""
        options = BOTH if self.guard is None else BOTH._replace(lanes=int(self.guard.lanes[0]))
        ids = ((self.clock * 4 + np.arange(4)) % 64).astype(np.int32)  # round all experts: nothing is resident
        plan_layer(
            self.state, GEOMETRY, self.rates, options, 0, ids, np.ones(4, np.int32), 4, self.clock, self.work
        )  # fmt: skip
        self.clock += 1
        loads = loads_of(self.work)
        if self.learns:
            self.learn(true, loads, spike)
        us = step_us(true, loads) * spike
        if self.quarrels and loads.stream_nbytes > 0 and loads.cpu_nbytes > 0:
            us *= 3.0
        if self.guard is not None:
            missed = loads.stream_nbytes + loads.cpu_nbytes
            guard_step(self.guard, missed, missed + loads.hit_nbytes, us)
            if self.guard.left[0] == 0:
                begin_window(self.guard, STREAM)
        return us

    def learn(self, true, loads, spike):
        changed = pass_step(
            self.observed, (1 << STREAM) * (loads.stream_nbytes > 0) | (1 << CPU) * (loads.cpu_nbytes > 0)
        )
        for lane, cost in ((STREAM, stream_cost), (CPU, cpu_cost)):
            changed |= observe_lane(self.observed, lane, cost(self.believed, loads), cost(true, loads) * spike)
        if changed:
            self.rates = scale_rates(self.believed, self.observed)


def loads_of(work):
    nbytes, rows, counts = work.lane_nbytes, work.lane_row_nbytes, work.counts
    return Loads(
        nbytes[HIT], rows[HIT], float(counts[NUM_COPIES]), nbytes[STREAM], rows[STREAM], int(counts[ZERO_COPY]),
        nbytes[ZERO_COPY], rows[ZERO_COPY], int(counts[CPU]), nbytes[CPU], rows[CPU],
    )  # fmt: skip


def stream_cost(rates, loads):
    return stream_us(rates, loads.stream_runs, loads.stream_nbytes)


def cpu_cost(rates, loads):
    return cpu_us(rates, loads.cpu_shards, loads.cpu_nbytes, loads.cpu_row_nbytes)


def slower(rates, *, cpu=1.0, link=1.0):
    return rates._replace(
        cpu_us_per_byte=rates.cpu_us_per_byte * cpu,
        cpu_row_us_per_byte=rates.cpu_row_us_per_byte * cpu,
        stream_us_per_byte=rates.stream_us_per_byte * link,
    )


def best_us(true):
    """Mean us of one who knows the rates."""
    device = Device(true, learns=False)
    return np.mean([device.step(true) for _ in range(300)][200:])


def test_a_lane_that_is_far_slower_than_its_benchmark_is_left():
    """T01: the CPU was measured at ten times what the real kernel reaches in this container."""
    true, device = slower(H200, cpu=10.0), Device(H200)
    times, on_cpu = [], []
    for _ in range(120):
        times.append(device.step(true))
        on_cpu.append(device.work.counts[CPU])
    assert times[0] > 2 * best_us(true) and on_cpu[0] >= 5
    assert max(on_cpu[40:]) <= 2  # left within tens of steps, but for what it still shortens
    assert np.mean(times[40:]) <= 1.08 * best_us(true)


@pytest.mark.parametrize("change", [{"link": 2.0}, {"cpu": 2.0}, {"cpu": 1.7}], ids=["link", "cpu", "neighbour"])
def test_a_rate_that_changes_is_followed_and_back(change):
    """T44 and T45: at step 500 a rate halves, or a neighbour takes memory bandwidth; at 1000 it is as before."""
    device, late = Device(H200), slower(H200, **change)
    times = [device.step(late if 500 <= step < 1000 else H200) for step in range(1400)]
    assert np.mean(times[300:500]) <= 1.02 * best_us(H200)
    assert np.mean(times[600:1000]) <= 1.03 * best_us(late)
    assert np.mean(times[1100:]) <= 1.05 * best_us(H200)  # slots lie scattered by now: more copies


def test_first_outcomes_and_spikes_move_nothing():
    """T15: page faults and a link that wakes up come first; later a single outcome is a hundred times off."""
    device = Device(H200)
    for step in range(200):
        device.step(H200, spike=100.0 if step < WARM_UP or step % 37 == 36 else 1.0)
    assert device.rates is H200
    assert np.abs(device.observed.factor[[STREAM, CPU]] - 1).max() < 0.06


def test_a_lane_that_is_not_used_is_tried_again():
    """T15: the CPU recovers while nothing is computed there; its cost is bounded where it has not."""
    bad = slower(H200, cpu=30.0)
    device = Device(H200)
    for _ in range(100):
        device.step(bad)
    assert device.work.counts[CPU] == 0
    cost = np.mean([device.step(bad) for _ in range(3000)])
    assert cost <= 1.08 * best_us(bad)
    for _ in range(FORGET_AFTER + 600):
        device.step(H200)
    assert np.mean([device.step(H200) for _ in range(50)]) <= 1.05 * best_us(H200)


def test_factors_are_bounded_and_nonsense_is_ignored():
    observed = make_observed()
    for us in (1e9,) * 100:
        observe_lane(observed, CPU, 1.0, us)
    assert observed.factor[CPU] == MOST
    before = observed.factor.copy()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        assert not observe_lane(observed, CPU, 1.0, wrong)
    assert not observe_lane(observed, CPU, 0.0, 1.0)
    assert (observed.factor == before).all()
