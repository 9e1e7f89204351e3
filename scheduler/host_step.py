"""One layer-step on the host device, in compiled code: from a plan to the blocks that the lanes work from.

This is where a decision (planner) becomes work (words): it knows both vocabularies and decides nothing. No
allocation: everything lives in the workspace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trilane.cpu_kernels import layout
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.host_workspace import Part
from trilane.cpu_kernels.shard_words import set_weights
from trilane.cpu_kernels.words import Combine, DeviceJob, LinkJob, Piece, Publish, Shard, TeamJob
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY
from trilane.jit import compiled
from trilane.records import record

NUM_PLAYED = 5
LINK_NS, ZERO_COPY_NS, HIT_NS, CPU_NS, LINK_FIX_NS = range(NUM_PLAYED)  # places in Tables.played
TASKS_PER_THREAD = 12  # CPU tasks of a step: enough that an uneven end costs little
MIN_UP_ROWS, MIN_DOWN_ROWS = 16, 128  # fewer rows a task would put the four memory streams too close


@record
class Tables(NamedTuple):
    """What never changes while a scheduler lives.

    Attributes
    ----------
    layer_words : int64 (layers, Layer.SIZE)
        Layer blocks of words.py; ``layer_address`` (layers,) has their addresses.
    descriptor : int64 (layers, max shards, 16)
        Shard offsets and strides, see layout.py.
    num_shards, expert_base, expert_stride, down_bias : int64 (layers,)
        Shards of an expert; address of expert 0; bytes to the next; offset of the down bias, -1 without.
    gate_int8, up_int8 : int64 (layers,)
        1 where the matrix takes int8 records of the hidden rows, 0 for float32 ones.
    record_nbytes : int64 (layers,)
        Bytes of a row's down record.
    slot_address : int64 (slots,)
    hidden, num_threads : int
        Row length; workers of the CPU lane.
    played : float64 (5,)
        Played ns a byte of each lane (0: not played), and ns a copy.
    """

    layer_words: np.ndarray
    layer_address: np.ndarray
    descriptor: np.ndarray
    num_shards: np.ndarray
    expert_base: np.ndarray
    expert_stride: np.ndarray
    down_bias: np.ndarray
    gate_int8: np.ndarray
    up_int8: np.ndarray
    record_nbytes: np.ndarray
    slot_address: np.ndarray
    hidden: int
    num_threads: int
    played: np.ndarray


@compiled(counted=False)
def set_publish(tables, ws, layer, num_rows, address, stride, element, int8_stride, floats_stride):
    """The publish block: where the hidden rows are, and which records the layer needs."""
    block = ws.publish
    block[Publish.INPUT] = address
    block[Publish.INPUT_STRIDE] = stride
    block[Publish.ELEMENT] = element
    block[Publish.HIDDEN] = tables.hidden
    block[Publish.FLOATS] = ws.address[Part.FLOATS]
    block[Publish.FLOATS_STRIDE] = floats_stride
    needs_int8 = tables.gate_int8[layer] + tables.up_int8[layer] > 0
    block[Publish.INT8] = ws.address[Part.INT8] if needs_int8 else 0
    block[Publish.INT8_STRIDE] = int8_stride
    block[Publish.BAD] = ws.address[Part.BAD_ROWS]
    block[Publish.NUM_ROWS] = num_rows


@compiled(counted=False)
def set_combine(tables, ws, grouping_address, layer, num_rows, top_k, address, stride, element):
    """The combine block; ``grouping_address`` int64[2] has the addresses of the ids and positions."""
    block = ws.combine
    block[Combine.PARTS] = ws.address[Part.PARTS]
    block[Combine.NUM_SHARDS] = tables.num_shards[layer]
    block[Combine.HIDDEN] = tables.hidden
    block[Combine.TOP_K] = top_k
    block[Combine.IDS] = grouping_address[0]
    block[Combine.POSITION] = grouping_address[1]
    block[Combine.WEIGHTS] = ws.address[Part.WEIGHTS]
    bias = tables.down_bias[layer]
    block[Combine.DOWN_BIAS] = tables.expert_base[layer] + bias if bias >= 0 else 0
    block[Combine.DOWN_BIAS_STRIDE] = tables.expert_stride[layer]
    block[Combine.BAD] = ws.address[Part.BAD_ROWS]
    block[Combine.OUT] = address
    block[Combine.OUT_STRIDE] = stride
    block[Combine.ELEMENT] = element
    block[Combine.NUM_ROWS] = num_rows


@compiled(counted=False)
def point_rows(tables, ws, grouping, layer, num_positions, int8_stride, floats_stride):
    """Give each grouped row the addresses of its token's records."""
    for position in range(num_positions):
        token = grouping.token[position]
        as_floats = ws.address[Part.FLOATS] + token * floats_stride
        as_int8 = ws.address[Part.INT8] + token * int8_stride
        ws.gate_inputs[position] = as_int8 if tables.gate_int8[layer] else as_floats
        ws.up_inputs[position] = as_int8 if tables.up_int8[layer] else as_floats


