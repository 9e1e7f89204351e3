"""The mailbox: what the GPU published of a step with misses, read whole or not at all. Nothing here decides."""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.atomics import fence
from trilane.cpu_kernels.words import load_i32, word
from trilane.cuda_words import (
    BEGIN,
    CLOCK,
    END,
    LAYER,
    NUM_GROUPS,
    NUM_ROWS,
    TOP_K,
    Control,
    Place,
    u32_at,
)
from trilane.jit import compiled


@compiled(counted=False)
def take_mail(wire, grouping, num_layers):
    """Copy a new mailbox into the grouping; its layer, -1 where there is none or the GPU is writing it.

    The GPU writes ``begin`` first and ``end`` last, so what lies between two equal readings of them is whole.
    """
    mail = wire.places[Place.MAIL]
    sequence = u32_at(mail + END)
    if sequence == wire.control[Control.SEQUENCE] or u32_at(mail + BEGIN) != sequence:
        return -1
    layer, num_groups = load_i32(mail + LAYER), load_i32(mail + NUM_GROUPS)
    entries = load_i32(mail + NUM_ROWS) * load_i32(mail + TOP_K)
    clock = u32_at(mail + CLOCK)
    if not _fits(wire, grouping, num_layers, layer, num_groups, entries):
        return -1
    _copy_groups(wire, grouping, num_groups, entries)
    fence()
    if u32_at(mail + BEGIN) != sequence:
        return -1
    wire.control[Control.SEQUENCE] = sequence
    wire.control[Control.NUM_ROWS] = load_i32(mail + NUM_ROWS)
    before = wire.control[Control.CLOCK]
    wire.control[Control.CLOCK] = before + ((clock - before) & 0xFFFFFFFF)  # the GPU's has 32 bits
    return layer


@compiled(counted=False)
def _fits(wire, grouping, num_layers, layer, num_groups, entries):
    """Whether the numbers can be meant; half-written ones need not."""
    if layer < 0 or layer >= num_layers:
        return False
    return 0 < num_groups <= wire.missing.size and 0 < entries <= grouping.token.size


@compiled(counted=False)
def _copy_groups(wire, grouping, num_groups, entries):
    groups, bits = wire.places[Place.MAIL_GROUPS], wire.places[Place.MAIL_MISSING]
    for i in range(num_groups):
        grouping.experts[i] = load_i32(groups + 4 * i)
        grouping.first_position[i] = load_i32(groups + 4 * (entries + i))
        grouping.rows[i] = load_i32(groups + 4 * (2 * entries + i))
        wire.missing[i] = word(bits, i)
    tokens = wire.places[Place.MAIL_TOKENS]
    for position in range(entries):
        grouping.token[position] = load_i32(tokens + 4 * position)


@compiled(counted=False)
def num_groups_of(wire):
    """Groups of the mailbox that was taken."""
    return np.int64(load_i32(wire.places[Place.MAIL] + NUM_GROUPS))
