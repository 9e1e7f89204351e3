"""The mailbox: what the GPU published of a step with misses, read whole or not at all. Nothing here decides."""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.activation import BS16, BS32, RECORD_NBYTES, D
from trilane.cpu_kernels.atomics import fence, load_at, pause
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.words import load_i32, set_word, word
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
    control_word,
    u32_at,
)
from trilane.gpu_kernels.words import NUM_USES, TOLD_BAD, USE_IDS, USE_WORDS
from trilane.jit import compiled

LOW = 0xFFFFFFFF
SIGNS = np.int64(-0x7F7F7F7F7F7F7F80)  # the highest bit of each byte
EVEN_BYTES, ONES = np.int64(0x00FF00FF00FF00FF), np.int64(0x0001000100010001)
USE_NBYTES = 4 * USE_WORDS
LATER = 1 << 31


@compiled(counted=False)
def take_mail(wire, grouping, num_layers):
    """Copy a new mailbox into the grouping; its layer, -1 where there is none or the GPU is writing it."""
    layer = _take_brief(wire, grouping, num_layers)
    return layer if layer >= 0 else _take_whole(wire, grouping, num_layers)


@compiled(counted=False)
def _take_brief(wire, grouping, num_layers):
    """The same of a single row's brief, which comes before its mailbox: sixteen bytes each, the number at both ends."""
    brief, sequence = wire.places[Place.BRIEF], (wire.control[Control.SEQUENCE] + 1) & LOW
    first, second = load_at(brief), load_at(brief + 8)
    if first & LOW != sequence or _high(second) != sequence:
        return -1
    layer, num_groups = _high(first) & 0xFFFF, _high(first) >> 16
    if not _fits(wire, grouping, num_layers, layer, num_groups, num_groups):
        return -1
    for i in range(num_groups):
        of, missing = load_at(brief + 16 * (i + 1)), load_at(brief + 16 * (i + 1) + 8)
        if of & LOW != sequence or _high(missing) != sequence:
            return -1
        grouping.experts[i], wire.missing[i] = _high(of), missing & LOW
        grouping.first_position[i], grouping.rows[i], grouping.token[i] = i, 1, 0
    _begin_step(wire, sequence, num_groups, 1, second & LOW)
    return layer


@compiled(counted=False)
def _high(value):
    """The upper half of a word."""
    return (value >> 32) & LOW


@compiled(counted=False)
def _begin_step(wire, sequence, num_groups, num_rows, clock):
    wire.control[Control.SEQUENCE] = sequence
    wire.control[Control.NUM_GROUPS], wire.control[Control.NUM_ROWS] = num_groups, num_rows
    before = wire.control[Control.CLOCK]
    wire.control[Control.CLOCK] = before + ((clock - before) & LOW)  # the GPU's has 32 bits


@compiled(counted=False)
def _take_whole(wire, grouping, num_layers):
    """The same of the mailbox itself.

    The GPU writes ``begin`` first and ``end`` last, so what lies between two equal readings of them is whole. Of a step
    that was told in a brief, the mailbox may not be closed yet: it still has the number of the step before.
    """
    mail, sequence = wire.places[Place.MAIL], (wire.control[Control.SEQUENCE] + 1) & LOW
    if u32_at(mail + END) != sequence or u32_at(mail + BEGIN) != sequence:
        return -1
    layer, num_groups = load_i32(mail + LAYER), load_i32(mail + NUM_GROUPS)
    num_rows, ranks = load_i32(mail + NUM_ROWS), load_i32(mail + TOP_K)
    entries = num_rows * ranks
    clock = u32_at(mail + CLOCK)
    if not _fits(wire, grouping, num_layers, layer, num_groups, entries):
        return -1
    _copy_groups(wire, grouping, num_groups, entries)
    fence()
    if u32_at(mail + BEGIN) != sequence:
        return -1
    wire.control[Control.RANKS] = ranks
    _begin_step(wire, sequence, num_groups, num_rows, clock)
    return layer


@compiled(counted=False)
def take_use(wire, grouping, num_layers):
    """The experts that the next step without misses used, into the grouping; its layer, -1 where none is told.

    Four times sixteen bytes, each with the step's clock. If later steps have taken the place, the first that is left
    comes next: what lies between is not known.
    """
    clock = wire.control[Control.USED] + 1
    use = wire.places[Place.USES] + USE_NBYTES * (clock % NUM_USES)
    later = (load_at(use) - clock) & LOW
    if later != 0:
        if later < LATER and later % NUM_USES == 0:
            wire.control[Control.USED] = clock + later - 1
        return -1
    first = load_at(use)
    layer, num = _high(first) & 0xFFFF, _high(first) >> 16
    if layer >= num_layers or num > min(USE_IDS, grouping.experts.size):
        return -1
    for i in range(num):
        at = use + 4 * (2 + i // 2 + (i // 2 + 1) // 3)  # pairs of ids, after a clock every sixteen bytes
        grouping.experts[i] = (load_i32(at) >> 16 * (i % 2)) & 0xFFFF
        grouping.rows[i] = 1
    fence()
    for k in range(4):
        if u32_at(use + 16 * k) != clock & LOW:
            return -1
    wire.control[Control.USED], wire.control[Control.NUM_GROUPS] = clock, num
    return layer


@compiled(counted=False)
def await_rows(wire):
    """Until the mailbox is closed: a brief says nothing of the rows. False if nothing will run any more."""
    while u32_at(wire.places[Place.MAIL] + END) != wire.control[Control.SEQUENCE]:
        if control_word(wire.places[Place.CONTROL], Control.STOP) != 0:
            return False
        pause()
    return True


@compiled(counted=False)
def take_told(wire, record, hidden):
    """A single row's records, from what is told of each eight elements: these, the block's scale, and the step's clock.

    Their sums are made here. False if nothing will run any more.
    """
    told, clock = wire.places[Place.TOLD], wire.control[Control.CLOCK] & LOW
    for _ in range(-(-hidden // BLOCK)):
        sums16, sums32, four = np.int64(0), np.int64(0), np.int64(0)
        for pair in range(16):
            two = np.int64(0)
            for lane in range(2 * pair, 2 * pair + 2):
                while _high(load_at(told + 8)) != clock:
                    if control_word(wire.places[Place.CONTROL], Control.STOP) != 0:
                        return False
                    pause()
                elements = load_at(told)  # after the clock: both came in one store
                set_word(record, lane, elements)
                two += sum_of_bytes(elements)
                told += 16
            four += two
            sums16 |= (two & 0xFFFF) << 16 * (pair % 4)
            if pair % 2 == 1:
                sums32 |= (four & 0xFFFF) << 16 * (pair // 2 % 4)
                four = np.int64(0)
            if pair % 4 == 3:
                set_word(record + BS16, pair // 4, sums16)
                sums16 = np.int64(0)
            if pair % 8 == 7:
                set_word(record + BS32, pair // 8, sums32)
                sums32 = np.int64(0)
        scale = load_at(told - 8) & LOW
        set_word(record + D, 0, np.int64(1) << 32 if scale == TOLD_BAD else scale)  # d, and behind it bad
        set_word(record + D, 1, 0)
        record += RECORD_NBYTES
    return True


@compiled
def sum_of_bytes(elements):
    """The sum of a word's eight signed bytes."""
    shifted = elements ^ SIGNS  # each byte and 128 more
    pairs = (shifted & EVEN_BYTES) + ((shifted >> 8) & EVEN_BYTES)
    return (((pairs * ONES) >> 48) & 0xFFFF) - 8 * 128


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