@compiled(counted=False)
def lay_out_step(tables, ws, grouping, plan, layer, num_experts, counts):
    """Blocks of all lanes for what the plan places now.

    ``counts`` int64[4] gets the shards of each lane. Items lie in ``ws.shards`` in the order hit, streamed,
    CPU, zero-copy; pieces of the link are the streamed items, then those read in place.
    """
    num_shards = tables.num_shards[layer]
    _count_lanes(ws, plan, num_experts * num_shards, counts)
    for i in range(num_experts):
        for j in range(num_shards):
            lane = plan.lane[i * num_shards + j]
            if lane >= 0:
                index = ws.cursor[lane]
                ws.cursor[lane] = index + 1
                lay_out_shard(tables, ws, grouping, plan, layer, i, j, index)
                if lane == STREAM or lane == ZERO_COPY:
                    _lay_out_piece(tables, ws, grouping, plan, layer, i, j, index, counts)
    _set_jobs(tables, ws, layer, counts)


@compiled(counted=False)
def _count_lanes(ws, plan, num, counts):
    counts[:] = 0
    for at in range(num):
        if plan.lane[at] >= 0:
            counts[plan.lane[at]] += 1
    ws.cursor[HIT] = 0
    ws.cursor[STREAM] = counts[HIT]
    ws.cursor[CPU] = counts[HIT] + counts[STREAM]
    ws.cursor[ZERO_COPY] = counts[HIT] + counts[STREAM] + counts[CPU]


@compiled(counted=False)
def source_address(tables, layer, expert, j):
    start = tables.expert_base[layer] + expert * tables.expert_stride[layer]
    return start + tables.descriptor[layer, j, layout.OFFSET]


@compiled(counted=False)
def lay_out_shard(tables, ws, grouping, plan, layer, i, j, index):
    """The item of shard ``j`` of the ``i``-th expert: weights from its slot or from the arena, rows, scratch."""
    num_shards = tables.num_shards[layer]
    lane, slot = plan.lane[i * num_shards + j], plan.slot[i * num_shards + j]
    block, where = ws.shards[index], tables.descriptor[layer, j]
    weights = source_address(tables, layer, grouping.experts[i], j)
    if lane == HIT or lane == STREAM:
        weights = tables.slot_address[slot]
    set_weights(block, where, weights)
    rows, first = grouping.rows[i], grouping.first_position[i]
    row = first * num_shards + j * rows  # scratch rows of one item lie together
    block[Shard.NUM_ROWS] = rows
    block[Shard.GATE_INPUTS] = ws.address[Part.GATE_INPUTS] + 8 * first
    block[Shard.UP_INPUTS] = ws.address[Part.UP_INPUTS] + 8 * first
    block[Shard.PRODUCTS] = ws.address[Part.PRODUCTS] + row * 8 * BLOCK
    block[Shard.RECORDS] = ws.address[Part.RECORDS] + row * tables.record_nbytes[layer]
    block[Shard.DOWN_INPUTS] = ws.address[Part.DOWN_INPUTS] + 8 * row
    block[Shard.BAD] = ws.address[Part.BAD_HIDDEN] + 8 * row
    block[Shard.OUT] = ws.address[Part.PARTS] + 4 * tables.hidden * (first * num_shards + j)
    block[Shard.OUT_STRIDE] = num_shards * tables.hidden
    block[Shard.PROGRESS] = 0
    block[Shard.SLEEPERS] = 0
    block[Shard.LANDED] = 0


