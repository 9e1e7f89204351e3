"""The threads of the CUDA device: the CPU lane's team, the control thread, the watchdog; and how one meets them.

They run without an interpreter. The words that they share with it are ``cuda_words.Control``. Who wants to look at
the state holds the control thread for a moment. The file knows no steps and no lanes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from trilane.config import Config
from trilane.cpu_kernels.cpus import CpuBudget, read_cpu_budget, suggest_num_threads, suggest_spin_us
from trilane.cpu_kernels.team import LaneThread, WorkerTeam
from trilane.cuda_control import control_task, watch_task
from trilane.cuda_copier import copier_task
from trilane.cuda_errors import failure_error
from trilane.cuda_words import Control, Failure
from trilane.errors import WorkerError
from trilane.gpu_kernels.cuda_device import CudaDevice
from trilane.stash import Stash

HOT_NS = 5_000_000  # how long the control thread spins after a miss
NAP_NS = 50_000
HOLD_S = 5.0
WAIT_NAP_S = 20e-6
CONTROL_THREADS = 1  # the control thread has a core of its own; the watchdog sleeps


def spin_us(config: Config, budget: CpuBudget, num_threads: int) -> float:
    """us that workers spin after a job: as long as the control thread, where there is a CPU for all of them.

    Between two layers with misses lie the rest of the model and layers without. Who sleeps by then comes 30 us late.
    """
    if config.cpu.spin_us != "auto":
        return config.cpu.spin_us
    if suggest_spin_us(budget, num_threads + CONTROL_THREADS) > 0:
        return 1e-3 * HOT_NS
    return suggest_spin_us(budget, num_threads)


class CudaThreads:
    """The threads of one scheduler on a GPU, not yet started.

    Attributes
    ----------
    control : int64 array
        Words by ``Control``.
    num_threads : int
        Workers of the CPU lane.
    """

    def __init__(self, config: Config) -> None:
        budget = read_cpu_budget()
        threads = config.cpu.threads
        if threads == "auto":
            count, _ = suggest_num_threads(budget)
            threads = count - CONTROL_THREADS if count > 2 * CONTROL_THREADS else count
        self.num_threads, self._stall_s = int(threads), config.cpu.stall_timeout_s
        options: dict[str, Any] = {
            "spin_us": spin_us(config, budget, self.num_threads), "stall_timeout_s": self._stall_s
        }  # fmt: skip
        self.team = WorkerTeam(self.num_threads, name="trilane-cpu", **options)
        self.control_thread = LaneThread("trilane-control", **options)
        self.watchdog = LaneThread("trilane-watch", spin_us=0)
        self.copier = LaneThread("trilane-copies", **options)
        self.control = np.zeros(Control.SIZE, np.int64)
        spins = suggest_spin_us(budget, self.num_threads + CONTROL_THREADS) > 0
        self.control[Control.HOT_NS] = HOT_NS if spins else 0
        self.control[Control.NAP_NS] = NAP_NS
        self.control[Control.STALL_NS] = int(1e9 * self._stall_s)
        self.running = False
        self._held, self._is_held = threading.RLock(), False

    def start(self, device: CudaDevice, run: Stash, frozen: Stash, rates: Stash, rate_addresses: np.ndarray) -> None:
        """Compile what they run and start them.

        Parameters
        ----------
        run, frozen : Stash
            The ``CudaStep``, and the one for steps while slots are frozen; :meth:`use` takes others of the same types.
        rates : Stash
            Any layer's rates, for their type.
        rate_addresses : int64 (layers,)
            Addresses of stashes with each layer's rates, read anew in each step.
        """
        control, driver = control_task(run.kind, rates.kind), device.driver
        words, address = self.control.ctypes.data, device.address
        self._control_block = np.array([words, run.address, rate_addresses.ctypes.data, frozen.address], np.int64)
        self._copier_run = run  # its wire never changes
        self._copier_block = np.array([words, run.address, driver.table.ctypes.data, driver.context], np.int64)
        self._watch_block = np.array([words, address["mail"], address["abort"], address["copied"]], np.int64)
        self.team.start()
        for thread, task, block in (
            (self.control_thread, control, self._control_block),
            (self.watchdog, watch_task(), self._watch_block),
            (self.copier, copier_task(run.kind), self._copier_block),
        ):
            thread.start()
            thread.post(task.address, block.ctypes.data, 1)
        self.running = True

    def use(self, run: Stash, frozen: Stash) -> None:
        """Let the control thread work with other stashes; it must be held."""
        self._control_block[1], self._control_block[3] = run.address, frozen.address

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Have the state for oneself inside a ``with`` block; the control thread pauses. Before the start it is.

        Blocks of one thread may be nested; those of several come one after the other.
        """
        with self._held:
            if not self.running or self._is_held:
                yield
                return
            self._is_held = True
            try:
                self._hold()
                yield
            finally:
                self._let_go()
                self._is_held = False

    def _hold(self) -> None:
        """Have the control thread pause, and wait for it."""
        self.control[Control.HOLD] = 1
        deadline = time.monotonic() + HOLD_S
        while not self.control[Control.HELD]:
            self.check()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"the control thread has not answered for {HOLD_S:g} s; close the scheduler and make a new one"
                )
            time.sleep(WAIT_NAP_S)

    def _let_go(self) -> None:
        """Let the control thread go on; it may have gone."""
        self.control[Control.HOLD] = 0
        deadline = time.monotonic() + HOLD_S
        while self.control[Control.HELD] and time.monotonic() < deadline:
            time.sleep(WAIT_NAP_S)

    def check(self) -> None:
        """Raise what a thread has found, or that one is gone."""
        failure = Failure(int(self.control[Control.FAILURE]))
        if failure is not Failure.NONE:
            raise failure_error(failure, int(self.control[Control.STATUS]), self._stall_s)
        self.control_thread.check()
        self.copier.check()
        self.team.check()

    def close(self) -> bool:
        """Stop them; True once none is left."""
        self.control[Control.STOP] = 1
        return all([thread.close() for thread in (self.control_thread, self.copier, self.watchdog, self.team)])

    def hold(self, memory: object) -> None:
        """Keep memory alive for as long as a thread that did not end may write to it."""
        for thread in (self.control_thread, self.copier, self.watchdog, self.team):
            thread.hold(memory)
