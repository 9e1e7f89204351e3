"""Runs layer-steps on the CUDA device: owns its memory, its launches, the state, and the threads that answer misses.

Nothing here waits for the GPU, but where results go to host memory. The control thread (cuda_control.py) has the
state while it runs; who wants to look at it holds that thread for a moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config import Config
from trilane.cost import Rates, make_rates
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.host_device import PlayedRates
from trilane.cpu_kernels.host_workspace import Part, StepShape, make_workspace
from trilane.cpu_kernels.team import TeamError
from trilane.cuda_copier import frozen_options
from trilane.cuda_counts import CudaCounts
from trilane.cuda_errors import device_errors, step_error
from trilane.cuda_fills import MOST_AT_ONCE, begin_fills, copy_listed, forget_fills
from trilane.cuda_launches import StepLaunches
from trilane.cuda_places import make_places
from trilane.cuda_prefill import CudaPrefill
from trilane.cuda_recorder import TAPE_ENTRIES, TAPE_EVENTS, CudaRecorder
from trilane.cuda_threads import WAIT_NAP_S, CudaThreads
from trilane.cuda_words import Control, CudaStep, Fault, Wire
from trilane.errors import DeviceError, TrilaneError
from trilane.expert import Outcome, Plan
from trilane.gpu_kernels.cuda_device import CudaDevice, DeviceLayer, DeviceShape
from trilane.gpu_kernels.driver import CudaDriver, Driver
from trilane.gpu_kernels.driver_calls import compile_calls
from trilane.gpu_kernels.words import ERRORS
from trilane.host_runner import StepInput, available_isa
from trilane.host_tables import make_tables, store_geometry
from trilane.journal import StoryEntry, expert_story, last_plan, make_journal
from trilane.plan import Options, make_work
from trilane.policy import empty_state, gpu_options, num_slots
from trilane.prefill_batches import routed_experts
from trilane.recorder import trace_meta
from trilane.routing import make_grouping
from trilane.stash import Stash, on_stashes, stash_each
from trilane.state import State
from trilane.store import ExpertStore
from trilane.tape import make_tape
from trilane.warm_file import WarmFile
from trilane.warm_keeper import WarmKeeper
from trilane.warm_start import WarmState

log = logging.getLogger("trilane")

PARTS_NBYTES = 32 << 20  # of shard parts in device memory, and as much in host memory; larger batches go in parts
MAX_ROWS = 512
LANDING_S = 10.0  # a copy that takes longer never lands


class _CpuSide:
    """What host_tables.py needs to know of a device."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads, self.played = num_threads, PlayedRates()
        self.slot_address = np.zeros(1, np.int64)


