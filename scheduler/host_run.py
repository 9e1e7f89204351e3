"""A layer-step on the host device from end to end, in two calls of compiled code: open and finish.

Open: group the rows, publish them, plan, lay the work out, post the lanes. Finish: wait for the lanes, combine,
account. Between the two the lanes run; neither call needs the interpreter or allocates. What takes long or can
fail (large batches, waits of more than a slice, further waves) is handed back to host_runner.py by a status.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from trilane.accounts import account_step, account_wave
from trilane.cpu_kernels.atomics import mono_ns
from trilane.cpu_kernels.float_env import call_exactly
from trilane.cpu_kernels.host_workspace import Part, Workspace
from trilane.cpu_kernels.jobs import ENDED, job_error, post_job, wait_job
from trilane.cpu_kernels.words import Combine, DeviceJob, LinkJob, Publish, TeamJob
from trilane.expert import CPU, HIT, STREAM, Geometry
from trilane.guard import Guard, guard_step
from trilane.host_step import CPU_NS, Tables, lay_out_step, point_rows, set_combine, set_publish
from trilane.jit import compiled
from trilane.journal import Journal, write_plan, write_wave
from trilane.plan import Options, Work
from trilane.planner import learn_step, plan_layer, plan_wave
from trilane.records import record
from trilane.routing import Grouping, group_rows
from trilane.state import State

WAIT_NS = 50_000_000  # then the interpreter looks at signals and at the threads
ROWS_IN_CALLER = 4  # publish and combine of so many rows are done by the caller: a hand-over costs more

DONE, WAITING, MORE_WAVES, MANY_ROWS, REFUSED, FAILED = range(6)  # statuses


class Lane(IntEnum):
    """Places in the array of addresses of the device's threads and tasks."""

    TEAM = 0  # job words of the threads
    LINK = 1
    DEVICE = 2
    TEAM_TASK = 3
    LINK_TASK = 4
    DEVICE_TASK = 5
    PUBLISH_TASK = 6
    COMBINE_TASK = 7
    SIZE = 8


class Step(IntEnum):
    """Places in the array that describes the step in flight."""

    LAYER = 0
    NUM_ROWS = 1
    TOP_K = 2
    HIDDEN = 3  # address, bytes from row to row, element type; the same of the output
    HIDDEN_STRIDE = 4
    HIDDEN_ELEMENT = 5
    OUT = 6
    OUT_STRIDE = 7
    OUT_ELEMENT = 8
    INT8_STRIDE = 9
    FLOATS_STRIDE = 10
    CLOCK = 11
    NUM_EXPERTS = 12
    UNPLACED = 13  # shards left for further waves
    START_NS = 14
    PLAN_NS = 15
    TEAM_TICKET = 16  # 0: the lane has nothing to do
    LINK_TICKET = 17
    DEVICE_TICKET = 18
    PLANNED = 19  # 1 once the plan has changed the state
    GUARDED = 20  # 1 where the guard chose the lanes of its misses
    SWITCHED = 21  # 1 once the guard has changed its mind: the caller tells, and clears it
    SIZE = 24


@record
class HostStep(NamedTuple):
    """Everything that a step needs, in one argument."""

    tables: Tables
    ws: Workspace
    grouping: Grouping
    grouping_address: np.ndarray
    state: State
    geometry: Geometry
    options: Options
    work: Work
    guard: Guard
    journal: Journal
    totals: np.ndarray
    counts: np.ndarray
    lane_us: np.ndarray
    lanes: np.ndarray
    step: np.ndarray


