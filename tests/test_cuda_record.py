"""Recording runs on a GPU: replayed, all that the control thread decided comes out the same; the driver is played."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
import pytest
from expert_cases import random_routing, random_store

from trilane import cuda_recorder
from trilane.cuda_words import Control
from trilane.traces.trace import (
    BACKGROUND,
    GAP,
    HINT,
    NOT_PLANNED,
    REQUEST,
    SETTLED,
    STEP,
    TOUCHED,
    UNDER_WAY,
    check_events,
)
from trilane.traces.trace_file import read_trace
from trilane.verify import verify

X = np.ones((1, 256), np.float32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.trace"


def store_of(**shape):
    return random_store("q8_0", **{"layers": 4, "experts": 8, "hidden": 256, "intermediate": 512, **shape})


def step(scheduler, layer, experts):
    scheduler.forward(layer, X, np.array([experts]), np.full((1, len(experts)), 0.5, np.float32))


def drive(scheduler, passes=12, rows=(1, 1, 1, 3), hints=0.1, seed=0, nap_s=0.001):
    """Steps of one and of several rows, mostly through the same experts of a layer, some hints between them."""
    rng, store = np.random.default_rng(seed), scheduler.store
    for number in range(passes):
        for layer in range(store.num_layers):
            experts, count = store.layers[layer].num_experts, int(rng.choice(rows))
            ids, weights = random_routing(rng, count, 2, experts)
            if count == 1 and number % 3:
                ids = np.array([[layer % experts, (layer + 3) % experts]])
            scheduler.forward(layer, np.repeat(X, count, 0), ids, weights)
            if rng.random() < hints:
                scheduler.hint((layer + 1) % store.num_layers, rng.permutation(experts)[:3])
            time.sleep(nap_s)


def checked(path):
    """The trace of a run, whose plans come out the same when it is replayed."""
    trace = read_trace(path)
    check_events(trace)
    found = verify(trace)
    assert found.differences == ()
    kinds = np.bincount(trace.kind, minlength=9)
    planned = (trace.digest[trace.kind == STEP] != NOT_PLANNED).sum()
    assert found.plans == planned + kinds[HINT] + kinds[BACKGROUND] and found.baselines == len(trace.baselines)
    return trace, kinds


@pytest.mark.parametrize(
    "cache",
    [{"fraction": 0.3}, {"fraction": 0.6}, {"fraction": 0.4, "eviction": "lru", "pool": "layer"},
     {"fraction": 0.4, "eviction": "decayed_frequency"}],
)  # fmt: skip
@pytest.mark.parametrize("policy", [{}, {"lanes": ["cpu"]}, {"force": "stream"}, {"admit": "always"}])
def test_a_replayed_run_has_identical_plans(played, path, cache, policy):
    scheduler = played(store_of(), cache=cache, policy=policy, record={"path": path})
    drive(scheduler)
    stats, rescues = scheduler.stats(), scheduler._runner.threads.control[Control.RESCUES]
    scheduler.close()
    trace, kinds = checked(path)
    steps = trace.kind == STEP
    assert 0 < kinds[STEP] <= 48 and (trace.digest[steps] != NOT_PLANNED).any()
    assert len(trace.baselines) == 1 or rescues > 0  # where copies come late, slots are frozen for a while
    landed = trace.ids[np.repeat(trace.kind == SETTLED, np.diff(trace.start))]
    assert stats.background_fills >= (landed == 1).sum()


def test_steps_that_nobody_planned_and_fills_are_part_of_it(played, path):
    scheduler = played(store_of(layers=6), cache={"fraction": 0.35}, policy={"lanes": ["cpu"]}, record={"path": path})
    for _ in range(40):
        for layer in range(6):
            step(scheduler, layer, [layer, 7])
            time.sleep(0.002)
        if scheduler.stats().background_fills >= 4:
            break
    for layer in range(6):
        step(scheduler, layer, [layer, 7])
    scheduler.close()
    trace, kinds = checked(path)
    assert (trace.digest[trace.kind == STEP] == NOT_PLANNED).any()
    assert kinds[BACKGROUND] > 0 and kinds[SETTLED] > 0


def test_what_the_control_thread_does_not_hear_of_is_a_gap(played, path):
    """Steps of several rows without misses are not told; their uses are, later, by stamps."""
    policy = {"force": "zero_copy", "admit": "always", "background": False}
    scheduler = played(store_of(layers=1), cache={"fraction": 0.5}, policy=policy, record={"path": path})
    for experts in ([0, 1], [2, 3]):
        step(scheduler, 0, experts)
    for _ in range(3):
        scheduler.forward(0, np.repeat(X, 3, 0), np.array([[0, 1], [2, 3], [1, 2]]), np.ones((3, 2), np.float32))
    step(scheduler, 0, [4, 5])
    step(scheduler, 0, [6, 0])
    scheduler.close()
    trace, kinds = checked(path)
    assert kinds[GAP] >= 1 and kinds[TOUCHED] >= 1
    events = np.flatnonzero(trace.kind == GAP)
    first = int(trace.start[events[0]])
    assert trace.ids[first : first + 4].tolist() == [3, 0, 0, 0]


@pytest.mark.parametrize("eviction", ["lru", "predicted"])
def test_fills_from_pageable_memory_are_given_up_at_once(played, path, eviction):
    store = store_of()
    scheduler = played(
        store, cache={"fraction": 0.5, "eviction": eviction}, policy={"lanes": ["cpu"], "background": False},
        host={"pin_limit": store.arena.nbytes // 2}, record={"path": path},
    )  # fmt: skip
    for layer in range(4):
        step(scheduler, layer, [0, 1])
        scheduler.hint(layer, [2, 3, 4])
        for _ in range(12):
            step(scheduler, layer, [0, 1])
            time.sleep(0.001)
    scheduler.close()
    trace, kinds = checked(path)
    ends = trace.ids[np.repeat(trace.kind == SETTLED, np.diff(trace.start))]
    assert kinds[HINT] == 4 and 0 in ends and 1 in ends
    if eviction == "lru":
        assert set(ends.tolist()) <= {0, 1, UNDER_WAY}


def test_a_reset_and_other_options_begin_anew(played, path):
    scheduler = played(store_of(), cache={"fraction": 0.4}, record={"path": path})
    runner = scheduler._runner
    drive(scheduler, 4)
    runner.reset()
    drive(scheduler, 3, seed=1)
    runner.use_options(runner.options._replace(lanes=1 << 3))
    drive(scheduler, 3, seed=2)
    runner.rates = [one._replace(cpu_us_per_byte=2 * one.cpu_us_per_byte) for one in runner.rates]
    drive(scheduler, 3, seed=3)
    scheduler.close()
    trace, _ = checked(path)
    assert len(trace.baselines) >= 4 and {base.settings["options"]["lanes"] for base in trace.baselines} == {14, 8}


def test_a_tape_that_is_full_begins_anew(played, path, monkeypatch):
    monkeypatch.setattr("trilane.cuda_runner.TAPE_EVENTS", 4)
    monkeypatch.setattr(cuda_recorder, "DRAIN_S", 0.5)
    scheduler = played(store_of(), cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 20, nap_s=0.005)
    scheduler.close()
    trace, kinds = checked(path)
    assert len(trace.baselines) > 1 and 4 < kinds[STEP] < 80


def test_requests_are_recorded_and_a_second_run_appends(played, path):
    for _ in range(2):
        policy = {"background": False, "force": "zero_copy"}
        scheduler = played(store_of(), cache={"fraction": 0.4}, policy=policy, record={"path": path})
        with scheduler.request():
            step(scheduler, 0, [1, 2])
        with scheduler.request():
            step(scheduler, 1, [1, 2])
        scheduler.close()
    trace, kinds = checked(path)
    assert trace.kind.tolist() == [REQUEST, STEP, REQUEST, STEP] * 2 and kinds[STEP] == 4
    assert trace.layer[trace.kind == STEP].tolist() == [0, 1] * 2
    assert trace.ids[: 2 * 4].reshape(4, 2).tolist() == [[1, 2]] * 4


def test_slots_that_are_frozen_end_the_taping(played, path):
    scheduler = played(store_of(), cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 2)
    control = scheduler._runner.threads.control
    with scheduler._runner.threads.holding():
        scheduler._runner.recorder.drain()
        control[Control.FROZEN] = 1
    step(scheduler, 0, [5, 6])
    deadline = time.monotonic() + 5
    while not (control[Control.FROZEN] == 0 and control[Control.TAPING]) and time.monotonic() < deadline:
        time.sleep(0.01)
    drive(scheduler, 2, seed=1)
    scheduler.close()
    trace, _ = checked(path)
    assert len(trace.baselines) >= 1


def test_a_disk_that_fails_ends_the_recording_only(played, path, caplog):
    scheduler = played(store_of(), cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler, 2)

    def fail(block):
        raise OSError(28, os.strerror(28))

    recorder = scheduler._runner.recorder
    recorder._appender.append = fail
    drive(scheduler, 4, seed=1)
    recorder.drain()
    drive(scheduler, 2, seed=2)
    assert "No space left" in scheduler.stats().inactive["record"] and "recording ended" in caplog.text
    scheduler.close()
    checked(path)


def test_one_other_word_is_found(played, path):
    scheduler = played(store_of(), cache={"fraction": 0.4}, record={"path": path})
    drive(scheduler)
    scheduler.close()
    trace, _ = checked(path)
    digest = trace.digest.copy()
    planned = np.flatnonzero((trace.kind == STEP) & (trace.digest != NOT_PLANNED))
    digest[planned[len(planned) // 2]] ^= 1
    assert len(verify(replace(trace, digest=digest)).differences) == 1
