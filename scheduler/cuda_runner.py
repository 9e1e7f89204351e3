"""Runs layer-steps on the CUDA device: puts them on a stream, and owns the threads that answer their misses.

Nothing here waits for the GPU, but where results go to host memory. The control thread (cuda_control.py) has the
state while it runs; who wants to look at it holds that thread for a moment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trilane.config import Config
from trilane.cost import Rates, make_rates
from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES, RECORD_NBYTES
from trilane.cpu_kernels.cpus import read_cpu_budget, suggest_num_threads, suggest_spin_us
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.host_device import PlayedRates
from trilane.cpu_kernels.host_lanes import team_task
from trilane.cpu_kernels.host_workspace import Part, StepShape, make_workspace
from trilane.cpu_kernels.team import LaneThread, WorkerTeam
from trilane.cuda_control import control_task, watch_task
from trilane.cuda_fills import begin_fills
from trilane.cuda_words import Control, CudaStep, Failure, Fault, Place, Wire
from trilane.errors import DeviceError, RoutingError, WorkerError
from trilane.expert import HIT, Outcome, Plan
from trilane.gpu_kernels.cuda_device import CudaDevice, DeviceLayer, DeviceShape
from trilane.gpu_kernels.driver import CudaDriver, Driver, DriverError, DriverMissing, Encoded
from trilane.gpu_kernels.driver_calls import compile_calls, launch_graph
from trilane.gpu_kernels.nvrtc import CompileError, CompilerMissing
from trilane.gpu_kernels.words import ERRORS, TYPES
from trilane.host_runner import ELEMENTS, StepInput, available_isa
from trilane.host_tables import make_tables, store_geometry
from trilane.journal import StoryEntry, expert_story, last_plan, make_journal
from trilane.plan import Options, make_work
from trilane.policy import empty_state, num_slots, policy_options
from trilane.recorder import Recorder
from trilane.routing import make_grouping
from trilane.stash import Stash, on_stashes
from trilane.stats import NUM_LANES, LaneTotal, Total
from trilane.store import ExpertStore

PARTS_NBYTES = 32 << 20  # of shard parts in device memory, and as much in host memory; larger batches go in parts
MAX_ROWS = 512
HOT_NS = 5_000_000  # how long the control thread spins after a miss
NAP_NS = 50_000
HOLD_S = 5.0
CACHED_STEPS = 256  # of which the launches are kept
WAIT_NAP_S = 20e-6
CONTROL_THREADS = 1  # the control thread has a core of its own; the watchdog sleeps


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
        self.recorder: Recorder | None = None  # steps on a GPU are not recorded yet
        self._pid, self._closed = os.getpid(), False
        isa = available_isa(config.cpu.isa)
        self.geometry = store_geometry(store)
        with _device_errors():
            self.driver = driver or CudaDriver()
            self._make_device(config)
        assert self.device.pinned is not None
        self._pinned_nbytes = min(store.nbytes, self.device.pinned.pinned_nbytes)
        self._make_team(config)
        self.tables = make_tables(store, _CpuSide(self.num_threads), isa)
        self.options = policy_options(config)
        self._work, self._fill_work = make_work(self.geometry), make_work(self.geometry)
        self._control = np.zeros(Control.SIZE, np.int64)
        budget = read_cpu_budget()
        spins = suggest_spin_us(budget, self.num_threads + CONTROL_THREADS) > 0
        self._control[Control.HOT_NS] = HOT_NS if spins else 0
        self._control[Control.NAP_NS] = NAP_NS
        self._control[Control.STALL_NS] = int(1e9 * config.cpu.stall_timeout_s)
        self._make_scratch()
        self._steps: OrderedDict[tuple[Any, ...], tuple[Encoded, int]] = OrderedDict()
        self._stream: int | None = None
        self._counted = np.zeros(2, np.int64)
        self._reported = [0] * len(ERRORS)
        self._rates = [make_rates()] * store.num_layers
        self._rate_stashes = [Stash(rates) for rates in self._rates]
        self._rate_addresses = np.zeros(store.num_layers, np.int64)
        self._make_state()
        self.rates = self._rates
        compile_calls()
        self._begin_fills = on_stashes(begin_fills, self._run.kind)
        self._start()

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

    def _make_team(self, config: Config) -> None:
        budget = read_cpu_budget()
        threads = config.cpu.threads
        if threads == "auto":
            count, _ = suggest_num_threads(budget)
            threads = count - CONTROL_THREADS if count > 2 * CONTROL_THREADS else count
        self.num_threads = int(threads)
        spin = suggest_spin_us(budget, self.num_threads) if config.cpu.spin_us == "auto" else config.cpu.spin_us
        options: dict[str, Any] = {"spin_us": spin, "stall_timeout_s": config.cpu.stall_timeout_s}
        self.team = WorkerTeam(self.num_threads, name="trilane-cpu", **options)
        self.control_thread = LaneThread("trilane-control", **options)
        self.watchdog = LaneThread("trilane-watch", spin_us=0)

    def _make_scratch(self) -> None:
        """The CPU lane's scratch; its results go to mapped memory."""
        shape = self.shape
        self.ws = make_workspace(
            StepShape(shape.max_rows, shape.max_positions, shape.hidden, shape.max_experts, shape.max_shards)
        )
        self.ws.address[Part.PARTS] = self.device.address["cpu_parts"]
        self.grouping = make_grouping(shape.max_positions, shape.max_experts)

    def _places(self) -> np.ndarray:
        device, places = self.device, np.zeros(Place.SIZE, np.int64)
        for place in (
            Place.MAIL, Place.MAIL_GROUPS, Place.MAIL_MISSING, Place.MAIL_TOKENS, Place.STAMPS, Place.ACKNOWLEDGED,
            Place.PLAN_LIST, Place.UPDATES, Place.PENDING, Place.CPU_FLAG, Place.ABORT, Place.COPY_FLAGS, Place.COPIED,
            Place.FILL_FLAG, Place.MAIL_RECORDS, Place.MAIL_FLOATS,
        ):  # fmt: skip
            places[place] = device.address[place.name.lower()]
        blocks = -(-self.store.hidden // BLOCK)
        assert device.pinned is not None
        for place, value in (
            (Place.DRIVER, self.driver.table.ctypes.data), (Place.CONTEXT, self.driver.context),
            (Place.COPY_STREAM, device.copy_stream), (Place.FILL_STREAM, device.fill_stream),
            (Place.TEAM, self.team.words), (Place.TEAM_TASK, team_task().address),
            (Place.SLOTS, device.slots), (Place.SLOT_NBYTES, device.slot_nbytes),
            (Place.PINNED_END, device.pinned.end), (Place.INT8_STRIDE, blocks * RECORD_NBYTES),
            (Place.FLOATS_STRIDE, blocks * F32_BLOCK_NBYTES), (Place.PINNED_START, device.pinned.address),
            (Place.SEGMENT_NBYTES, device.pinned.segment_nbytes),
        ):  # fmt: skip
            places[place] = value
        return places

    def _make_state(self) -> None:
        geometry = self.geometry
        self.state = empty_state(self.config, geometry, self.device.num_slots)
        self.journal, self._totals = make_journal(geometry), np.zeros(Total.SIZE)
        wire = Wire(
            self._places(), self._control, np.zeros(4, np.int64), np.zeros(self.shape.max_experts, np.int64),
            np.zeros((max(1, self.shape.max_items), 3), np.int64),
        )  # fmt: skip
        self._held = CudaStep(
            wire, self.tables, self.ws, self.grouping, np.zeros(int(geometry.first_expert[-1]), np.int64),
            np.zeros(self.shape.max_experts, np.int32), self.state, geometry, self.options, self._work,
            self._fill_work, self.journal, self._totals, np.zeros(3),
        )  # fmt: skip
        self._run: Stash = Stash(self._held)

    def _start(self) -> None:
        control = control_task(self._run.kind, self._rate_stashes[0].kind)
        words = self._control.ctypes.data
        self._control_block = np.array(
            [words, self._run.address, self._rate_addresses.ctypes.data, self.driver.table.ctypes.data,
             self.driver.context], np.int64,
        )  # fmt: skip
        address = self.device.address
        self._watch_block = np.array([words, address["mail"], address["abort"], address["copied"]], np.int64)
        self.team.start()
        for thread, task, block in (
            (self.control_thread, control, self._control_block),
            (self.watchdog, watch_task(), self._watch_block),
        ):
            thread.start()
            thread.post(task.address, block.ctypes.data, 1)

    # --------------------------------------------------------------------------------- the thread's state
    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Have the state for oneself inside a ``with`` block; the control thread pauses."""
        self._control[Control.HOLD] = 1
        deadline = time.monotonic() + HOLD_S
        try:
            while not self._control[Control.HELD]:
                self.check()
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"the control thread has not answered for {HOLD_S:g} s; close the scheduler and make a new one"
                    )
                time.sleep(WAIT_NAP_S)
            yield
        finally:
            self._control[Control.HOLD] = 0
            while self._control[Control.HELD] and time.monotonic() < deadline:
                time.sleep(WAIT_NAP_S)

    @property
    def rates(self) -> list[Rates]:
        """The cost model's constants, by layer."""
        return self._rates

    @rates.setter
    def rates(self, rates: Sequence[Rates]) -> None:
        stashes = {id(one): Stash(one) for one in rates}
        before, self._rate_stashes = self._rate_stashes, [stashes[id(one)] for one in rates]
        self._rates = list(rates)
        running = hasattr(self, "_control_block")
        with self.holding() if running else contextlib.nullcontext():
            self._rate_addresses[:] = [stash.address for stash in self._rate_stashes]
        del before

    def use_options(self, options: Options) -> Options:
        """Plan with other options from now on; those used before."""
        before, self.options = self.options, options
        with self.holding():
            self._held = self._held._replace(options=options)
            self._run, old = Stash(self._held), self._run
            self._control_block[1] = self._run.address
        del old
        return before

    # --------------------------------------------------------------------------------------- one layer-step
    def max_rows(self, top_k: int) -> int:
        """Rows that one step takes; a larger batch is run in parts."""
        return max(1, min(self.shape.max_rows, self.shape.max_positions // max(1, top_k)))

    def launch(self, step: StepInput, ids: int, id_nbytes: int, weights: int, stream: int) -> None:
        """Put a layer-step on a stream. All addresses are the GPU's; nothing is waited for."""
        self.check()
        capturing = self.driver.is_capturing(stream)
        self._order(stream, capturing)
        encoded, graph = self._encoded(step, ids, id_nbytes, weights, make_graph=not capturing)
        with _device_errors():
            if graph:
                status = launch_graph(self.driver.table.ctypes.data, graph, stream)
            else:
                status = encoded.launch(self.driver.table, stream)
            if status:
                raise DriverError(f"the kernels of layer {step.layer} were not launched: CUDA error {status}")

    def _encoded(
        self, step: StepInput, ids: int, id_nbytes: int, weights: int, make_graph: bool
    ) -> tuple[Encoded, int]:
        """The launches for these inputs, and the graph of them from the second time on."""
        key = (step, ids, id_nbytes, weights)
        found = self._steps.get(key)
        if found is None:
            found = self.device.encode_step(step.layer, self._step_words(step, ids, id_nbytes, weights)), 0
        elif make_graph and not found[1]:
            found = found[0], self.driver.make_graph(found[0])
        self._steps[key] = found
        self._steps.move_to_end(key)
        if len(self._steps) > CACHED_STEPS:
            _, (_, graph) = self._steps.popitem(last=False)
            if graph:
                self.driver.destroy_graph(graph)
        return found if make_graph else (found[0], 0)

    def _step_words(self, step: StepInput, ids: int, id_nbytes: int, weights: int) -> np.ndarray:
        words = self.device.step_words(step.layer)
        for name, value in (
            ("x", step.hidden), ("x_stride", step.hidden_stride), ("x_element", ELEMENTS[step.hidden_element]),
            ("ids", ids), ("id_nbytes", id_nbytes), ("weights", weights), ("out", step.out),
            ("out_stride", step.out_stride), ("out_element", ELEMENTS[step.out_element]),
            ("num_rows", step.num_rows), ("top_k", step.top_k),
        ):  # fmt: skip
            words[name] = value
        return words

    def _order(self, stream: int, capturing: bool) -> None:
        """Steps share buffers, so one on another stream than the last comes after it."""
        before, self._stream = self._stream, stream
        if before is None or before == stream:
            return
        if not capturing:
            self.driver.order_after(stream, before)
        elif not self.driver.finished(before):
            self._stream = before
            raise DeviceError(
                "stream: it is captured while a step on another stream is still running, and the two share buffers; "
                "synchronize that stream before the capture"
            )

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
        failure = Failure(int(self._control[Control.FAILURE]))
        if failure is not Failure.NONE:
            self._raise_failure(failure)
        self.control_thread.check()
        self.team.check()
        found = self.device.mapped("error", np.uint32, len(ERRORS)).tolist()
        before, self._reported = self._reported, found
        for name, now, then in zip(ERRORS, found, before, strict=True):
            if now != then:
                self._raise_error(name, now)

    def _raise_failure(self, failure: Failure) -> None:
        status = int(self._control[Control.STATUS])
        why = {
            Failure.STALLED: f"a step waited for the host for more than {self.config.cpu.stall_timeout_s:g} s "
            "(cpu.stall_timeout_s)",
            Failure.COPY: f"the driver refused a copy to the GPU (CUDA error {status})",
            Failure.TEAM: f"the CPU lane failed (code {status})",
        }[failure]
        raise WorkerError(f"{why}; outputs since then may be NaN; close the scheduler and make a new one")

    def _raise_error(self, name: str, clock: int) -> None:
        if name == "bad_id":
            raise RoutingError(
                f"topk_ids: layer-step {clock} named an expert that its layer does not have, and skipped it; check "
                "the router's output (ids are seen on the GPU, so a later call tells)"
            )
        raise WorkerError(f"layer-step {clock} ended as {name}: its output is NaN; make a new scheduler")

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
        return dict(self.device.notes)

    def inject_fault(self, fault: Fault) -> None:
        """The one seam for faults, for tests."""
        self._control[Control.FAULT] = fault

    # ----------------------------------------------------------------------------------- hints and looking
    def record(self, path: Path | str) -> None:
        """Refused: plans are made by a thread without an interpreter, and are not recorded yet."""
        raise DeviceError(f"record.path is {str(path)!r}, but steps on a GPU cannot be recorded yet; leave it out")

    @property
    def totals(self) -> np.ndarray:
        """What was done so far. Steps without misses are counted on the GPU; bytes of their hits are an average."""
        totals = self._totals.copy()
        steps, routed = self._device_counts() - self._counted
        lanes = totals[Total.LANES : Total.SIZE].reshape(NUM_LANES, -1)
        hits = float(routed) - float(lanes[:, LaneTotal.SHARDS].sum())
        shard_nbytes = float(self.geometry.shard_nbytes.sum() / self.geometry.num_shards.sum())
        lanes[HIT, LaneTotal.SHARDS] += max(0.0, hits)
        lanes[HIT, LaneTotal.NBYTES] += max(0.0, hits) * shard_nbytes
        totals[Total.STEPS] = max(totals[Total.STEPS], float(steps))
        return totals

    def forget_counts(self) -> None:
        """Count from now on; what slots hold stays."""
        with self.holding():
            self._totals[:] = 0.0
            self._counted = self._device_counts()

    def _device_counts(self) -> np.ndarray:
        """Steps and shards routed to, as the GPU counts them now."""
        state, stream = np.zeros((), TYPES["State"]), self.device.fill_stream
        self.driver.to_host(state.ctypes.data, self.device.address["state"], state.nbytes, stream)
        while not self.driver.finished(stream):
            time.sleep(WAIT_NAP_S)
        return np.array([int(state["clock"]), int(state["routed"])], np.int64)

    def start_fills(self, layer: int, experts: Sequence[int]) -> int:
        """Begin background fills for likely experts; how many."""
        if not self.options.fills:
            return 0
        with self.holding():
            self._held.hints[: len(experts)] = experts
            self._control[Control.HINT_LAYER], self._control[Control.NUM_HINTS] = layer, len(experts)
            return int(self._begin_fills(self._run.address))

    def explain(self, layer: int) -> tuple[Plan, Outcome] | None:
        """The layer's last plan and outcome: of a step with misses, the only ones that are planned."""
        with self.holding():
            return last_plan(self.journal, self.geometry, self.rates[layer], layer, self._work)

    def story(self, layer: int, expert: int) -> tuple[StoryEntry, ...]:
        """What happened to an expert lately."""
        with self.holding():
            return expert_story(self.journal, layer, expert)

    def close(self) -> None:
        """End the GPU's waits, stop the threads, free the memory. A forked child frees nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.driver.make_current()
        self.device.mapped("abort", np.uint32, 1)[0] = 1
        self._control[Control.STOP] = 1
        ended = all([thread.close() for thread in (self.control_thread, self.watchdog, self.team)])
        if ended:
            for _, graph in self._steps.values():
                if graph:
                    self.driver.destroy_graph(graph)
            self.device.close()
        else:  # a thread that hangs may still write to it
            for thread in (self.control_thread, self.watchdog, self.team):
                thread.hold(self)


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Errors of the driver and of the compiler as public ones."""
    try:
        yield
    except DriverMissing as error:
        raise DeviceError(str(error)) from error
    except (DriverError, CompileError, CompilerMissing) as error:
        raise DeviceError(f"device 'cuda': {error}") from error
