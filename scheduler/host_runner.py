"""Runs layer-steps on the host device: decide, lay out, post, wait, combine, account.

One step reads top to bottom in :meth:`HostRunner.begin` and :meth:`HostRunner.finish`. Argument checks and the
public face are the engine's; decisions are the planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.config import Config
from trilane.cost import STEP_US, TERM_NAMES, Rates
from trilane.cpu_kernels.activation import (
    F32_BLOCK_NBYTES,
    HIDDEN_BF16,
    HIDDEN_F16,
    HIDDEN_F32,
    RECORD_NBYTES,
)
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.host_device import HostDevice, PlayedRates, mono_now
from trilane.cpu_kernels.host_workspace import StepShape, Workspace, make_workspace, rows_per_step
from trilane.cpu_kernels.words import DeviceJob, LinkJob, Piece, TeamJob
from trilane.errors import DeviceError
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, Outcome, Plan
from trilane.host_step import CPU_NS, LINK_NS, lay_out_step, point_rows, set_combine, set_publish
from trilane.host_tables import make_tables, store_geometry
from trilane.jit import compiled
from trilane.journal import StoryEntry, expert_story, last_plan, make_journal, write_plan, write_wave
from trilane.plan import NUM_EVICTIONS, NUM_FILLS, make_options, make_work
from trilane.planner import abandon_step, plan_fills, plan_layer, plan_wave
from trilane.residency import drop_fill, land_fill
from trilane.routing import group_rows, make_grouping
from trilane.state import make_state
from trilane.stats import LaneTotal, Total
from trilane.store import ExpertStore

ELEMENTS = {"f32": HIDDEN_F32, "f16": HIDDEN_F16, "bf16": HIDDEN_BF16}
SCRATCH_NBYTES = 64 << 20
FIRST_ROWS = 8  # rows that the first workspace holds
HITS_US, FETCH_US, CPU_US = 0, 1, 2


@dataclass(frozen=True)
class StepInput:
    """Rows of one step, as addresses: hidden and output rows with strides in bytes and element names."""

    layer: int
    num_rows: int
    top_k: int
    hidden: int
    hidden_stride: int
    hidden_element: str
    out: int
    out_stride: int
    out_element: str


class HostRunner:
    """State, memory and threads of one scheduler on the host device.

    Parameters
    ----------
    store : ExpertStore
    config : Config
    """

    def __init__(self, store: ExpertStore, config: Config) -> None:
        self.store, self.config = store, config
        self.geometry = store_geometry(store)
        slot_nbytes = int(self.geometry.shard_nbytes.max())
        num_slots = config.cache.num_slots(int(self.geometry.first_shard[-1]), slot_nbytes)
        self.device = HostDevice(
            num_slots,
            slot_nbytes,
            threads=config.cpu.threads,
            spin_us=config.cpu.spin_us,
            stall_timeout_s=config.cpu.stall_timeout_s,
            played=PlayedRates(**config.host_device.model_dump()),
        )
        self.device.start()
        self.tables = make_tables(store, self.device, config.cpu.isa)
        self.state = make_state(
            self.geometry,
            num_slots,
            pool=config.cache.pool,
            eviction=config.cache.eviction,
            half_life_steps=config.cache.half_life_steps,
        )
        policy = config.policy
        self.options = make_options(policy.lanes, force=policy.force, admit=policy.admit, fills=policy.fills)
        self.rates: list[Rates] = []
        self.work = make_work(self.geometry)
        self.fill_work = make_work(self.geometry)
        self.journal = make_journal(self.geometry)
        self.totals = np.zeros(Total.SIZE)
        self.counts = np.zeros(4, np.int64)
        self.lane_us = np.zeros(3)
        self.clock = 0
        self._blocks = -(-store.hidden // BLOCK)
        self._top_k, self._rows = 0, 0
        self._fill_job = np.zeros(LinkJob.SIZE, np.int64)
        self._fills: list[tuple[int, int]] = []
        self._reserve(FIRST_ROWS, 1)

    # ----------------------------------------------------------------------------------------- memory
    def max_rows(self, top_k: int) -> int:
        """Rows that one step takes; a larger batch is run in parts."""
        return rows_per_step([layer.layout for layer in self.store.layers], top_k, SCRATCH_NBYTES)

    def _reserve(self, rows: int, top_k: int) -> None:
        """Grow the scratch to ``rows`` rows of ``top_k`` ranks; steps within it allocate nothing."""
        if rows <= self._rows and top_k <= self._top_k:
            return
        self._rows, self._top_k = max(rows, self._rows), max(top_k, self._top_k)
        experts = max(layer.num_experts for layer in self.store.layers)
        shape = StepShape(
            self._rows, self._top_k, self.store.hidden, experts, int(self.geometry.num_shards.max())
        )
        self.ws: Workspace = make_workspace(shape)
        self.grouping = make_grouping(shape.max_positions, experts)
        addresses = [self.grouping.ids.ctypes.data, self.grouping.position.ctypes.data]
        self._grouping_address = np.array(addresses, np.int64)

    # ------------------------------------------------------------------------------------- one layer-step
    def take_routing(self, ids: np.ndarray, weights: np.ndarray) -> None:
        """Copy (rows, top_k) ids and float32 weights to where the step finds them."""
        rows, top_k = ids.shape
        self._reserve(rows, top_k)
        self.grouping.ids[: ids.size].reshape(ids.shape)[...] = ids
        self.ws.weights[: ids.size].reshape(ids.shape)[...] = weights

    def check_routing(self, step: StepInput) -> int:
        """Group the rows by expert; experts routed to, or -1 - entry of an id that does not exist."""
        num_experts = self.store.layers[step.layer].num_experts
        return int(group_rows(self.grouping, step.num_rows, step.top_k, num_experts))

    def begin(self, step: StepInput, num_experts: int) -> None:
        """Publish the rows, plan, and start the lanes."""
        self.start_ns = mono_now()
        self.settle_fills()
        self.step, self.num_experts = step, num_experts
        int8_stride, floats_stride = self._blocks * RECORD_NBYTES, self._blocks * F32_BLOCK_NBYTES
        set_publish(
            self.tables, self.ws, step.layer, step.num_rows, step.hidden, step.hidden_stride,
            ELEMENTS[step.hidden_element], int8_stride, floats_stride,
        )  # fmt: skip
        self.device.publish(self.ws, step.num_rows)
        self.clock += 1
        try:
            self._plan(step)
            positions = int(self.grouping.rows[:num_experts].sum())
            point_rows(self.tables, self.ws, self.grouping, step.layer, positions, int8_stride, floats_stride)
            self.lane_us[:] = 0.0
            self._post()
        except BaseException:
            self._abandon()
            raise

    def _plan(self, step: StepInput) -> None:
        g, start_ns = self.grouping, mono_now()
        self.unplaced = plan_layer(
            self.state, self.geometry, self.rates[step.layer], self.options, step.layer, g.experts, g.rows,
            self.num_experts, self.clock, self.work,
        )  # fmt: skip
        self.plan_us = (mono_now() - start_ns) / 1e3
        write_plan(
            self.journal,
            self.geometry,
            step.layer,
            self.clock,
            g.experts,
            g.rows,
            self.num_experts,
            self.work,
        )

    def _post(self) -> None:
        """Lay the plan's current wave out and start the lanes."""
        lay_out_step(
            self.tables, self.ws, self.grouping, self.work, self.step.layer, self.num_experts, self.counts
        )
        due = int(self.work.lane_nbytes[CPU] * self.tables.played[CPU_NS])
        self.device.post(self.ws, due)

    def finish(self) -> None:
        """Wait for the lanes, run further waves if the plan has them, combine into the output, account."""
        step = self.step
        try:
            self._wait_waves()
        except BaseException:
            self._abandon()
            raise
        set_combine(
            self.tables, self.ws, self._grouping_address, step.layer, step.num_rows, step.top_k, step.out,
            step.out_stride, ELEMENTS[step.out_element],
        )  # fmt: skip
        self.device.combine(self.ws, step.num_rows)
        step_us = (mono_now() - self.start_ns) / 1e3
        account_step(
            self.totals, self.journal, self.work, self.ws, step.layer, self.num_experts, step.num_rows,
            self.geometry.num_shards[step.layer], self.lane_us, step_us, self.plan_us,
        )  # fmt: skip

    def _wait_waves(self) -> None:
        g, step = self.grouping, self.step
        while True:
            self.device.wait(self.ws)
            account_wave(self.totals, self.work, self.ws, self.lane_us)
            if not self.unplaced:
                return
            waiting = self.unplaced
            self.unplaced = plan_wave(
                self.state, self.geometry, self.rates[step.layer], self.options, step.layer, g.experts, g.rows,
                self.num_experts, self.work,
            )  # fmt: skip
            if self.unplaced >= waiting:
                raise DeviceError(
                    f"layer {step.layer}: {waiting} shards find no slot among {len(self.tables.slot_address)} and "
                    "only the stream lane is allowed; give the cache more slots or the policy more lanes"
                )
            write_wave(
                self.journal, step.layer, self.num_experts * self.geometry.num_shards[step.layer], self.work
            )
            self._post()

    def _abandon(self) -> None:
        """A failed step's fills hold nothing that may be hit."""
        self.device.abandon(self.ws)
        if self.state.clock[0] == self.clock:  # it was planned
            abandon_step(
                self.state, self.geometry, self.step.layer, self.grouping.experts, self.num_experts, self.work
            )

    # ------------------------------------------------------------------------------------ background fills
    def start_fills(self, layer: int, experts: Sequence[int]) -> int:
        """Reserve slots for likely experts and copy them while the link is idle; fills started."""
        self.settle_fills()
        ids = np.array(experts, np.int32)
        w = self.fill_work
        num = int(plan_fills(self.state, self.geometry, self.options, layer, ids, len(ids), self.clock, w))
        self._fills = [(int(w.fill_slot[i]), int(w.fill_shard[i])) for i in range(num)]
        if num:
            self._post_fills(layer)
        return num

    def _post_fills(self, layer: int) -> None:
        pieces = np.zeros((len(self._fills), Piece.SIZE), np.int64)
        self._landed = np.zeros(len(self._fills), np.int64)
        where, shards = self.store.layers[layer], int(self.geometry.num_shards[layer])
        rate, first = self.tables.played[LINK_NS], int(self.geometry.first_shard[layer])
        for index, (slot, shard) in enumerate(self._fills):
            expert, j = divmod(shard - first, shards)
            nbytes = int(where.layout.shard_nbytes[j])
            source = int(self.tables.expert_base[layer]) + expert * where.stride
            piece = pieces[index]
            piece[Piece.SOURCE] = source + int(where.layout.shard_offset[j])
            piece[Piece.DESTINATION] = self.tables.slot_address[slot]
            piece[Piece.NBYTES] = nbytes
            piece[Piece.LANDED] = self._landed.ctypes.data + 8 * index
            piece[Piece.PLAYED_NS] = int(nbytes * rate)
        self._pieces, job = pieces, self._fill_job
        job[:] = 0
        job[LinkJob.PIECES] = pieces.ctypes.data
        job[LinkJob.NUM_PIECES] = len(pieces)
        self.device.post_background(job)

    def settle_fills(self, *, let_end: bool = False) -> None:
        """Take in the background fills that landed; what did not land gives its slot back."""
        if not self._fills:
            return
        if let_end:
            self.device.wait_background()
        self.device.settle_background()
        fills, self._fills = self._fills, []
        for index, (slot, shard) in enumerate(fills):
            if self._landed[index]:
                land_fill(self.state, self.geometry, slot, shard)
                self.totals[Total.BACKGROUND_FILLS] += 1
            else:
                drop_fill(self.state, self.geometry, slot, shard)

    # -------------------------------------------------------------------------------------------- looking
    def explain(self, layer: int) -> tuple[Plan, Outcome] | None:
        """The layer's last plan and outcome."""
        return last_plan(self.journal, self.geometry, self.rates[layer], layer, self.work)

    def story(self, layer: int, expert: int) -> tuple[StoryEntry, ...]:
        """What happened to an expert lately."""
        return expert_story(self.journal, layer, expert)

    def close(self) -> None:
        """Stop the threads."""
        self.device.close()