class CudaRunner:
    """State, memory and threads of one scheduler on a GPU.

    Parameters
    ----------
    store : ExpertStore
    config : Config
    driver : Driver, optional
        None: NVIDIA's, on the first visible GPU.
    """

    def __init__(self, store: ExpertStore, config: Config, driver: Driver | None = None) -> None:
        self.store, self.config = store, config
        self.recorder: CudaRecorder | None = None
        self._pid, self._closed = os.getpid(), False
        isa = available_isa(config.cpu.isa)
        self.geometry = store_geometry(store)
        with device_errors():
            self.driver = driver or CudaDriver()
            self._make_device(config)
        assert self.device.pinned is not None
        self._pinned_nbytes = min(store.nbytes, self.device.pinned.pinned_nbytes)
        self.threads = CudaThreads(config)
        self.launches = StepLaunches(self.device)
        self.tables = make_tables(store, _CpuSide(self.num_threads), isa)
        self.options = gpu_options(config)
        self._work, self._fill_work = make_work(self.geometry), make_work(self.geometry)
        self._make_scratch()
        self._warm = WarmKeeper(config)
        self._reported = [0] * len(ERRORS)
        self._rates = [make_rates()] * store.num_layers
        self._rate_stashes = stash_each(self._rates)
        self._rate_addresses = np.zeros(store.num_layers, np.int64)
        self._make_state()
        self.prefill = self._make_prefill(config)
        self.rates = self._rates
        compile_calls()
        self._begin_fills = on_stashes(begin_fills, self._run.kind)
        self.threads.start(self.device, self._run, self._frozen, self._rate_stashes[0], self._rate_addresses)

    # -------------------------------------------------------------------------------------------- making
    def _make_device(self, config: Config) -> None:
        layers, geometry = self.store.layers, self.geometry
        experts, shards = max(layer.num_experts for layer in layers), int(geometry.num_shards.max())
        positions = max(experts, PARTS_NBYTES // (4 * shards * self.store.hidden))
        self.shape = DeviceShape(
            min(MAX_ROWS, positions), positions, self.store.hidden, experts, shards, int(geometry.first_shard[-1])
        )
        slot_nbytes = int(geometry.shard_nbytes.max())
        self.device = CudaDevice(
            self.driver,
            [self._device_layer(index) for index in range(len(layers))],
            self.shape,
            num_slots=num_slots(config, geometry),
            slot_nbytes=slot_nbytes,
            arena_address=self.store.arena.address,
            arena_nbytes=self.store.arena.nbytes,
            pin_limit=config.host.pin_limit,
        )

    def _device_layer(self, index: int) -> DeviceLayer:
        layer, geometry = self.store.layers[index], self.geometry
        return DeviceLayer(
            layer.layout, index, layer.num_experts, int(geometry.first_expert[index]),
            int(geometry.first_shard[index]), GATES[layer.gate.kind], layer.gate.alpha, layer.gate.limit,
            self.store.arena.address + layer.offset, layer.stride,
        )  # fmt: skip

    def _make_scratch(self) -> None:
        """The CPU lane's scratch; its results go to mapped memory."""
        shape = self.shape
        self.ws = make_workspace(
            StepShape(shape.max_rows, shape.max_positions, shape.hidden, shape.max_experts, shape.max_shards)
        )
        self.ws.address[Part.PARTS] = self.device.address["cpu_parts"]
        self.grouping = make_grouping(shape.max_positions, shape.max_experts)

    def _make_state(self) -> None:
        geometry = self.geometry
        self.state = empty_state(self.config, geometry, self.device.num_slots)
        self.journal, self.counts = make_journal(geometry), CudaCounts(self.device, geometry)
        places = make_places(self.device, self.threads.team.words, self.threads.control.ctypes.data)
        wire = Wire(
            places, self.threads.control, np.zeros(6, np.int64), np.zeros(self.shape.max_experts, np.int64),
            np.zeros((4, max(1, self.shape.max_items)), np.int64), np.zeros((3, MOST_AT_ONCE), np.int64),
            np.zeros(max(1, self.shape.max_items), np.int8),
        )  # fmt: skip
        self._held = CudaStep(
            wire, self.tables, self.ws, self.grouping, np.zeros(int(geometry.first_expert[-1]), np.int64),
            np.zeros(self.shape.max_experts, np.int32), self.state, geometry, self.options, self._work,
            self._fill_work, self.journal, self.counts.totals, np.zeros(3), make_tape(1, 1),
        )  # fmt: skip
        self._run, self._frozen = self._stash_both()

    def _stash_both(self) -> tuple[Stash, Stash]:
        """What the control thread works with, usually and while slots are frozen."""
        return Stash(self._held), Stash(self._held._replace(options=frozen_options(self._held.options)))

    def _make_prefill(self, config: Config) -> CudaPrefill | None:
        """Passes of large batches; None where there is no memory for them."""
        if self.device.prefill is None:
            return None
        return CudaPrefill(
            self.device,
            self.launches,
            self.threads,
            self.state,
            self.counts.totals,
            config.policy.prefill_rows,
            self.check,
        )

    @property
    def rates(self) -> list[Rates]:
        """The cost model's constants, by layer."""
        return self._rates

    @rates.setter
    def rates(self, rates: Sequence[Rates]) -> None:
        before, self._rate_stashes = self._rate_stashes, stash_each(rates)
        self._rates = list(rates)
        with self._changing():
            self._rate_addresses[:] = [stash.address for stash in self._rate_stashes]
        del before

    @property
    def usual_options(self) -> Options:
        """What steps are planned with: there is no guard here."""
        return self.options

    def use_options(self, options: Options) -> Options:
        """Plan with other options from now on; those used before."""
        before, self.options = self.options, options
        self._use(self._held._replace(options=options))
        return before

    def _use(self, held: CudaStep) -> None:
        """Let the control thread work with this from now on."""
        with self._changing():
            old = self._run, self._frozen
            self._held = held
            self._run, self._frozen = self._stash_both()
            self.threads.use(self._run, self._frozen)
        del old

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change what decisions depend on, with the control thread held; a recording begins anew afterwards."""
        with self.threads.holding():
            yield
            if self.recorder is not None:
                self.recorder.lose_track()
        if self.recorder is not None:
            self.recorder.drain()

    # --------------------------------------------------------------------------------------- one layer-step
    def max_rows(self, top_k: int) -> int:
        """Rows that one step takes; a larger batch is run in parts."""
        return max(1, min(self.shape.max_rows, self.shape.max_positions // max(1, top_k)))

    def prefill_for(
        self, layer: int, rows: int, top_k: int, stream: int, ids: np.ndarray | None = None
    ) -> CudaPrefill | None:
        """What runs a batch whose layer streams past the slots; None: steps do, and always while a stream is captured.

        ``ids`` where they are in host memory.
        """
        prefill = self.prefill
        if prefill is None or not prefill.may_take(layer, rows, top_k) or self.driver.is_capturing(stream):
            return None
        experts = None if ids is None else routed_experts(ids, self.store.layers[layer].num_experts)
        rates, step_rows = self._rates[layer], self.max_rows(top_k)
        return prefill if prefill.takes(layer, rows, top_k, experts, rates, self.options, step_rows) else None

    def launch(self, step: StepInput, ids: int, id_nbytes: int, weights: int, stream: int) -> None:
        """Put a layer-step on a stream. All addresses are the GPU's; nothing is waited for."""
        self.check()
        self.launches.launch(step, ids, id_nbytes, weights, stream)

    def wait_for(self, stream: int) -> None:
        """Wait until a stream is done; signals are seen, and failures raised."""
        begin = time.monotonic()
        while not self.driver.finished(stream):
            if time.monotonic() - begin > 1e-3:
                time.sleep(WAIT_NAP_S)
        self.check()

    # ------------------------------------------------------------------------------------------- failures
    def check(self) -> None:
        """Raise what the GPU or a thread has found since the last call.

        Raises
        ------
        RoutingError, WorkerError, DeviceError
        """
        self.threads.check()
        found = self.device.mapped("error", np.uint32, len(ERRORS)).tolist()
        before, self._reported = self._reported, found
        for name, now, then in zip(ERRORS, found, before, strict=True):
            if now != then:
                raise step_error(name, now)

    @property
    def num_threads(self) -> int:
        """Workers of the CPU lane."""
        return self.threads.num_threads

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self.device.num_slots

    @property
    def played(self) -> PlayedRates:
        """Nothing is played on a GPU."""
        return PlayedRates()

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the store in pinned memory."""
        return self._pinned_nbytes

    def notes(self) -> dict[str, str]:
        """What is less than was asked for, and why; for ``stats``."""
        notes = self.device.notes | self._warm.notes
        if count := int(self.threads.control[Control.RESCUES]):
            notes["copies"] = (
                f"{count} steps read in place what was not copied in time: the driver was held up by another thread "
                "of the program, such as one inside cudaFree or cudaMalloc, or had put the copies behind other work of "
                "the GPU, such as many launches ahead"
            )
        return notes

    def inject_fault(self, fault: Fault) -> None:
        """The one seam for faults, for tests."""
        self.threads.control[Control.FAULT] = fault

    # ----------------------------------------------------------------------------------- hints and looking
    def record(self, path: Path | str) -> None:
        """Record to a trace file from now on.

        Raises
        ------
        TraceError, OSError
        """
        tape = make_tape(TAPE_ENTRIES, TAPE_EVENTS)
        self._use(self._held._replace(tape=tape))
        self.recorder = CudaRecorder(path, trace_meta(self.store), self.threads, tape, self._look)

    def _look(self) -> tuple[dict[str, Any], list[Rates], State]:
        """All that plans depend on."""
        sections = self.config.model_dump(mode="json", include={"cache", "policy"})
        return {"options": self.options._asdict(), "config": sections}, self._rates, self.state

    def begin_request(self) -> None:
        """What follows belongs to a new request."""
        if self.recorder is not None:
            self.recorder.request()

    @property
    def totals(self) -> np.ndarray:
        """What was done so far. Steps without misses are counted on the GPU; bytes of their hits are an average."""
        return self.counts.in_all()

    def answered_totals(self) -> np.ndarray:
        """What was done in steps with misses so far, without asking the GPU, whose copies may be queued up."""
        with self.threads.holding():
            return self.counts.totals.copy()

    def reset(self) -> None:
        """Empty slots, no history, counters at 0; no step may be under way."""
        self.wait_for(self.device.work_stream)
        with self._changing():
            self._end_fills()
            self.device.empty_table()
            self._take_state(self._empty_state())
            self.counts.begin_anew()

    def _end_fills(self) -> None:
        """Give up background fills, once a copy that is under way has landed; the control thread is held."""
        deadline = time.monotonic() + LANDING_S
        while not forget_fills(self._held.wire):
            self.threads.check()
            if time.monotonic() > deadline:
                raise DeviceError(f"reset: a background copy has not landed for {LANDING_S:g} s; make a new scheduler")
            time.sleep(WAIT_NAP_S)

    def _empty_state(self) -> State:
        return empty_state(self.config, self.geometry, self.device.num_slots)

    def _take_state(self, fresh: State) -> None:
        """Put a state in place of what the control thread has."""
        clock = self.state.clock.copy()
        for into, source in zip(self.state, fresh, strict=True):
            if isinstance(into, np.ndarray):
                into[...] = source
        self.state.clock[...] = clock  # the GPU's goes on

    # ----------------------------------------------------------------------------------------- warm start
    @property
    def warm_shards(self) -> int:
        """Shards that lay in slots before the first step."""
        return self._warm.num_shards

    def warm_up(self, file: WarmFile) -> None:
        """Take over what the run before left in the file, as much as fits, and leave it there anew at the end."""
        self.reset()
        self._warm.begin(file, int(self.state.clock[0]))
        found = self._warm.load(self._empty_state(), self.geometry)
        if found is None:
            return
        with device_errors():
            self._copy_now(found)
            with self._changing():
                self._take_state(found.state)
                self.device.write_table(self.state.slot_of)
        self._warm.tell(self.geometry, found)

    def _copy_now(self, warm: WarmState) -> None:
        """Copy shards into slots of which no table knows, a piece of the list at a time: Ctrl-C gets through."""
        listed, copy = self._fill_work, on_stashes(copy_listed, self._run.kind)
        most = len(listed.fill_slot)
        for start in range(0, len(warm.shards), most):
            shards = warm.shards[start : start + most]
            listed.fill_shard[: len(shards)] = shards
            listed.fill_slot[: len(shards)] = warm.slots[start : start + most]
            self.threads.control[Control.NUM_FILLS] = len(shards)
            if status := copy(self._run.address):
                raise DeviceError(f"a copy into a slot at the start was refused (CUDA error {status})")
            self.wait_for(self.device.fill_stream)

    def save_warm_start(self) -> Path | None:
        """Keep what the next start should take over; the file, or None if nothing was kept."""
        if not self._warm.is_on:
            return None
        with self.threads.holding():
            hot = self._warm.take(self.state, self.geometry)
        return self._warm.save(hot)

    def forget_counts(self) -> None:
        """Count from now on; what slots hold stays."""
        with self.threads.holding():
            self.counts.begin_anew()

    def start_fills(self, layer: int, experts: Sequence[int]) -> int:
        """Begin background fills for likely experts; how many."""
        if not self.options.fills:
            return 0
        with self.threads.holding():
            self._held.hints[: len(experts)] = experts
            self.threads.control[Control.HINT_LAYER], self.threads.control[Control.NUM_HINTS] = layer, len(experts)
            return int(self._begin_fills(self._run.address))

    def explain(self, layer: int) -> tuple[Plan, Outcome] | None:
        """The layer's last plan and outcome: of a step with misses, the only ones that are planned."""
        with self.threads.holding():
            return last_plan(self.journal, self.geometry, self.rates[layer], layer, self._work)

    def story(self, layer: int, expert: int) -> tuple[StoryEntry, ...]:
        """What happened to an expert lately."""
        with self.threads.holding():
            return expert_story(self.journal, layer, expert)

    def close(self) -> None:
        """End the GPU's waits, stop the threads, free the memory. A forked child frees nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.driver.make_current()
        if self.recorder is not None:
            self.recorder.close()
        try:
            self.save_warm_start()
        except (TeamError, TrilaneError) as error:  # a thread that has failed does not hand the state out
            log.warning("warm start: nothing is saved: %s", error)
        finally:
            self._close_device()

    def _close_device(self) -> None:
        self.device.mapped("abort", np.uint32, 1)[0] = 1
        if self.threads.close():
            self.launches.close()
            self.device.close()
        else:  # a thread that hangs may still write to it
            self.threads.hold(self)
