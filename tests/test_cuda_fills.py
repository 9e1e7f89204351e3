"""Background fills that the policy begins on a GPU, and the steps without misses that it learns from; driver played."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, random_store

from trilane.cuda_control import note_pause
from trilane.cuda_fills import MOST_AT_ONCE, fills_at_once, fits_in_pause
from trilane.cuda_words import Control, Fault, Place, Stage
from trilane.gpu_kernels.cuda_device import array_at
from trilane.gpu_kernels.words import NUM_USES, TYPES, USE_IDS, USE_WORDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_slots import check_slots  # noqa: E402

ONE = np.ones((1, 1), np.float32)
X = np.ones((1, 256), np.float32)


def store_of(**shape):
    return random_store("q8_0", **{"experts": 6, "hidden": 256, "intermediate": 512, **shape})


def step(scheduler, experts, layer=0):
    """One row through these experts, compared with the reference."""
    ids, weights = np.array([experts]), np.full((1, len(experts)), 0.5, np.float32)
    out = scheduler.forward(layer, X, ids, weights)
    assert_same_bits(out, expected(scheduler.store, layer, X, ids, weights))


def until(scheduler, holds, seconds=5.0):
    """Wait for the control thread; whether it came to that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with scheduler._runner.threads.holding():
            if holds(scheduler._runner):
                return True
        time.sleep(0.002)
    return False


def device_clock(runner):
    return int(runner.counts.on_device()[0])


@pytest.fixture
def resident(played):
    """A scheduler whose experts all lie in slots."""
    scheduler = played(store_of(layers=2), cache={"fraction": 1.0}, policy={"force": "zero_copy", "admit": "always"})
    for layer in range(2):
        step(scheduler, range(6), layer)
    return scheduler


def test_steps_without_misses_are_told_and_learned_from(resident):
    runner = resident._runner
    step(resident, [1, 4], 1)
    step(resident, [5], 0)
    clock = device_clock(runner)
    assert until(resident, lambda runner: runner.threads.control[Control.USED] == clock)
    with runner.threads.holding():
        seen, past, row = runner._held.seen.copy(), runner.state.past.copy(), int(runner.state.row[0])
    assert seen[6:].tolist() == [2, clock - 1, 2, 2, clock - 1, 2] and seen[5] == clock
    assert past[0, 0, row] == 1 << 5  # layer 0 began another pass


