"""A start that takes over what the run before left: the same slots, what fits of them, or nothing and the reason."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, open_scheduler, random_routing, random_store
from numba import config
from played_driver import PlayedDriver
from test_trace_file import mutated
from trace_cases import drive, drive_until_full

from trilane import ConfigError, ExpertStore, WorkerError, calibrate
from trilane.cuda_words import Control, Fault
from trilane.profile import Machine
from trilane.profile_cache import machine_name
from trilane.state import NUM_PAST, check
from trilane.traces.trace_file import read_trace
from trilane.verify import verify
from trilane.warm_file import HEAD, MAGIC, VERSION, WarmFile, decode, encode, model_digest, warm_file
from trilane.warm_start import Unusable, take_hot_set, warm_state

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")

SHAPE = dict(layers=3, experts=6, hidden=256, intermediate=544)
EVICTIONS = ("lru", "decayed_frequency", "predicted")
HALF_LIFE = 16.0


@pytest.fixture(scope="module")
def store():
    return random_store("q8_0", **SHAPE)


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder / "hot.warm"


@pytest.fixture
def warm(store, scheduler_of, path):
    """Opens schedulers that load from and save to one file."""

    def open_one(store=store, rates=None, **sections):
        sections.setdefault("cache", {}).setdefault("slots", 20)
        return scheduler_of(store, rates, **({"warm_start": {"enabled": True, "path": path}} | sections))

    return open_one


@pytest.fixture
def left(warm):
    """What a run of 90 steps or more left behind: its state and what was in its slots when it was closed."""
    scheduler = warm()
    drive_until_full(scheduler, 90)
    end(scheduler)
    return scheduler._runner


def end(scheduler):
    """Close it with no fill under way, which would be in no slot yet."""
    scheduler._runner.settle_fills(let_end=True)
    scheduler.close()


def residents(runner):
    return set(np.flatnonzero(runner.state.slot_of >= 0).tolist())


def experts_by_worth(hot, geometry):
    """Keys of the experts that were resident, of most worth first."""
    keys = sorted({expert_of(geometry, shard) for shard in np.flatnonzero(hot.is_resident)})
    return sorted(keys, key=lambda key: (-hot.worth[key], -key))


def expert_of(geometry, shard):
    layer = int(np.searchsorted(geometry.first_shard, shard, side="right")) - 1
    return int(geometry.first_expert[layer] + (shard - geometry.first_shard[layer]) // geometry.num_shards[layer])


def assert_slots_hold(runner, addresses=None):
    """Every slot has the bytes of the shard that the state says."""
    addresses = runner.tables.slot_address if addresses is None else addresses
    geometry, store = runner.geometry, runner.store
    for slot, shard in enumerate(runner.state.owner.tolist()):
        if shard < 0:
            continue
        layer = int(np.searchsorted(geometry.first_shard, shard, side="right")) - 1
        expert, j = divmod(shard - int(geometry.first_shard[layer]), int(geometry.num_shards[layer]))
        layout = store.layers[layer].layout
        start, nbytes = int(layout.shard_offset[j]), int(layout.shard_nbytes[j])
        held = ctypes.string_at(int(addresses[slot]), nbytes)
        assert held == store.expert_bytes(layer, expert)[start : start + nbytes].tobytes()


# --------------------------------------------------------------------------------------------- what is kept
def test_the_same_slots_hold_the_same_shards_again(warm, left, path, caplog):
    with caplog.at_level(logging.INFO, "trilane"):
        scheduler = warm()
    runner = scheduler._runner
    assert residents(runner) == residents(left) and len(residents(runner)) == 20
    assert_slots_hold(runner)
    assert scheduler.stats().warm_shards == 20 and "20 shards in slots before" in str(scheduler.stats())
    assert scheduler.stats().background_fills == 0 and "warm_start" not in scheduler.stats().inactive
    assert "20 of 20 shards" in caplog.text and " s, from " in caplog.text
    assert runner.state.past.any() and runner.state.row[0] == NUM_PAST - 1
    behind = NUM_PAST - 1 - int(left.state.row[0])
    np.testing.assert_array_equal(runner.state.past, np.roll(left.state.past, behind, axis=2))
    before = take_hot_set(left.state, left.geometry, HALF_LIFE)
    np.testing.assert_array_equal(runner.state.score, before.worth)
    assert path.stat().st_size < 4000
    drive(scheduler, 60, seed=1)


@pytest.mark.parametrize("before", EVICTIONS)
@pytest.mark.parametrize("after", EVICTIONS)
def test_another_eviction_keeps_the_slots_and_the_order(warm, before, after):
    scheduler = warm(cache={"slots": 20, "eviction": before})
    drive(scheduler, 60)
    end(scheduler)
    old, scheduler = scheduler._runner, warm(cache={"slots": 20, "eviction": after})
    new = scheduler._runner
    assert residents(new) == residents(old)
    hot = take_hot_set(old.state, old.geometry, HALF_LIFE)
    order = np.lexsort((np.arange(len(hot.worth)), hot.worth))
    assert (np.diff(new.state.score[order]) >= 0).all() and new.state.score.max() > 0
    assert new.state.past.any() == (before == after == "predicted")
    drive(scheduler, 60, seed=1)
    assert new.state.clock[0] == 60


@pytest.mark.parametrize("slots", [0, 1, 7, 13, 19])
def test_fewer_slots_keep_the_hottest(warm, left, path, slots):
    hot = take_hot_set(left.state, left.geometry, HALF_LIFE)
    runner = warm(cache={"slots": slots})._runner
    wanted = []
    for key in experts_by_worth(hot, left.geometry):
        wanted += [shard for shard in sorted(residents(left)) if expert_of(left.geometry, shard) == key]
    assert residents(runner) == set(wanted[:slots])
    assert_slots_hold(runner)


def test_more_slots_keep_all(warm, left):
    scheduler = warm(cache={"slots": 40})
    assert residents(scheduler._runner) == residents(left)
    assert scheduler._runner.state.num_free.tolist() == [20]
    drive(scheduler, 40, seed=2)


@pytest.mark.parametrize("slots", [9, 20, 40])
def test_one_pool_a_layer_keeps_what_fits_of_each_layer(warm, left, slots):
    hot, geometry = take_hot_set(left.state, left.geometry, HALF_LIFE), left.geometry
    scheduler = warm(cache={"slots": slots, "pool": "layer"})
    runner = scheduler._runner
    for layer in range(3):
        first, stop = geometry.first_shard[layer : layer + 2]
        had = [shard for shard in sorted(residents(left)) if first <= shard < stop]
        had.sort(key=lambda shard: experts_by_worth(hot, geometry).index(expert_of(geometry, shard)))
        assert {s for s in residents(runner) if first <= s < stop} == set(had[: runner.num_slots_of(layer)])
    assert_slots_hold(runner)
    drive(scheduler, 60, seed=3)
    end(scheduler)
    again = warm(cache={"slots": slots})._runner
    assert residents(again) == residents(runner)


def test_another_half_life_keeps_the_meaning_of_worth(warm, left):
    before = take_hot_set(left.state, left.geometry, HALF_LIFE).worth
    after = warm(cache={"slots": 20, "half_life_steps": 4.0})._runner.state.score
    certain = [1 / (1 - 2.0 ** (-1 / h)) for h in (16.0, 4.0)]
    np.testing.assert_allclose(after / certain[1], before / certain[0])


def test_worth_is_that_of_uses_of_late_alone(left):
    """What is foretold for the next step only is taken out of the scores, and the growing unit too."""
    state, geometry = left.state, left.geometry
    assert state.boost.any() and state.unit[0] > 1
    worth = take_hot_set(state, geometry, HALF_LIFE).worth
    raised = state.boost * state.boost_unit[geometry.layer_of]
    np.testing.assert_allclose(worth * state.unit[0] + raised, state.score, rtol=1e-12)


def test_it_goes_on_from_start_to_start(warm):
    """Not only what the last run used: an expert that it did not use keeps what it was worth."""
    x, weights = np.ones((1, 256), np.float32), [[1.0]]
    for eviction in EVICTIONS:
        scheduler = warm(cache={"slots": 20, "eviction": eviction})
        for _ in range(20):
            scheduler.forward(0, x, [[4]], weights)
        scheduler.close()
    before = take_hot_set(scheduler._runner.state, scheduler._runner.geometry, HALF_LIFE)
    for _ in range(3):
        scheduler = warm()
        scheduler.forward(1, x, [[2]], weights)
        scheduler.close()
    after = take_hot_set(scheduler._runner.state, scheduler._runner.geometry, HALF_LIFE)
    assert after.is_resident[before.is_resident].all() and 0 < after.worth[4] < before.worth[4]


# ------------------------------------------------------------------------------------- what it is good for
def routed(scheduler, steps, odds, seed):
    """Outputs of steps whose routing prefers the same experts each time."""
    rng, outputs = np.random.default_rng(seed), []
    for step in range(steps):
        layer = step % scheduler.store.num_layers
        ids = [rng.choice(len(odds), 2, replace=False, p=np.roll(odds, layer))]
        x = rng.standard_normal((1, scheduler.store.hidden)).astype(np.float32)
        outputs.append(scheduler.forward(layer, x, ids, [[0.6, 0.4]]))
        scheduler._runner.settle_fills(let_end=True)  # how many land in time is the machine's affair
    return np.concatenate(outputs)


def test_the_first_steps_hit_more_and_give_the_same_bits(scheduler_of, tmp_path):
    store = random_store("q8_0", layers=3, experts=24, hidden=256, intermediate=544)
    odds = 0.75 ** np.arange(24)
    odds /= odds.sum()
    sections = {"warm_start": {"enabled": True, "path": tmp_path / "hot.warm"}}
    first = scheduler_of(store, cache={"fraction": 0.4}, **sections)
    routed(first, 150, odds, seed=1)
    first.close()
    cold = scheduler_of(store, cache={"fraction": 0.4})
    warmed = scheduler_of(store, cache={"fraction": 0.4}, **sections)
    assert_same_bits(routed(warmed, 50, odds, seed=2), routed(cold, 50, odds, seed=2))
    rates = cold.stats().hit_rate, warmed.stats().hit_rate
    assert rates[1] > rates[0] + 0.15, rates


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_recording_of_a_warm_start_replays_identically(warm, left, tmp_path, eviction):
    trace = tmp_path / "run.trace"
    scheduler = warm(cache={"slots": 17, "eviction": eviction}, record={"path": trace})
    drive(scheduler, 90, seed=4)
    scheduler.close()
    recorded = read_trace(trace)
    assert (recorded.baselines[0].state["slot_of"] >= 0).sum() == 17
    found = verify(recorded)
    assert found.differences == () and found.baselines == 1 and found.plans >= 90


def test_learned_rates_go_on_where_they_were(warm, tmp_path, caplog):
    policy = {"learn_rates": True}
    scheduler = warm(policy=policy)
    drive(scheduler, 20)
    learned = scheduler._runner._observed
    learned.factor[:] = 1.0, 2.0, 0.5, 3.0
    profiled = scheduler._runner._profiled[0]
    scheduler.close()
    trace = tmp_path / "run.trace"
    scheduler = warm(policy=policy, record={"path": trace})
    runner = scheduler._runner
    assert runner._observed.used.tolist() == [1.0, 2.0, 0.5, 3.0] and not runner._observed.outcomes.any()
    assert runner.rates[0].cpu_us_per_byte == 3 * profiled.cpu_us_per_byte
    assert len({id(rates) for rates in runner.rates}) == 1
    drive(scheduler, 30, seed=1)
    scheduler.close()
    assert verify(read_trace(trace)).differences == ()
    assert (
        warm()._runner.rates[0].cpu_us_per_byte == profiled.cpu_us_per_byte
    )  # they are not followed unless that is asked for
    with caplog.at_level(logging.INFO, "trilane"):
        other = warm(policy=policy, rates={"cpu": 3.0})._runner
    assert (other._observed.factor == 1).all() and "of another profile" in caplog.text


# -------------------------------------------------------------------------------------- what is refused
def refusal(scheduler):
    return scheduler.stats().inactive["warm_start"]


def test_the_first_start_says_that_nothing_was_saved(warm, caplog):
    with caplog.at_level(logging.WARNING, "trilane"):
        scheduler = warm()
    assert "nothing was saved yet" in refusal(scheduler) and not caplog.text
    assert scheduler.stats().warm_shards == 0


@pytest.mark.parametrize("change", [{"seed": 1}, {"experts": 7}, {"kind": "gelu_tanh_glu"}, {"formats": "q4_k"}])
def test_another_model_is_refused(warm, left, path, caplog, change):
    other = random_store(**{"formats": "q8_0", **SHAPE, "intermediate": 512, **change})
    before = path.read_bytes()
    scheduler = warm(other)
    assert "of another model" in refusal(scheduler) and "of another model" in caplog.text
    assert not residents(scheduler._runner)
    scheduler.close()
    assert path.read_bytes() == before  # no step was run, so there is nothing better to put there


def test_the_same_weights_are_the_same_model(store):
    assert model_digest(random_store("q8_0", **SHAPE)) == model_digest(store)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((4, 32, 32), np.float32) for name in ("gate", "up", "down")}
    changed = {name: array.copy() for name, array in arrays.items()}
    changed["down"][3] *= 1.01
    one, other = (ExpertStore.from_arrays([layer], formats="f32") for layer in (arrays, changed))
    assert model_digest(one) != model_digest(other)


def test_the_usual_place_is_one_file_a_model_and_machine(store, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = open_scheduler(store).config
    files = {
        warm_file(config, s, machine).path
        for s in (store, random_store("q8_0", seed=1))
        for machine in (Machine(cpu="A"), Machine(cpu="B" * 400), Machine(cpu="A", gpu="G"))
    }
    assert len(files) == 6 and {file.parent for file in files} == {tmp_path / "trilane" / "warm"}
    assert max(len(file.name) for file in files) <= 240
    assert not list(tmp_path.rglob("*.warm"))


def test_another_machine_and_another_version_are_refused(store, warm, left, path, monkeypatch):
    here = machine_name(calibrate.this_machine())
    data = path.read_bytes()
    hot = decode(data, left.geometry, model_digest(store), here)
    path.write_bytes(encode(hot, model_digest(store), "an-abacus"))
    assert "of another machine ('an-abacus'" in refusal(warm())
    path.write_bytes(HEAD.pack(MAGIC, VERSION + 1, *HEAD.unpack_from(data)[2:]) + data[HEAD.size :])
    assert f"it is of version {VERSION + 1}" in refusal(warm())
    path.write_bytes(b"")
    assert "no file of a warm start" in refusal(warm())
    path.unlink()
    path.mkdir()
    scheduler = warm()
    assert "no regular file" in refusal(scheduler)
    drive(scheduler, 3)
    assert scheduler.save_warm_start() is None


def test_damaged_bytes_are_refused(store, left, path):
    data, rng = path.read_bytes(), random.Random(1)
    model, machine = model_digest(store), machine_name(calibrate.this_machine())
    for _ in range(500):
        if (wrong := mutated(rng, data)) == data:
            continue
        try:
            hot = decode(wrong, left.geometry, model, machine)
        except Unusable as error:
            assert 0 < len(str(error)) < 400
        else:  # bytes of the head that mean nothing
            assert encode(hot, model, machine) == data


def test_forged_files_are_refused_or_make_a_sound_state(store, left, path, warm):
    """Checksums are right, contents are not: compiled code must never see a state that it could leave."""
    data, rng = path.read_bytes(), random.Random(2)
    model, machine = model_digest(store), machine_name(calibrate.this_machine())
    payload, sound = zlib.decompress(data[HEAD.size :]), []
    for _ in range(600):
        wrong = mutated(rng, payload)
        stored = zlib.compress(wrong, 1)
        forged = HEAD.pack(MAGIC, VERSION, zlib.crc32(stored), len(wrong)) + stored
        try:
            hot = decode(forged, left.geometry, model, machine)
            made = warm_state(hot, fresh_state(left), left.geometry, HALF_LIFE)
        except Unusable:
            continue
        check(made.state, left.geometry)
        sound.append(forged)
    assert 50 < len(sound) < 600
    for forged in sound[:8]:
        path.write_bytes(forged)
        scheduler = warm()
        drive(scheduler, 12)
        scheduler.close()


def fresh_state(runner, **cache):
    from trilane.policy import empty_state

    made = runner.config.cache.model_copy(update=cache)
    return empty_state(runner.config.model_copy(update={"cache": made}), runner.geometry, runner.num_slots)


@pytest.mark.parametrize(
    "change",
    [
        {"worth": "nan"}, {"worth": "negative"}, {"worth": "huge"}, {"worth": "short"}, {"half_life_steps": 0.0},
        {"half_life_steps": float("inf")}, {"past": 7}, {"past": 31}, {"past": "short"}, {"is_resident": 0},
        {"factors": [1.0] * 3}, {"factors": [1.0, np.nan, 1.0, 1.0]}, {"factors": [1.0, 1.0, 100.0, 1.0]},
    ],
    ids=str,
)  # fmt: skip
def test_each_claim_is_checked(left, change):
    hot = take_hot_set(left.state, left.geometry, HALF_LIFE)
    ((name, what),) = change.items()
    if name == "worth":
        worth = hot.worth.copy()
        worth[3] = {"nan": np.nan, "negative": -1e-9, "huge": 2.0**65, "short": 0}[what]
        hot = replace(hot, worth=worth[:-1] if what == "short" else worth)
    elif name == "past":
        past = hot.past.copy()
        past[1, 0, 5] |= 0 if what == "short" else 1 << what
        hot = replace(hot, past=past[:-1] if what == "short" else past)
    elif name == "is_resident":
        hot = replace(hot, is_resident=hot.is_resident[:-1])
    else:
        hot = replace(hot, **{name: np.array(what) if name == "factors" else what})
    with pytest.raises(Unusable):
        warm_state(hot, fresh_state(left), left.geometry, HALF_LIFE)


def test_extreme_but_allowed_worth_is_harmless(left):
    hot = take_hot_set(left.state, left.geometry, HALF_LIFE)
    cases = ((2.0**64, 1e300, 1e-300), (2.0**64, 5e-324, 1e10), (0.0, 16.0, 16.0), (5e-324, 1e308, 2.0))
    for worth, saved, here in cases:
        extreme = replace(hot, worth=np.full_like(hot.worth, worth), half_life_steps=saved)
        for eviction in EVICTIONS:
            made = warm_state(extreme, fresh_state(left, eviction=eviction), left.geometry, here)
            check(made.state, left.geometry)
            assert len(made.shards) == 20


# ---------------------------------------------------------------------------------- when and how it is saved
def test_it_is_off_unless_asked_for(store, scheduler_of, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from made_profile import save_made_profile

    save_made_profile()
    scheduler = scheduler_of(store, cache={"slots": 20})
    drive(scheduler, 10)
    assert scheduler.save_warm_start() is None and "warm_start" not in scheduler.stats().inactive
    scheduler.close()
    assert not list(tmp_path.rglob("*.warm"))
    scheduler = scheduler_of(store, cache={"slots": 20}, warm_start={"enabled": True})
    drive(scheduler, 10)
    scheduler.close()
    (file,) = tmp_path.rglob("*.warm")
    assert file.name.startswith("experts-" + model_digest(store)[:16]) and file.stat().st_mode & 0o077 == 0
    assert [other.name for other in file.parent.iterdir()] == [file.name]


def test_a_file_that_is_not_ours_is_left_alone(warm, path, caplog):
    path.write_text("cache: {slots: 20}")
    scheduler = warm()
    assert "no file of a warm start" in refusal(scheduler)
    drive(scheduler, 6)
    scheduler.close()
    assert path.read_text() == "cache: {slots: 20}" and "cannot be written" in caplog.text


def test_saving_now_and_with_a_step_in_flight(warm, path):
    scheduler = warm()
    assert scheduler.save_warm_start() is None and not path.exists()  # no step was run
    drive(scheduler, 12)
    assert scheduler.save_warm_start() == path
    ticket = scheduler.submit(0, np.ones((1, 256), np.float32), [[0, 1]], [[0.5, 0.5]])
    assert scheduler.save_warm_start() == path
    scheduler.wait(ticket)
    assert_slots_hold(warm()._runner)


@pytest.mark.parametrize("problem", ["no folder", "full"])
def test_a_folder_that_cannot_be_written_is_told_once(warm, path, monkeypatch, caplog, problem):
    if problem == "full":

        def full(path, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("trilane.warm_file.replace_file", full)
    scheduler = warm()
    drive(scheduler, 9)
    if problem == "no folder":
        path.parent.rmdir()
    assert scheduler.save_warm_start() is None is scheduler.save_warm_start()
    assert "cannot be written" in refusal(scheduler)
    scheduler.close()
    assert sum("cannot be written" in message for message in caplog.messages) == 1


def test_a_named_file_in_no_folder_is_refused_at_the_start(warm, path):
    """As a recording's is; a folder that a slip of the pen makes is found by nobody."""
    with pytest.raises(
        ConfigError, match=r"warm_start.path: is '.*none.hot.warm', but its folder does not exist: make"
    ):
        warm(warm_start={"enabled": True, "path": path.parent / "none" / "hot.warm"})
    assert not (path.parent / "none").exists()


