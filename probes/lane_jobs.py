"""The product's own lanes as something to time: jobs of packed experts, posted to its team, link and device threads.

An isolated loop over a kernel does not predict the lane that runs it, so what is timed here is the lane: its
threads, its tasks, its blocks, experts packed as a store packs them. A call arms the blocks of one step, posts
every lane that has work and waits for all. Experts lie one after the other in memory larger than the caches, and
successive steps take other ones. The result of the first step is checked against NumPy.

The file knows no store, no residency and no decisions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.arena import Arena
from trilane.cpu_kernels.atomics import mono_ns
from trilane.cpu_kernels.cpus import CpuBudget, suggest_spin_us
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.host_lanes import device_task, link_task, team_task
from trilane.cpu_kernels.host_workspace import StepShape, aligned, make_workspace
from trilane.cpu_kernels.jobs import post_job, wait_job
from trilane.cpu_kernels.layout import OFFSET
from trilane.cpu_kernels.rows import ROWS_SIGNATURE
from trilane.cpu_kernels.shard_words import set_all_weights
from trilane.cpu_kernels.team import LaneThread, WorkerTeam
from trilane.cpu_kernels.words import DeviceJob, LinkJob, Piece, Shard, TeamJob, set_word, word
from trilane.errors import ProbeError
from trilane.jit import native
from trilane.probes.lane_experts import HIDDEN, Experts
from trilane.probes.timing import NUM_WORDS, Case, scattered

TASKS_PER_THREAD = 12  # CPU tasks of a step, as the engine cuts them
MIN_UP_ROWS, MIN_DOWN_ROWS = 16, 128
MOST_STEPS = 512
LANES = ("hit", "stream", "zero_copy", "cpu")
_TOLERANCE = 0.05  # of the largest output: eight-bit activations, twice


@functools.cache
def lanes_call() -> Any:
    """A call of the row kernels' signature that runs one step: arms its blocks, posts its lanes, waits for them.

    Arguments: address of int64[6] (job words of team, link and device; their tasks), team block, its number of
    tasks, link block, device block (0: nothing to do), first Shard block, number of them; four unused.
    """

    @native(ROWS_SIGNATURE)
    def run(control, team, num_tasks, link, device, shards, num_shards, a, b, c, d):
        for i in range(num_shards):
            set_word(shards + 8 * Shard.SIZE * i, Shard.PROGRESS, 0)
            set_word(shards + 8 * Shard.SIZE * i, Shard.LANDED, 0)
        linked = post_job(word(control, 1), word(control, 4), link, 1) if link != 0 else 0
        teamed = 0
        if team != 0:
            set_word(team, TeamJob.DONE, 0)
            set_word(team, TeamJob.POSTED_NS, mono_ns())
            teamed = post_job(word(control, 0), word(control, 3), team, num_tasks)
        deviced = post_job(word(control, 2), word(control, 5), device, 1) if device != 0 else 0
        if linked > 0:
            wait_job(word(control, 1), linked, -1)
        if teamed > 0:
            wait_job(word(control, 0), teamed, -1)
        if deviced > 0:
            wait_job(word(control, 2), deviced, -1)

    return run


@dataclass(frozen=True)
class Lanes:
    """Running threads of the three lanes, and what a call needs to post to them."""

    team: WorkerTeam
    control: NDArray[np.int64]

    @property
    def num_threads(self) -> int:
        return self.team.num_threads


@contextlib.contextmanager
def open_lanes(num_threads: int, budget: CpuBudget, spin_us: float | None = None) -> Iterator[Lanes]:
    """Start a team of ``num_threads``, a link and a device thread, with the product's own spinning."""
    spin = suggest_spin_us(budget, num_threads) if spin_us is None else spin_us
    with (
        WorkerTeam(num_threads, name="probe-cpu", spin_us=spin) as team,
        LaneThread("probe-link", spin_us=spin) as link,
        LaneThread("probe-device", spin_us=spin) as device,
    ):
        words = [team.words, link.words, device.words]
        tasks = [team_task().address, link_task().address, device_task().address]
        yield Lanes(team, np.array([*words, *tasks], np.int64))


@dataclass(frozen=True)
class Share:
    """Experts of one step, by lane; ``num_rows`` activation rows for each.

    What is read in place is also kept in a slot, as the engine does where it can.
    """

    hit: int = 0
    stream: int = 0
    zero_copy: int = 0
    cpu: int = 0
    num_rows: int = 1

    @property
    def num_experts(self) -> int:
        return self.hit + self.stream + self.zero_copy + self.cpu


