"""A scheduler over many steps: two phases, hints, counters, explanations, waves; nothing allocated or compiled."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, force, open_scheduler, random_store
from numba import config
from numba.core.runtime import _nrt_python, rtsys
from test_engine import EXPERTS, HIDDEN, IDS, LANES, WEIGHTS, X, step_inputs

from trilane import (
    ArrayTypeError,
    ClosedError,
    DeviceError,
    RoutingError,
    TrilaneError,
    host_fills,
    host_run,
    host_runner,
)

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@pytest.fixture(scope="module")
def store():
    return random_store("q8_0", layers=2, experts=EXPERTS, hidden=HIDDEN, intermediate=544)


@pytest.fixture
def scheduler(store, scheduler_of):
    return scheduler_of(store, cache={"fraction": 0.5})


# ------------------------------------------------------------------------------------------- submit and wait
def test_two_phases(store, scheduler):
    x, ids, weights = step_inputs()
    wanted = expected(store, 0, x, ids, weights)
    ticket = scheduler.submit(0, x, ids, weights)
    with pytest.raises(TrilaneError, match="a step of layer 0 is in flight and there can be one only; wait"):
        scheduler.submit(1, x, ids, weights)
    assert scheduler.hint(0, [1]) == 0
    ids[:], weights[:] = 0, 0  # routing was copied
    assert_same_bits(scheduler.wait(ticket), wanted)
    assert scheduler.wait(ticket) is scheduler.wait(ticket)


def test_wrong_tickets(store, scheduler_of):
    one, other = scheduler_of(store), scheduler_of(store)
    ticket = one.submit(0, X, IDS, WEIGHTS)
    with pytest.raises(TrilaneError, match="that ticket is not in flight"):
        other.wait(ticket)
    one.wait(ticket)
    ticket = one.submit(0, X, IDS, WEIGHTS)
    one.close()
    with pytest.raises(ClosedError):
        one.wait(ticket)


def test_closed(store):
    scheduler = open_scheduler(store)
    assert not np.isnan(scheduler.forward(0, X, IDS, WEIGHTS)).any()
    scheduler.close()
    scheduler.close()
    for call in (
        lambda: scheduler.forward(0, X, IDS, WEIGHTS),
        lambda: scheduler.submit(0, X, IDS, WEIGHTS),
        lambda: scheduler.hint(0, [1]),
    ):
        with pytest.raises(ClosedError, match="it has been closed; make a new one"):
            call()
    assert scheduler.stats().steps == 1 and scheduler.explain(0) is not None  # what was done can still be seen
    with open_scheduler(store) as scheduler:
        assert not scheduler._runner.device.team._failure
    assert scheduler._runner.device.team._failure


def test_a_scheduler_that_nobody_holds_ends(store):
    before = threading.active_count()
    scheduler = open_scheduler(store)
    scheduler.submit(0, X, IDS, WEIGHTS)
    del scheduler
    gc.collect()
    assert threading.active_count() == before


# -------------------------------------------------------------------------------------------------- hints
def test_hinted_experts_hit(store, scheduler_of):
    scheduler = scheduler_of(store, cache={"fraction": 0.5}, policy={"force": "cpu"})
    assert scheduler.hint(1, [4, 4, -1, EXPERTS, 2]) == 2 * 3
    scheduler._runner.settle_fills(let_end=True)
    ids = np.array([[4, 2]] * 3)
    assert_same_bits(scheduler.forward(1, X, ids, WEIGHTS), expected(store, 1, X, ids, WEIGHTS))
    stats = scheduler.stats()
    assert stats.background_fills == 6 and stats.hit_rate == 1.0 and stats.lanes["cpu"].shards == 0
    assert scheduler.hint(1, [2, 4]) == 0  # there already
    assert scheduler.hint(1, []) == 0 and scheduler.hint(0, [-1]) == 0


@pytest.mark.alone
def test_a_demand_preempts_a_hint(store, scheduler_of):
    """Fills that had not landed are given back; what had landed hits; the bits are right either way."""
    rate = float(store.layers[0].layout.shard_nbytes[0]) / 5e6  # 5 ms a shard
    scheduler = scheduler_of(
        store, cache={"fraction": 1.0}, policy=force("cpu"), host_device={"link_gb_s": rate, "cpu_gb_s": 50.0}
    )
    for ids in ([[0, 1]] * 3, [[2, 3]] * 3, [[1, 2]] * 3):
        assert scheduler.hint(0, [0, 1, 2, 3]) > 0
        assert_same_bits(scheduler.forward(0, X, ids, WEIGHTS), expected(store, 0, X, ids, WEIGHTS))
    assert not scheduler._runner.state.filling.any()
    assert scheduler.stats().background_fills < 12


def test_hints_that_are_refused(scheduler_of, store, scheduler):
    with pytest.raises(RoutingError, match="hint: expert id 7, but layer 0 has experts 0 to 5"):
        scheduler.hint(0, [1, 7])
    with pytest.raises(RoutingError, match="layer: 5"):
        scheduler.hint(5, [1])
    with pytest.raises(ArrayTypeError, match="expert_ids: dtype float64, but integers"):
        scheduler.hint(0, [0.5])
    assert scheduler.hint(0, np.array([1, 2], np.uint8)) > 0
    assert scheduler_of(store, policy={"fills": False}).hint(0, [1]) == 0
    assert scheduler_of(store, cache={"slots": 0}).hint(0, [1]) == 0


# ------------------------------------------------------------------------------------------------- what it tells
@pytest.mark.parametrize("lane", LANES)
def test_totals_add_up(store, scheduler_of, lane):
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, policy=force(lane))
    rng, routed, rows = np.random.default_rng(0), 0, 0
    for number in range(30):
        x, ids, weights = step_inputs([1, 3, 9][number % 3], seed=number, skips=True)
        scheduler.forward(number % 2, x, ids, weights)
        routed += sum(len(np.unique(part[(part >= 0) & (part < EXPERTS)])) for part in [ids])
        rows += len(x)
        if rng.random() < 0.3:
            scheduler.hint(number % 2, rng.integers(0, EXPERTS, 2))
    stats = scheduler.stats()
    assert stats.steps == 30 and stats.rows == rows
    shards = {name: part.shards for name, part in stats.lanes.items()}
    assert sum(shards.values()) == 3 * routed
    assert stats.hit_rate == shards["hit"] / sum(shards.values())
    nbytes = store.layers[0].layout.shard_nbytes.sum()
    assert sum(part.nbytes for part in stats.lanes.values()) == routed * nbytes
    if lane is not None:
        assert all(shards[name] == 0 for name in LANES[1:] if name != lane)
        assert set(stats.inactive) == {*LANES[1:]} - {lane}
    runner = scheduler._runner
    runner.settle_fills(let_end=True)
    resident = (runner.state.owner >= 0).sum()
    stats = scheduler.stats()
    assert stats.fills + stats.background_fills - stats.evictions == resident
    assert 0 < stats.plan_us < stats.step_us and stats.bytes_pageable == store.nbytes and stats.played == {}
    for name, part in stats.lanes.items():
        assert (part.observed_us > 0) == (part.shards > 0), name
        assert part.experts <= part.shards and (part.predicted_us > 0) == (part.shards > 0)
    assert dataclasses.asdict(stats) == stats.to_dict()


def test_requests(scheduler):
    scheduler.forward(0, X, IDS, WEIGHTS)
    with scheduler.request() as outer:
        scheduler.forward(0, X, IDS, WEIGHTS)
        with pytest.raises(RoutingError), scheduler.request() as inner:
            scheduler.forward(0, X, IDS, WEIGHTS)
            scheduler.forward(9, X, IDS, WEIGHTS)
        assert outer.stats.steps == 2
    scheduler.forward(0, X, IDS, WEIGHTS)
    assert (outer.stats.steps, inner.stats.steps, scheduler.stats().steps) == (2, 1, 4)
    assert inner.stats.rows == 3


def test_nothing_is_told_as_missing_on_a_device_that_does_not_need_it(store, scheduler_of):
    stats = scheduler_of(store).stats()
    assert stats.inactive == {} and "not used" not in str(stats)
    assert (stats.bytes_pinned, stats.bytes_pageable) == (0, store.nbytes)  # who looks for it finds it


def test_what_is_inactive_says_why(store, scheduler_of):
    inactive = scheduler_of(store, cache={"slots": 0}, policy={"lanes": ("stream", "cpu")}).stats().inactive
    assert inactive["cache"] == "there are no slots (section cache)"
    assert inactive["stream"] == "there are no slots to stream to"
    assert inactive["zero_copy"] == "policy.lanes leaves it out" and "cpu" not in inactive


def test_explanations_and_stories(scheduler):
    assert scheduler.explain(0) is None and scheduler.story(0, 1) == ()
    for _ in range(3):
        scheduler.forward(0, X[:1], [[1, 2]], [[1, 1]])
    told = scheduler.explain(0)
    assert told.plan.layer == 0 and [e.expert for e in told.plan.experts] == [1, 2]
    assert told.outcome.clock == told.plan.clock == 3 and dict(told.outcome.observed_us)["step"] > 0
    assert "layer 0, clock 3" in str(told) and "observed us: " in str(told)
    story = scheduler.story(0, 1)
    assert [entry.clock for entry in story] == [1, 2, 3]
    assert all(entry.hit + entry.stream + entry.zero_copy + entry.cpu == 3 and entry.rows == 1 for entry in story)
    assert story[0].hit == 0 and scheduler.story(1, 1) == () and scheduler.explain(1) is None
    with pytest.raises(RoutingError, match="story: expert id 6"):
        scheduler.story(0, 6)
    with pytest.raises(RoutingError, match="layer: 3"):
        scheduler.explain(3)


def test_more_shards_than_slots_are_streamed_in_waves(store, scheduler_of):
    """Only the stream lane, and a step that needs more slots than there are."""
    for slots in (1, 2, 5):
        scheduler = scheduler_of(store, cache={"slots": slots}, policy={"force": "stream"})
        for number in range(4):
            x, ids, weights = step_inputs([2, 9][number % 2], 3, number)
            wanted = expected(store, number % 2, x, ids, weights)
            assert_same_bits(scheduler.forward(number % 2, x, ids, weights), wanted, f"{slots} slots")
        stats = scheduler.stats()
        routed = sum(len(np.unique(step_inputs([2, 9][n % 2], 3, n)[1])) for n in range(4))
        assert sum(part.shards for part in stats.lanes.values()) == 3 * routed
    scheduler = scheduler_of(store, cache={"slots": 0}, policy={"force": "stream"})
    for _ in range(2):
        with pytest.raises(DeviceError, match="layer 0: 3 shards find no slot among 0.*more slots"):
            scheduler.forward(0, X, IDS, WEIGHTS)


def test_nothing_is_compiled_after_the_start(store, scheduler_of):
    """Not in the first step, a large batch, a wave, a hint or a failure: they would take a second each."""
    functions = [
        f for module in (host_run, host_fills, host_runner) for f in vars(module).values() if hasattr(f, "signatures")
    ]
    scheduler = scheduler_of(store, cache={"slots": 2}, policy={"force": "stream"})

    def count_compiled():
        return [len(function.signatures) + len(function.linked.signatures) for function in functions]

    before = count_compiled()
    for rows in (1, 12):
        scheduler.hint(0, [1, 2])
        scheduler._runner.settle_fills(let_end=True)
        scheduler.forward(0, *step_inputs(rows))
    scheduler.hint(0, [3])
    scheduler.submit(0, *step_inputs())
    scheduler._ticket = None  # as an interrupt would leave it
    scheduler.forward(1, *step_inputs())
    assert count_compiled() == before
    assert {host_run.open_step, host_fills.reserve_hinted, host_runner.abandon_step} <= set(functions)


# ---------------------------------------------------------------------------------------- no allocation
@pytest.mark.alone
@pytest.mark.parametrize("rows", [1, 3, 24])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_steps_allocate_nothing_that_stays(store, scheduler_of, rows, fraction):
    """Over 1000 steps: no block of Python's, no reference-counted memory of Numba's, a flat peak."""
    scheduler = scheduler_of(store, cache={"fraction": fraction})
    inputs = [step_inputs(rows, seed=seed) for seed in range(8)]
    out = np.empty_like(inputs[0][0])

    def run(num_steps):
        for number in range(num_steps):
            x, ids, weights = inputs[number % 8]
            scheduler.forward(number % 2, x, ids, weights, out=out)

    run(50)
    _nrt_python.memsys_enable_stats()
    try:
        blocks, live, allocations, peaks = [], [], [], []
        for _ in range(4):
            gc.collect()
            tracemalloc.start()
            run(100)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            run(150)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            stats = rtsys.get_allocation_stats()
            live.append((stats.alloc - stats.free, stats.mi_alloc - stats.mi_free))
            allocations.append((stats.alloc, stats.mi_alloc))
    finally:
        _nrt_python.memsys_disable_stats()
    assert live[1] == live[-1], live
    assert allocations[1] == allocations[-1], f"compiled code allocates: {allocations}"
    assert abs(blocks[-1] - blocks[1]) < 250, blocks  # 500 steps: one object each would be seen
    assert max(peaks) < 1.2 * peaks[0] + 4096, peaks
