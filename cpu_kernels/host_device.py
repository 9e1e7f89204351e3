"""The host device: slots are a second region of host memory, the link is a real copy, the "GPU" is one thread.

It makes every lane real on a machine without a GPU: a thread copies (or reads in place) as the link would, a
thread computes what slots hold, the worker team computes the CPU lane. Rates may be played, so that a slower
link or processor can be tried; without that everything shares the machine's cores and memory.

It runs job blocks (words.py) and knows nothing of how they came about.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trilane.cpu_kernels.arena import Arena, allocate_arena
from trilane.cpu_kernels.atomics import mono_ns, store_at
from trilane.cpu_kernels.combine import combine_task
from trilane.cpu_kernels.cpus import CpuBudget, read_cpu_budget, suggest_num_threads, suggest_spin_us
from trilane.cpu_kernels.float_env import call_exactly
from trilane.cpu_kernels.host_lanes import device_task, link_task, team_task
from trilane.cpu_kernels.host_workspace import Workspace
from trilane.cpu_kernels.publish import publish_task
from trilane.cpu_kernels.team import LaneThread, TeamError, WorkerTeam
from trilane.cpu_kernels.words import Combine, DeviceJob, LinkJob, Publish, TeamJob
from trilane.jit import compiled

ROWS_IN_CALLER = 4  # publish and combine of up to so many rows are done by the caller: a hand-over costs more
LANE_THREADS = 2  # link and device, beside the team
SLOT_ALIGNMENT = 64
DRAIN_S = 2.0  # how long lanes may take to give up after a failure


@dataclass(frozen=True)
class PlayedRates:
    """Rates that lanes play, GB/s (1e9) and us; None: as fast as the machine is."""

    link_gb_s: float | None = None
    link_fix_us: float | None = None
    zero_copy_gb_s: float | None = None
    hit_gb_s: float | None = None
    cpu_gb_s: float | None = None

    def given(self) -> dict[str, float]:
        """The rates that are played, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def ns_per_byte(self, name: str) -> float:
        """Played ns a byte of a lane's rate; 0 where it is not played."""
        rate = getattr(self, name)
        return 1.0 / rate if rate else 0.0


@compiled
def _call_block(address, block, tasks):
    """Run all tasks of a block in the calling thread, in exact float mode."""
    for task in range(tasks):
        call_exactly(address, block, task, 0)


