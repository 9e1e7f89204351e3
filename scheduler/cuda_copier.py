"""The thread that hands copies to the driver, so that no answer to the GPU waits for a call of the driver.

A thread of the program that is inside cudaFree or cudaMalloc may hold the driver until the GPU has drained, and the GPU
may be waiting for a copy that was not issued yet: then neither would ever go on. Nor would they where the driver took
the copy, but put it behind other work of the program, which waits for the step (many launches ahead, on a GPU whose
queues are shared by streams). So the control thread posts copies here and looks how they get on. A step whose copies
stand still is told to read those shards in place, and to store them into their slots. A copy that was on its way may
still land then, the same bytes in the same slots; until it has, slots are *frozen*: misses take the lanes that need no
copy, and no slot changes hands.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from trilane.cpu_kernels.atomics import (
    add_at,
    fence,
    futex_wake,
    mono_ns,
    pause,
    sleep_ns,
    store32_at,
    store_at,
)
from trilane.cpu_kernels.float_env import TASK_SIGNATURE
from trilane.cpu_kernels.parking import park_while
from trilane.cpu_kernels.words import word
from trilane.cuda_plan import NUM_COPIES
from trilane.cuda_words import (
    COPY_FROM,
    COPY_GROUP,
    COPY_NBYTES,
    COPY_TO,
    Control,
    Failure,
    Fault,
    Place,
    control_word,
    fail,
    u32_at,
)
from trilane.expert import CPU, STREAM, ZERO_COPY
from trilane.gpu_kernels.driver_calls import copy_batch, copy_to_device, has_batches, set_context, write_value
from trilane.jit import compiled, native
from trilane.plan import Options
from trilane.stash import on_stashes

RESCUE_NS = 1_000_000  # a call of the driver that takes longer is held up by something else
LANDING_NS, LANDING_NS_PER_BYTE = 2_000_000, 1.0  # copies that take longer stand still: 1 GB/s
HOT_NS = 300_000  # how long the thread spins after the last copy: some layers of a token
SPINS, NAP_NS = 4_000, 20_000  # of the control thread that waits for it
PARK_NS = 50_000_000
HELD_NAP_NS = 200_000
NOTHING, FILL, LIST = 0, 1, 2  # what is handed over
INJECTED = 999  # the status of a copy that a test lets fail


def frozen_options(options: Options) -> Options:
    """What steps are planned with while no slot may change hands."""
    lanes = options.lanes & ~(1 << STREAM)
    return options._replace(lanes=lanes or 1 << ZERO_COPY | 1 << CPU, fills=False, background=False)


# ---------------------------------------------------------------------------------- for the control thread
@compiled
def _wake(words):
    add_at(words + 8 * Control.POSTED, 1)
    fence()
    if control_word(words, Control.PARKED) > 0:
        futex_wake(words + 8 * Control.POSTED, 1)


@compiled(counted=False)
def post_copies(wire, sequence):
    """Post the listed copies; their ticket, 0 without any."""
    if wire.counts[NUM_COPIES] == 0:
        return 0
    words, ticket = wire.places[Place.CONTROL], wire.control[Control.LISTED] + 1
    wire.control[Control.LIST_SEQUENCE] = sequence
    wire.control[Control.LIST_SIZE] = wire.counts[NUM_COPIES]
    nbytes = 0.0
    for k in range(wire.counts[NUM_COPIES]):
        nbytes += wire.copies[COPY_NBYTES, k]
    wire.control[Control.DUE_NS] = mono_ns() + LANDING_NS + np.int64(LANDING_NS_PER_BYTE * nbytes)
    store_at(words + 8 * Control.LISTED, ticket)
    _wake(words)
    return ticket


@compiled(counted=False)
def post_fills(wire, size):
    """Post the listed copies of background fills; the stream of fills writes FILL_COUNT to its flag behind them."""
    words = wire.places[Place.CONTROL]
    wire.control[Control.FILL_SIZE] = size
    store_at(words + 8 * Control.FILL_POSTED, wire.control[Control.FILL_COUNT])
    _wake(words)


@compiled(counted=False)
def await_issue(wire, ticket):
    """Until the driver has taken the copies of a list; where it stands still, the step does without them."""
    words, looks = wire.places[Place.CONTROL], 0
    while ticket > 0 and control_word(words, Control.ISSUED) < ticket:
        if control_word(words, Control.STOP) != 0 or control_word(words, Control.FAILURE) != Failure.NONE:
            return
        begun = control_word(words, Control.CALLED_NS)
        if begun != 0 and mono_ns() - begun > RESCUE_NS and wire.control[Control.READABLE] != 0:
            _give_up(wire, ticket)
            return
        looks += 1
        if looks < SPINS:
            pause()
        else:  # the copier may want this core
            sleep_ns(NAP_NS)


@compiled(counted=False)
def watch_landing(run):
    """Between two mailboxes: copies that were issued and do not land are given up, too."""
    wire = run.wire
    words = wire.places[Place.CONTROL]
    if wire.control[Control.READABLE] == 0:
        return
    if u32_at(wire.places[Place.COPIED]) == wire.control[Control.LIST_SEQUENCE]:
        wire.control[Control.COPIES] = 0
    elif mono_ns() > wire.control[Control.DUE_NS] and control_word(words, Control.FAILURE) == Failure.NONE:
        _give_up(wire, wire.control[Control.LISTED])


@compiled(counted=False)
def _give_up(wire, ticket):
    """Let the step's kernels read in place what is not copied, and freeze the slots until it is known what was."""
    words = wire.places[Place.CONTROL]
    store_at(words + 8 * Control.GIVEN_UP, ticket)
    wire.control[Control.COPIES] = 0
    wire.control[Control.RESCUES] += 1
    store_at(words + 8 * Control.FROZEN, 1)
    store32_at(wire.places[Place.RESCUE], np.int32(wire.control[Control.LIST_SEQUENCE]))


