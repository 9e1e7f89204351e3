"""The host device's lanes under plans made by hand: each shard on any lane, cut anywhere, gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, random_routing, random_store
from numba import config

from trilane.cpu_kernels.host_device import PlayedRates
from trilane.cpu_kernels.host_lanes import _chunk
from trilane.cpu_kernels.words import Shard, TeamJob
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY
from trilane.host_run import DONE, WAITING, Step, finish_step, group_step, post_wave
from trilane.host_runner import StepInput
from trilane.host_step import point_rows

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
ROWS, TOP_K = 3, 2


def load_slot(runner, slot, layer, expert, j):
    """What a fill does, by hand."""
    layout = runner.store.layers[layer].layout
    start, nbytes = int(layout.shard_offset[j]), int(layout.shard_nbytes[j])
    source = runner.store.expert_bytes(layer, expert)[start : start + nbytes]
    offset = int(runner.tables.slot_address[slot]) - runner.device.slots.address
    runner.device.slots.view(offset, nbytes)[:] = source


def finish(run):
    """Its status in the end: on a busy machine it may have to wait again."""
    while (status := finish_step(run)) == WAITING:
        pass
    return status


def run_plan(runner, layer, hidden, ids, weights, lanes, fill):
    """One step whose shards go where ``lanes`` (a function of i, j) says; slots are handed out in turn."""
    runner.take_routing(ids, weights)
    out = np.full_like(hidden, np.nan)
    step = StepInput(
        layer, *ids.shape, hidden.ctypes.data, hidden.strides[0], "f32", out.ctypes.data, out.strides[0], "f32"
    )
    run, grouping, work = runner._run.held, runner.grouping, runner._work
    run.step[Step.LAYER : Step.OUT_ELEMENT + 1] = [
        step.layer, step.num_rows, step.top_k, step.hidden, step.hidden_stride, 0, step.out, step.out_stride, 0,
    ]  # fmt: skip
    num = group_step(run)
    shards, slot = int(runner.tables.num_shards[layer]), 0
    work.run[:], work.slot[:], work.victim[:], work.counts[:] = 0, -1, -1, 0
    runner.device.slots.bytes[:] = 0xA5
    for i in range(num):
        for j in range(shards):
            at = i * shards + j
            work.lane[at] = lanes(i, j)
            work.counts[work.lane[at]] += 1
            if work.lane[at] in (HIT, STREAM) or (work.lane[at] == ZERO_COPY and fill):
                work.slot[at] = slot
                if work.lane[at] == HIT:
                    load_slot(runner, slot, layer, int(grouping.experts[i]), j)
                slot += 1
    run.step[Step.UNPLACED] = 0
    positions = int(grouping.rows[:num].sum())
    strides = run.step[Step.INT8_STRIDE], run.step[Step.FLOATS_STRIDE]
    point_rows(runner.tables, runner.ws, grouping, layer, positions, *strides)
    assert post_wave(run) == DONE
    assert finish(run) == DONE
    check_fills(runner, layer, num, shards)
    return out


def check_fills(runner, layer, num, shards):
    """Every slot that the plan filled holds its shard."""
    layout, work = runner.store.layers[layer].layout, runner._work
    for at in range(num * shards):
        if work.slot[at] >= 0:
            nbytes, start = (int(part[at % shards]) for part in (layout.shard_nbytes, layout.shard_offset))
            source = runner.store.expert_bytes(layer, int(runner.grouping.experts[at // shards]))
            offset = int(runner.tables.slot_address[work.slot[at]]) - runner.device.slots.address
            np.testing.assert_array_equal(runner.device.slots.view(offset, nbytes), source[start : start + nbytes])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("formats", ["q4_k+q6_k", "mxfp4", "f16", "q6_k+mxfp4+f32"])
def test_shards_split_anywhere(scheduler_of, formats, threads):
    kind = "swiglu_oai" if formats == "mxfp4" else "silu_glu"
    hidden = 96 if formats == "f16" else 256
    intermediate = 1280 if formats == "q4_k+q6_k" else 800
    store = random_store(formats, kind, experts=4, hidden=hidden, intermediate=intermediate)
    runner = scheduler_of(store, cpu={"threads": threads}, cache={"fraction": 1.0})._runner
    rng = np.random.default_rng(threads)
    hidden_rows = rng.standard_normal((ROWS, store.hidden)).astype(np.float32)
    ids, weights = random_routing(rng, ROWS, TOP_K, 4)
    wanted = expected(store, 0, hidden_rows, ids, weights)
    for turn in range(24):
        lanes = rng.choice(4, (4, 8), p=rng.dirichlet([0.5] * 4))
        out = run_plan(runner, 0, hidden_rows, ids, weights, lambda i, j, lanes=lanes: lanes[i, j], fill=turn % 2)
        assert_same_bits(out, wanted, f"lanes {lanes.tolist()}")


@pytest.mark.parametrize("lane", [HIT, STREAM, ZERO_COPY, CPU])
def test_one_expert_in_two_parts(scheduler_of, lane):
    """Every cut of an expert between a lane and each other one, the short last shard on either side."""
    store = random_store("q8_0", experts=2, hidden=96, intermediate=1056)
    runner = scheduler_of(store, cpu={"threads": 2}, cache={"fraction": 1.0})._runner
    x = np.random.default_rng(0).standard_normal((1, 96)).astype(np.float32)
    ids, weights = np.array([[1]]), np.ones((1, 1), np.float32)
    wanted = expected(store, 0, x, ids, weights)
    for other in (HIT, STREAM, ZERO_COPY, CPU):
        for cut in range(6):
            out = run_plan(runner, 0, x, ids, weights, lambda i, j, c=cut, o=other: lane if j < c else o, fill=False)
            assert_same_bits(out, wanted, f"{lane} up to {cut}, then {other}")


@pytest.mark.parametrize("up_chunks", [1, 2, 3, 7, 16, 32])
@pytest.mark.parametrize("down_chunks", [1, 2, 5, 8])
def test_shards_are_cut_into_any_chunks(scheduler_of, up_chunks, down_chunks):
    """Chunks of no rows (more chunks than fours of rows) do no harm either."""
    store = random_store("mxfp4", experts=3, hidden=288, intermediate=288)
    runner = scheduler_of(store, cpu={"threads": 2}, cache={"slots": 0})._runner
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 288)).astype(np.float32)
    ids, weights = random_routing(rng, 2, 2, 3, skips=False)
    runner.take_routing(ids, weights)
    out = run_plan(runner, 0, x, ids, weights, lambda i, j: CPU, fill=False)  # sets all but the chunks
    team, lane = runner.ws.team_job, runner.device.team
    team[TeamJob.UP_CHUNKS], team[TeamJob.DOWN_CHUNKS], team[TeamJob.DONE] = up_chunks, down_chunks, 0
    runner.ws.shards[:, Shard.PROGRESS] = 0
    runner.ws.parts[:] = np.nan
    tasks = int(team[TeamJob.NUM_SHARDS]) * (up_chunks + down_chunks)
    lane.run(runner.device.addresses["TEAM_TASK"], team.ctypes.data, tasks)
    assert finish(runner._run.held) == DONE
    assert_same_bits(out, expected(store, 0, x, ids, weights))


@pytest.mark.parametrize("size", [0, 32, 64, 96, 256, 2880])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8, 11, 64])
def test_chunks_cover_all_rows_once(size, num_chunks):
    starts = [_chunk(size, chunk, num_chunks) for chunk in range(num_chunks + 1)]
    assert starts[0] == 0 and starts[-1] == size and starts == sorted(starts)
    assert all(start % 4 == 0 for start in starts[:-1])


@pytest.mark.alone
def test_played_lanes_take_the_time_that_they_play(scheduler_of):
    """Slower than the machine, each lane by its own rate. A busy machine may add to one try, not to all."""
    store = random_store("q8_0", experts=4, hidden=256, intermediate=512)
    nbytes = float(store.layers[0].layout.shard_nbytes.sum())
    played = {"link_gb_s": nbytes / 8e6, "zero_copy_gb_s": nbytes / 10e6, "cpu_gb_s": nbytes / 12e6}
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)
    weights = [[1.0]]
    for lane, place, wanted_us in (("stream", 1, 8e3), ("zero_copy", 1, 10e3), ("cpu", 2, 12e3)):
        scheduler = scheduler_of(store, policy={"force": lane}, host_device=played, cache={"fraction": 1.0})
        took_us = []
        for expert in range(4):
            ids = [[expert]]
            assert_same_bits(scheduler.forward(0, x, ids, weights), expected(store, 0, x, ids, weights))
            took_us.append(scheduler._runner.lane_us[place])
        assert 0.999 * wanted_us <= min(took_us) < wanted_us + 4e3, f"{lane}: {took_us} us"
        assert scheduler.stats().played == {name: pytest.approx(rate) for name, rate in played.items()}


@pytest.mark.alone
def test_resident_shards_play_their_rate_too(scheduler_of):
    store = random_store("q8_0", experts=4, hidden=256, intermediate=512)
    nbytes = float(store.layers[0].layout.shard_nbytes.sum())
    scheduler = scheduler_of(
        store, policy={"force": "stream"}, cache={"fraction": 1.0}, host_device={"hit_gb_s": nbytes / 9e6}
    )
    x = np.ones((1, 256), np.float32)
    took_us = []
    for _ in range(5):
        scheduler.forward(0, x, [[2]], [[1.0]])
        took_us.append(scheduler._runner.lane_us[0])
    assert 0.999 * 9e3 <= min(took_us[1:]) < 13e3, took_us


def test_played_rates():
    assert PlayedRates().given() == {} and PlayedRates().ns_per_byte("link_gb_s") == 0
    rates = PlayedRates(link_gb_s=4.0, link_fix_us=0.0)
    assert rates.given() == {"link_gb_s": 4.0, "link_fix_us": 0.0} and rates.ns_per_byte("link_gb_s") == 0.25
