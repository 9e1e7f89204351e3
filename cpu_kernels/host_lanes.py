"""What the host device's threads run: the CPU lane, the link lane and the device itself, as task functions.

All three have the task signature of team.py, ``int64 task(int64 block, int64 task, int64 worker)``, and find
their work in the blocks of words.py. A lane may be *played*: it does its work and then sleeps until the time
that a slower link or processor would have taken. The file knows no residency and no decisions.
"""

from __future__ import annotations

import functools
from typing import Any

from trilane.cpu_kernels.atomics import (
    add_at,
    fence,
    futex_wake,
    load_at,
    mono_ns,
    pause,
    sleep_until_ns,
    store_at,
)
from trilane.cpu_kernels.expert_mlp import activate_rows, multiply_down, multiply_up, run_shard
from trilane.cpu_kernels.float_env import TASK_SIGNATURE
from trilane.cpu_kernels.parking import park_while
from trilane.cpu_kernels.words import (
    DeviceJob,
    Layer,
    LinkJob,
    Piece,
    Shard,
    TeamJob,
    copy_bytes,
    set_word,
    word,
)
from trilane.jit import compiled, native

ABORTED = 1
COPY_CHUNK_NBYTES = 32 << 10  # a background copy gives way to a demand after at most this much
SPINS_BEFORE_SLEEP = 2000
SLEEP_SLICE_NS = 2_000_000


@compiled
def address_of(block, index):
    """Address of a word of a block."""
    return block + 8 * index


@compiled
def await_word(shard, index, value, abort_address):
    """Wait until a word of a shard is at least ``value``; False if the abort word was set first."""
    address, sleepers = address_of(shard, index), address_of(shard, Shard.SLEEPERS)
    spins = 0
    seen = load_at(address)
    while seen < value:
        if load_at(abort_address) != 0:
            return False
        spins += 1
        if spins < SPINS_BEFORE_SLEEP:
            pause()
        else:
            park_while(address, seen, sleepers, SLEEP_SLICE_NS)
        seen = load_at(address)
    return True


@compiled
def announce(address, value):
    """Store a word and wake whoever waits for it."""
    store_at(address, value)
    futex_wake(address, 1 << 30)


