"""The guard on a synthetic device whose lanes do each other harm that no lane's own time shows."""

import numpy as np
from plan_cases import H200
from test_observed import Device, best_us

from trilane.expert import STREAM
from trilane.guard import FIRST_PERIOD, LONGEST_PERIOD, WINDOW, guard_step, guarded_lanes, make_guard


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


def test_only_allowed_lanes_and_steps_with_misses_count():
    assert [guarded_lanes(make_guard(), lanes) for lanes in (2, 10, 14)] == [2, 10, 14]
    guard = make_guard()
    guard.lane[0] = STREAM
    assert guarded_lanes(guard, 14) == 1 << STREAM and guarded_lanes(guard, 12) == 12
    assert not guard_step(guard, STREAM, 0.0, 1.0) and guard.left[0] == FIRST_PERIOD
