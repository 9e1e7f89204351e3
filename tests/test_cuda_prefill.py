"""Large batches on a played GPU: bits of the reference, each missing expert copied once, and steps as before after."""

from __future__ import annotations

import time

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, profile_for, random_routing, random_store
from played_driver import PlayedDriver

import trilane.cuda_runner
from trilane import DeviceError
from trilane.cuda_crossover import Batch, decode_us, distinct_experts, prefill_is_faster
from trilane.errors import ArrayTypeError
from trilane.gpu_kernels.driver import DriverError
from trilane.host_runner import StepInput
from trilane.plan import make_options
from trilane.prefill_batches import cut_batches, place_shards


def store_of(formats="q8_0", **shape):
    return random_store(formats, **{"experts": 6, "hidden": 64, "intermediate": 288, **shape})


class DeviceArray:
    """An array that says it is on the GPU."""

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)

    @property
    def __cuda_array_interface__(self):
        return self.array.__array_interface__


def random_step(store, rows, top_k=2, seed=0, layer=0):
    rng = np.random.default_rng([seed, rows])
    x = rng.standard_normal((rows, store.hidden)).astype(np.float32)
    return x, *random_routing(rng, rows, top_k, store.layers[layer].num_experts)


def run(scheduler, rows, seed=0, layer=0):
    """A step, compared with the reference."""
    step = random_step(scheduler.store, rows, seed=seed, layer=layer)
    assert_same_bits(scheduler.forward(layer, *step), expected(scheduler.store, layer, *step), f"{rows} rows")


def passes(scheduler):
    return scheduler._runner.driver.calls.get("prefill_group", 0)


def resident(scheduler, layer=0):
    """(experts, shards): what the host takes for resident."""
    with scheduler._runner.threads.holding():
        return scheduler._runner.prefill._slot_of(layer).copy() >= 0


def copied_shards(scheduler, since, layer=0):
    """How often each shard of a layer was copied as a whole from the arena, (experts, shards)."""
    where, arena = scheduler.store.layers[layer], scheduler.store.arena
    layout, counts = where.layout, np.zeros((where.num_experts, where.layout.num_shards), int)
    covered = np.zeros(arena.nbytes, np.int8)
    for _, source, nbytes in scheduler._runner.driver.copies[since:]:
        if arena.address <= source < arena.address + arena.nbytes:
            covered[source - arena.address : source - arena.address + nbytes] += 1
    for (expert, shard), _ in np.ndenumerate(counts):
        start = where.offset + expert * where.stride + int(layout.shard_offset[shard])
        part = covered[start : start + int(layout.shard_nbytes[shard])]
        assert (part == part[0]).all(), "a shard was copied in part"
        counts[expert, shard] = part[0]
    return counts


# --------------------------------------------------------------------------------------------------- bits
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_batches_and_steps_in_turn_give_the_bits_of_the_reference(played, fraction):
    scheduler = played(
        store_of(layers=2),
        cache={"fraction": fraction},
        policy={"prefill_rows": 3, "force": "stream", "admit": "always"},
    )
    for seed, rows in enumerate((2, 3, 2, 33, 1, 150, 2)):
        run(scheduler, rows, seed, layer=seed % 2)
    assert passes(scheduler) == 3


@pytest.mark.parametrize(("formats", "kind"), [("q4_k+q6_k", "silu_glu"), ("mxfp4", "swiglu_oai")])
def test_other_formats(played, formats, kind):
    store = random_store(formats, kind, experts=5, hidden=256, intermediate=512)
    scheduler = played(store, cache={"fraction": 0.3}, policy={"prefill_rows": 4})
    for seed, rows in enumerate((2, 21, 2)):
        run(scheduler, rows, seed)
    assert passes(scheduler) == 1


def test_a_large_batch_chooses_by_itself_and_takes_several_passes(played, monkeypatch):
    monkeypatch.setattr(trilane.gpu_kernels.prefill_memory, "MAX_ROWS", 256)
    monkeypatch.setattr(trilane.gpu_kernels.prefill_memory, "MAX_POSITIONS", 2048)
    scheduler = played(store_of(intermediate=64), cache={"fraction": 0.3})
    run(scheduler, 600)
    assert passes(scheduler) == 3
    run(scheduler, 2)
    assert passes(scheduler) == 3