@compiled(counted=False)
def group_step(run):
    """Group the rows by expert; experts routed to, or ``-1 - entry`` of an id that does not exist."""
    step, layer = run.step, run.step[Step.LAYER]
    num_experts = run.geometry.first_expert[layer + 1] - run.geometry.first_expert[layer]
    step[Step.START_NS] = mono_ns()
    step[Step.PLANNED] = 0
    found = group_rows(run.grouping, step[Step.NUM_ROWS], step[Step.TOP_K], num_experts)
    step[Step.NUM_EXPERTS] = max(0, found)
    set_publish(
        run.tables, run.ws, layer, step[Step.NUM_ROWS], step[Step.HIDDEN], step[Step.HIDDEN_STRIDE],
        step[Step.HIDDEN_ELEMENT], step[Step.INT8_STRIDE], step[Step.FLOATS_STRIDE],
    )  # fmt: skip
    if found >= 0 and step[Step.NUM_ROWS] <= ROWS_IN_CALLER:
        run.ws.publish[Publish.ROWS_PER_TASK] = step[Step.NUM_ROWS]
        call_exactly(run.lanes[Lane.PUBLISH_TASK], run.ws.address[Part.PUBLISH_BLOCK], 0, 0)
    return found


@compiled(counted=False)
def open_step(run, rates):
    """Plan the grouped and published rows, lay the work out, and post the lanes; DONE or REFUSED."""
    step, g, layer = run.step, run.grouping, run.step[Step.LAYER]
    num_experts, clock = step[Step.NUM_EXPERTS], step[Step.CLOCK] + 1
    begin = mono_ns()
    step[Step.CLOCK] = clock
    step[Step.PLANNED] = 1
    step[Step.UNPLACED] = plan_layer(
        run.state, run.geometry, rates, run.options, layer, g.experts, g.rows, num_experts, clock, run.work
    )
    step[Step.PLAN_NS] = mono_ns() - begin
    write_plan(run.journal, run.geometry, layer, clock, g.experts, g.rows, num_experts, run.work)
    positions = 0
    for i in range(num_experts):
        positions += g.rows[i]
    point_rows(run.tables, run.ws, g, layer, positions, step[Step.INT8_STRIDE], step[Step.FLOATS_STRIDE])
    run.lane_us[:] = 0.0
    status = post_wave(run)
    learn_step(run.state, run.geometry, run.options, layer, g.experts, num_experts)  # while the lanes run
    return status


@compiled(counted=False)
def post_wave(run):
    """Lay out what the plan places now, and start the lanes that have work."""
    step, ws, lanes = run.step, run.ws, run.lanes
    lay_out_step(run.tables, ws, run.grouping, run.work, step[Step.LAYER], step[Step.NUM_EXPERTS], run.counts)
    step[Step.LINK_TICKET : Step.DEVICE_TICKET + 1] = 0
    step[Step.TEAM_TICKET] = 0
    link, team, device = ws.link_job, ws.team_job, ws.device_job
    link[LinkJob.POSTED_NS] = device[DeviceJob.POSTED_NS] = mono_ns()
    if link[LinkJob.NUM_PIECES] > 0:
        step[Step.LINK_TICKET] = post_job(lanes[Lane.LINK], lanes[Lane.LINK_TASK], ws.address[Part.LINK_BLOCK], 1)
    if team[TeamJob.NUM_SHARDS] > 0:
        now = mono_ns()
        team[TeamJob.POSTED_NS] = now
        due = np.int64(run.work.lane_nbytes[CPU] * run.tables.played[CPU_NS])
        team[TeamJob.DUE_NS] = now + due if due > 0 else 0
        tasks = team[TeamJob.NUM_SHARDS] * (team[TeamJob.UP_CHUNKS] + team[TeamJob.DOWN_CHUNKS])
        step[Step.TEAM_TICKET] = post_job(lanes[Lane.TEAM], lanes[Lane.TEAM_TASK], ws.address[Part.TEAM_BLOCK], tasks)
    if device[DeviceJob.NUM_HITS] + device[DeviceJob.NUM_STREAMED] > 0:
        step[Step.DEVICE_TICKET] = post_job(
            lanes[Lane.DEVICE], lanes[Lane.DEVICE_TASK], ws.address[Part.DEVICE_BLOCK], 1
        )
    refused = min(step[Step.LINK_TICKET], step[Step.TEAM_TICKET], step[Step.DEVICE_TICKET]) < 0
    return REFUSED if refused else DONE