class HostDevice:
    """Three lanes of native threads over host memory.

    Parameters
    ----------
    num_slots, slot_nbytes : int
        Slots, and bytes of each.
    threads : int or "auto"
        Workers of the CPU lane.
    spin_us : float or "auto"
    stall_timeout_s : float
        A job without progress for so long is given up.
    played : PlayedRates
    """

    name = "host"

    def __init__(
        self,
        num_slots: int,
        slot_nbytes: int,
        *,
        threads: int | str = "auto",
        spin_us: float | str = "auto",
        stall_timeout_s: float = 30.0,
        played: PlayedRates | None = None,
        budget: CpuBudget | None = None,
    ) -> None:
        budget = budget or read_cpu_budget()
        self.budget = budget
        self.played = played or PlayedRates()
        self.num_threads, self.thread_reasons = _team_size(budget, threads)
        spin = suggest_spin_us(budget, self.num_threads + LANE_THREADS) if spin_us == "auto" else spin_us
        options: dict[str, Any] = {"spin_us": spin, "stall_timeout_s": stall_timeout_s}
        stride = -(-max(1, slot_nbytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.slots: Arena = allocate_arena(num_slots * stride)
        self.slot_address = self.slots.address + stride * np.arange(num_slots, dtype=np.int64)
        self.team = WorkerTeam(self.num_threads, name="trilane-cpu", **options)
        self.link = LaneThread("trilane-link", **options)
        self.device = LaneThread("trilane-device", **options)
        self._urgent = np.zeros(8, np.int64)
        self._tickets: dict[str, int] = {}
        self._background: int | None = None

    def start(self) -> None:
        """Start the threads and compile what they run."""
        self._team_task, self._link_task = team_task().address, link_task().address
        self._device_task, self._publish_task = device_task().address, publish_task().address
        self._combine_task = combine_task().address
        for lane in (self.team, self.link, self.device):
            lane.start()

    # ------------------------------------------------------------------------------- the caller's own work
    def publish(self, ws: Workspace, num_rows: int) -> None:
        """Hidden rows to activation records."""
        self._run_rows(self._publish_task, ws.publish, num_rows, Publish.ROWS_PER_TASK)

    def combine(self, ws: Workspace, num_rows: int) -> None:
        """Shard parts to output rows."""
        self._run_rows(self._combine_task, ws.combine, num_rows, Combine.ROWS_PER_TASK)

    def _run_rows(self, task: int, block: np.ndarray, num_rows: int, rows_word: int) -> None:
        if num_rows <= ROWS_IN_CALLER:
            block[rows_word] = num_rows
            _call_block(task, block.ctypes.data, 1)
            return
        rows = max(1, -(-num_rows // (4 * self.num_threads)))
        block[rows_word] = rows
        self.team.run(task, block.ctypes.data, -(-num_rows // rows))

    # ------------------------------------------------------------------------------------------- one step
    def post(self, ws: Workspace, cpu_due_ns: int) -> None:
        """Start every lane that has work in the workspace's job blocks.

        Parameters
        ----------
        cpu_due_ns : int
            Played time of the CPU lane, 0: not played.
        """
        self._tickets.clear()
        if ws.link_job[LinkJob.NUM_PIECES]:
            self._tickets["link"] = self.link.post(self._link_task, ws.link_job.ctypes.data, 1)
        if ws.team_job[TeamJob.NUM_SHARDS]:
            shards = int(ws.team_job[TeamJob.NUM_SHARDS])
            tasks = shards * int(ws.team_job[TeamJob.UP_CHUNKS] + ws.team_job[TeamJob.DOWN_CHUNKS])
            now = mono_now()
            ws.team_job[TeamJob.POSTED_NS] = now
            ws.team_job[TeamJob.DUE_NS] = now + cpu_due_ns if cpu_due_ns else 0
            self._tickets["team"] = self.team.post(self._team_task, ws.team_job.ctypes.data, tasks)
        if ws.device_job[DeviceJob.NUM_HITS] or ws.device_job[DeviceJob.NUM_STREAMED]:
            self._tickets["device"] = self.device.post(self._device_task, ws.device_job.ctypes.data, 1)

    def wait(self, ws: Workspace) -> None:
        """Wait for all lanes of the step. After a failure none of them touches the workspace any more.

        The device thread waits for the link, so the link comes first: its failure is then seen at once.
        """
        try:
            for name, lane in self._lanes():
                if name in self._tickets:
                    lane.wait(self._tickets[name])
        except BaseException:
            self.abandon(ws)
            raise
        self._tickets.clear()

    def _lanes(self) -> tuple[tuple[str, WorkerTeam], ...]:
        return ("link", self.link), ("team", self.team), ("device", self.device)

    def abandon(self, ws: Workspace) -> None:
        """Let lanes that are still at work, or wait for one another, give up, and wait until they have."""
        for block, word in (
            (ws.device_job, DeviceJob.ABORT),
            (ws.team_job, TeamJob.ABORT),
            (ws.link_job, LinkJob.ABORT),
        ):
            set_flag(block.ctypes.data + 8 * word, 1)
        for name, lane in self._lanes():
            if name in self._tickets:
                with contextlib.suppress(TeamError, TimeoutError):
                    lane.wait(self._tickets[name], timeout_s=DRAIN_S)
        self._tickets.clear()

    # ---------------------------------------------------------------------------------- background copies
    def post_background(self, job: np.ndarray) -> None:
        """Copy the pieces of a link job while nothing else needs the link."""
        self._urgent[0] = 0
        job[LinkJob.URGENT] = self._urgent.ctypes.data
        job[LinkJob.BACKGROUND] = 1
        self._background = self.link.post(self._link_task, job.ctypes.data, 1)

    def settle_background(self) -> None:
        """Stop background copies after the chunk in hand, and wait until the link is free."""
        if self._background is not None:
            set_flag(self._urgent.ctypes.data, 1)
            self.link.wait(self._background)
            self._background = None

    def wait_background(self) -> None:
        """Let background copies end."""
        if self._background is not None:
            self.link.wait(self._background)
            self._background = None

    def close(self) -> bool:
        """Stop the threads; True once none is left."""
        set_flag(self._urgent.ctypes.data, 1)
        return all([lane.close() for lane in (self.team, self.link, self.device)])


@compiled
def mono_now():
    """The monotonic clock of compiled code, in ns."""
    return mono_ns()


@compiled
def set_flag(address, value):
    """Store a word that native threads poll."""
    store_at(address, value)


def _team_size(budget: CpuBudget, threads: int | str) -> tuple[int, tuple[str, ...]]:
    if threads != "auto":
        return int(threads), ()
    count, reasons = suggest_num_threads(budget)
    if count > 2 * LANE_THREADS:
        return count - LANE_THREADS, (*reasons, "two cores left for the link and the device thread")
    return count, reasons
