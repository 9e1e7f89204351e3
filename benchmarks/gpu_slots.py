"""What the slots of a GPU hold and by which policy, while its control thread is held; no step may be in flight."""

from __future__ import annotations

import time

import numpy as np

from trilane.cuda_words import Control, Stage
from trilane.policy import empty_state, gpu_options

NAP_S = 50e-6


def settle(runner):
    """Until the control thread has counted the last step."""
    with runner.threads.holding():
        pass


def _finish(runner, stream):
    while not runner.driver.finished(stream):
        time.sleep(NAP_S)


def slot_table(runner):
    """int32 by shard: its slot as the GPU looks it up, -1 without."""
    table, stream = np.zeros(runner.shape.num_shards, np.int32), runner.device.fill_stream
    runner.driver.to_host(table.ctypes.data, runner.device.address["table"], table.nbytes, stream)
    _finish(runner, stream)
    return table


def empty_slots(runner, rng=None):
    """Forget what is resident, and all counts; with ``rng`` slots will be taken in a random order."""
    runner.reset()
    if rng is not None:
        state = runner.state
        with runner.threads.holding():
            for first, end in zip(state.first_slot[:-1], state.first_slot[1:], strict=True):
                rng.shuffle(state.free[first:end])


def shard_sources(store, geometry):
    """Address in host memory and bytes of every shard, int64 (shards, 2)."""
    found = []
    for where in store.layers:
        layout = where.layout
        for expert in range(where.num_experts):
            base = store.arena.address + where.offset + expert * where.stride
            found += zip(base + layout.shard_offset, layout.shard_nbytes, strict=True)
    assert len(found) == geometry.first_shard[-1]
    return np.array(found, np.int64)


def check_slots(scheduler):
    """Compare every slot that the GPU's table names with the store's bytes; how many, and their checksum.

    Raises
    ------
    AssertionError
        A slot holds other bytes, two shards share one, or the planner believes something else.
    """
    runner, store = scheduler._runner, scheduler.store
    sources, arena = shard_sources(store, runner.geometry), store.arena.view(0, store.arena.nbytes)
    with runner.threads.holding():
        table, state = slot_table(runner), runner.state
        named = np.flatnonzero(table >= 0)
        assert len(set(table[named].tolist())) == len(named), "two shards have the same slot"
        if runner.threads.control[Control.FILL_STAGE] == Stage.IDLE:
            wrong = np.flatnonzero(np.where(state.slot_of >= 0, state.slot_of, -1) != table)
            assert not len(wrong), (
                f"shard {wrong[0]}: slot {table[wrong[0]]} on the GPU, {state.slot_of[wrong[0]]} here"
            )
        checksum = 0
        buffer = np.zeros(int(sources[:, 1].max()), np.uint8)
        for shard in named:
            address, nbytes = (int(value) for value in sources[shard])
            slot = runner.device.slots + int(table[shard]) * runner.device.slot_nbytes
            runner.driver.to_host(buffer.ctypes.data, slot, nbytes, runner.device.fill_stream)
            _finish(runner, runner.device.fill_stream)
            start = address - store.arena.address
            same = np.array_equal(buffer[:nbytes], arena[start : start + nbytes])
            assert same, f"slot {table[shard]} does not hold the bytes of shard {shard}"
            checksum += int(buffer[: nbytes // 8 * 8].view(np.uint64).sum(dtype=np.uint64))
    return len(named), checksum & (2**64 - 1)


def use_policy(runner, config):
    """Another policy from now on, its cache empty and nothing learned; as many slots, and no step may be in flight."""
    runner.reset()
    state = empty_state(config, runner.geometry, runner.num_slots)
    with runner.threads.holding():
        state.clock[...] = runner.state.clock
        runner._held.seen[:] = runner.counts.begun  # what was stamped up to now is another policy's
        runner.config, runner.state, runner._held = config, state, runner._held._replace(state=state)
    runner.use_options(gpu_options(config))