def lanes_case(ring: LaneRing) -> Case:
    """The case of a ring's steps."""
    nbytes = ring.share.num_experts * ring.experts.nbytes
    return Case(str(ring.share), nbytes, ring.calls(), ring.check, waits=True, held=(ring,))


class LaneRing:
    """The blocks of steps that run ``share`` on the lanes, one after the other on other experts.

    Streamed experts, and those read in place, are copied into ``slots`` in turn, which must have room for one step's.
    Items lie in the order hit, streamed, CPU, zero-copy, as the engine's do.
    """

    def __init__(self, lanes: Lanes, experts: Experts, slots: Arena, share: Share) -> None:
        self.lanes, self.experts, self.share = lanes, experts, share
        self.num_shards = experts.layout.num_shards
        self.num_items = share.num_experts * self.num_shards
        self.num_steps = max(1, min(MOST_STEPS, experts.count // share.num_experts))
        ends = self.num_shards * np.cumsum([share.hit, share.stream, share.cpu])
        self.starts = dict(zip(("hit", "stream", "cpu", "zero_copy"), [0, *ends.tolist()], strict=True))
        positions = share.num_experts * share.num_rows
        shape = StepShape(1, positions, HIDDEN, share.num_experts, self.num_shards)
        self.ws = make_workspace(shape)
        self.ws.parts[:] = np.nan
        self.ws.gate_inputs[:] = experts.made.record.ctypes.data
        self.shards = aligned(self.num_steps * self.num_items * Shard.SIZE, np.int64)
        self.shards = self.shards.reshape(self.num_steps, self.num_items, Shard.SIZE)
        self.pieces = np.zeros((self.num_steps, self.num_items, Piece.SIZE), np.int64)
        self.jobs = np.zeros((3, self.num_steps, max(TeamJob.SIZE, LinkJob.SIZE, DeviceJob.SIZE)), np.int64)
        self.slots, self.num_slots = slots, slots.nbytes // int(experts.layout.shard_nbytes.max())
        for item in range(self.num_items):
            self._lay_out(item)
        self._set_jobs()

    def _lay_out(self, item: int) -> None:
        """The blocks of one item in all steps."""
        blocks, where = self.shards[:, item], self.experts.layout.descriptor[item % self.num_shards]
        steps = np.arange(self.num_steps)
        order = scattered(self.experts.count)
        expert = order[(steps * self.share.num_experts + item // self.num_shards) % len(order)]
        source = self.experts.arena.address + expert * self.experts.layout.expert_nbytes + int(where[OFFSET])
        streamed, in_place = self._start("stream") <= item < self._start("cpu"), item >= self._start("zero_copy")
        slot = self._slots(steps * self.num_items + item)
        set_all_weights(blocks, where, slot if streamed else source)
        row = item * self.share.num_rows
        blocks[:, Shard.NUM_ROWS] = self.share.num_rows
        blocks[:, Shard.GATE_INPUTS] = blocks[:, Shard.UP_INPUTS] = self.ws.gate_inputs.ctypes.data
        blocks[:, Shard.PRODUCTS] = self.ws.products.ctypes.data + row * 8 * BLOCK
        blocks[:, Shard.RECORDS] = self.ws.records.ctypes.data + row * (self.ws.records.nbytes // self._rows_in_all)
        blocks[:, Shard.DOWN_INPUTS] = self.ws.down_inputs.ctypes.data + 8 * row
        blocks[:, Shard.BAD] = self.ws.bad_hidden.ctypes.data + 8 * row
        blocks[:, Shard.OUT] = self.ws.parts.ctypes.data + 4 * HIDDEN * row
        blocks[:, Shard.OUT_STRIDE] = HIDDEN
        if streamed or in_place:
            self._set_pieces(item, source, slot, in_place)

    @property
    def _rows_in_all(self) -> int:
        return self.num_items * self.share.num_rows

    def _start(self, lane: str) -> int:
        """The first item of a lane."""
        return self.starts[lane]

    def _slots(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        nbytes = int(self.experts.layout.shard_nbytes.max())
        return self.slots.address + index % self.num_slots * nbytes

    def _set_pieces(self, item: int, source: NDArray[np.int64], slot: NDArray[np.int64], in_place: bool) -> None:
        address = self.shards.ctypes.data + (np.arange(self.num_steps) * self.num_items + item) * 8 * Shard.SIZE
        number = item - self._start("stream")
        if in_place:
            number = item - self._start("zero_copy") + self._count("stream")
        pieces = self.pieces[:, number]
        pieces[:, Piece.SOURCE], pieces[:, Piece.DESTINATION] = source, slot
        pieces[:, Piece.NBYTES] = self.shards[:, item, Shard.NBYTES]
        pieces[:, Piece.SHARD] = address if in_place else 0
        pieces[:, Piece.LANDED] = address + 8 * Shard.LANDED

    def _count(self, lane: str) -> int:
        return self.num_shards * int(getattr(self.share, lane))

    def _set_jobs(self) -> None:
        team, link, device = self.jobs
        for job, layer in ((team, TeamJob.LAYER), (link, LinkJob.LAYER), (device, DeviceJob.LAYER)):
            job[:, layer] = self.experts.words.ctypes.data
        steps = np.arange(self.num_steps)
        first = self.shards.ctypes.data + self.shards.strides[0] * steps
        device[:, DeviceJob.SHARDS] = first
        device[:, DeviceJob.NUM_HITS], device[:, DeviceJob.NUM_STREAMED] = self._count("hit"), self._count("stream")
        link[:, LinkJob.PIECES] = self.pieces.ctypes.data + self.pieces.strides[0] * steps
        link[:, LinkJob.NUM_PIECES] = self._count("stream") + self._count("zero_copy")
        team[:, TeamJob.SHARDS] = first + 8 * Shard.SIZE * self._start("cpu")
        team[:, TeamJob.NUM_SHARDS] = self._count("cpu")
        threads = self.lanes.num_threads
        wanted = 1 if threads == 1 else -(-TASKS_PER_THREAD * threads // max(1, self._count("cpu")))
        team[:, TeamJob.UP_CHUNKS] = max(1, min(wanted * 2 // 3, BLOCK // MIN_UP_ROWS))
        team[:, TeamJob.DOWN_CHUNKS] = max(1, min(wanted // 3, HIDDEN // MIN_DOWN_ROWS))

    def lane_us(self) -> dict[str, float]:
        """What each lane with work took by its own clock, the median over the steps that ran last."""
        team, link, device = self.jobs
        clocks = {
            "hit": (device, DeviceJob.START_NS, DeviceJob.HITS_END_NS),
            "zero_copy": (link, LinkJob.START_NS, LinkJob.END_NS),
            "cpu": (team, TeamJob.POSTED_NS, TeamJob.END_NS),
        }
        found = {}
        for lane, (job, start, end) in clocks.items():
            if self._count(lane):
                ran = job[job[:, end] > 0]
                found[lane] = float(np.median(ran[:, end] - ran[:, start]) / 1e3)
        return found

    def calls(self) -> NDArray[np.int64]:
        """One thread's calls; the lanes' threads are not the timing's."""
        calls = np.zeros((1, self.num_steps, NUM_WORDS), np.int64)
        team, link, device = (
            self.jobs[k].ctypes.data + self.jobs.strides[1] * np.arange(self.num_steps) for k in range(3)
        )
        chunks = self.jobs[0, 0, TeamJob.UP_CHUNKS] + self.jobs[0, 0, TeamJob.DOWN_CHUNKS]
        calls[:, :, 0] = lanes_call().address
        calls[:, :, 1] = self.lanes.control.ctypes.data
        calls[:, :, 2] = team if self.share.cpu else 0
        calls[:, :, 3] = self._count("cpu") * chunks
        calls[:, :, 4] = link if self.share.stream + self.share.zero_copy else 0
        calls[:, :, 5] = device if self.share.hit + self.share.stream else 0
        calls[:, :, 6] = self.shards.ctypes.data + self.shards.strides[0] * np.arange(self.num_steps)
        calls[:, :, 7] = self.num_items
        return calls

    def check(self) -> None:
        """Every expert of the first step gave the output that NumPy gives."""
        rows = self.share.num_rows
        parts = self.ws.parts[: self._rows_in_all * HIDDEN].reshape(-1, self.num_shards, rows, HIDDEN)
        error = np.abs(parts.sum(axis=1) - self.experts.made.expected).max()
        if not error <= _TOLERANCE * np.abs(self.experts.made.expected).max():
            raise ProbeError(
                f"experts in {self.experts.format} on the lanes {self.share} gave a wrong output: their speed would "
                "be worthless; please report this with the output of 'trilane probe'"
            )
