"""The CUDA device's step on a played driver: kernels, control thread and threads are the product's own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, profile_for, random_routing, random_store
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane import ArrayError, Config, DeviceError, ExpertScheduler, RoutingError, WorkerError
from trilane.cpu_kernels.cpus import DEFAULT_SPIN_US
from trilane.cuda_plan import GROUP_COPIES, GROUP_NBYTES, add_copy
from trilane.cuda_threads import spin_us
from trilane.cuda_words import COPY_FROM, COPY_GROUP, COPY_NBYTES, COPY_TO, Control, Fault, Stage
from trilane.gpu_kernels.driver import CudaDriver, DriverMissing
from trilane.gpu_kernels.driver_calls import Call

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_slots import check_slots  # noqa: E402


def store_of(**shape):
    return random_store("q8_0", **{"experts": 6, "hidden": 256, "intermediate": 512, **shape})


def run(scheduler, steps=6, rows=2, top_k=2, seed=1):
    """Random steps, each compared with the reference."""
    rng = np.random.default_rng(seed)
    store = scheduler.store
    for _ in range(steps):
        layer = int(rng.integers(store.num_layers))
        x = rng.standard_normal((rows, store.hidden)).astype(np.float32)
        ids, weights = random_routing(rng, rows, top_k, store.layers[layer].num_experts)
        assert_same_bits(scheduler.forward(layer, x, ids, weights), expected(store, layer, x, ids, weights))


@pytest.mark.parametrize("force", [None, "stream", "zero_copy", "cpu"])
def test_every_lane_gives_the_bits_of_the_reference(played, force):
    scheduler = played(store_of(layers=2), cache={"fraction": 0.4}, policy={"force": force, "admit": "always"})
    run(scheduler)
    lanes = scheduler.stats().lanes
    used = {name for name in ("stream", "zero_copy", "cpu") if lanes[name].shards}
    assert used == {force} if force else used


def test_workers_spin_through_the_rest_of_a_model_where_each_has_a_cpu():
    many, some, few = (SimpleNamespace(num_concurrent=count) for count in (16, 4, 2))
    assert spin_us(Config(), many, 13) == 5000.0 and spin_us(Config(), few, 2) == 0.0
    assert spin_us(Config(), some, 3) == DEFAULT_SPIN_US  # longer, and they would keep the control thread waiting
    assert spin_us(Config(cpu={"spin_us": 70}), few, 2) == 70.0


def test_a_resident_step_asks_nobody(played):
    scheduler = played(store_of(), cache={"fraction": 1.0}, policy={"force": "zero_copy", "admit": "always"})
    x, ids, weights = np.ones((1, 256), np.float32), np.array([[1, 4]]), np.array([[0.5, 0.25]], np.float32)
    wanted = expected(scheduler.store, 0, x, ids, weights)
    scheduler.forward(0, x, ids, weights)
    scheduler._runner.inject_fault(Fault.DEAF)
    for _ in range(3):
        assert_same_bits(scheduler.forward(0, x, ids, weights), wanted)
    stats = scheduler.stats()
    assert (stats.steps, stats.lanes["hit"].shards, stats.hit_rate) == (4, 12, 12 / 16)
    scheduler._runner.inject_fault(Fault.NONE)


def test_batches_of_more_rows_than_a_step_takes(played, monkeypatch):
    monkeypatch.setattr(trilane.cuda_runner, "MAX_ROWS", 4)
    scheduler = played(store_of(), cache={"fraction": 0.5})
    run(scheduler, steps=2, rows=9, top_k=3)


def test_pageable_experts_take_lanes_that_need_no_pinned_memory(played):
    store = store_of()
    limit = store.nbytes // 2
    scheduler = played(store, cache={"fraction": 0.4}, policy={"force": "zero_copy"}, host={"pin_limit": limit})
    run(scheduler)
    stats = scheduler.stats()
    assert stats.bytes_pinned == limit // 4096 * 4096 and stats.bytes_pinned + stats.bytes_pageable == store.nbytes
    assert "host.pin_limit" in stats.inactive["pinned"]


@pytest.mark.alone
def test_copies_that_the_driver_holds_up_are_read_in_place(played):
    """Another thread inside cudaFree may hold the driver until the GPU is done, which waits for the copies."""
    scheduler = played(store_of(), cache={"fraction": 0.4}, policy={"force": "stream", "admit": "always"})
    runner = scheduler._runner
    run(scheduler, steps=2)
    runner.inject_fault(Fault.HELD_DRIVER)
    run(scheduler, steps=4, seed=2)
    assert runner.threads.control[Control.FROZEN] == 1
    rescues = int(runner.threads.control[Control.RESCUES])
    assert 1 <= rescues <= 2 and "read in place" in scheduler.stats().inactive["copies"]
    lanes = {name: lane.shards for name, lane in scheduler.stats().lanes.items()}
    assert scheduler.hint(0, [0, 1, 2, 3, 4, 5]) == 0  # no slot changes hands
    runner.inject_fault(Fault.NONE)
    run(scheduler, steps=6, seed=3)
    assert runner.threads.control[Control.FROZEN] == 0
    assert scheduler.stats().lanes["stream"].shards > lanes["stream"]
    check_slots(scheduler)


@pytest.mark.alone
def test_copies_that_were_issued_and_do_not_land_are_read_in_place(played):
    """The driver may put a copy behind work of the GPU that waits for it."""
    scheduler = played(store_of(), cache={"fraction": 0.4}, policy={"force": "stream", "admit": "always"})
    runner = scheduler._runner
    control = runner.threads.control
    run(scheduler, steps=2)
    before = int(control[Control.RESCUES])  # a busy machine may hold a call up, too
    runner.inject_fault(Fault.LOST_FLAG)
    run(scheduler, steps=3, seed=2)
    assert control[Control.FROZEN] == 1 and control[Control.RESCUES] > before
    assert "read in place" in scheduler.stats().inactive["copies"]
    runner.inject_fault(Fault.NONE)
    streamed = scheduler.stats().lanes["stream"].shards
    run(scheduler, steps=2, seed=4)
    assert scheduler.stats().lanes["stream"].shards == streamed  # not before it is known that they have landed
    runner.device.mapped("copied", np.uint32, 1)[0] = control[Control.LIST_SEQUENCE]
    run(scheduler, steps=6, seed=3)
    assert control[Control.FROZEN] == 0 and scheduler.stats().lanes["stream"].shards > streamed
    check_slots(scheduler)


def test_pageable_copies_that_do_not_land_are_a_stall(played):
    driver, policy = PlayedDriver(pin_nbytes=0), {"lanes": ["stream"], "admit": "always"}
    scheduler = played(store_of(), driver, cache={"fraction": 0.4}, policy=policy, cpu={"stall_timeout_s": 0.3})
    scheduler._runner.inject_fault(Fault.LOST_FLAG)
    with pytest.raises(WorkerError, match="stall_timeout_s"):
        run(scheduler, steps=3)


def test_steps_of_one_and_of_many_rows_while_the_driver_is_held_now_and_then(played):
    """Briefs and whole mailboxes, frozen slots and not, one behind the other; more entries than a warp has lanes."""
    scheduler = played(store_of(layers=2, experts=8), cache={"fraction": 0.25}, policy={"admit": "always"})
    rng = np.random.default_rng(5)
    for step in range(16):
        scheduler._runner.inject_fault(Fault.HELD_DRIVER if step % 5 == 2 else Fault.NONE)
        run(scheduler, steps=1, rows=(1, 12, 1, 2)[step % 4], top_k=3, seed=int(rng.integers(1000)))
    scheduler._runner.inject_fault(Fault.NONE)
    run(scheduler, steps=2, seed=9)
    check_slots(scheduler)


def test_a_refused_registration_keeps_what_was_pinned_before(played):
    scheduler = played(store_of(), PlayedDriver(pin_nbytes=0), cache={"fraction": 0.5}, policy={"lanes": ["stream"]})
    run(scheduler)
    assert scheduler.stats().bytes_pinned == 0 and "out of memory" in scheduler.stats().inactive["pinned"]


def test_copies_stay_within_one_registration(played, monkeypatch):
    monkeypatch.setattr(trilane.gpu_kernels.pinning, "SEGMENT_NBYTES", 5 * 4096)
    scheduler = played(store_of(), cache={"fraction": 0.4}, policy={"force": "stream", "admit": "always"})
    assert len(scheduler._runner.driver.registered) > 10
    run(scheduler)


def test_copies_of_a_step_share_a_call_and_a_flag(played):
    """Played batches turn round, as copies of one call have no order; a driver without them gets them one by one."""
    scheduler = played(store_of(experts=8), cache={"fraction": 1.0}, policy={"force": "stream", "admit": "always"})
    runner, store = scheduler._runner, scheduler.store
    x, weights = np.ones((1, 256), np.float32), np.full((1, 4), 0.25, np.float32)
    for batches, ids in ((True, [[0, 1, 2, 3]]), (False, [[4, 5, 6, 7]])):
        runner.driver.table[Call.COPY_BATCH] *= batches
        copies, writes = len(runner.driver.copies), len(runner.driver.writes)
        assert_same_bits(scheduler.forward(0, x, np.array(ids), weights), expected(store, 0, x, np.array(ids), weights))
        sources = [source for _, source, _ in runner.driver.copies[copies:]]
        assert len(sources) == 4 and sources == sorted(sources, reverse=batches)
        assert runner.driver.writes[writes:] == [runner.device.address["copy_flags"], runner.device.address["copied"]]


def test_a_group_of_copies_is_full_from_some_bytes_on(played):
    wire = played(store_of())._runner._held.wire
    wire.counts[:] = 0
    sizes = [GROUP_NBYTES // 2, GROUP_NBYTES // 2, 1, 2 * GROUP_NBYTES, 1]
    for k, nbytes in enumerate(sizes):
        add_copy(wire, 100 + k, 200 + k, nbytes)
    rows = [wire.copies[row, : len(sizes)].tolist() for row in (COPY_TO, COPY_FROM, COPY_NBYTES, COPY_GROUP)]
    assert rows == [[100, 101, 102, 103, 104], [200, 201, 202, 203, 204], sizes, [0, 0, 1, 1, 2]]


def test_a_group_has_so_many_copies_at_most(played):
    """The driver is not to be busy for long with one call: whoever waits for it takes it for held up."""
    experts = 2 * GROUP_COPIES + 2
    store = store_of(experts=experts, intermediate=256)
    wire = played(store, cache={"fraction": 1.0})._runner._held.wire
    wire.counts[:] = 0
    for k in range(experts):
        add_copy(wire, k, k, 1)
    groups = wire.copies[COPY_GROUP, :experts].tolist()
    assert groups == [0] * GROUP_COPIES + [1] * GROUP_COPIES + [2, 2]


def test_slots_come_from_free_memory_and_fewer_of_them_are_told(played):
    store = store_of()
    slot = int(store.layers[0].layout.shard_nbytes.max())
    driver = PlayedDriver(vram_nbytes=(1 << 40))
    driver.free_nbytes = lambda: trilane.gpu_kernels.cuda_device.RESERVE_NBYTES + 3 * slot + 5
    scheduler = played(store, driver, cache={"fraction": 1.0})
    assert scheduler._runner.num_slots == 3 and "3 of 12 slots" in scheduler.stats().inactive["cache"]
    run(scheduler)


@pytest.mark.alone
def test_background_fills_land_in_stages(played):
    scheduler = played(store_of(experts=8), cache={"slots": 4}, policy={"force": "cpu"})
    x, weights = np.ones((1, 256), np.float32), np.ones((1, 1), np.float32)
    assert scheduler.hint(0, [6, 7]) == 4
    for _ in range(40):  # each step can acknowledge one list
        scheduler.forward(0, x, [[1]], weights)
        if scheduler._runner.threads.control[Control.FILL_STAGE] == Stage.IDLE:
            break
        time.sleep(0.002)
    before = scheduler.stats()
    assert before.background_fills == 4
    wanted = expected(scheduler.store, 0, x, np.array([[6]]), weights)
    assert_same_bits(scheduler.forward(0, x, [[6]], weights), wanted)
    assert scheduler.stats().lanes["hit"].shards == before.lanes["hit"].shards + 2


@pytest.mark.alone
def test_hits_that_only_the_gpu_saw_count_for_eviction(played):
    scheduler = played(
        store_of(experts=8), cache={"slots": 4, "eviction": "lru"}, policy={"force": "zero_copy", "admit": "always"}
    )
    x, one = np.ones((1, 256), np.float32), np.ones((1, 1), np.float32)
    for expert in (0, 1, 0, 2):  # 0 was hit last, so 1 goes
        scheduler.forward(0, x, [[expert]], one)
        time.sleep(0.01)
    scheduler.forward(0, x, [[3]], one)
    with scheduler._runner.threads.holding():
        resident = scheduler._runner.state.resident[:4].tolist()
    assert resident[3] == 2 and resident[1] == 0


@pytest.mark.alone
def test_explain_and_story_tell_of_steps_with_misses(played):
    scheduler = played(store_of(), cache={"fraction": 0.5}, policy={"force": "zero_copy", "admit": "always"})
    assert scheduler.explain(0) is None
    scheduler.forward(0, np.ones((1, 256), np.float32), [[2]], [[1.0]])
    time.sleep(0.02)
    assert scheduler.explain(0).plan.experts[0].expert == 2
    assert len(scheduler.story(0, 2)) == 1


def test_a_request_counts_its_own_steps(played):
    scheduler = played(store_of())
    x, one = np.ones((1, 256), np.float32), np.ones((1, 1), np.float32)
    scheduler.forward(0, x, [[1]], one)
    with scheduler.request() as request:
        scheduler.forward(0, x, [[2]], one)
        scheduler.forward(0, x, [[2]], one)
    scheduler.forward(0, x, [[3]], one)
    assert request.stats.steps == 2


def test_ids_and_arrays_are_checked(played):
    scheduler = played(store_of())
    x, one = np.ones((1, 256), np.float32), np.ones((1, 1), np.float32)
    with pytest.raises(RoutingError, match="expert id 9"):
        scheduler.forward(0, x, [[9]], one)
    with pytest.raises(ArrayError, match="stream"):
        scheduler.forward(0, x, [[1]], one, stream="main")
    assert scheduler.forward(0, x[:0], np.zeros((0, 1), np.int64), one[:0]).shape == (0, 256)


@pytest.mark.parametrize(
    ("fault", "force", "text"),
    [
        (Fault.COPY, "stream", "refused a copy"),
        (Fault.DEAF, "cpu", "stall_timeout_s"),
    ],
)
def test_a_fault_ends_the_wait_and_is_told(played, fault, force, text):
    scheduler = played(
        store_of(), cache={"fraction": 0.5}, policy={"force": force, "admit": "always"}, cpu={"stall_timeout_s": 0.3}
    )
    scheduler._runner.inject_fault(fault)
    x, one = np.ones((1, 256), np.float32), np.ones((1, 1), np.float32)
    with pytest.raises(WorkerError, match=text):
        scheduler.forward(0, x, [[1]], one)
    with pytest.raises(WorkerError):
        scheduler.forward(0, x, [[1]], one)


def test_without_a_gpu_the_error_says_what_is_missing(monkeypatch):
    def missing():
        raise DriverMissing("device 'cuda': NVIDIA's driver library was not found; use device='host'")

    monkeypatch.setattr(trilane.cuda_runner, "CudaDriver", missing)
    store = store_of()
    with pytest.raises(DeviceError, match="use device='host'"):
        ExpertScheduler(store, profile=profile_for(store), device="cuda")
    with pytest.raises(DeviceError, match="'rocm'"):
        ExpertScheduler(store, profile=profile_for(store), device="rocm")
    with ExpertScheduler(store, profile=profile_for(store), device="auto") as scheduler:
        run(scheduler, steps=1)


def test_the_real_driver_is_there_or_says_why_not():
    try:
        driver = CudaDriver()
    except DriverMissing as error:
        assert "device='host'" in str(error)
    else:
        assert driver.free_nbytes() > 0
        driver.close()