@compiled(counted=False)
def thaw(run):
    """Let slots change hands again once every copy that was begun has landed."""
    wire = run.wire
    is_over = control_word(wire.places[Place.CONTROL], Control.ISSUED) == wire.control[Control.LISTED]
    if is_over and u32_at(wire.places[Place.COPIED]) == wire.control[Control.LIST_SEQUENCE]:
        wire.control[Control.FROZEN] = 0


# ------------------------------------------------------------------------------------------ the copier
@compiled(counted=False)
def copy_by_segment(wire, destination, source, nbytes, stream):
    """Put a copy on a stream, in as many pieces as registrations of pinned memory hold its source; the status."""
    driver, size = wire.places[Place.DRIVER], wire.places[Place.SEGMENT_NBYTES]
    while nbytes > 0:
        part, left = nbytes, wire.places[Place.PINNED_END] - source
        if left > 0:
            part = min(nbytes, left, size - (source - wire.places[Place.PINNED_START]) % size)
        status = copy_to_device(driver, destination, source, part, stream)
        if status != 0:
            return status
        destination, source, nbytes = destination + part, source + part, nbytes - part
    return 0


@compiled(counted=False)
def _put_copies(wire, copies, first, end, stream):
    """Put listed copies on a stream, by one call of the driver if it can be; the status."""
    driver, together = wire.places[Place.DRIVER], end - first > 1 and has_batches(wire.places[Place.DRIVER])
    for k in range(first, end):
        together = together and _in_one_piece(wire, copies[COPY_FROM, k], copies[COPY_NBYTES, k])
    if together:
        at, row = copies.ctypes.data + 8 * first, 8 * copies.shape[1]
        return copy_batch(driver, at + row * COPY_TO, at + row * COPY_FROM, at + row * COPY_NBYTES, end - first, stream)
    for k in range(first, end):
        status = copy_by_segment(wire, copies[COPY_TO, k], copies[COPY_FROM, k], copies[COPY_NBYTES, k], stream)
        if status != 0:
            return status
    return 0


@compiled(counted=False)
def _in_one_piece(wire, source, nbytes):
    """Whether a copy's source is pinned, all of it by one registration."""
    at, size = source - wire.places[Place.PINNED_START], wire.places[Place.SEGMENT_NBYTES]
    return source + nbytes <= wire.places[Place.PINNED_END] and at // size == (at + nbytes - 1) // size