@pytest.mark.parametrize("pinned", [0.0, 0.5])
def test_pageable_experts_go_through_pinned_memory(played, monkeypatch, pinned):
    monkeypatch.setattr(trilane.cuda_stages, "BOUNCE_NBYTES", 5000)
    store = store_of()
    scheduler = played(
        store, cache={"fraction": 0.4}, host={"pin_limit": int(pinned * store.nbytes)},
        policy={"prefill_rows": 3, "admit": "always"},
    )  # fmt: skip
    for seed, rows in enumerate((2, 40, 2, 7)):
        run(scheduler, rows, seed)
    assert passes(scheduler) == 2


def test_copies_stay_within_one_registration(played, monkeypatch):
    monkeypatch.setattr(trilane.gpu_kernels.pinning, "SEGMENT_NBYTES", 5 * 4096)
    scheduler = played(store_of(), cache={"fraction": 0.4}, policy={"prefill_rows": 3})
    assert len(scheduler._runner.driver.registered) > 4
    run(scheduler, 20)


def submit(scheduler, x, ids, weights, layer=0):
    """A step with arrays on the GPU, not waited for; what it reads and writes."""
    arrays = [DeviceArray(a) for a in (x, ids, weights, np.zeros_like(x))]
    return scheduler.submit(layer, *arrays[:3], out=arrays[3]), arrays


def wait(scheduler):
    scheduler._runner.wait_for(scheduler._runner.device.work_stream)


@pytest.mark.parametrize("rows", [2, 64])
def test_router_weights_of_half_precision_on_the_gpu(played, rows):
    """As steps and as a pass; in float64 they are refused."""
    scheduler = played(store_of(), cache={"fraction": 0.4})
    x, ids, weights = random_step(scheduler.store, rows)
    half = weights.astype(np.float16)
    _, arrays = submit(scheduler, x, ids, half)
    wait(scheduler)
    assert_same_bits(arrays[3].array, expected(scheduler.store, 0, x, ids, half.astype(np.float32)))
    assert (passes(scheduler) > 0) == (rows == 64)
    with pytest.raises(ArrayTypeError, match="topk_weights: dtype float64, but float32 or float16"):
        submit(scheduler, x, ids, weights.astype(np.float64))


def test_batches_and_steps_that_nobody_waits_for(played):
    store = store_of(experts=8)
    scheduler = played(
        store, PlayedDriver(copy_s=0.003), cache={"slots": 4},
        policy={"prefill_rows": 5, "force": "stream", "admit": "always"},
    )  # fmt: skip
    steps = [random_step(store, 1 if number % 3 else 9, seed=number) for number in range(14)]
    kept = [submit(scheduler, *step) for step in steps]
    wait(scheduler)
    for (_, arrays), step in zip(kept, steps, strict=True):
        assert_same_bits(arrays[3].array, expected(store, 0, *step))
    assert passes(scheduler) == 5


class Replayed:
    """A step as a graph of the caller has it: the runner does not see when it runs."""

    def __init__(self, scheduler, x, ids, weights):
        self.runner, self.arrays = scheduler._runner, [np.ascontiguousarray(a) for a in (x, ids, weights, x)]
        x_at, ids_at, weights_at, out = (a.ctypes.data for a in self.arrays)
        stride = 4 * x.shape[1]
        step = StepInput(0, len(x), ids.shape[1], x_at, stride, "f32", out, stride, "f32")
        self.encoded = self.runner.launches.encode(step, ids_at, 8, weights_at)

    def run(self):
        self.encoded.launch(self.runner.driver.table, self.runner.device.work_stream)


