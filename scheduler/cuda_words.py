"""The words by which the control thread of the CUDA device meets the GPU, its helpers and the interpreter.

Addresses that never change are in ``Place``, what changes is in ``Control``; the GPU's own structs are
``gpu_kernels/words.py``. The file knows names and offsets only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from trilane.cpu_kernels.atomics import load32_at, load_at, store32_at
from trilane.cpu_kernels.host_workspace import Workspace
from trilane.expert import Geometry
from trilane.gpu_kernels.words import TYPES
from trilane.host_step import Tables
from trilane.jit import compiled
from trilane.journal import Journal
from trilane.plan import Options, Work
from trilane.records import record
from trilane.routing import Grouping
from trilane.state import State
from trilane.tape import Tape

COPY_TO, COPY_FROM, COPY_NBYTES, COPY_GROUP = range(4)  # rows of Wire.copies


class Place(IntEnum):
    """Places in ``CudaStep.places``: addresses, streams, sizes."""

    DRIVER = 0  # the table of driver calls
    CONTEXT = 1
    COPY_STREAM = 2
    FILL_STREAM = 3
    TEAM = 4
    TEAM_TASK = 5
    MAIL = 6  # mapped memory, written by the GPU
    MAIL_GROUPS = 7
    MAIL_MISSING = 8
    MAIL_TOKENS = 9
    STAMPS = 10
    ACKNOWLEDGED = 11
    PLAN_LIST = 12  # mapped memory, written by the host
    UPDATES = 13
    PENDING = 14
    CPU_FLAG = 15
    ABORT = 16
    COPY_FLAGS = 17  # device memory: many thread blocks look at them
    FILL_FLAG = 18
    SLOTS = 19
    SLOT_NBYTES = 20
    PINNED_END = 21  # what lies below can be read by kernels
    INT8_STRIDE = 22  # bytes of a row's records in the mailbox
    FLOATS_STRIDE = 23
    PINNED_START = 24
    SEGMENT_NBYTES = 25  # of a registration: a copy may not reach from one into the next
    COPIED = 26  # the last copy's flag once more, for the host
    MAIL_RECORDS = 27
    MAIL_FLOATS = 28
    CONTROL = 29  # words by Control
    RESCUE = 30  # mapped: the sequence of a step whose copies will not come in time
    BRIEF = 31  # mapped: a single row's missing shards, before its mailbox is closed
    USES = 32  # mapped: what the last steps without misses used
    TOLD = 33  # mapped: a single row's records, before its mailbox is closed
    SIZE = 34


class Control(IntEnum):
    """Words of the control thread's block; the writer is named."""

    STOP = 0  # host: leave
    HOLD = 1  # host: let the state be
    HELD = 2  # thread: the state is the host's until HOLD is 0
    SEQUENCE = 3  # thread: last mailbox that was taken
    COPIES = 4  # thread: copies of that step, by the flags that tell their end
    FAILURE = 5  # thread or watchdog: a Failure; nothing runs after one
    STATUS = 6  # thread: the driver's status or the team's code that came with it
    FAULT = 7  # tests: a Fault to suffer
    HOT_NS = 8  # host: how long to spin after the last work
    NAP_NS = 9  # host: how long to sleep between two looks then
    STALL_NS = 10  # host: an outstanding wait of so long is a failure
    CLOCK = 11  # thread: the last step's clock
    FILL_STAGE = 12  # thread: a Stage
    NUM_FILLS = 13  # thread: fills under way
    FILLS_DONE = 14  # thread: of these, copied
    FILL_COUNT = 15  # thread: how often copies of fills were begun
    PENDING = 16  # thread: sequence of the pending list
    ANSWERED = 17  # thread: last mailbox of which everything was released
    TAKEN_LAYER = 18  # thread: the layer of the mailbox in hand
    NUM_ROWS = 19  # thread: its rows
    HINT_LAYER = 20  # host, while it holds the state
    NUM_HINTS = 21
    HITS_SEEN = 22  # thread: the expert whose stamp it looks at next
    FROZEN = 23  # thread: slots keep what they hold, since copies that were given up may still come
    RESCUES = 24  # thread: steps whose copies the driver did not take in time
    READABLE = 25  # thread: whether kernels can read all that is to be copied
    NUM_GROUPS = 26  # thread: experts of the mailbox in hand
    USED = 28  # thread: clock of the last step of which it has learned
    DONE_NS = 29  # thread: when it had answered and learned last
    IDLE_NS = 30  # thread: from then to the next mailbox, averaged
    FILL_NS = 31  # thread: what the copy of a shard takes
    DUE_NS = 27  # thread: when the copies of the last list have landed at the latest, if they get on at all
    # Copies, which a thread of their own hands to the driver; its words are behind those of the control thread.
    POSTED = 32  # thread: how often there was something new; the copier sleeps on it
    LISTED = 33  # thread: lists of copies ever posted
    LIST_SEQUENCE = 34  # thread: the step of the last one
    LIST_SIZE = 35  # thread: its copies
    GIVEN_UP = 36  # thread: the last list that a step does not wait for: no more of its copies are to be issued
    FILL_POSTED = 37  # thread: FILL_COUNT of the last fills that were posted
    FILL_SIZE = 38  # thread: their copies
    PAUSE_NS = 39  # thread: from FREE_NS to the next step, averaged, after steps without misses
    PAUSE_AFTER_MISSES_NS = 40  # thread: the same after others, at PAUSE_NS + MISSED
    FREE_NS = 41  # thread: when it had heard of the last step, if that had misses when it had answered
    MISSED = 42  # thread: 1 if that step had misses
    TAPING = 43  # whether events are written down; host: begin, thread: it cannot go on
    TAPED_CLOCK = 44  # thread: of the last step on the tape
    NO_FILLS = 45  # host: begin no fills of the policy's own, since the state is wanted without any under way
    RANKS = 46  # thread: of a row of the mailbox in hand
    PARKED = 48  # copier: whether it sleeps
    CALLED_NS = 49  # copier: when the call of the driver began in which it is, 0 in none
    ISSUED = 50  # copier: lists that it is done with
    FILL_ISSUED = 51  # copier: FILL_COUNT of the last fills that it issued
    SIZE = 56


