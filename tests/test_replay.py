"""Replay: the live decision code over a trace, against figures from elsewhere and against plain Python."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numba import config
from trace_cases import mixed_trace, random_tokens

from trilane import Config, ProfileError, TraceError
from trilane.machines import bundled_machines, load_machine
from trilane.plan import make_work
from trilane.planner import plan_layer
from trilane.policy import empty_state, policy_options
from trilane.profile import Curve, MachineProfile
from trilane.replay import Replay, shards_of
from trilane.traces.trace import HINT, STEP, TraceMeta
from trilane.traces.trace_file import read_trace
from trilane.traces.trace_summary import reuse_distances

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")

ROOT = Path(__file__).resolve().parent.parent
GPTOSS = ROOT / "benchmarks" / "data" / "gptoss20b_160conv.trace"
LRU = Config(cache={"pool": "layer", "eviction": "lru"}, policy={"force": "stream", "admit": "always"})
MACHINE = load_machine("rtx3090-ddr4")


@pytest.fixture(scope="module")
def gptoss():
    return read_trace(GPTOSS)


# Hit rates of an LRU cache by slots a layer on this trace, from a simulation that shares no code with this project.
@pytest.mark.parametrize(("slots", "wanted"), [(4, 0.4485), (8, 0.6639), (16, 0.8987)])
def test_hit_rates_of_lru_on_the_whole_trace(gptoss, slots, wanted):
    replay = Replay(gptoss, MACHINE, num_shards=1)
    assert replay.passes[-1] == 51487
    size = replay.slots_for(LRU, per_layer=slots, total=None, nbytes=None)
    result = replay.run("lru", LRU, size, single_lanes=False)
    assert abs(result.hit_rate - wanted) < 0.002
    distances = reuse_distances(gptoss)
    assert result.lanes["hit"].experts == distances[:slots].sum()
    assert result.fills == result.lanes["stream"].shards == distances[slots:].sum()
    assert result.evictions == result.fills - 24 * slots


@pytest.mark.parametrize("policy", [{}, {"admit": "always"}, {"force": "stream"}, {"lanes": ("cpu", "zero_copy")}])
@pytest.mark.parametrize("eviction", ["lru", "decayed_frequency"])
def test_replay_is_what_the_planner_does_step_by_step(policy, eviction):
    trace = random_tokens(60, starts=(0, 30))
    chosen = Config(cache={"eviction": eviction, "half_life_steps": 4}, policy=policy)
    replay = Replay(trace, MACHINE)
    result = replay.run("x", chosen, 20, single_lanes=False)
    state, work = empty_state(chosen, replay.geometry, 20), make_work(replay.geometry)
    times, shards = [], np.zeros(4, int)
    for clock, ids in enumerate(trace.ids.reshape(-1, 2)):
        experts, layer = np.unique(ids).astype(np.int32), clock % 3
        rates, rows = replay.rates[layer], np.ones(2, np.int32)
        options = policy_options(chosen)
        left = plan_layer(state, replay.geometry, rates, options, layer, experts, rows, 2, clock + 1, work)
        assert left == 0
        shards += work.counts[:4]
        times.append(work.predicted_us[7])
    assert [lane.shards for lane in result.lanes.values()] == shards.tolist()
    wanted = np.reshape(times, (60, 3)).sum(1) + 3 * MACHINE.gap_us
    np.testing.assert_allclose(result.pass_us, wanted, rtol=1e-12)
    assert result.mean_us == pytest.approx(wanted.mean()) and result.passes == 60


def test_any_model_and_any_batch():
    trace = mixed_trace(400)
    assert (trace.kind == HINT).any() and (trace.rows > 1).any()
    result = Replay(trace, MACHINE).run("x", Config(cache={"fraction": 0.3}), 200)
    assert result.steps == (trace.kind == STEP).sum()
    assert result.background_fills > 0
    assert set(result.single_lane_us) == {"stream", "zero_copy", "cpu"}
    routed = sum(lane.shards for lane in result.lanes.values())
    shards = np.array([2, 3, 1])
    start, wanted = trace.start, 0
    for event in np.flatnonzero(trace.kind == STEP):
        ids = trace.ids[start[event] : start[event + 1]]
        wanted += len(np.unique(ids[ids != trace.meta.no_expert])) * shards[trace.layer[event]]
    assert routed == wanted
    json.dumps(result.to_dict())


def test_fills_land_only_in_idle_link_time():
    trace = mixed_trace(400)
    chosen, fills = Config(cache={"fraction": 0.3}), []
    for gap in (0.0, 30.0, 1e6):
        machine = load_machine("rtx3090-ddr4", gap_us=gap)
        fills.append(Replay(trace, machine).run("x", chosen, 200, single_lanes=False).background_fills)
    assert fills[0] == 0 < fills[1] < fills[2]


def test_the_host_device_begins_only_fills_that_fit_between_two_layers():
    """There a fill that has not landed when a step comes gives its slot back: no bytes are kept."""
    trace, chosen = random_tokens(300), Config(cache={"fraction": 0.3})
    of_gpu = load_machine("rtx3090-ddr4", gap_us=0.0)
    here = replace(of_gpu, profile=replace(of_gpu.profile, machine=replace(of_gpu.profile.machine, gpu=None)))
    shard_us = 10 + 1e6 / 25.2e3
    fills = {}
    for name, machine in (("gpu", of_gpu), ("host", here)):
        for part in (0.9, 2.5):
            replay = Replay(trace, replace(machine, gap_us=part * shard_us), expert_nbytes=2_000_000, num_shards=2)
            found = replay.run("x", chosen, 60, single_lanes=False)
            fills[name, part] = found.background_fills / found.steps
    assert fills["host", 0.9] == 0 < fills["gpu", 0.9]
    assert 0 < fills["host", 2.5] <= 2 and fills["host", 2.5] < fills["gpu", 2.5]


def test_single_lanes_are_what_the_machine_gives():
    trace = random_tokens(40)
    machine = load_machine("h200-host")
    result = Replay(trace, machine, expert_nbytes=10_000_000, num_shards=1).run("x", Config(), 0)
    # Without slots every expert is missed: 2 experts a layer, 3 layers; nothing can be streamed.
    assert set(result.single_lane_us) == {"zero_copy", "cpu"}
    cpu = 3 * (10 + 2e7 / 90e3 + 60)
    in_place = 3 * (2e7 / 45e3 + 60)
    assert result.single_lane_us["cpu"] == pytest.approx(cpu)
    assert result.single_lane_us["zero_copy"] == pytest.approx(in_place)
    assert result.best_single_lane == "cpu" and result.mean_us <= cpu + 1e-9
    assert result.hit_rate == 0 and result.fills == 0


def test_stream_alone_without_room_is_refused_by_its_name():
    with pytest.raises(TraceError, match="lru: 0 slots of one shard are too few"):
        Replay(random_tokens(5), MACHINE).run("lru", LRU, 0)


def test_steps_larger_than_the_cache_run_in_waves():
    trace = random_tokens(10, layers=1, top_k=6)
    result = Replay(trace, MACHINE, expert_nbytes=1000, num_shards=1).run("x", LRU, 4, single_lanes=False)
    assert sum(lane.shards for lane in result.lanes.values()) == 60


def test_slots_by_layer_in_all_by_bytes_and_by_configuration():
    replay = Replay(random_tokens(5), MACHINE)  # 3 layers, 8 experts of 3 shards of at most 1000 bytes
    none = {"per_layer": None, "total": None, "nbytes": None}
    assert replay.slots_for(Config(), **none | {"per_layer": 2}) == 18
    assert replay.slots_for(Config(), **none | {"total": 7}) == 21
    assert replay.slots_for(Config(), **none | {"nbytes": 10_500}) == 10
    assert replay.slots_for(Config(cache={"slots": 5}), **none) == 5
    assert replay.slots_for(Config(), **none) == 18
    assert replay.slots_for(Config(), **none | {"per_layer": 99}) == 72


def test_sizes_of_experts():
    known = TraceMeta("m", (2, 2), ((10, 5), (8,)))
    unknown = TraceMeta("m", (2, 2))
    assert shards_of(known, None, None) == [(10, 5), (8,)]
    assert shards_of(known, None, 2) == [(8, 7), (4, 4)]
    assert shards_of(known, 30, None) == [(15, 15), (30,)]
    assert shards_of(unknown, 30, None) == [(30,), (30,)]
    assert shards_of(unknown, 31, 3) == [(11, 11, 9)] * 2
    for meta, nbytes, num in ((unknown, None, 2), (known, 3, 9), (known, 30, 5000), (unknown, 0, None)):
        with pytest.raises(TraceError):
            shards_of(meta, nbytes, num)


def test_an_empty_trace_has_no_times():
    result = Replay(random_tokens(5).first_passes(0), MACHINE).run("x", Config(), 10, single_lanes=False)
    assert (result.steps, result.passes, result.hit_rate, result.mean_us) == (0, 0, None, 0.0)


# ------------------------------------------------------------------------------------------------ machines
def test_bundled_machines_have_their_rates():
    assert len(bundled_machines()) == 8
    for name, row in bundled_machines().items():
        machine = load_machine(name)
        rates = machine.rates((1_000_000,) * 3)
        assert machine.gap_us == float(row["gap_us"]) and machine.source
        assert rates.stream_us_per_byte == pytest.approx(1e-3 / float(row["dma_gb_s"]))
        assert rates.run_fix_us == float(row["dma_fix_us"]) and rates.cpu_fix_us == float(row["cpu_fix_us"])
        assert rates.cpu_us_per_byte == pytest.approx(1e-3 / float(row["cpu_gb_s"]))
        assert rates.hit_us_per_byte == pytest.approx(1e-3 / float(row["vram_gb_s"]))
        assert rates.both_us_per_byte == pytest.approx(1e-3 / float(row["both_gb_s"]))
        for shards, experts in ((3, 1), (6, 2), (24, 8)):  # in flight, of thirds of an expert
            gb_s = float(row[f"zc{experts}_gb_s"])
            assert rates.zero_copy_us_per_byte[shards - 1] == pytest.approx(1e-3 / gb_s)


def test_a_profile_file_is_a_machine(tmp_path):
    profile = MachineProfile(
        pinned_to_device=Curve((1.0,), (20.0,)), cpu_experts={"q4_k": Curve((1.0, 8.0), (5.0, 30.0))},
        device_experts={"q4_k": 500.0},
    )  # fmt: skip
    path = tmp_path / "mine.json"
    path.write_text(profile.to_json())
    machine = load_machine(str(path), gap_us=7.0)
    assert (machine.name, machine.format, machine.gap_us) == ("mine", "q4_k", 7.0)
    assert machine.rates((1000,)).cpu_us_per_byte == pytest.approx(1e-3 / 30)
    with pytest.raises(ProfileError, match="no rates of 'q6_k'; it has q4_k"):
        load_machine(str(path), format_name="q6_k")
    path.write_text(MachineProfile().to_json())
    with pytest.raises(ProfileError, match="no weight format"):
        load_machine(str(path))


def test_unknown_machines_are_refused(tmp_path):
    with pytest.raises(ProfileError, match="Did you mean 'rtx3090-ddr4'"):
        load_machine("rtx3090")
    with pytest.raises(ProfileError, match="leave out --format"):
        load_machine("h200-host", format_name="q4_k")
    with pytest.raises(OSError, match="nothing.json"):
        load_machine(str(tmp_path / "nothing.json"))
