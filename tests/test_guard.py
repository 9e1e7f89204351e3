"""The guard on a synthetic device whose lanes do each other harm that no lane's own time shows."""

import numpy as np
from plan_cases import H200
from test_observed import Device, best_us

from trilane.expert import STREAM
from trilane.guard import FIRST_PERIOD, LONGEST_PERIOD, TURN, WINDOW, begin_window, guard_step, make_guard


def test_a_split_that_costs_more_than_it_saves_is_left_and_taken_up_again():
    """T01 and T03: with both lanes at work everything takes three times as long."""
    device, free = Device(H200, learns=False, guards=True, quarrels=True), Device(H200, learns=False, quarrels=True)
    times = np.array([device.step(H200) for _ in range(400)])
    split = np.mean([free.step(H200) for _ in range(20)])
    assert device.guard.lane[0] == STREAM and device.guard.switches[0] == 1
    assert times[FIRST_PERIOD + WINDOW + 1 :].mean() < 0.8 * split
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
        assert guard.lanes[0] == 14 and not guard_step(guard, 1.0, 1.0)
        assert (guard.left[0] == 0) == (step >= FIRST_PERIOD - 1)  # and waits for its window
    begin_window(guard, STREAM)
    for step in range(WINDOW):
        taken.append(int(guard.lanes[0]))
        guard_step(guard, 2.0, 1000.0 if step in (0, 7) else 2.0)
    assert taken == ([14] * TURN + [1 << STREAM] * TURN) * 2
    assert guard.switches[0] == 0 and guard.lanes[0] == 14 and guard.left[0] == 2 * FIRST_PERIOD


def test_steps_without_misses_do_not_count():
    guard = make_guard(10)
    assert not guard_step(guard, 0.0, 1.0) and guard.left[0] == FIRST_PERIOD
