"""The guard on a synthetic device whose lanes do each other harm that no lane's own time shows."""

import numpy as np
from plan_cases import H200
from test_observed import Device, best_us

from trilane.expert import STREAM
from trilane.guard import (
    BLOCK,
    BLOCKS,
    FIRST_PERIOD,
    LONGEST_PERIOD,
    TURN,
    WINDOW,
    begin_window,
    guard_step,
    make_guard,
)


def test_a_split_that_costs_more_than_it_saves_is_left_and_taken_up_again():
    """T01 and T03: with both lanes at work everything takes three times as long."""
    device, free = Device(H200, learns=False, guards=True, quarrels=True), Device(H200, learns=False, quarrels=True)
    times = np.array([device.step(H200) for _ in range(500)])
    split = np.mean([free.step(H200) for _ in range(20)])
    assert device.guard.lane[0] == STREAM and device.guard.switches[0] == 1
    assert times[2 * (FIRST_PERIOD + WINDOW) + 1 :].mean() < 0.8 * split
    device.quarrels = False
    fine = np.array([device.step(H200) for _ in range(2000)])
    assert device.guard.lane[0] == 0 and device.guard.switches[0] == 2
    assert fine[-500:].mean() <= 1.05 * best_us(H200)  # slots lie scattered by now: more copies


def test_windows_become_rare_while_the_split_wins():
    device = Device(H200, learns=False, guards=True)
    tried = 0
    for _ in range(12_000):
        device.step(H200)
        tried += device.guard.tried[0] != 0
    assert device.guard.switches[0] == 0 and device.guard.period[0] == LONGEST_PERIOD
    assert tried <= 8 * WINDOW


def test_ways_take_turns_and_one_slow_step_of_either_proves_nothing():
    guard, taken = make_guard(14), []
    for step in range(FIRST_PERIOD + 1):
        assert guard.lanes[0] == 14 and not guard_step(guard, 1.0, 4.0, 1.0)
        assert (guard.left[0] == 0) == (step >= FIRST_PERIOD - 1)  # and waits for its window
    begin_window(guard, STREAM)
    for step in range(WINDOW):
        taken.append(int(guard.lanes[0]))
        guard_step(guard, 2.0, 4.0, 1000.0 if step in (0, 7) else 2.0)
    assert taken == ([14] * TURN + [1 << STREAM] * TURN) * 2
    assert guard.switches[0] == 0 and guard.lanes[0] == 14 and guard.left[0] == 2 * FIRST_PERIOD


def test_steps_without_misses_do_not_count():
    guard = make_guard(10)
    assert not guard_step(guard, 0.0, 4.0, 1.0) and guard.left[0] == FIRST_PERIOD


class Cache:
    """Steps of 8 bytes of which a part is missed, which follows what the lane of late fills."""

    def __init__(self, *, missed_alone, us_alone):
        self.guard, self.missed = make_guard(14), 2.0
        self.missed_alone, self.us_alone, self.us_split = missed_alone, us_alone, 10.0
        self.ways = []

    def run(self, steps):
        """Us of each step."""
        times = []
        for _ in range(steps):
            alone = int(self.guard.lanes[0]) != 14
            self.missed += ((self.missed_alone if alone else 2.0) - self.missed) / 32
            times.append(self.missed * (self.us_alone if alone else self.us_split) + 2.0)
            guard_step(self.guard, self.missed, 8.0, times[-1])
            if self.guard.left[0] == 0:
                begin_window(self.guard, STREAM)
            self.ways.append(int(self.guard.lane[0]))
        return np.array(times)


def test_a_lane_that_wins_windows_and_costs_hits_is_on_trial_only():
    """It serves a miss in 7 us instead of 10, but fills no slot, so that misses become twice as many."""
    cache = Cache(missed_alone=4.0, us_alone=7.0)
    times = cache.run(12_000)
    on_trial = np.count_nonzero(cache.ways)
    assert cache.guard.switches[0] >= 2 and cache.guard.lane[0] == 0
    assert on_trial <= cache.guard.switches[0] / 2 * (BLOCK * BLOCKS + 1)
    assert times[6000:].mean() < 1.03 * 22.0  # trials become rare too
    assert cache.guard.verdict[2] == 1.0 and cache.guard.verdict[1] > cache.guard.verdict[0]


def test_a_lane_that_keeps_the_hits_stays():
    cache = Cache(missed_alone=2.2, us_alone=7.0)
    times = cache.run(3000)
    assert cache.guard.lane[0] == STREAM and cache.guard.switches[0] == 1
    assert times[-500:].mean() < 0.9 * 22.0


def test_a_lane_that_slows_down_later_is_left():
    cache = Cache(missed_alone=2.0, us_alone=7.0)
    cache.run(1000)
    assert cache.guard.lane[0] == STREAM
    cache.us_alone = 30.0
    cache.run(2 * BLOCK * BLOCKS)
    assert cache.guard.lane[0] == 0


def test_no_lane_is_tried_before_there_is_something_to_compare_it_with():
    """Right after a change the splits have no blocks yet; a window that comes sooner changes nothing."""
    guard = make_guard(14)
    begin_window(guard, STREAM)
    for _ in range(WINDOW):
        guard_step(guard, 1.0, 4.0, 1.0 if guard.lanes[0] != 14 else 9.0)
    assert guard.lane[0] == 0 and guard.switches[0] == 0


def test_a_lane_must_win_two_windows_in_a_row():
    """One that was won by chance is followed by another of the same lane soon, which it loses."""
    guard, wins = make_guard(14), [True, False]
    tried = []
    for _ in range(2 * (FIRST_PERIOD + WINDOW)):
        if guard.left[0] == 0:
            begin_window(guard, STREAM + len(tried))
            tried.append(int(guard.tried[0]))
        alone = guard.tried[0] != 0 and guard.lanes[0] != 14
        guard_step(guard, 1.0, 4.0, 0.5 if alone and wins[len(tried) - 1] else 1.0)
    assert tried == [STREAM, STREAM] and guard.lane[0] == 0 and guard.candidate[0] == 0
    assert guard.left[0] == 2 * FIRST_PERIOD


def test_a_spell_is_noticed_and_left_again():
    """Splits take five times as long for a while: the lane serves misses meanwhile, and splits come back."""
    cache = Cache(missed_alone=2.0, us_alone=15.0)
    cache.run(700)
    assert cache.guard.switches[0] == 0
    cache.us_split = 50.0
    times = cache.run(4000)
    assert cache.guard.lane[0] == STREAM and times[-500:].mean() < 0.4 * 102.0
    cache.us_split = 10.0
    times = cache.run(5000)
    assert cache.guard.lane[0] == 0 and times[-500:].mean() < 1.02 * 22.0
