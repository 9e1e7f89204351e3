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
from trilane.cpu_kernels.atomics import store_at
from trilane.cpu_kernels.combine import combine_task
from trilane.cpu_kernels.cpus import CpuBudget, read_cpu_budget, suggest_num_threads, suggest_spin_us
from trilane.cpu_kernels.host_lanes import device_task, link_task, team_task
from trilane.cpu_kernels.host_workspace import Workspace
from trilane.cpu_kernels.jobs import last_ticket, wait_job
from trilane.cpu_kernels.publish import publish_task
from trilane.cpu_kernels.team import LaneThread, TaskFailed, TeamError, WorkerTeam
from trilane.cpu_kernels.words import Combine, DeviceJob, LinkJob, Publish, TeamJob
from trilane.jit import compiled

ROW_TASKS_PER_THREAD = 4
LANE_ORDER = ("link", "team", "device")
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


class HostDevice:
    """Three lanes of native threads over host memory.

    Parameters
    ----------
    num_slots, slot_nbytes : int
        Slots, and bytes of each.
    threads : int or "auto"
        Workers of the CPU lane.
    knee : int, optional
        Most of them for "auto": more would not compute faster.
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
        knee: int | None = None,
        spin_us: float | str = "auto",
        stall_timeout_s: float = 30.0,
        played: PlayedRates | None = None,
        budget: CpuBudget | None = None,
    ) -> None:
        budget = budget or read_cpu_budget()
        self.budget = budget
        self.played = played or PlayedRates()
        self.num_threads, self.thread_reasons = _team_size(budget, threads, knee)
        spin = suggest_spin_us(budget, self.num_threads) if spin_us == "auto" else spin_us
        options: dict[str, Any] = {"spin_us": spin, "stall_timeout_s": stall_timeout_s}
        stride = -(-max(1, slot_nbytes) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.slots: Arena = allocate_arena(num_slots * stride)
        self.slot_address = self.slots.address + stride * np.arange(num_slots, dtype=np.int64)
        self.team = WorkerTeam(self.num_threads, name="trilane-cpu", **options)
        self.link = LaneThread("trilane-link", **options)
        self.device = LaneThread("trilane-device", **options)
        self._urgent = np.zeros(8, np.int64)
        self._background = False  # whether copies may be under way

    def start(self) -> None:
        """Start the threads and compile what they run."""
        for lane in (self.team, self.link, self.device):
            lane.start()
        self.addresses = {
            "TEAM": self.team.words,
            "LINK": self.link.words,
            "DEVICE": self.device.words,
            "TEAM_TASK": team_task().address,
            "LINK_TASK": link_task().address,
            "DEVICE_TASK": device_task().address,
            "PUBLISH_TASK": publish_task().address,
            "COMBINE_TASK": combine_task().address,
        }

    # ------------------------------------------------------------------------------------- many rows at once
    def publish(self, ws: Workspace, num_rows: int) -> None:
        """Many hidden rows to activation records, by the team."""
        self._run_rows("PUBLISH_TASK", ws.publish, num_rows, Publish.ROWS_PER_TASK)

    def combine(self, ws: Workspace, num_rows: int) -> None:
        """Shard parts to many output rows, by the team."""
        self._run_rows("COMBINE_TASK", ws.combine, num_rows, Combine.ROWS_PER_TASK)

    def _run_rows(self, task: str, block: np.ndarray, num_rows: int, rows_word: int) -> None:
        rows = max(1, -(-num_rows // (ROW_TASKS_PER_THREAD * self.num_threads)))
        block[rows_word] = rows
        try:
            self.team.run(self.addresses[task], block.ctypes.data, -(-num_rows // rows))
        except BaseException:  # what workers have in hand goes to memory that is given up when this is left
            wait_job(self.team.words, last_ticket(self.team.words), int(1e9 * DRAIN_S))
            raise

    # ------------------------------------------------------------------------------------------- one step
    def wait(self, tickets: dict[str, int]) -> None:
        """Wait for lanes ("link", "team", "device") that compiled code has posted, seeing signals and deaths.

        The device thread waits for the link, so the link comes first: its failure is then seen at once.
        """
        for name in LANE_ORDER:
            if name in tickets:
                getattr(self, name).wait(tickets[name])

    def abandon(self, ws: Workspace, tickets: dict[str, int]) -> None:
        """Let lanes that are still at work, or wait for one another, give up, and wait until they have."""
        for block, word in (
            (ws.device_job, DeviceJob.ABORT),
            (ws.team_job, TeamJob.ABORT),
            (ws.link_job, LinkJob.ABORT),
        ):
            set_flag(block.ctypes.data + 8 * word, 1)
        for name in LANE_ORDER:
            if name in tickets:
                with contextlib.suppress(TeamError, TimeoutError):
                    getattr(self, name).wait(tickets[name], timeout_s=DRAIN_S)

    def settle(self, tickets: dict[str, int]) -> None:
        """Wait until the lanes of an abandoned step have given up, however long their last piece takes."""
        for name in LANE_ORDER:
            if name in tickets:
                with contextlib.suppress(TaskFailed):
                    getattr(self, name).wait(tickets[name])

    def check(self) -> None:
        """Raise if one of the threads is gone or has been stopped."""
        for name in LANE_ORDER:
            getattr(self, name).check()

    # ---------------------------------------------------------------------------------- background copies
    def post_background(self, job: np.ndarray) -> None:
        """Copy the pieces of a link job while nothing else needs the link."""
        self._urgent[0] = 0
        job[LinkJob.URGENT] = self._urgent.ctypes.data
        job[LinkJob.BACKGROUND] = 1
        self._background = True  # before they are: an interrupt can come as soon as they are posted
        self.link.post(self.addresses["LINK_TASK"], job.ctypes.data, 1)

    def settle_background(self, *, let_end: bool = False) -> None:
        """Stop background copies after the chunk in hand (or let them end), and wait until the link is free."""
        if self._background:
            set_flag(self._urgent.ctypes.data, 0 if let_end else 1)
            if ticket := last_ticket(self.link.words):
                with contextlib.suppress(TaskFailed):  # called off by an interrupt; what has landed says so
                    self.link.wait(ticket)
            self._background = False

    def close(self) -> bool:
        """Stop the threads; True once none is left."""
        set_flag(self._urgent.ctypes.data, 1)
        return all([lane.close() for lane in (self.team, self.link, self.device)])

    def hold(self, memory: object) -> None:
        """Keep ``memory`` for as long as one of the threads lives."""
        for lane in (self.team, self.link, self.device):
            lane.hold(memory)


@compiled
def set_flag(address, value):
    """Store a word that native threads poll."""
    store_at(address, value)


def _team_size(budget: CpuBudget, threads: int | str, knee: int | None) -> tuple[int, tuple[str, ...]]:
    return (int(threads), ()) if threads != "auto" else suggest_team_size(budget, knee)


def suggest_team_size(budget: CpuBudget, knee: int | None = None) -> tuple[int, tuple[str, ...]]:
    """Workers of the CPU lane beside the link and the device thread, and why not more; ``knee``: at most so many."""
    count, reasons = suggest_num_threads(budget)
    if count > 2 * LANE_THREADS:
        count -= LANE_THREADS
        reasons = (*reasons, "two cores left for the link and the device thread")
    if knee is not None and 1 <= knee < count:
        return knee, (*reasons, f"{knee} threads are as fast as more on this machine")
    return count, reasons
