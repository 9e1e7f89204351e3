"""Recording live runs: replayed, their plans come out the same, whatever happened in between."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from expert_cases import random_layer, random_store
from numba import config
from test_trace_file import mutated, payloads
from trace_cases import assert_same_trace, drive

from trilane import ExpertStore, TraceError
from trilane.plan import make_options
from trilane.state import NUM_NEAR, NUM_PAST
from trilane.traces import block_file as blocks
from trilane.traces.trace import BACKGROUND, HINT, REQUEST, SETTLED, STEP, WAVE, Trace
from trilane.traces.trace_file import append_trace, read_trace
from trilane.verify import verify

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")

POLICIES = {
    "all lanes": {},
    "always admitted": {"admit": "always"},
    "stream alone": {"force": "stream"},
    "zero-copy alone": {"force": "zero_copy"},
    "CPU alone": {"force": "cpu"},
    "no fills": {"fills": False},
    "two lanes": {"lanes": ("zero_copy", "cpu")},
}


@pytest.fixture(scope="module")
def store():
    return random_store("q8_0", layers=3, experts=6, hidden=256, intermediate=544)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.trace"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("cache", [{"fraction": 0.4}, {"fraction": 0.6, "eviction": "lru", "pool": "layer"}])
def test_a_replayed_live_run_has_identical_plans(store, scheduler_of, path, policy, cache):
    scheduler = scheduler_of(store, cache=cache, policy=policy, record={"path": path})
    drive(scheduler, 90)
    stats = scheduler.stats()
    scheduler.close()
    trace = read_trace(path)
    found = verify(trace)
    kinds = np.bincount(trace.kind, minlength=7)
    assert kinds[STEP] == 90 == stats.steps
    assert found.differences == () and found.plans == kinds[STEP] + kinds[WAVE] + kinds[HINT] + kinds[BACKGROUND]
    if policy.get("fills", True):
        landed = trace.ids[np.repeat(trace.kind == SETTLED, np.diff(trace.start))]
        assert stats.background_fills == (landed == 1).sum() > 0


def test_fills_that_were_given_up_are_part_of_the_run(store, scheduler_of, path):
    slow = {"link_gb_s": 0.02}
    scheduler = scheduler_of(store, cache={"fraction": 0.5}, host_device=slow, record={"path": path})
    drive(scheduler, 40, hints=0.8)
    scheduler.close()
    trace = read_trace(path)
    landed = trace.ids[np.repeat(trace.kind == SETTLED, np.diff(trace.start))]
    assert set(landed.tolist()) == {0, 1}
    assert verify(trace).differences == ()


def test_one_other_word_in_a_plan_is_found(store, scheduler_of, path):
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 60)
    scheduler.close()
    trace = read_trace(path)
    digest = trace.digest.copy()
    event = int(np.flatnonzero(trace.kind == STEP)[40])
    digest[event] ^= 1
    wrong = dataclasses.replace(trace, digest=digest)
    assert verify(wrong).differences == (f"event {event}, a step of layer {trace.layer[event]}",)
    ids = trace.ids.copy()
    first = int(trace.start[event])
    ids[first] = (ids[first] + 1) % 6
    assert verify(dataclasses.replace(trace, ids=ids)).differences


def test_steps_in_waves_and_batches_in_parts(store, scheduler_of, path, monkeypatch):
    monkeypatch.setattr("trilane.host_runner.SCRATCH_NBYTES", 1 << 20)
    scheduler = scheduler_of(store, cache={"slots": 5}, policy={"force": "stream"}, record={"path": path})
    drive(scheduler, 30, rows=(1, 3, 700))
    scheduler.close()
    trace = read_trace(path)
    assert (trace.kind == WAVE).any() and (trace.kind == STEP).sum() > 30
    assert verify(trace).differences == ()


def test_layers_that_differ_and_ids_past_one_byte(scheduler_of, path):
    rng = np.random.default_rng(1)
    layers = [random_layer(rng, experts, 32, 32 * size) for experts, size in ((300, 1), (4, 9), (7, 17))]
    scheduler = scheduler_of(
        ExpertStore.from_arrays(layers, formats="q8_0"), cache={"fraction": 0.3}, record={"path": path}
    )
    drive(scheduler, 45)
    scheduler.close()
    trace = read_trace(path)
    assert trace.meta.num_experts == (300, 4, 7) and [len(s) for s in trace.meta.shard_nbytes] == [1, 2, 3]
    assert trace.ids.dtype == np.uint16 and trace.ids.max() == 0xFFFF
    assert verify(trace).differences == ()


def test_routing_and_requests_are_recorded_as_they_came(store, scheduler_of, path):
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, policy={"background": False}, record={"path": path})
    x = np.ones((2, 256), np.float32)
    with scheduler.request():
        scheduler.forward(1, x, [[0, 5], [-1, 6]], [[0.25, 0.75], [1.0, 0.5]])
    with scheduler.request():
        pass
    scheduler.close()
    trace = read_trace(path)
    assert trace.kind.tolist() == [REQUEST, STEP, REQUEST]
    assert trace.ids.tolist() == [0, 5, 255, 255]
    assert trace.weights.tolist() == [0.25, 0.75, 1.0, 0.5]
    assert trace.meta.num_experts == (6, 6, 6)


def test_what_is_no_event_is_followed_by_a_new_baseline(store, scheduler_of, path, monkeypatch):
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    runner = scheduler._runner
    drive(scheduler, 20)
    runner.use_options(make_options(force="cpu"))
    drive(scheduler, 20)
    runner.rates = [rates._replace(cpu_us_per_byte=1e-6) for rates in runner.rates]
    drive(scheduler, 20)

    def interrupt(tickets):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_finish_step", lambda address: 1)  # WAITING
        patch.setattr(runner.device, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            drive(scheduler, 1)
    scheduler._ticket = None
    drive(scheduler, 20)
    runner.reset()
    drive(scheduler, 20)
    scheduler.close()
    trace = read_trace(path)
    found = verify(trace)
    assert (found.baselines, found.differences) == (5, ())


def test_a_second_run_is_appended(store, scheduler_of, path):
    for seed in (1, 2):
        scheduler = scheduler_of(store, cache={"fraction": 0.2 * seed}, record={"path": path})
        drive(scheduler, 30, seed=seed)
        scheduler.close()
    trace = read_trace(path)
    found = verify(trace)
    assert (trace.kind == STEP).sum() == 60 and (found.baselines, found.differences) == (2, ())
    other = path.with_name("copy.trace")
    append_trace(other, trace)
    assert_same_trace(read_trace(other), trace)
    assert verify(read_trace(other)) == found


def test_two_schedulers_cannot_share_a_file(store, scheduler_of, path):
    scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    with pytest.raises(TraceError, match="another scheduler"):
        scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})


def test_full_tapes_are_written_while_the_run_goes_on(store, scheduler_of, path, monkeypatch):
    monkeypatch.setattr("trilane.tape.TAPE_EVENTS", 7)
    monkeypatch.setattr("trilane.recorder.FLUSH_S", 0.05)
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 50)
    deadline = time.monotonic() + 20
    while read_trace(path).num_events < 40 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert read_trace(path).num_events >= 40
    scheduler.close()
    assert verify(read_trace(path)).differences == ()


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(store, scheduler_of, path, monkeypatch, caplog):
    monkeypatch.setattr("trilane.tape.TAPE_EVENTS", 4)
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})

    def fail(block):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scheduler._runner.recorder._appender, "append", fail)
    with caplog.at_level(logging.WARNING, "trilane"):
        drive(scheduler, 40)
        deadline = time.monotonic() + 20
        while "record" not in scheduler.stats().inactive and time.monotonic() < deadline:
            drive(scheduler, 4)
    assert "No space left" in scheduler.stats().inactive["record"] and "recording ended" in caplog.text
    drive(scheduler, 40)


def test_a_path_that_cannot_be_written_is_told_at_once(store, scheduler_of, tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        scheduler_of(store, cache={"fraction": 0.4}, record={"path": tmp_path / "nowhere" / "x.trace"})


def test_imported_traces_and_other_versions_are_not_verified(store, scheduler_of, path):
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 10)
    scheduler.close()
    trace = read_trace(path)
    with pytest.raises(TraceError, match="holds no live run"):
        verify(dataclasses.replace(trace, baselines=()))
    base = trace.baselines[0]
    for change in (
        {"settings": {**base.settings, "clock": -1}},
        {"settings": {**base.settings, "options": {}}},
        {"settings": {**base.settings, "options": {**base.settings["options"], "lanes": 1}}},
        {"rates": base.rates[:1]},
        {"rates": ({**base.rates[0], "step_fix_us": -1.0},) * 3},
        {"rates": ({"step_fix_us": 1.0},) * 3},
        {"state": {**base.state, "owner": base.state["owner"][:-1]}},
        {"state": {**base.state, "owner": base.state["owner"] + 1}},
        {"state": {**base.state, "num_held": np.array([99])}},
        {"state": {**base.state, "num_free": base.state["num_free"] + 1}},
        {"state": {**base.state, "slot_of": base.state["slot_of"].astype(np.int64)}},
        {"state": {**base.state, "eviction": 7}},
        {"state": {**base.state, "past": np.full_like(base.state["past"], 1 << 31)}},
        {"state": {**base.state, "row": base.state["row"] + NUM_PAST}},
        {"state": {**base.state, "near": base.state["near"] + NUM_PAST}},
        {"state": {**base.state, "near_rate": base.state["near_rate"] + 200, "num_near": np.array([2])}},
        {"state": {**base.state, "num_near": np.array([NUM_NEAR + 1])}},
        {"state": {**base.state, "last_layer": base.state["last_layer"] - 9}},
        {"state": {name: value for name, value in base.state.items() if name != "heap"}},
    ):
        with pytest.raises(TraceError, match="cannot be used"):
            verify(dataclasses.replace(trace, baselines=(dataclasses.replace(base, **change),)))


def test_forged_recordings_are_refused_or_differ_but_do_no_harm(store, scheduler_of, path):
    """Checksums are right, contents are not: compiled code must never see a state that it could leave."""
    import random

    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 40)
    scheduler.close()
    data, rng = path.read_bytes(), random.Random(3)
    whole, verified = list(payloads(data)), 0
    for _ in range(600):
        chosen = rng.randrange(len(whole))
        forged = [(kind, mutated(rng, p) if i == chosen else p) for i, (kind, p) in enumerate(whole)]
        body = b"".join(blocks.encode_block(kind, payload, blocks.RAW) for kind, payload in forged)
        path.write_bytes(data[: blocks.FILE_HEAD.size] + body)
        try:
            verify(read_trace(path, max_nbytes=1 << 24))
            verified += 1
        except TraceError:
            pass
    assert 0 < verified < 600


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from expert_cases import open_scheduler, random_store
from trace_cases import drive
store = random_store("q8_0", layers=3, experts=6, hidden=256, intermediate=544)
with open_scheduler(store, cache={{"fraction": 0.4}}) as scheduler:
    print("ready", flush=True)
    for seed in range({runs}):
        drive(scheduler, 30, seed=seed)
"""


def program(runs: int) -> str:
    return textwrap.dedent(PROGRAM.format(tests=str(Path(__file__).parent), runs=runs))


def test_a_killed_run_leaves_a_trace_that_verifies_and_can_go_on(store, scheduler_of, path):
    environment = os.environ | {"TRILANE_RECORD_PATH": str(path)}
    with subprocess.Popen([sys.executable, "-c", program(10**6)], stdout=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while (not path.exists() or path.stat().st_size < 4000) and time.monotonic() < deadline:
            time.sleep(0.1)
        running.send_signal(signal.SIGKILL)
    before = verify(read_trace(path))
    assert before.plans > 30 and before.differences == ()
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 10)
    scheduler.close()
    after = verify(read_trace(path))
    assert after.baselines == before.baselines + 1 and after.plans > before.plans and after.differences == ()


def test_the_trace_is_whole_when_a_program_ends_without_close(path):
    code = program(1).replace("with open", "scheduler = open").replace(") as scheduler:", ")\nif 1:")
    environment = os.environ | {"TRILANE_RECORD_PATH": str(path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    trace = read_trace(path)
    assert isinstance(trace, Trace) and (trace.kind == STEP).sum() == 30
    assert verify(trace).differences == ()