@compiled
def account_wave(totals, work, ws, lane_us):
    """Observed us of each lane's last job into ``lane_us``; shards, bytes and fills into the totals."""
    device, link, team = ws.device_job, ws.link_job, ws.team_job
    if device[DeviceJob.NUM_HITS] > 0:
        lane_us[HITS_US] += (device[DeviceJob.HITS_END_NS] - device[DeviceJob.START_NS]) / 1e3
    if link[LinkJob.NUM_PIECES] > 0:
        lane_us[FETCH_US] += (link[LinkJob.END_NS] - link[LinkJob.START_NS]) / 1e3
    if team[TeamJob.NUM_SHARDS] > 0:
        lane_us[CPU_US] += (team[TeamJob.END_NS] - team[TeamJob.POSTED_NS]) / 1e3
    for lane in range(4):
        place = Total.LANES + 4 * lane
        totals[place + LaneTotal.SHARDS] += work.counts[lane]
        totals[place + LaneTotal.NBYTES] += work.lane_nbytes[lane]
        totals[place + LaneTotal.PREDICTED_US] += work.predicted_us[lane]
    totals[Total.PREDICTED_STEP_US] += work.predicted_us[STEP_US]
    totals[Total.FILLS] += work.counts[NUM_FILLS]
    totals[Total.EVICTIONS] += work.counts[NUM_EVICTIONS]