@pytest.mark.parametrize("pinned", [0, 1 << 40])
def test_steps_of_a_graph_may_change_the_slots_before_a_pass(played, pinned):
    """What is gone then is read in place; what is pageable cannot be, and is copied while the stream is busy."""
    store, driver = store_of(experts=8), PlayedDriver(copy_s=0.01)
    scheduler = played(
        store, driver, cache={"slots": 4}, host={"pin_limit": pinned},
        policy={"prefill_rows": 5, "force": "stream", "admit": "always"},
    )  # fmt: skip
    x, one = np.ones((1, store.hidden), np.float32), np.ones((1, 2), np.float32)
    scheduler.forward(0, x, [[0, 1]], one)
    sources = {address for address, _ in scheduler._runner.device.prefill.bounces}
    sizes, step = store.layers[0].layout.shard_nbytes, random_step(store, 9)
    for busy in (False, True):
        before, here = len(driver.copies), resident(scheduler)
        assert here.sum() == 4
        if busy:
            graph = Replayed(scheduler, x, np.array([[5, 6]]), one)
            graph.run()
        _, arrays = submit(scheduler, *step)
        wait(scheduler)
        assert_same_bits(arrays[3].array, expected(store, 0, *step))
        through = sum(nbytes for _, source, nbytes in driver.copies[before:] if source in sources)
        assert through == (((~here | busy) * sizes).sum() if pinned == 0 else 0)
    assert not (resident(scheduler) & here).any()


def test_a_copy_that_the_driver_refuses_is_an_error_and_nothing_more(played):
    scheduler = played(store_of(), cache={"fraction": 0.3}, policy={"prefill_rows": 3})
    driver, copies = scheduler._runner.driver, []

    def refuse(*copy):
        copies.append(copy)
        raise DriverError("cuMemcpyHtoDAsync_v2: invalid argument (CUDA error 1)")

    driver.to_device = refuse
    with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync"):
        run(scheduler, 9)
    del driver.to_device
    for rows in (9, 2, 9):
        run(scheduler, rows)
    assert len(copies) == 1


# ------------------------------------------------------------------------------------------------- copies
@pytest.mark.alone
def test_residents_are_not_copied_again_and_the_rest_once(played):
    scheduler = played(store_of(experts=9), cache={"fraction": 0.4}, policy={"prefill_rows": 5, "admit": "always"})
    for seed in range(8):
        run(scheduler, 2, seed)
    time.sleep(0.01)
    before, here, stats = len(scheduler._runner.driver.copies), resident(scheduler), scheduler.stats()
    assert 0 < here.sum() < here.size
    x, ids, weights = random_step(scheduler.store, 40)
    ids = np.where(ids == 4, 5, ids)  # nobody is routed to 4
    wanted = expected(scheduler.store, 0, x, ids, weights)
    assert_same_bits(scheduler.forward(0, x, ids, weights), wanted)
    routed = np.isin(np.arange(9), ids)[:, None]
    counts = copied_shards(scheduler, before)
    assert (counts == (routed & ~here)).all()
    assert (resident(scheduler) == here).all()
    after = scheduler.stats()
    copied, hits = (after.lanes[lane].shards - stats.lanes[lane].shards for lane in ("stream", "hit"))
    assert (copied, hits) == ((routed & ~here).sum(), (routed & here).sum()) and after.rows - stats.rows == 40


def test_ids_that_only_the_gpu_knows_bring_the_whole_layer(played):
    store = store_of(layers=2)
    slow = PlayedDriver(copy_s=0.05)  # what is computed before its copy has landed is wrong
    scheduler = played(store, slow, cache={"fraction": 0.5}, policy={"prefill_rows": 5})
    x, ids, weights = random_step(store, 8, layer=1)
    ids = np.where(ids >= 0, 3, ids)
    _, arrays = submit(scheduler, x, ids, weights, layer=1)
    wait(scheduler)
    assert_same_bits(arrays[3].array, expected(store, 1, x, ids, weights))
    assert (copied_shards(scheduler, 0, layer=1) == 1).all() and not copied_shards(scheduler, 0, layer=0).any()


