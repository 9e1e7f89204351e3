"""From a plan to what the GPU reads: the work list, the slot table's changes, copies; and the CPU lane's shards.

The GPU looked its slots up before the plan was made, and tells what it missed. Where the two differ (a change of
the table is still on its way), a shard that the GPU has needs nothing, and one that only the planner has is read
from its slot, which is then told to the table again.
"""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels import layout
from trilane.cpu_kernels.atomics import store32_at
from trilane.cpu_kernels.words import set_word
from trilane.cuda_words import (
    COPY_FROM,
    COPY_GROUP,
    COPY_NBYTES,
    COPY_TO,
    COUNT,
    ITEM_FILL,
    ITEM_FLAG,
    ITEM_POSITION,
    ITEM_ROWS,
    ITEM_SEQUENCE,
    ITEM_SEQUENCE_2,
    ITEM_SEQUENCE_3,
    ITEM_SHARD,
    ITEM_WEIGHTS,
    PLAN_UPDATES,
    SEQUENCE,
    UPDATE_ENTRY,
    UPDATE_SEQUENCE,
    UPDATE_SLOT,
    Control,
    Place,
)
from trilane.expert import HIT, STREAM, UNPLACED, ZERO_COPY
from trilane.gpu_kernels.words import HEADER_NBYTES, ITEM_NBYTES, UPDATE_NBYTES
from trilane.host_step import lay_out_shard, source_address
from trilane.jit import compiled

NOTHING, IN_SLOT, IN_PLACE, COPIED, ON_CPU = range(5)  # what becomes of a shard
# Places in Wire.counts: of the plan that is being written, and the newest group of copies with its bytes.
NUM_ITEMS, NUM_UPDATES, NUM_COPIES, NUM_CPU, GROUP, GROUP_SIZE = range(6)
GROUP_NBYTES, GROUP_COPIES = 8 << 20, 64  # from which a group of copies, which share a flag, is full; see docs/cuda.md


@compiled(counted=False)
def is_pinned(wire, tables, grouping, layer, i, j):
    """Whether kernels can read a shard in host memory."""
    source = source_address(tables, layer, grouping.experts[i], j)
    return source + tables.descriptor[layer, j, layout.NBYTES] <= wire.places[Place.PINNED_END]


@compiled(counted=False)
def fate_of(wire, tables, grouping, marks, layer, i, j):
    """What becomes of shard ``j`` of the ``i``-th expert."""
    at = i * tables.num_shards[layer] + j
    lane, slot = marks.lane[at], marks.slot[at]
    is_missing = (wire.missing[i] >> j) & 1
    if lane == STREAM:
        return COPIED
    if lane == ZERO_COPY and slot >= 0:
        return IN_PLACE if is_pinned(wire, tables, grouping, layer, i, j) else COPIED
    if not is_missing:
        return NOTHING
    if lane == HIT:
        return IN_SLOT
    if (lane == ZERO_COPY or lane == UNPLACED) and is_pinned(wire, tables, grouping, layer, i, j):
        return IN_PLACE
    return ON_CPU


@compiled(counted=False)
def lay_out_plan(wire, tables, grouping, marks, first_shard, layer, num_experts):
    """Write items, changes and copies; their numbers go to ``wire.counts``, and each shard's fate to ``wire.fates``.

    Items come in the order in which they can start: what is in VRAM or read in place, then what is copied.
    ``first_shard`` is the layer's.
    """
    wire.counts[:] = 0
    num_shards, copied = tables.num_shards[layer], 0
    wire.control[Control.READABLE] = 1
    for i in range(num_experts):
        for j in range(num_shards):
            fate = fate_of(wire, tables, grouping, marks, layer, i, j)
            wire.fates[i * num_shards + j] = fate
            copied += fate == COPIED
            if fate == IN_SLOT or fate == IN_PLACE:
                _add_item(wire, tables, grouping, marks, layer, i, j, fate)
            if fate != NOTHING and fate != ON_CPU:
                _add_updates(wire, tables, grouping, marks, first_shard, layer, i, j)
    if copied == 0:
        return
    for i in range(num_experts):
        left = 0  # shards of the copy in hand
        for j in range(num_shards):
            if wire.fates[i * num_shards + j] == COPIED:
                left = _add_copied(wire, tables, grouping, marks, layer, i, j, left)


@compiled(counted=False)
def lay_out_cpu(wire, tables, ws, grouping, marks, layer, num_experts):
    """Write the CPU lane's blocks; their number goes to ``wire.counts``."""
    num_shards = tables.num_shards[layer]
    for i in range(num_experts):
        for j in range(num_shards):
            if wire.fates[i * num_shards + j] == ON_CPU:
                lay_out_shard(tables, ws, grouping, marks, layer, i, j, wire.counts[NUM_CPU])
                wire.counts[NUM_CPU] += 1


