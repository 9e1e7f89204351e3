"""Bookkeeping of finished steps, in compiled code: observed times from the job blocks into totals and journal."""

from __future__ import annotations

from trilane.cost import STEP_US, TERM_NAMES
from trilane.cpu_kernels.words import DeviceJob, LinkJob, TeamJob
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY
from trilane.jit import compiled
from trilane.plan import NUM_EVICTIONS, NUM_FILLS
from trilane.stats import LaneTotal, Total

HITS_US, FETCH_US, CPU_US = 0, 1, 2  # places in lane_us


@compiled(counted=False)
def account_wave(totals, work, ws, lane_us):
    """Observed us of each lane's job into ``lane_us``; shards, bytes and fills into the totals."""
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


@compiled(counted=False)
def account_step(totals, journal, layer, num_experts, num_rows, num_shards, lane_us, step_us, plan_us):
    """The step's times, and its experts by lane, into the totals and the journal."""
    totals[Total.STEPS] += 1
    totals[Total.ROWS] += num_rows
    totals[Total.STEP_US] += step_us
    totals[Total.PLAN_US] += plan_us
    totals[Total.HITS_US] += lane_us[HITS_US]
    totals[Total.FETCH_US] += lane_us[FETCH_US]
    totals[Total.CPU_US] += lane_us[CPU_US]
    lanes_used = 0
    for i in range(num_experts):
        used = 0
        for at in range(i * num_shards, (i + 1) * num_shards):
            if journal.lane[layer, at] >= 0:
                used |= 1 << journal.lane[layer, at]
        for lane in range(4):
            totals[Total.LANES + 4 * lane + LaneTotal.EXPERTS] += (used >> lane) & 1
        lanes_used |= used
    if lanes_used > 1 << HIT:
        totals[Total.MISS_STEPS] += 1
    _observe(journal.observed_us[layer], journal.counts[layer], lane_us, step_us)


@compiled(counted=False)
def _observe(observed, counts, lane_us, step_us):
    """Observed us by the terms of the cost model; what was not measured by itself stays NaN."""
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
