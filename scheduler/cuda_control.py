"""The control thread of the CUDA device: answers the GPU's misses without an interpreter, from mailbox to flags.

It looks at the mailbox, plans, releases the plan to the GPU, starts the CPU lane, posts the copies, and releases
the CPU lane's parts; it never calls the driver. Then it counts what happened. Between two misses it moves background
fills on, and learns from the steps that asked nobody. The watchdog, a second thread, ends waits of the GPU that nobody
answers. What a plan is, the planner decides.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from trilane.accounts import account_step, account_wave
from trilane.cpu_kernels.atomics import load_at, mono_ns, pause, sleep_ns, store32_at, store_at
from trilane.cpu_kernels.float_env import TASK_SIGNATURE
from trilane.cpu_kernels.host_workspace import Part
from trilane.cpu_kernels.jobs import ENDED, TIMED_OUT, job_error, post_job, wait_job
from trilane.cpu_kernels.words import TeamJob, copy_bytes, word
from trilane.cuda_copier import await_issue, post_copies, thaw, watch_landing
from trilane.cuda_fills import begin_background, fill_ns, tend_fills
from trilane.cuda_mail import await_rows, take_mail, take_told, take_use
from trilane.cuda_plan import NUM_COPIES, NUM_CPU, lay_out_cpu, lay_out_plan, release_plan
from trilane.cuda_tape import tape_plan, tape_touch, tape_use
from trilane.cuda_words import END, Control, Failure, Fault, Marks, Place, control_word, fail, u32_at
from trilane.host_step import cut_tasks, point_rows
from trilane.jit import compiled, native
from trilane.journal import write_plan
from trilane.planner import learn_step, note_stamp, note_step, plan_layer
from trilane.stash import on_stashes

TEAM_SLICE_NS = 5_000_000
WATCH_NS = 5_000_000
PAUSES = 4  # between two looks while hot
STAMPS_AT_ONCE = 128  # eight lines of memory that the GPU writes
LONGEST_NS = 1_000_000


# ----------------------------------------------------------------------------------------- one step's answer
@compiled(counted=False)
def answer_mail(run, rates):
    """Everything that the GPU waits for in the step whose mailbox was taken, then the bookkeeping."""
    begin = mono_ns()
    wire, g = run.wire, run.grouping
    _note_idle(wire.control, begin)
    note_pause(wire.control, wire.control[Control.CLOCK] - wire.control[Control.USED], begin)
    layer, clock = wire.control[Control.TAKEN_LAYER], wire.control[Control.CLOCK]
    num_experts = wire.control[Control.NUM_GROUPS]
    plan_layer(run.state, run.geometry, rates, run.options, layer, g.experts, g.rows, num_experts, clock, run.work)
    plan_ns = mono_ns() - begin
    marks = Marks(run.work.lane, run.work.slot, run.work.victim, run.work.run)
    lay_out_plan(wire, run.tables, g, marks, run.geometry.first_shard[layer], layer, num_experts)
    sequence = wire.control[Control.SEQUENCE]
    wire.control[Control.COPIES] = wire.counts[NUM_COPIES]
    release_plan(wire)
    lay_out_cpu(wire, run.tables, run.ws, g, marks, layer, num_experts)
    ticket = _post_team(wire, run.tables, run.ws, g, layer, num_experts)
    copies = post_copies(wire, sequence)
    if _await_team(wire, ticket):
        store32_at(wire.places[Place.CPU_FLAG], np.int32(sequence))
    await_issue(wire, copies)
    wire.control[Control.ANSWERED] = sequence
    wire.control[Control.FREE_NS], wire.control[Control.MISSED] = mono_ns(), 1
    tape_plan(run, layer, clock, num_experts)
    learn_step(run.state, run.geometry, run.options, layer, g.experts, num_experts)
    write_plan(run.journal, run.geometry, layer, clock, g.experts, g.rows, num_experts, run.work)
    run.lane_us[:] = 0.0
    account_wave(run.totals, run.work, run.ws, run.lane_us)
    account_step(
        run.totals, run.journal, layer, num_experts, wire.control[Control.NUM_ROWS],
        run.geometry.num_shards[layer], run.lane_us, (mono_ns() - begin) / 1e3, plan_ns / 1e3,
    )  # fmt: skip
    first = run.geometry.first_expert[layer]
    for i in range(num_experts):
        run.seen[first + g.experts[i]] = clock
    count_hits(run, clock)
    wire.control[Control.USED] = clock
    wire.control[Control.FILL_NS] = fill_ns(rates, run.geometry.shard_nbytes[layer, 0])
    begin_background(run, layer)
    wire.control[Control.DONE_NS] = mono_ns()


@compiled(counted=False)
def _note_idle(control, begin):
    """For how long there was nothing to answer."""
    if control[Control.DONE_NS] != 0:
        control[Control.IDLE_NS] = average_time(control[Control.IDLE_NS], begin - control[Control.DONE_NS])


@compiled(counted=False)
def note_pause(control, steps, now):
    """How long it took to this step from when the one before left the link alone, where that is known."""
    if steps == 1 and control[Control.FREE_NS] != 0:
        place = Control.PAUSE_NS + control[Control.MISSED]
        control[place] = average_time(control[place], now - control[Control.FREE_NS])
    control[Control.FREE_NS], control[Control.MISSED] = now, 0


@compiled
def average_time(average_ns, ns):
    """The average moved on; a pause of the program counts as a short one."""
    return average_ns + (min(ns, LONGEST_NS) - average_ns) // 16


@compiled(counted=False)
def learn_use(run):
    """Learn from a step without misses, of which the GPU has told what it used; True if there was one."""
    wire, g = run.wire, run.grouping
    if wire.control[Control.FAILURE] != Failure.NONE:
        return False
    before = wire.control[Control.USED]
    layer = take_use(wire, g, run.geometry.num_layers)
    if layer < 0:
        return False
    note_pause(wire.control, wire.control[Control.USED] - before, mono_ns())
    clock, num = wire.control[Control.USED], wire.control[Control.NUM_GROUPS]
    first, end = run.geometry.first_expert[layer], run.geometry.first_expert[layer + 1]
    for i in range(num):
        if first + g.experts[i] >= end:
            return False
    for i in range(num):
        run.seen[first + g.experts[i]] = clock
    tape_use(run, layer, clock, num)
    note_step(run.state, run.geometry, run.options, layer, g.experts, num, clock)
    begin_background(run, layer)
    return True


@compiled(counted=False)
def _post_team(wire, tables, ws, grouping, layer, num_experts):
    """Start the CPU lane on its shards; its ticket, 0 without any."""
    team = ws.team_job
    team[:] = 0
    if wire.counts[NUM_CPU] == 0 or not _take_records(wire, tables, ws, layer):
        return 0
    positions = 0
    for i in range(num_experts):
        positions += grouping.rows[i]
    strides = wire.places[Place.INT8_STRIDE], wire.places[Place.FLOATS_STRIDE]
    point_rows(tables, ws, grouping, layer, positions, strides[0], strides[1])
    team[TeamJob.LAYER] = tables.layer_address[layer]
    team[TeamJob.SHARDS] = ws.address[Part.SHARDS]
    team[TeamJob.NUM_SHARDS] = wire.counts[NUM_CPU]
    cut_tasks(tables, team, layer, wire.counts[NUM_CPU])
    team[TeamJob.POSTED_NS] = mono_ns()
    tasks = team[TeamJob.NUM_SHARDS] * (team[TeamJob.UP_CHUNKS] + team[TeamJob.DOWN_CHUNKS])
    return post_job(wire.places[Place.TEAM], wire.places[Place.TEAM_TASK], ws.address[Part.TEAM_BLOCK], tasks)


@compiled(counted=False)
def _take_records(wire, tables, ws, layer):
    """Copy the rows' records to plain memory: each worker reads them again for every row of weights.

    Those of a single row do not wait for the mailbox. False if nothing will run any more.
    """
    rows, int8 = wire.control[Control.NUM_ROWS], tables.gate_int8[layer] + tables.up_int8[layer] > 0
    floats = tables.up_int8[layer] == 0 or tables.gate_int8[layer] == 0
    if (rows > 1 or floats) and not await_rows(wire):
        return False
    if int8 and rows == 1 and not take_told(wire, ws.address[Part.INT8], tables.hidden):
        return False
    if int8 and rows > 1:
        copy_bytes(ws.address[Part.INT8], wire.places[Place.MAIL_RECORDS], rows * wire.places[Place.INT8_STRIDE])
    if floats:
        copy_bytes(ws.address[Part.FLOATS], wire.places[Place.MAIL_FLOATS], rows * wire.places[Place.FLOATS_STRIDE])
    return True


@compiled(counted=False)
def _await_team(wire, ticket):
    """Wait for the CPU lane; False if its parts will never be there."""
    if ticket == 0:
        return True
    team, status = wire.places[Place.TEAM], TIMED_OUT
    while ticket > 0 and status == TIMED_OUT:
        status = wait_job(team, ticket, TEAM_SLICE_NS)
        if wire.control[Control.STOP] != 0 and status != ENDED:
            return False
    if ticket > 0 and status == ENDED and job_error(team, ticket) == 0:
        return True
    fail(wire, Failure.TEAM, job_error(team, ticket) if ticket > 0 and status == ENDED else -1 - status)
    return False


# ------------------------------------------------------------------------------------------- what happened
@compiled(counted=False)
def count_hits(run, clock):
    """Uses in steps without misses, which only the GPU saw: its stamps say when an expert was last routed to.

    Looks at some experts after each step, in turn, so that the next mailbox never waits for all of them.
    """
    wire, seen, state = run.wire, run.seen, run.state
    first, stamps = wire.control[Control.HITS_SEEN], wire.places[Place.STAMPS]
    end = min(first + STAMPS_AT_ONCE, seen.size)
    wire.control[Control.HITS_SEEN] = end if end < seen.size else 0
    for expert in range(first, end):
        stamp = clock - ((clock - u32_at(stamps + 4 * expert)) & 0xFFFFFFFF)  # a later step's is not counted yet
        if stamp > seen[expert]:
            seen[expert] = stamp
            tape_touch(run, expert, stamp)
            note_stamp(state, run.geometry, expert, stamp)


# ------------------------------------------------------------------------------------------------ threads
@compiled
def _let_hold(words):
    """Let the host have the state for as long as it wants it."""
    store_at(words + 8 * Control.HELD, 1)
    while control_word(words, Control.HOLD) != 0 and control_word(words, Control.STOP) == 0:
        sleep_ns(20_000)
    store_at(words + 8 * Control.HELD, 0)


@compiled
def _rest(words, idle_ns):
    if idle_ns < control_word(words, Control.HOT_NS):
        for _ in range(PAUSES):
            pause()
    else:
        sleep_ns(control_word(words, Control.NAP_NS))


@compiled(counted=False)
def look(run):
    """The layer of a new mailbox, -1 without one, or where nothing may run any more."""
    if run.wire.control[Control.FAILURE] != Failure.NONE:
        return -1
    layer = take_mail(run.wire, run.grouping, run.geometry.num_layers)
    run.wire.control[Control.TAKEN_LAYER] = layer
    return layer


@functools.cache
def control_task(run_kind: Any, rates_kind: Any) -> Any:
    """The control thread's task for stashes of these types; its block: Block words."""
    take, tend, learn, watch, warm, answer = (
        on_stashes(look, run_kind),
        on_stashes(tend_fills, run_kind),
        on_stashes(learn_use, run_kind),
        on_stashes(watch_landing, run_kind),
        on_stashes(thaw, run_kind),
        on_stashes(answer_mail, run_kind, rates_kind),
    )

    @native(TASK_SIGNATURE)
    def control(block, task, worker):
        words, last = word(block, 0), mono_ns()
        while control_word(words, Control.STOP) == 0:
            if control_word(words, Control.HOLD) != 0:
                _let_hold(words)
            elif control_word(words, Control.FAULT) == Fault.DEAF:
                sleep_ns(1_000_000)
            else:
                run = load_at(block + 8)
                if control_word(words, Control.FROZEN) != 0:
                    warm(run)
                    if control_word(words, Control.FROZEN) != 0:
                        run = load_at(block + 24)
                layer = take(run)
                if layer >= 0:
                    answer(run, word(word(block, 2), layer))
                    last = mono_ns()
                elif tend(run):
                    last = mono_ns()
                elif not learn(run):  # which keeps nobody awake: what was used can wait
                    if control_word(words, Control.COPIES) != 0:
                        watch(run)
                    _rest(words, mono_ns() - last)
        return 0

    return control


@functools.cache
def watch_task() -> Any:
    """The watchdog's task; its block: control words, addresses of the mailbox, the abort word, the last copy's flag."""

    @native(TASK_SIGNATURE)
    def watch(block, task, worker):
        words, begin, before = word(block, 0), np.int64(0), np.int64(0)
        while control_word(words, Control.STOP) == 0:
            sleep_ns(WATCH_NS)
            sequence = u32_at(word(block, 1) + END)
            copies = control_word(words, Control.COPIES)
            waits = sequence != control_word(words, Control.ANSWERED)
            if not waits and copies > 0:
                waits = u32_at(word(block, 3)) != sequence
            now = mono_ns()
            if not waits:
                begin = 0
            elif begin == 0 or sequence != before:
                begin, before = now, sequence
            elif now - begin > control_word(words, Control.STALL_NS):
                if control_word(words, Control.FAILURE) == Failure.NONE:
                    store_at(words + 8 * Control.FAILURE, Failure.STALLED)
                store32_at(word(block, 2), np.int32(1))
        return 0

    return watch