def test_an_interrupt_while_slots_are_filled_leaves_the_file(warm, left, path, monkeypatch):
    from trilane.cpu_kernels.host_device import HostDevice

    before = path.read_bytes()

    def interrupt(self, *, let_end=False):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostDevice, "settle_background", interrupt)
        with pytest.raises(KeyboardInterrupt):
            warm()
    assert path.read_bytes() == before
    assert residents(warm()._runner) == residents(left)


def test_a_forked_child_saves_nothing(warm, path):
    scheduler = warm()
    drive(scheduler, 6)
    if (child := os.fork()) == 0:
        os._exit(0 if scheduler._runner.save_warm_start() is None else 1)
    assert os.waitpid(child, 0)[1] == 0 and not path.exists()


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from expert_cases import open_scheduler, random_store
from trace_cases import drive_until_full
store = random_store("q8_0", layers=3, experts=6, hidden=256, intermediate=544)
scheduler = open_scheduler(store, cache={{"slots": 20}}, warm_start={{"enabled": True, "path": {path!r}}})
drive_until_full(scheduler, 30)
print("ready", flush=True)
"""
SAVES = """
while True:
    scheduler.save_warm_start()
"""


def program(path, then=""):
    code = textwrap.dedent(PROGRAM.format(tests=str(Path(__file__).parent), path=str(path)))
    return [sys.executable, "-c", code + then]


def test_a_program_that_ends_without_close_saves(path, left, warm):
    path.unlink()
    subprocess.run(program(path), check=True, stdout=subprocess.DEVNULL)
    assert warm().stats().warm_shards == 20


@pytest.mark.alone
def test_killed_and_simultaneous_saves_leave_a_whole_file(store, left, path):
    """Two programs save to one file without end; whenever it is read, and after both are killed, it is whole."""
    file = WarmFile(path, model_digest(store), machine_name(calibrate.this_machine()))
    reads = 0
    for _ in range(3):
        running = [subprocess.Popen(program(path, SAVES), stdout=subprocess.PIPE) for _ in range(2)]
        try:
            for one in running:
                assert one.stdout is not None and one.stdout.readline() == b"ready\n"
            until = time.monotonic() + 0.5 + random.random()
            while time.monotonic() < until:
                assert file.load(left.geometry) is not None
                reads += 1
        finally:
            for one in running:
                one.send_signal(signal.SIGKILL)
                one.communicate()
        assert file.load(left.geometry).is_resident.sum() == 20
    assert reads > 50


# ------------------------------------------------------------------------------------------------ on a GPU
@pytest.fixture
def on_gpu(played, store, path):
    """Opens schedulers on played GPUs that load from and save to one file."""

    def open_one(driver=None, **sections):
        sections.setdefault("cache", {}).setdefault("slots", 20)
        return played(store, driver, **({"warm_start": {"enabled": True, "path": path}} | sections))

    return open_one


def steps_on_gpu(scheduler, steps=12, seed=1):
    """Random steps, each compared with the reference."""
    rng, store = np.random.default_rng(seed), scheduler.store
    for step in range(steps):
        layer = step % store.num_layers
        x = rng.standard_normal((2, store.hidden)).astype(np.float32)
        ids, weights = random_routing(rng, 2, 2, store.layers[layer].num_experts)
        assert_same_bits(scheduler.forward(layer, x, ids, weights), expected(store, layer, x, ids, weights))


def assert_gpu_slots_hold(runner):
    """Every slot has the bytes of the shard that the state says, and the GPU's table says the same."""
    device, table = runner.device, np.empty_like(runner.state.slot_of)
    runner.driver.to_host(table.ctypes.data, device.address["table"], table.nbytes, device.work_stream)
    runner.driver.synchronize()
    np.testing.assert_array_equal(table, runner.state.slot_of)
    assert_slots_hold(runner, device.slots + device.slot_nbytes * np.arange(runner.num_slots))