@compiled(counted=False)
def _begin_call(wire):
    """Before a call of the driver: whoever waits sees since when."""
    words = wire.places[Place.CONTROL]
    store_at(words + 8 * Control.CALLED_NS, mono_ns())
    while control_word(words, Control.FAULT) == Fault.HELD_DRIVER and control_word(words, Control.STOP) == 0:
        sleep_ns(HELD_NAP_NS)


@compiled(counted=False)
def _issue_list(wire, ticket):
    """Copies with a flag behind each group, on their stream, as long as they are wanted; the driver's status."""
    words, driver, stream = wire.places[Place.CONTROL], wire.places[Place.DRIVER], wire.places[Place.COPY_STREAM]
    sequence, writes = wire.control[Control.LIST_SEQUENCE], wire.control[Control.FAULT] != Fault.LOST_FLAG
    first, size = 0, wire.control[Control.LIST_SIZE]
    while first < size and control_word(words, Control.GIVEN_UP) < ticket:
        group = wire.copies[COPY_GROUP, first]
        end = first + 1
        while end < size and wire.copies[COPY_GROUP, end] == group:
            end += 1
        _begin_call(wire)
        status = _put_copies(wire, wire.copies, first, end, stream)
        if wire.control[Control.FAULT] == Fault.COPY:
            status = INJECTED
        if status == 0 and writes:
            status = write_value(driver, stream, wire.places[Place.COPY_FLAGS] + 4 * group, sequence)
        if status != 0:
            return status
        first = end
    _begin_call(wire)
    return write_value(driver, stream, wire.places[Place.COPIED], sequence) if writes else 0


@compiled(counted=False)
def _issue_fills(wire, number):
    """The copies of background fills; the driver's status."""
    driver, stream = wire.places[Place.DRIVER], wire.places[Place.FILL_STREAM]
    _begin_call(wire)
    status = _put_copies(wire, wire.fill_copies, 0, wire.control[Control.FILL_SIZE], stream)
    if status == 0 and wire.control[Control.FAULT] != Fault.LOST_FLAG:
        status = write_value(driver, stream, wire.places[Place.FILL_FLAG], number & 0xFFFFFFFF)
    return status


@compiled(counted=False)
def issue(run):
    """Hand what was posted to the driver, what a step waits for first: NOTHING, FILL or LIST."""
    wire = run.wire
    words = wire.places[Place.CONTROL]
    ticket, number = control_word(words, Control.LISTED), control_word(words, Control.FILL_POSTED)
    if ticket != wire.control[Control.ISSUED]:
        _end_call(wire, _issue_list(wire, ticket), Control.ISSUED, ticket)
        return LIST
    if number != wire.control[Control.FILL_ISSUED]:
        _end_call(wire, _issue_fills(wire, number), Control.FILL_ISSUED, number)
        return FILL
    return NOTHING


@compiled(counted=False)
def _end_call(wire, status, place, number):
    """After the calls for a list or a fill: whoever waits for its number finds no call under way, and any failure."""
    words = wire.places[Place.CONTROL]
    store_at(words + 8 * Control.CALLED_NS, 0)
    if status != 0:
        fail(wire, Failure.COPY, status)
    store_at(words + 8 * place, number)


@functools.cache
def copier_task(run_kind: Any) -> Any:
    """The copier's task for a stash of this type; its block: control words, the stash, the driver's table, context."""
    work = on_stashes(issue, run_kind)

    @native(TASK_SIGNATURE)
    def copier(block, task, worker):
        words, run = word(block, 0), word(block, 1)
        set_context(word(block, 2), word(block, 3))
        last = mono_ns()
        while control_word(words, Control.STOP) == 0:
            posted = control_word(words, Control.POSTED)
            handed = work(run)
            if handed == LIST:
                last = mono_ns()
            elif handed == FILL:
                continue  # nobody waits for it, so nobody spins for the next one
            elif mono_ns() - last < control_word(words, Control.HOT_NS) and mono_ns() - last < HOT_NS:
                pause()
            else:
                park_while(words + 8 * Control.POSTED, posted, words + 8 * Control.PARKED, PARK_NS)
        return 0

    return copier
