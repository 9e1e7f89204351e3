"""The guard in live steps on the host device, whose CPU lane plays a small part of what it is believed to reach."""

import logging

import numpy as np
import pytest
from numba import config
from test_engine import step_inputs, store  # noqa: F401

from trilane.expert import CPU, STREAM
from trilane.guard import FIRST_PERIOD, WINDOW
from trilane.guarded import GuardedOptions
from trilane.plan import make_options
from trilane.traces.trace_file import read_trace
from trilane.verify import verify

pytestmark = pytest.mark.alone  # the guard goes by what steps take
JIT = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
ENOUGH = 4 * FIRST_PERIOD + 3 * WINDOW + 30  # three windows: of the CPU, and two that the other lane wins


def misled(scheduler_of, store, **sections):  # noqa: F811
    """A scheduler that takes its CPU for twenty times as fast as it is."""
    scheduler = scheduler_of(
        store,
        cache={"fraction": 0.0},
        host_device={"cpu_gb_s": 0.2, "zero_copy_gb_s": 0.5},
        **{"policy": {"lanes": ["zero_copy", "cpu"], "guard": True}} | sections,
    )
    runner = scheduler._runner
    runner.rates = [one._replace(cpu_us_per_byte=one.cpu_us_per_byte / 20) for one in runner.rates]
    return scheduler


def drive(scheduler, steps):
    outputs, times = [], []
    for seed in range(steps):
        x, ids, weights = step_inputs(rows=1, seed=seed)
        outputs.append(scheduler.forward(0, x, ids, weights))
        times.append(scheduler._runner.step_us)
    return outputs, np.array(times)


@JIT
def test_steps_end_up_on_the_lane_that_is_faster_and_it_is_said(store, scheduler_of, caplog):  # noqa: F811
    unguarded = misled(scheduler_of, store, policy={"lanes": ["zero_copy", "cpu"]})
    expected, slow = drive(unguarded, ENOUGH)
    with caplog.at_level(logging.INFO, "trilane"):
        scheduler = misled(scheduler_of, store)
        outputs, times = drive(scheduler, ENOUGH)
    assert all((a == b).all() for a, b in zip(outputs, expected, strict=True))
    assert np.median(times[-20:]) < 0.8 * np.median(slow[-20:])
    assert "zero_copy alone faster" in caplog.text
    _, ids, _ = step_inputs(rows=1, seed=0)
    assert scheduler.predict_us(0, ids) > unguarded.predict_us(0, ids)  # no help is expected of the CPU any more
    assert "zero_copy alone faster" in scheduler.stats().inactive["split"]
    assert "zero_copy alone faster" in scheduler.explain(0).plan.why
    assert unguarded.stats().inactive.keys().isdisjoint({"split"})
    assert "the guard" not in unguarded.explain(0).plan.why


@JIT
def test_a_recorded_run_with_a_guard_that_changed_its_mind_verifies(store, scheduler_of, tmp_path):  # noqa: F811
    scheduler = misled(scheduler_of, store, record={"path": tmp_path / "run.trace"})
    drive(scheduler, ENOUGH)
    assert scheduler._runner._guarded.guard.switches[0] == 1
    scheduler.close()
    found = verify(read_trace(tmp_path / "run.trace"))
    assert found.differences == () and found.plans >= ENOUGH and found.baselines >= 4


@JIT
def test_other_options_than_the_policys_and_a_reset_leave_the_guard_out(store, scheduler_of):  # noqa: F811
    scheduler = misled(scheduler_of, store)
    runner = scheduler._runner
    before = runner.use_options(make_options(force="cpu"))
    drive(scheduler, ENOUGH)
    assert runner._guarded.guard.left[0] == FIRST_PERIOD and scheduler.stats().lanes["zero_copy"].shards == 0
    runner.use_options(before)
    drive(scheduler, ENOUGH)
    assert runner._guarded.guard.switches[0] == 1
    runner.reset()
    assert runner._guarded.guard.switches[0] == 0 and "split" not in runner.notes()


def test_a_step_that_streaming_alone_could_not_serve_at_once_is_split():
    options = make_options(["stream", "cpu"])
    guarded = GuardedOptions(options, enabled=True)
    assert guarded.options_of(options, 8, 4) == (options, True)
    guarded.guard.lanes[0] = 1 << STREAM
    assert guarded.options_of(options, 8, 8)[0].lanes == 1 << STREAM
    assert guarded.options_of(options, 9, 8) == (options, False)
    us = {"stream": 1.0, "cpu": 2.0, "zero_copy": 0.5}
    tried = []
    for shards in (8, 8, 8, 9):
        guarded.begin_window(us, shards, 8)
        tried.append(guarded.guard.tried[0])
    assert tried == [STREAM, CPU, STREAM, CPU]


@pytest.mark.parametrize(
    ("options", "enabled"),
    [
        (make_options(["stream", "cpu"]), False),
        (make_options(["cpu"]), True),
        (make_options(force="cpu"), True),
        (make_options(["stream", "cpu"], split="ratio"), True),
    ],
)
def test_there_is_nothing_to_guard(options, enabled):
    guarded = GuardedOptions(options, enabled=enabled)
    assert guarded.options_of(options, 1, 8) == (options, False)