@compiled(counted=False)
def _add_item(wire, tables, grouping, marks, layer, i, j, fate):
    """One item of the work list, its number last in each sixteen bytes; a copied one waits for the newest group."""
    at = i * tables.num_shards[layer] + j
    item = wire.places[Place.PLAN_LIST] + HEADER_NBYTES + ITEM_NBYTES * wire.counts[NUM_ITEMS]
    wire.counts[NUM_ITEMS] += 1
    slot = marks.slot[at]
    in_slot = wire.places[Place.SLOTS] + slot * wire.places[Place.SLOT_NBYTES] if slot >= 0 else 0
    source = source_address(tables, layer, grouping.experts[i], j)
    flag = wire.places[Place.COPY_FLAGS] + 4 * wire.counts[GROUP]
    sequence = np.int32(wire.control[Control.SEQUENCE])
    set_word(item + ITEM_WEIGHTS, 0, source if fate == IN_PLACE else in_slot)
    store32_at(item + ITEM_SHARD, np.int32(j))
    store32_at(item + ITEM_SEQUENCE, sequence)
    fill = in_slot if fate == IN_PLACE else 0
    if fate == COPIED:
        if is_pinned(wire, tables, grouping, layer, i, j):
            fill = source  # where to read it if no copy comes
        else:
            wire.control[Control.READABLE] = 0
    set_word(item + ITEM_FILL, 0, fill)
    store32_at(item + ITEM_POSITION, np.int32(grouping.first_position[i]))
    store32_at(item + ITEM_SEQUENCE_2, sequence)
    set_word(item + ITEM_FLAG, 0, flag if fate == COPIED else 0)
    store32_at(item + ITEM_ROWS, np.int32(grouping.rows[i]))
    store32_at(item + ITEM_SEQUENCE_3, sequence)


@compiled(counted=False)
def _add_copied(wire, tables, grouping, marks, layer, i, j, left):
    """An item and, at the start of a run of neighbours, its copy; what is left of the run after it."""
    at = i * tables.num_shards[layer] + j
    if left == 0:
        left = max(1, marks.run[at])
        nbytes = np.int64(0)
        for k in range(j, j + left):
            nbytes += tables.descriptor[layer, k, layout.NBYTES]
        slot = wire.places[Place.SLOTS] + marks.slot[at] * wire.places[Place.SLOT_NBYTES]
        add_copy(wire, slot, source_address(tables, layer, grouping.experts[i], j), nbytes)
    _add_item(wire, tables, grouping, marks, layer, i, j, COPIED)
    return left - 1


@compiled(counted=False)
def add_copy(wire, destination, source, nbytes):
    """A copy, in the newest group unless that is full."""
    k, counts = wire.counts[NUM_COPIES], wire.counts
    if counts[GROUP_SIZE] >= GROUP_NBYTES or (k > 0 and k % GROUP_COPIES == 0):
        counts[GROUP] += 1
        counts[GROUP_SIZE] = 0
    wire.copies[COPY_TO, k], wire.copies[COPY_FROM, k] = destination, source
    wire.copies[COPY_NBYTES, k], wire.copies[COPY_GROUP, k] = nbytes, counts[GROUP]
    counts[GROUP_SIZE] += nbytes
    counts[NUM_COPIES] = k + 1


@compiled(counted=False)
def _add_updates(wire, tables, grouping, marks, first_shard, layer, i, j):
    """The slot table learns where a shard is from now on, and that its victim is gone."""
    at = i * tables.num_shards[layer] + j
    slot = marks.slot[at]
    if slot < 0:
        return
    shard, sequence = first_shard + grouping.experts[i] * tables.num_shards[layer] + j, wire.control[Control.SEQUENCE]
    if marks.lane[at] != HIT and marks.victim[at] >= 0:
        add_update(wire.places[Place.UPDATES], wire.counts[NUM_UPDATES], marks.victim[at], -1, sequence)
        wire.counts[NUM_UPDATES] += 1
    add_update(wire.places[Place.UPDATES], wire.counts[NUM_UPDATES], shard, slot, sequence)
    wire.counts[NUM_UPDATES] += 1


@compiled(counted=False)
def add_update(updates, index, entry, slot, sequence):
    """One change of the slot table, its list's number last."""
    update = updates + HEADER_NBYTES + UPDATE_NBYTES * index
    store32_at(update + UPDATE_ENTRY, np.int32(entry))
    store32_at(update + UPDATE_SLOT, np.int32(slot))
    store32_at(update + UPDATE_SEQUENCE, np.int32(sequence))


@compiled(counted=False)
def release_plan(wire):
    """Say that the plan's items and changes are complete."""
    plan = wire.places[Place.PLAN_LIST]
    store32_at(plan + PLAN_UPDATES, np.int32(wire.counts[NUM_UPDATES]))
    release_list(plan, wire.counts[NUM_ITEMS], wire.control[Control.SEQUENCE])


@compiled(counted=False)
def release_list(address, count, sequence):
    """Say that a list is complete; the stores before it are seen first."""
    store32_at(address + COUNT, np.int32(count))
    store32_at(address + SEQUENCE, np.int32(sequence))