# ------------------------------------------------------------------------------------------------ the CPU lane
@compiled
def _chunk(size, chunk, num_chunks):
    """Start of a chunk of ``size`` rows; chunks are multiples of four rows but for the end."""
    return min(size, (size * chunk // num_chunks + 3) // 4 * 4) if chunk < num_chunks else size


@compiled
def _up_task(layer, shard, chunk, num_chunks):
    neurons = word(shard, Shard.NEURONS)
    multiply_up(layer, shard, _chunk(neurons, chunk, num_chunks), _chunk(neurons, chunk + 1, num_chunks))
    progress = address_of(shard, Shard.PROGRESS)
    if add_at(progress, 1) == num_chunks - 1:
        activate_rows(layer, shard)
        store_at(progress, num_chunks + 1)
        fence()  # either the sleeper's counter is seen, or it sees the word
        if load_at(address_of(shard, Shard.SLEEPERS)) > 0:
            futex_wake(progress, 1 << 30)


@compiled
def _down_task(layer, shard, chunk, num_chunks, up_chunks, abort_address):
    if not await_word(shard, Shard.PROGRESS, up_chunks + 1, abort_address):
        return False
    hidden = word(layer, Layer.HIDDEN)
    multiply_down(layer, shard, _chunk(hidden, chunk, num_chunks), _chunk(hidden, chunk + 1, num_chunks))
    return True


@compiled
def run_team_task(job, task):
    """Task ``task`` of the CPU lane; gate/up chunks have the low numbers, so they are claimed first."""
    layer, num_shards = word(job, TeamJob.LAYER), word(job, TeamJob.NUM_SHARDS)
    up_chunks, down_chunks = word(job, TeamJob.UP_CHUNKS), word(job, TeamJob.DOWN_CHUNKS)
    num_up = num_shards * up_chunks
    if task < num_up:
        shard = word(job, TeamJob.SHARDS) + 8 * Shard.SIZE * (task // up_chunks)
        _up_task(layer, shard, task % up_chunks, up_chunks)
    else:
        task -= num_up
        shard = word(job, TeamJob.SHARDS) + 8 * Shard.SIZE * (task // down_chunks)
        abort = address_of(job, TeamJob.ABORT)
        if not _down_task(layer, shard, task % down_chunks, down_chunks, up_chunks, abort):
            return ABORTED
        set_word(job, TeamJob.END_NS, mono_ns())  # the last one's stays
    if word(job, TeamJob.DUE_NS) != 0:
        if add_at(address_of(job, TeamJob.DONE), 1) == num_up + num_shards * down_chunks - 1:
            sleep_until_ns(word(job, TeamJob.DUE_NS))
            set_word(job, TeamJob.END_NS, mono_ns())
    return 0


# --------------------------------------------------------------------------------------------- the device itself
@compiled
def _begin_ns(posted_ns):
    """When a lane's time begins: at the post, so that a thread that wakes late still ends when it is due."""
    return posted_ns if posted_ns != 0 else mono_ns()


@compiled
def _played_ns(shard, played_ps):
    return word(shard, Shard.NBYTES) * played_ps // 1000


@compiled
def run_device_job(job):
    """Resident shards first, then streamed ones in the order in which they were asked for."""
    layer, shard = word(job, DeviceJob.LAYER), word(job, DeviceJob.SHARDS)
    played_ps = word(job, DeviceJob.HIT_PS)
    due = _begin_ns(word(job, DeviceJob.POSTED_NS))
    set_word(job, DeviceJob.START_NS, due)
    for _ in range(word(job, DeviceJob.NUM_HITS)):
        run_shard(layer, shard)
        due += _played_ns(shard, played_ps)
        shard += 8 * Shard.SIZE
    sleep_until_ns(due)
    set_word(job, DeviceJob.HITS_END_NS, mono_ns())
    for _ in range(word(job, DeviceJob.NUM_STREAMED)):
        if not await_word(shard, Shard.LANDED, 1, address_of(job, DeviceJob.ABORT)):
            return ABORTED
        due = max(due, mono_ns()) + _played_ns(shard, played_ps)
        run_shard(layer, shard)
        sleep_until_ns(due if played_ps > 0 else 0)
        shard += 8 * Shard.SIZE
    set_word(job, DeviceJob.END_NS, mono_ns())
    return 0


# ------------------------------------------------------------------------------------------------- the link lane
@compiled
def _copy_piece(job, piece, due, played_ns):
    """Copy in chunks; a background copy that must give way returns False and lands nothing."""
    nbytes, done = word(piece, Piece.NBYTES), 0
    background = word(job, LinkJob.BACKGROUND)
    while done < nbytes:
        if background != 0 and load_at(word(job, LinkJob.URGENT)) != 0:
            return False
        size = min(COPY_CHUNK_NBYTES, nbytes - done)
        copy_bytes(word(piece, Piece.DESTINATION) + done, word(piece, Piece.SOURCE) + done, size)
        done += size
        if background != 0 and played_ns > 0:
            sleep_until_ns(due - played_ns + played_ns * done // nbytes)
    return True


@compiled
def run_link_job(job):
    """All pieces in order; a piece is announced when it has landed."""
    layer, piece = word(job, LinkJob.LAYER), word(job, LinkJob.PIECES)
    due = _begin_ns(word(job, LinkJob.POSTED_NS))
    set_word(job, LinkJob.START_NS, due)
    for _ in range(word(job, LinkJob.NUM_PIECES)):
        if load_at(address_of(job, LinkJob.ABORT)) != 0:
            return ABORTED
        played_ns = word(piece, Piece.PLAYED_NS)
        due += played_ns
        if word(piece, Piece.SHARD) != 0:
            run_shard(layer, word(piece, Piece.SHARD))
        if word(piece, Piece.DESTINATION) != 0 and not _copy_piece(job, piece, due, played_ns):
            break
        if played_ns > 0:
            sleep_until_ns(due)
        announce(word(piece, Piece.LANDED), 1)
        piece += 8 * Piece.SIZE
    set_word(job, LinkJob.END_NS, mono_ns())
    return 0


# --------------------------------------------------------------------------------- the same with a C signature
@functools.cache
def team_task() -> Any:
    @native(TASK_SIGNATURE)
    def team(block, task, worker):
        return run_team_task(block, task)

    return team


@functools.cache
def device_task() -> Any:
    @native(TASK_SIGNATURE)
    def device(block, task, worker):
        return run_device_job(block)

    return device


@functools.cache
def link_task() -> Any:
    @native(TASK_SIGNATURE)
    def link(block, task, worker):
        return run_link_job(block)

    return link