@compiled(counted=False)
def _lay_out_piece(tables, ws, grouping, plan, layer, i, j, index, counts):
    """The link's piece for a streamed shard or one that is read in place."""
    at = i * tables.num_shards[layer] + j
    streamed = plan.lane[at] == STREAM
    number = index - counts[HIT] - (0 if streamed else counts[CPU])
    shard = ws.address[Part.SHARDS] + 8 * Shard.SIZE * index
    piece = ws.pieces[number]
    nbytes = tables.descriptor[layer, j, layout.NBYTES]
    slot = plan.slot[at]
    piece[Piece.SOURCE] = source_address(tables, layer, grouping.experts[i], j)
    piece[Piece.DESTINATION] = tables.slot_address[slot] if slot >= 0 else 0
    piece[Piece.NBYTES] = nbytes
    piece[Piece.SHARD] = 0 if streamed else shard
    piece[Piece.LANDED] = shard + 8 * Shard.LANDED
    rate = tables.played[LINK_NS if streamed else ZERO_COPY_NS]
    fix = tables.played[LINK_FIX_NS] if plan.run[at] > 0 else 0.0
    piece[Piece.PLAYED_NS] = np.int64(nbytes * rate + fix) if rate > 0.0 else 0


@compiled(counted=False)
def _set_jobs(tables, ws, layer, counts):
    """The job blocks of the three lanes; a lane's due time is set when it is posted."""
    shards, words = ws.address[Part.SHARDS], tables.layer_address[layer]
    device, link, team = ws.device_job, ws.link_job, ws.team_job
    device[:] = 0
    device[DeviceJob.LAYER] = words
    device[DeviceJob.SHARDS] = shards
    device[DeviceJob.NUM_HITS] = counts[HIT]
    device[DeviceJob.NUM_STREAMED] = counts[STREAM]
    device[DeviceJob.HIT_PS] = np.int64(1000.0 * tables.played[HIT_NS])
    link[:] = 0
    link[LinkJob.LAYER] = words
    link[LinkJob.PIECES] = ws.address[Part.PIECES]
    link[LinkJob.NUM_PIECES] = counts[STREAM] + counts[ZERO_COPY]
    team[:] = 0
    team[TeamJob.LAYER] = words
    team[TeamJob.SHARDS] = shards + 8 * Shard.SIZE * (counts[HIT] + counts[STREAM])
    team[TeamJob.NUM_SHARDS] = counts[CPU]
    if counts[CPU] > 0:
        cut_tasks(tables, team, layer, counts[CPU])


@compiled(counted=False)
def cut_tasks(tables, team, layer, num_shards):
    """Chunks a shard, so that each worker gets about TASKS_PER_THREAD tasks; one worker needs no cutting."""
    wanted = 1 if tables.num_threads == 1 else -(-TASKS_PER_THREAD * tables.num_threads // num_shards)
    neurons = tables.descriptor[layer, 0, layout.NEURONS]
    team[TeamJob.UP_CHUNKS] = max(1, min(wanted * 2 // 3, neurons // MIN_UP_ROWS))
    team[TeamJob.DOWN_CHUNKS] = max(1, min(wanted // 3, tables.hidden // MIN_DOWN_ROWS))