def test_what_a_step_tells_is_four_times_sixteen_bytes_with_its_clock(resident):
    runner = resident._runner
    step(resident, [3, 0, 5], 1)
    clock = device_clock(runner)
    uses = array_at(runner.device.address["uses"], np.uint32, (NUM_USES, USE_WORDS))[clock % NUM_USES]
    assert (uses[::4] == clock).all()
    assert uses[1] == 1 | 3 << 16 and uses[2] == 0 | 3 << 16 and uses[3] == 5  # ids in pairs, ascending
    assert USE_IDS == 2 * (USE_WORDS - USE_WORDS // 4 - 1)


def test_a_thread_that_was_away_goes_on_with_what_is_left(resident):
    runner = resident._runner
    runner.inject_fault(Fault.DEAF)
    for k in range(NUM_USES + 7):
        step(resident, [k % 6], 0)
    runner.inject_fault(Fault.NONE)
    clock = device_clock(runner)
    assert until(resident, lambda runner: runner.threads.control[Control.USED] == clock)


def test_steps_of_several_rows_tell_nothing_and_the_next_miss_goes_on(played):
    scheduler = played(store_of(experts=8), cache={"slots": 4, "eviction": "lru"}, policy={"force": "zero_copy"})
    step(scheduler, [1])
    ids = np.array([[1], [1]])
    scheduler.forward(0, np.repeat(X, 2, 0), ids, np.repeat(ONE, 2, 0))
    step(scheduler, [1])
    assert not until(scheduler, lambda runner: runner.threads.control[Control.USED] > 1, 0.05)
    step(scheduler, [2])
    step(scheduler, [2])
    clock = device_clock(scheduler._runner)
    assert until(scheduler, lambda runner: runner.threads.control[Control.USED] == clock)


def walk(scheduler, passes, seconds=0.002):
    """Passes of six layers through the same experts of each, and the background fills that landed."""
    for _ in range(passes):
        for layer in range(6):
            step(scheduler, [layer, 7], layer)
            time.sleep(seconds)
    return scheduler.stats().background_fills


def test_the_policy_fills_what_is_foretold(played):
    """Misses take the CPU lane, which fills no slot; what like passes used later on comes in time, and hits then."""
    scheduler = played(store_of(layers=6, experts=8), cache={"fraction": 0.3}, policy={"lanes": ["cpu"]})
    for _ in range(8):
        if walk(scheduler, 2) >= 4:
            break
    before = scheduler.stats()
    assert before.background_fills >= 4 and before.fills == 0 and before.lanes["hit"].shards > 0


def test_no_background_where_it_is_off(played):
    policy = {"lanes": ["cpu"], "background": False}
    scheduler = played(store_of(layers=6, experts=8), cache={"fraction": 0.3}, policy=policy)
    assert walk(scheduler, 4, 0.0005) == 0
    assert scheduler._runner.threads.control[Control.FILL_STAGE] == Stage.IDLE


def test_many_random_steps_with_fills_give_the_bits_of_the_reference(played):
    scheduler = played(store_of(layers=6, experts=8), cache={"fraction": 0.3}, policy={"lanes": ["zero_copy", "cpu"]})
    rng = np.random.default_rng(7)
    for token in range(16):
        for layer in range(6):
            step(scheduler, [layer, 7] if token % 4 else rng.choice(8, 2, False), layer)
            time.sleep(0.001)
    assert scheduler.stats().background_fills > 0
    check_slots(scheduler)


def test_a_reset_gives_up_fills_that_are_under_way(played):
    scheduler = played(store_of(experts=8), cache={"slots": 4}, policy={"force": "cpu"})
    runner = scheduler._runner
    step(scheduler, [1])
    assert scheduler.hint(0, [6, 7]) == 4 and runner.threads.control[Control.FILL_STAGE] == Stage.INVALIDATING
    runner.reset()
    assert runner.threads.control[Control.FILL_STAGE] == Stage.IDLE and scheduler.hint(0, [2]) == 0
    step(scheduler, [3])  # acknowledges that nothing is pending any more
    assert scheduler.hint(0, [2]) == 2
    for _ in range(40):
        step(scheduler, [1])
        if runner.threads.control[Control.FILL_STAGE] == Stage.IDLE:
            break
        time.sleep(0.002)
    table = array_at(runner.device.address["table"], np.int32, (16,))
    assert (table >= 0).nonzero()[0].tolist() == [4, 5]
    before = scheduler.stats().lanes["hit"].shards
    step(scheduler, [2])
    assert scheduler.stats().lanes["hit"].shards == before + 2


@pytest.mark.parametrize(
    ("idle_us", "fill_us", "most"), [(10, 18, 0), (50, 18, 0), (54, 18, 4), (72, 18, 6), (1000, 18, MOST_AT_ONCE)]
)
def test_as_many_fills_begin_as_the_link_has_time_for(idle_us, fill_us, most):
    assert fills_at_once(int(1e3 * idle_us), int(1e3 * fill_us)) == most


@pytest.mark.parametrize("missed", [0, 1])
@pytest.mark.parametrize(
    ("since_us", "most", "size"),
    [(0, 8, 5), (30, 8, 3), (30, 2, 2), (81, 8, 0), (150, 8, 0), (201, 8, 1)],
)
def test_as_many_copies_begin_as_the_pause_holds(missed, since_us, most, size):
    """Of the kind of step that the last one was; where the next step is late, one begins all the same."""
    control = np.zeros(Control.SIZE, np.int64)
    control[Control.PAUSE_NS + missed], control[Control.FILL_NS] = 100_000, 20_000
    control[Control.PAUSE_NS + 1 - missed], control[Control.MISSED] = 1, missed
    control[Control.FREE_NS] = 1_000_000
    assert fits_in_pause(control, 1_000_000 + 1000 * since_us, most) == size
    control[Control.FILL_NS] = 100_001  # never fits
    assert fits_in_pause(control, 1_000_000 + 1000 * since_us, most) == 1
    control[Control.FILL_NS] = 1
    assert fits_in_pause(control, 1_000_000, 100) == MOST_AT_ONCE


def test_pauses_are_averaged_by_the_kind_of_step_before_them():
    control = np.zeros(Control.SIZE, np.int64)
    note_pause(control, 1, 1_000_000)
    assert control[Control.PAUSE_NS] == 0 and control[Control.FREE_NS] == 1_000_000
    note_pause(control, 1, 1_160_000)
    assert control[Control.PAUSE_NS : Control.PAUSE_NS + 2].tolist() == [10_000, 0]
    control[Control.FREE_NS], control[Control.MISSED] = 1_200_000, 1  # answered
    note_pause(control, 1, 1_232_000)
    assert control[Control.PAUSE_NS : Control.PAUSE_NS + 2].tolist() == [10_000, 2_000]
    note_pause(control, 3, 2_000_000)  # steps in between were not heard of
    assert control[Control.PAUSE_NS : Control.PAUSE_NS + 2].tolist() == [10_000, 2_000]
    assert control[Control.FREE_NS] == 2_000_000 and control[Control.MISSED] == 0


def test_the_words_that_tell_a_use_are_where_the_host_looks(resident):
    runner = resident._runner
    assert runner._held.wire.places[Place.USES] == runner.device.address["uses"]
    assert "uses" in (TYPES["Step"].names or ())