class Failure(IntEnum):
    """Why nothing runs any more."""

    NONE = 0
    STALLED = 1  # a wait of the GPU was outstanding for too long
    COPY = 2  # the driver refused a copy
    TEAM = 3  # the CPU lane failed


class Fault(IntEnum):
    """The one seam for faults, for tests."""

    NONE = 0
    DEAF = 1  # the control thread does nothing until the fault is taken back
    COPY = 2  # copies fail
    LOST_FLAG = 3  # copies are made, but their flags are not written
    HELD_DRIVER = 4  # calls for copies do not return until the fault is taken back


class Stage(IntEnum):
    """Where background fills are: see cuda_fills.py."""

    IDLE = 0
    INVALIDATING = 1
    COPYING = 2
    VALIDATING = 3


@record
class Wire(NamedTuple):
    """What the control thread and the GPU share, and what it counts in between."""

    places: np.ndarray  # int64, by Place
    control: np.ndarray  # int64, by Control
    counts: np.ndarray  # int64 (6,): of the plan that is being written, see cuda_plan.py
    missing: np.ndarray  # int64 by group: bits of missing shards
    copies: np.ndarray  # int64 (4, items): destinations, sources, bytes, groups that share a flag
    fill_copies: np.ndarray  # int64 (3, MOST_AT_ONCE): as the copies, of the fills that were posted last
    fates: np.ndarray  # int8 (items,): of the plan in hand, see cuda_plan.py


class Marks(NamedTuple):
    """Of a plan, what becomes of each shard; the arrays of ``plan.Work``."""

    lane: np.ndarray
    slot: np.ndarray
    victim: np.ndarray
    run: np.ndarray


class Fills(NamedTuple):
    """Of a plan for background fills, the arrays of ``plan.Work``."""

    shard: np.ndarray
    slot: np.ndarray
    victim: np.ndarray


@record
class CudaStep(NamedTuple):
    """Everything that the control thread needs, in one argument."""

    wire: Wire
    tables: Tables
    ws: Workspace
    grouping: Grouping
    seen: np.ndarray  # int64 by expert: the clock up to which uses are counted
    hints: np.ndarray  # int32: experts that are likely soon
    state: State
    geometry: Geometry
    options: Options
    work: Work
    fills: Work
    journal: Journal
    totals: np.ndarray
    lane_us: np.ndarray
    tape: Tape


def _offset(struct: str, field: str) -> int:
    fields = TYPES[struct].fields
    assert fields is not None
    return int(fields[field][1])


BEGIN, END, LAYER = (_offset("Mailbox", name) for name in ("begin", "end", "layer"))
NUM_ROWS, TOP_K, CLOCK = (_offset("Mailbox", name) for name in ("num_rows", "top_k", "clock"))
NUM_GROUPS, NUM_MISSING = (_offset("Mailbox", name) for name in ("num_groups", "num_missing"))
ITEM_WEIGHTS, ITEM_SHARD, ITEM_SEQUENCE = (_offset("Item", name) for name in ("weights", "shard", "sequence"))
ITEM_FILL, ITEM_POSITION, ITEM_SEQUENCE_2 = (_offset("Item", name) for name in ("fill", "first_position", "sequence_2"))
ITEM_FLAG, ITEM_ROWS, ITEM_SEQUENCE_3 = (_offset("Item", name) for name in ("flag", "num_rows", "sequence_3"))
UPDATE_ENTRY, UPDATE_SLOT, UPDATE_SEQUENCE = (_offset("Update", name) for name in ("entry", "slot", "sequence"))
SEQUENCE, COUNT, PLAN_UPDATES = (_offset("WorkList", name) for name in ("sequence", "count", "num_updates"))
assert (SEQUENCE, COUNT) == (_offset("Updates", "sequence"), _offset("Updates", "count"))
AT_END = _offset("Updates", "at_end")


@compiled
def control_word(words, place):
    """A word of the control block, as another thread left it; ``words`` is the block's address."""
    return load_at(words + 8 * place)


@compiled
def u32_at(address):
    """The uint32 at an address, acquired, as int64."""
    return load32_at(address) & 0xFFFFFFFF


@compiled(counted=False)
def fail(wire, failure, status):
    """End every wait of the GPU, now and from now on: nothing that the slots should hold is certain any more."""
    wire.control[Control.STATUS] = status
    wire.control[Control.FAILURE] = failure
    store32_at(wire.places[Place.ABORT], np.int32(1))