@pytest.mark.parametrize("eviction, slots", [("predicted", 20), ("lru", 13), ("decayed_frequency", 40)])
def test_a_gpu_takes_over_what_fits(on_gpu, eviction, slots):
    first = on_gpu(cache={"slots": 20, "eviction": eviction})
    assert "nothing was saved" in refusal(first)
    steps_on_gpu(first)
    before = residents(first._runner)
    first.close()
    scheduler = on_gpu(cache={"slots": slots, "eviction": eviction})
    runner, stats = scheduler._runner, scheduler.stats()
    assert residents(runner) <= before and len(residents(runner)) == min(slots, len(before)) == stats.warm_shards
    assert (stats.steps, stats.fills) == (0, 0) and "warm_start" not in stats.inactive
    assert_gpu_slots_hold(runner)
    steps_on_gpu(scheduler, seed=2)
    assert scheduler.save_warm_start() is not None


def test_hits_on_a_warm_gpu_ask_nobody(on_gpu):
    first = on_gpu(cache={"fraction": 1.0, "slots": None}, policy={"force": "zero_copy", "admit": "always"})
    for layer in range(3):
        for expert in range(0, 6, 2):
            first.forward(layer, np.ones((1, 256), np.float32), [[expert, expert + 1]], [[0.5, 0.5]])
    first.close()
    warmed = on_gpu(cache={"fraction": 1.0, "slots": None})
    warmed._runner.inject_fault(Fault.DEAF)
    steps_on_gpu(warmed)
    assert warmed.stats().hit_rate == 1.0
    warmed._runner.inject_fault(Fault.NONE)