@compiled(counted=False)
def _await(words, ticket, deadline):
    """Wait for a lane until the deadline: DONE, WAITING or FAILED."""
    if ticket == 0:
        return DONE
    if wait_job(words, ticket, max(np.int64(0), deadline - mono_ns())) != ENDED:
        return WAITING
    return DONE if job_error(words, ticket) == 0 else FAILED


@compiled(counted=False)
def await_lanes(run):
    """Wait for all lanes of the wave, at most WAIT_NS; the device thread waits for the link itself."""
    step, lanes = run.step, run.lanes
    deadline = mono_ns() + WAIT_NS
    status = _await(lanes[Lane.LINK], step[Step.LINK_TICKET], deadline)
    if status == DONE:
        status = _await(lanes[Lane.TEAM], step[Step.TEAM_TICKET], deadline)
    if status == DONE:
        status = _await(lanes[Lane.DEVICE], step[Step.DEVICE_TICKET], deadline)
    return status


@compiled(counted=False)
def finish_step(run):
    """Wait, account, combine. MORE_WAVES and MANY_ROWS leave the rest of it to the caller."""
    status = await_lanes(run)
    if status != DONE:
        return status
    account_wave(run.totals, run.work, run.ws, run.lane_us)
    if run.step[Step.UNPLACED] > 0:
        return MORE_WAVES
    return combine_step(run)


@compiled(counted=False)
def combine_step(run):
    """Combine the parts of a few rows, or only fill the block in where there are MANY_ROWS."""
    step = run.step
    set_combine(
        run.tables, run.ws, run.grouping_address, step[Step.LAYER], step[Step.NUM_ROWS], step[Step.TOP_K],
        step[Step.OUT], step[Step.OUT_STRIDE], step[Step.OUT_ELEMENT],
    )  # fmt: skip
    if step[Step.NUM_ROWS] > ROWS_IN_CALLER:
        return MANY_ROWS
    run.ws.combine[Combine.ROWS_PER_TASK] = step[Step.NUM_ROWS]
    call_exactly(run.lanes[Lane.COMBINE_TASK], run.ws.address[Part.COMBINE_BLOCK], 0, 0)
    return close_step(run)


@compiled(counted=False)
def close_step(run):
    """The step's times into totals and journal."""
    step, layer = run.step, run.step[Step.LAYER]
    step_us = (mono_ns() - step[Step.START_NS]) / 1e3
    account_step(
        run.totals, run.journal, layer, step[Step.NUM_EXPERTS], step[Step.NUM_ROWS],
        run.geometry.num_shards[layer], run.lane_us, step_us, step[Step.PLAN_NS] / 1e3,
    )  # fmt: skip
    if step[Step.GUARDED]:
        missed = 0.0
        for lane in range(STREAM, CPU + 1):
            missed += run.work.lane_nbytes[lane]
        step[Step.SWITCHED] |= guard_step(run.guard, missed, missed + run.work.lane_nbytes[HIT], step_us)
    return DONE


@compiled(counted=False)
def next_wave(run, rates):
    """Plan and post what the wave before left; DONE, REFUSED, or FAILED where no slot can be had at all."""
    step, g, layer = run.step, run.grouping, run.step[Step.LAYER]
    waiting = step[Step.UNPLACED]
    step[Step.UNPLACED] = plan_wave(
        run.state, run.geometry, rates, run.options, layer, g.experts, g.rows, step[Step.NUM_EXPERTS], run.work
    )
    if step[Step.UNPLACED] >= waiting:
        return FAILED
    write_wave(run.journal, layer, step[Step.NUM_EXPERTS] * run.geometry.num_shards[layer], run.work)
    return post_wave(run)


@compiled(counted=False)
def plan_and_post(run, rates):
    """`open_step`, or `next_wave` once a first one was planned: one function, so that the planner is compiled once."""
    return next_wave(run, rates) if run.step[Step.PLANNED] else open_step(run, rates)