@compiled
def account_step(
    totals, journal, work, ws, layer, num_experts, num_rows, num_shards, lane_us, step_us, plan_us
):
    """The step's times and experts by lane into the totals and the journal."""
    totals[Total.STEPS] += 1
    totals[Total.ROWS] += num_rows
    totals[Total.STEP_US] += step_us
    totals[Total.PLAN_US] += plan_us
    totals[Total.HITS_US] += lane_us[HITS_US]
    totals[Total.FETCH_US] += lane_us[FETCH_US]
    totals[Total.CPU_US] += lane_us[CPU_US]
    missed = 0
    for i in range(num_experts):
        used = 0
        for at in range(i * num_shards, (i + 1) * num_shards):
            if journal.lane[layer, at] >= 0:
                used |= 1 << journal.lane[layer, at]
        for lane in range(4):
            totals[Total.LANES + 4 * lane + LaneTotal.EXPERTS] += (used >> lane) & 1
        missed |= used >> 1
    totals[Total.MISS_STEPS] += missed > 0
    _observe(journal.observed_us[layer], journal.counts[layer], lane_us, step_us)


@compiled
def _observe(observed, counts, lane_us, step_us):
    """Observed us by the terms of the cost model; what was not measured stays NaN."""
    if counts[HIT] > 0:
        observed[HIT] = lane_us[HITS_US]
    if counts[STREAM] > 0 and counts[ZERO_COPY] == 0:
        observed[STREAM] = lane_us[FETCH_US]
    if counts[ZERO_COPY] > 0 and counts[STREAM] == 0:
        observed[ZERO_COPY] = lane_us[FETCH_US]
    if counts[CPU] > 0:
        observed[CPU] = lane_us[CPU_US]
    observed[STEP_US] = step_us


assert TERM_NAMES[STEP_US] == "step"