def test_copies_to_a_gpu_stay_within_a_registration_or_are_pageable(on_gpu, store, monkeypatch):
    monkeypatch.setattr("trilane.gpu_kernels.pinning.SEGMENT_NBYTES", 5 * 4096)
    first = on_gpu()
    steps_on_gpu(first)
    first.close()
    scheduler = on_gpu(PlayedDriver(pin_nbytes=store.nbytes // 2 // 4096 * 4096))
    runner = scheduler._runner
    assert len(runner.driver.registered) > 10 and 0 < runner.pinned_nbytes < store.nbytes
    assert_gpu_slots_hold(runner)
    steps_on_gpu(scheduler, seed=3)


def test_the_host_devices_file_is_not_the_gpus(on_gpu, left):
    assert "of another machine" in refusal(on_gpu())


def test_a_gpu_whose_thread_has_failed_saves_nothing_and_closes(on_gpu, path, caplog):
    scheduler = on_gpu()
    steps_on_gpu(scheduler, steps=6)

    def failed():
        raise WorkerError("the control thread is gone")

    threads, check_threads = scheduler._runner.threads, scheduler._runner.threads.check
    threads.control[Control.STOP] = 1
    assert threads.control_thread.close()
    threads.check = failed
    scheduler.close()
    threads.check = check_threads
    assert "nothing is saved: the control thread is gone" in caplog.text and not path.exists()