def test_everything_resident_copies_nothing(played):
    scheduler = played(
        store_of(), cache={"fraction": 1.0}, policy={"prefill_rows": 5, "force": "stream", "admit": "always"}
    )
    for seed in range(12):
        run(scheduler, 2, seed)
    assert resident(scheduler).all()
    before = len(scheduler._runner.driver.copies)
    run(scheduler, 50)
    assert len(scheduler._runner.driver.copies) == before and passes(scheduler) == 1


# ------------------------------------------------------------------------------------- when there is no pass
def test_a_captured_stream_and_a_small_gpu_take_steps(played, monkeypatch):
    scheduler = played(store_of(), cache={"fraction": 0.3}, policy={"prefill_rows": 3})
    scheduler._runner.driver.is_capturing = lambda stream: True
    run(scheduler, 9)
    assert passes(scheduler) == 0
    monkeypatch.setattr(trilane.gpu_kernels.cuda_device, "MOST_NBYTES", 20000)
    small = played(store_of(), cache={"fraction": 0.3}, policy={"prefill_rows": 3})
    run(small, 9)
    assert small._runner.prefill is None and "free device memory" in small.stats().inactive["prefill"]


def test_a_policy_without_copies_takes_steps(played):
    scheduler = played(store_of(), policy={"prefill_rows": 3, "force": "cpu"})
    run(scheduler, 9)
    assert passes(scheduler) == 0


# -------------------------------------------------------------------------------------------- arithmetic
def test_the_crossover_follows_the_rates():
    store = store_of(experts=128)
    rates = profile_for(store, link=50.0, zero_copy=50.0, cpu=60.0, device=1500.0).rates(
        "q8_0", shard_nbytes=1 << 20, threads=1
    )
    options = make_options()

    def batch(rows, missing=1.0, considered=128.0):
        return Batch(rows, 8, 128, considered, missing, 3e6, 170)

    taken = [prefill_is_faster(rates, options, batch(rows)) for rows in (1, 15, 64, 512, 4096)]
    assert taken == sorted(taken) and not taken[0] and taken[-1]
    assert prefill_is_faster(rates, options, batch(512, considered=10.0))
    assert not prefill_is_faster(rates, make_options(force="cpu"), batch(4096))
    slow = rates._replace(stream_us_per_byte=100 * rates.stream_us_per_byte)
    assert not prefill_is_faster(slow, options, batch(256))
    assert not prefill_is_faster(rates, options, batch(512), submit_us=1e6)
    unknown = rates._replace(stream_us_per_byte=float("inf"))
    assert [prefill_is_faster(unknown, options, batch(rows)) for rows in (170, 171)] == [False, True]
    assert decode_us(rates, options, batch(340)) >= 2 * decode_us(rates, options, batch(170)) * 0.99
    assert 7.99 < distinct_experts(1, 8, 128) < 8.01 and distinct_experts(4096, 8, 128) > 127.9


def test_batches_and_copies_of_neighbours(played):
    scheduler = played(store_of(experts=6))
    layer = scheduler._runner.device.layers[0]
    missing = np.array([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1], [0, 1]], bool)
    needed = np.array([1, 1, 1, 1, 1, 1], bool)
    batches = cut_batches(needed, missing, 3)
    assert batches.resident.tolist() == [2] and [b.tolist() for b in batches.staged] == [[0, 1, 3], [4, 5]]
    stride, (first, second) = layer.expert_stride, layer.layout.shard_offset.tolist()
    staged, copies = place_shards(layer, batches, missing, [1 << 20, 1 << 21])
    assert [c.source - layer.expert_base for c in copies[0]] == [0, 3 * stride]
    assert [c.destination - (1 << 20) for c in copies[0]] == [0, 2 * stride]
    assert copies[0][0].nbytes == stride + int(layer.layout.shard_nbytes[0])
    assert [(c.source - layer.expert_base, c.destination - (1 << 21)) for c in copies[1]] == [
        (4 * stride, 0), (5 * stride + second, stride + second),
    ]  # fmt: skip
    assert staged[0].tolist() == [1 << 20, (1 << 20) + second] and staged[1, 1] == 0 and not staged[2].any()
    assert staged[4, 0] == 1 << 21 and staged[5, 1] == (1 << 21) + stride + second and first == 0
