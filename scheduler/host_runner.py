"""Runs layer-steps on the host device: owns the state, the memory and the threads of one scheduler.

A step is compiled code (host_run.py); this file feeds it, and does what it hands back: large batches, long waits,
further waves, failures. Argument checks and the public face are the engine's; decisions are the planner's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import typeof

from trilane.accounts import CPU_US, FETCH_US, HITS_US
from trilane.config import Config
from trilane.cost import Rates, make_rates
from trilane.cpu_kernels.activation import (
    F32_BLOCK_NBYTES,
    HIDDEN_BF16,
    HIDDEN_F16,
    HIDDEN_F32,
    RECORD_NBYTES,
)
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.host_device import HostDevice, PlayedRates, set_flag
from trilane.cpu_kernels.host_workspace import StepShape, make_workspace, rows_per_step
from trilane.cpu_kernels.isa import available_isas
from trilane.cpu_kernels.words import LinkJob, Piece
from trilane.errors import ConfigError, DeviceError, Problem
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, Outcome, Plan
from trilane.fill_budget import FillBudget
from trilane.guarded import GuardedOptions
from trilane.host_fills import Fill, HostFills, end_fill, reserve_hinted, reserve_own
from trilane.host_run import (
    DONE,
    FAILED,
    MANY_ROWS,
    MORE_WAVES,
    ROWS_IN_CALLER,
    HostStep,
    Lane,
    Step,
    close_step,
    finish_step,
    group_step,
    plan_and_post,
)
from trilane.host_step import LINK_NS
from trilane.host_tables import make_tables, store_geometry
from trilane.journal import StoryEntry, expert_story, last_plan, make_journal
from trilane.observed import make_observed, observe_lane, pass_step, scale_rates
from trilane.plan import Options, make_work, single_lane_us
from trilane.planner import abandon_step
from trilane.policy import empty_state, num_slots, policy_options
from trilane.routing import make_grouping
from trilane.stash import Stash, on_stashes, stash_each
from trilane.state import State
from trilane.stats import Total
from trilane.store import ExpertStore
from trilane.warm_keeper import WarmKeeper

if TYPE_CHECKING:  # loaded by who records, or begins warm
    from trilane.recorder import Recorder
    from trilane.warm_file import WarmFile

log = logging.getLogger("trilane")

ELEMENTS = {"f32": HIDDEN_F32, "f16": HIDDEN_F16, "bf16": HIDDEN_BF16}
SCRATCH_NBYTES = 64 << 20
FIRST_ROWS = 8  # rows that the first workspace holds
FILLS_AT_ONCE = 64
INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class StepInput:
    """Rows of one step, as addresses: hidden and output rows with strides in bytes and element names.

    ``weight_element`` is that of router weights on a GPU; in host memory they are float32.
    """

    layer: int
    num_rows: int
    top_k: int
    hidden: int
    hidden_stride: int
    hidden_element: str
    out: int
    out_stride: int
    out_element: str
    weight_element: str = "f32"


def available_isa(isa: str) -> str:
    """An instruction set as configured, if this CPU has it."""
    if isa != "auto" and isa not in available_isas():
        problem = f"is {isa!r}, but this CPU has {', '.join(available_isas())}: use one of them, or 'auto'"
        raise ConfigError([Problem("cpu.isa", problem)])
    return isa


class HostRunner:
    """State, memory and threads of one scheduler on the host device.

    Parameters
    ----------
    store : ExpertStore
    config : Config
    knee : int, optional
        CPU threads beyond which this machine's rates no longer grow; "auto" threads are at most so many.
    """

    def __init__(self, store: ExpertStore, config: Config, *, knee: int | None = None) -> None:
        self.store, self.config = store, config
        isa = available_isa(config.cpu.isa)
        self.geometry = store_geometry(store)
        slot_nbytes = int(self.geometry.shard_nbytes.max())
        self._num_slots = num_slots(config, self.geometry)
        self.recorder: Recorder | None = None
        self._warm = WarmKeeper(config)
        self.device = HostDevice(
            self._num_slots,
            slot_nbytes,
            threads=config.cpu.threads,
            knee=knee,
            spin_us=config.cpu.spin_us,
            stall_timeout_s=config.cpu.stall_timeout_s,
            played=PlayedRates(**config.host_device.model_dump()),
        )
        self.device.start()
        self.tables = make_tables(store, self.device, isa)
        self.options = self._own_options = policy_options(config)
        self.rates = [make_rates()] * store.num_layers  # of a probe: every lane is forced there
        self._work, self._fill_work = make_work(self.geometry), make_work(self.geometry)
        self._step, self._asked = np.zeros(Step.SIZE, np.int64), np.zeros(Fill.SIZE, np.int64)
        blocks = -(-store.hidden // BLOCK)
        self._step[Step.INT8_STRIDE] = blocks * RECORD_NBYTES
        self._step[Step.FLOATS_STRIDE] = blocks * F32_BLOCK_NBYTES
        self._lanes = np.array([self.device.addresses[lane.name] for lane in list(Lane)[:-1]], np.int64)
        experts = max(layer.num_experts for layer in store.layers)
        self._shape = StepShape(0, 0, store.hidden, experts, int(self.geometry.num_shards.max()))
        self._has_scratch = False  # of that shape, and the steps know it
        self._open = False  # a step was begun, and neither finished nor abandoned
        self._left: dict[str, int] = {}  # tickets of an abandoned step's lanes, which may still be at work
        self._fills: list[tuple[int, int]] = []
        self._is_own_fill = False  # they are the policy's, not a hint's
        self._is_unsure = False  # slots may be reserved that the list does not name: an interrupt took it
        self._budget = FillBudget()
        self._reserve(FIRST_ROWS, 1)
        self.reset()
        self._compile()

    def _compile(self) -> None:
        """Everything that runs later, now: no step waits for a compiler, and no interrupt hits one."""
        state, geometry, experts = self.state, self.geometry, self.grouping.experts
        run, rates = self._run.kind, self._rate_stashes[0].kind
        self._group_step, self._finish_step, self._close_step = (
            on_stashes(function, run) for function in (group_step, finish_step, close_step)
        )
        self._plan_and_post = on_stashes(plan_and_post, run, rates)
        self._reserve_hinted, self._reserve_own, self._end_fill = (
            on_stashes(function, self._fill_run.kind) for function in (reserve_hinted, reserve_own, end_fill)
        )
        for function, arguments in (
            (self._group_step, (0,)),
            (self._plan_and_post, (0, 0)),
            (self._finish_step, (0,)),
            (self._close_step, (0,)),
            (abandon_step, (state, geometry, 0, experts, 0, self._work)),
            (self._reserve_hinted, (0,)),
            (self._reserve_own, (0,)),
            (self._end_fill, (0,)),
            (set_flag, (0, 0)),
        ):
            function.compile(tuple(typeof(argument) for argument in arguments))
        if self.config.policy.learn_rates:
            observe_lane.compile((typeof(self._observed), typeof(0), typeof(0.0), typeof(0.0)))
            pass_step.compile((typeof(self._observed), typeof(0)))

    # ----------------------------------------------------------------------------------------- memory
    def reset(self) -> None:
        """Empty slots, no history, counters at 0."""
        self.settle_fills()
        self._lose_track()
        self.state = empty_state(self.config, self.geometry, self._num_slots)
        self.journal = make_journal(self.geometry)
        self._guarded = GuardedOptions(self._own_options, enabled=self.config.policy.guard)
        self.totals = np.zeros(Total.SIZE)
        self.lane_us = np.zeros(3)
        self._step[Step.CLOCK] = 0
        self._bind()

    def _bind(self) -> None:
        """Put all arrays into the one argument of the compiled steps."""
        held = HostStep(
            self.tables, self.ws, self.grouping, self._grouping_address, self.state, self.geometry, self.options,
            self._work, self._guarded.guard, self.journal, self.totals, np.zeros(4, np.int64), self.lane_us,
            self._lanes, self._step,
        )  # fmt: skip
        self._run = Stash(held)
        self._bind_fills()

    def _bind_fills(self) -> None:
        experts = np.zeros(self._shape.max_experts, np.int32)
        held = HostFills(self.state, self.geometry, self.options, self._fill_work, experts, self._asked)
        self._fill_run = Stash(held)

    @property
    def rates(self) -> list[Rates]:
        """The cost model's constants, by layer."""
        return [stash.held for stash in self._rate_stashes]

    @rates.setter
    def rates(self, rates: Sequence[Rates]) -> None:
        self._observed, self._profiled = make_observed(), list(rates)
        self._use_rates(rates)

    def _use_rates(self, rates: Sequence[Rates]) -> None:
        self._lose_track()
        self._rate_stashes = stash_each(rates)  # layers of one kind share theirs

    def _use_observed(self) -> None:
        """Plan with the profile's rates and what was learned of them."""
        scaled: dict[int, Rates] = {}
        self._use_rates([scaled.setdefault(id(one), scale_rates(one, self._observed)) for one in self._profiled])

    def use_options(self, options: Options) -> Options:
        """Plan with other options from now on, without the guard unless they are the policy's; those used before."""
        before, self.options = self.options, options
        self._plan_with(options)
        self._bind_fills()
        return before

    @property
    def usual_options(self) -> Options:
        """What steps are planned with, the guard's word included."""
        return self._guarded.usual(self.options)

    def _plan_with(self, options: Options) -> None:
        self._lose_track()
        self._run = Stash(self._run.held._replace(options=options))

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self._num_slots

    @property
    def num_threads(self) -> int:
        """Workers of the CPU lane."""
        return self.device.num_threads

    @property
    def played(self) -> PlayedRates:
        """The rates that lanes play."""
        return self.device.played

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the store in pinned memory."""
        return 0

    def notes(self) -> dict[str, str]:
        """What is inactive on this device, with the reason."""
        return self._warm.notes | ({"split": self._guarded.note} if self._guarded.note else {})

    def num_slots_of(self, layer: int) -> int:
        """Slots of the pool that a layer's shards go to."""
        pool = self.state.pool_of[layer]
        return int(self.state.first_slot[pool + 1] - self.state.first_slot[pool])

    def max_rows(self, top_k: int) -> int:
        """Rows that one step takes; a larger batch is run in parts."""
        return rows_per_step([layer.layout for layer in self.store.layers], top_k, SCRATCH_NBYTES)

    def _reserve(self, rows: int, top_k: int) -> None:
        """Grow the scratch to ``rows`` rows of ``top_k`` ranks; steps within it allocate nothing."""
        shape, positions = self._shape, rows * top_k
        if rows <= shape.max_rows and positions <= shape.max_positions and self._has_scratch:
            return
        self._has_scratch = False  # until all of it is new: an interrupt can come between any two lines
        self._shape = replace(
            shape, max_rows=max(rows, shape.max_rows), max_positions=max(positions, shape.max_positions)
        )
        self.ws = make_workspace(self._shape)
        self.grouping = make_grouping(self._shape.max_positions, shape.max_experts)
        addresses = [self.grouping.ids.ctypes.data, self.grouping.position.ctypes.data]
        self._grouping_address = np.array(addresses, np.int64)
        if hasattr(self, "_run"):
            self._bind()
        self._has_scratch = True

    # ------------------------------------------------------------------------------------- one layer-step
    def take_routing(self, ids: np.ndarray, weights: np.ndarray) -> None:
        """Copy (rows, top_k) ids and weights to where the step finds them."""
        self._end_leftovers()
        self._reserve(*ids.shape)
        if ids.dtype == np.uint64:  # else those past int64 would wrap round to -1, which means "none"
            ids = np.minimum(ids, np.uint64(INT64_MAX))
        self.grouping.ids[: ids.size].reshape(ids.shape)[...] = ids
        self.ws.weights[: ids.size].reshape(ids.shape)[...] = weights

    def begin(self, step: StepInput) -> bool:
        """Group, publish, plan, and start the lanes; False, and nothing done, where an id does not exist."""
        self._step[Step.LAYER : Step.OUT_ELEMENT + 1] = (
            step.layer, step.num_rows, step.top_k, step.hidden, step.hidden_stride,
            ELEMENTS[step.hidden_element], step.out, step.out_stride, ELEMENTS[step.out_element],
        )  # fmt: skip
        if self._group_step(self._run.address) < 0:
            return False
        self.settle_fills()
        self._choose_options(step.layer)
        if self.recorder is not None:
            self.recorder.ready()
        self._open = True
        try:
            if step.num_rows > ROWS_IN_CALLER:
                self.device.publish(self.ws, step.num_rows)
            status = self._plan_and_post(self._run.address, self._rate_stashes[step.layer].address)
            if self.recorder is not None:
                self.recorder.step(self._run)  # while the lanes work
            if status != DONE:
                self._raise_refusal()
        except BaseException:
            self._abandon()
            raise
        return True

    def finish(self) -> None:
        """Wait for the lanes, run further waves if the plan has them, combine into the output, account."""
        try:
            while (status := self._finish_step(self._run.address)) not in (DONE, MANY_ROWS):
                if status == MORE_WAVES:
                    self._begin_wave()
                else:
                    self.device.wait(self._tickets())  # sees signals, and what became of the threads
        except BaseException:
            self._abandon()
            raise
        if status == MANY_ROWS:
            self.device.combine(self.ws, int(self._step[Step.NUM_ROWS]))
            self._close_step(self._run.address)
        self._open = False
        if self._step[Step.GUARDED]:
            self._look_at_guard()
        if self.config.policy.learn_rates:
            self._learn_rates()
        if self.options.background and self.state.num_wanted[0] + self.state.num_coming[0] > 0:
            self._start_background()

    def _choose_options(self, layer: int) -> None:
        """Plan this step with what the guard says."""
        options, guarded = self._guarded.options_of(self.options, self._shards(layer), self.num_slots_of(layer))
        self._step[Step.GUARDED] = guarded
        if options is not self._run.held.options:
            self._plan_with(options)

    def _shards(self, layer: int) -> int:
        return int(self._step[Step.NUM_EXPERTS] * self.geometry.num_shards[layer])

    def _look_at_guard(self) -> None:
        """Tell of a change of its mind, and begin its window where that is due."""
        if self._step[Step.SWITCHED]:
            self._step[Step.SWITCHED] = 0
            self._guarded.tell()
        if self._guarded.is_due:
            layer, num_experts = int(self._step[Step.LAYER]), int(self._step[Step.NUM_EXPERTS])
            rows, rates = self.grouping.rows, self.rates[layer]
            us = single_lane_us(self.geometry, rates, layer, rows, num_experts, self._work)
            self._guarded.begin_window(us, self._shards(layer), self.num_slots_of(layer))

    @property
    def step_us(self) -> float:
        """Observed us of the layer's last step, from begin to combined."""
        return float(self.journal.observed_us[self._step[Step.LAYER], -1])

    def _tickets(self) -> dict[str, int]:
        places = {"link": Step.LINK_TICKET, "team": Step.TEAM_TICKET, "device": Step.DEVICE_TICKET}
        return {name: int(self._step[place]) for name, place in places.items() if self._step[place] > 0}

    def _begin_wave(self) -> None:
        waiting = int(self._step[Step.UNPLACED])
        rates = self._rate_stashes[self._step[Step.LAYER]]
        status = self._plan_and_post(self._run.address, rates.address)
        if status == FAILED:
            raise DeviceError(
                f"layer {self._step[Step.LAYER]}: {waiting} shards find no slot among {self._num_slots} and only "
                "the stream lane is allowed; give the cache more slots (section cache), or the policy more lanes"
            )
        if self.recorder is not None:
            self.recorder.step(self._run, is_wave=True)
        if status != DONE:
            self._raise_refusal()

    def _raise_refusal(self) -> None:
        self.device.check()
        raise DeviceError("a lane is still busy with an earlier step; make a new scheduler")

    def _abandon(self) -> None:
        """A failed step's fills hold nothing that may be hit."""
        self._lose_track()
        if self._open and self._step[Step.PLANNED]:
            layer, num_experts = int(self._step[Step.LAYER]), int(self._step[Step.NUM_EXPERTS])
            abandon_step(self.state, self.geometry, layer, self.grouping.experts, num_experts, self._work)
            self._left = self._tickets()
        self._open = False
        self.device.abandon(self.ws, self._left)

    def _end_leftovers(self) -> None:
        """Before memory is used anew: an interrupt can have come between any two lines, and a lane can be slow."""
        if self._open:
            self._abandon()
        if self._left:
            self.device.settle(self._left)
            self._left = {}

    # ------------------------------------------------------------------------------------------ recording
    def record(self, path: Path | str) -> None:
        """Record to a trace file from now on.

        Raises
        ------
        TraceError, OSError
        """
        from trilane.recorder import Recorder, trace_meta

        self.recorder = Recorder(path, trace_meta(self.store), self._run, self._look)

    def _look(self) -> tuple[dict[str, Any], list[Rates], State]:
        """All that plans depend on."""
        sections = self.config.model_dump(mode="json", include={"cache", "policy"})
        settings = {
            "clock": int(self._step[Step.CLOCK]),
            "options": self._run.held.options._asdict(),
            "config": sections,
        }
        return settings, self.rates, self.state

    def begin_request(self) -> None:
        """What follows belongs to a new request."""
        if self.recorder is not None:
            if not self._fills:
                self.recorder.ready()
            self.recorder.request()

    def _lose_track(self) -> None:
        if self.recorder is not None:
            self.recorder.lose_track()

    # ------------------------------------------------------------------------------------ background fills
    def start_fills(self, layer: int, experts: Sequence[int]) -> int:
        """Reserve slots for likely experts and copy them while the link is idle; fills started."""
        if not self.options.fills:
            return 0
        self._end_leftovers()
        self.settle_fills()
        if self.recorder is not None:
            self.recorder.ready()
        try:
            return self._reserve_fills(layer, experts)
        except BaseException:
            self._lose_track()
            raise

    def _reserve_fills(self, layer: int, experts: Sequence[int]) -> int:
        self._fill_run.held.experts[: len(experts)] = experts
        self._asked[Fill.LAYER : Fill.CLOCK + 1] = layer, len(experts), self._step[Step.CLOCK]
        self._is_unsure = True
        self._reserve_hinted(self._fill_run.address)
        num = self._take_fills()
        if self.recorder is not None:
            self.recorder.hint(layer, experts, int(self._asked[Fill.DIGEST]))
        self._post_fills()
        return num

    def _take_fills(self) -> int:
        """The fills that were reserved, none of which has landed; how many."""
        w, num = self._fill_work, int(self._asked[Fill.NUM])
        self.totals[Total.EVICTIONS] += np.count_nonzero(w.fill_victim[:num] >= 0)
        self._landed = np.zeros(num, np.int64)
        self._fills = [(int(w.fill_slot[i]), int(w.fill_shard[i])) for i in range(num)]
        return num

    def _learn_rates(self) -> None:
        """What the lanes took moves the rates of all layers; a step of several waves tells nothing of single lanes."""
        terms, counts, seen = self._work.predicted_us, self._work.counts, self._observed
        if (self._work.lane[: counts[:4].sum()] < 0).any():
            return
        fetches = [lane for lane in (STREAM, ZERO_COPY) if counts[lane]]
        took = {CPU: self.lane_us[CPU_US], HIT: self.lane_us[HITS_US]}
        took |= {fetches[0]: self.lane_us[FETCH_US]} if len(fetches) == 1 else {}
        changed = False
        if counts[STREAM : CPU + 1].any():
            changed |= bool(pass_step(seen, sum(1 << lane for lane in range(4) if counts[lane])))
        for lane, us in took.items():
            changed |= bool(observe_lane(seen, lane, float(terms[lane] / seen.used[lane]), float(us)))
        if changed:
            self._use_observed()
            log.info("rates by lane are now %s of the profile's", np.round(seen.used, 2).tolist())

    def _start_background(self) -> None:
        """Use the time until the next step for what was missed of late, as much of it as landed the last times."""
        if self._fills or self._is_unsure or not self._budget.allows():
            return
        if self.recorder is not None:
            self.recorder.ready()
        try:
            self._asked[Fill.MOST] = self._budget.most
            self._is_unsure = True
            self._reserve_own(self._fill_run.address)
            num = self._take_fills()
            if self.recorder is not None:
                self.recorder.background(self._budget.most, int(self._asked[Fill.DIGEST]))
            self._is_own_fill = num > 0
            self._post_fills()
        except BaseException:
            self._lose_track()
            raise

    def _post_fills(self) -> None:
        """Let the link bring them, if there are any; from here on it is known what is under way."""
        if self._fills:
            self.device.post_background(self._fill_job())
        self._is_unsure = False

    def _fill_job(self) -> np.ndarray:
        pieces = np.zeros((len(self._fills), Piece.SIZE), np.int64)
        for index, (slot, shard) in enumerate(self._fills):
            layer = int(np.searchsorted(self.geometry.first_shard, shard, side="right")) - 1
            layout = self.store.layers[layer].layout
            expert, j = divmod(shard - int(self.geometry.first_shard[layer]), int(self.geometry.num_shards[layer]))
            nbytes = int(layout.shard_nbytes[j])
            source = self.tables.expert_base[layer] + expert * self.tables.expert_stride[layer]
            piece = pieces[index]
            piece[Piece.SOURCE] = source + layout.shard_offset[j]
            piece[Piece.DESTINATION] = self.tables.slot_address[slot]
            piece[Piece.NBYTES] = nbytes
            piece[Piece.LANDED] = self._landed.ctypes.data + 8 * index
            piece[Piece.PLAYED_NS] = int(nbytes * self.tables.played[LINK_NS])
        job = np.zeros(LinkJob.SIZE, np.int64)
        job[LinkJob.PIECES] = pieces.ctypes.data
        job[LinkJob.NUM_PIECES] = len(pieces)
        self._fill_blocks = job, pieces  # the link thread reads them
        return job

    def settle_fills(self, *, let_end: bool = False) -> None:
        """Take in the background fills that landed; what did not land gives its slot back."""
        if not self._fills and not self._is_unsure:
            return
        was_unsure, self._is_unsure = self._is_unsure, True  # an interrupt can come between any two lines
        self.device.settle_background(let_end=let_end)
        fills, self._fills = self._fills, []
        if self._is_own_fill and fills:
            self._budget.learn(len(fills), int(self._landed.sum()))
        self._is_own_fill = False
        if was_unsure:
            self._lose_track()
        elif self.recorder is not None:
            self.recorder.settled(self._landed.astype(bool).tolist())
        try:
            for index, (slot, shard) in enumerate(fills):
                self._take_in(slot, shard, int(self._landed[index]))
            if was_unsure:
                self._drop_unknown()
        except BaseException:
            self._lose_track()
            raise
        self._is_unsure = False

    def _drop_unknown(self) -> None:
        """Give back slots that were reserved for fills of which an interrupt took the list."""
        for slot in np.flatnonzero(self.state.filling).tolist():
            self._take_in(slot, int(self.state.owner[slot]), 0)

    def _take_in(self, slot: int, shard: int, landed: int) -> None:
        """A fill has landed, or gives its slot back."""
        self._asked[Fill.SLOT : Fill.LANDED + 1] = slot, shard, landed
        self._end_fill(self._fill_run.address)
        self.totals[Total.BACKGROUND_FILLS] += landed

    # ----------------------------------------------------------------------------------------- warm start
    @property
    def warm_shards(self) -> int:
        """Shards that lay in slots before the first step."""
        return self._warm.num_shards

    def warm_up(self, file: WarmFile) -> None:
        """Take over what the run before left in the file, as much as fits, and leave it there anew at the end."""
        self._warm.begin(file, int(self.state.clock[0]))
        found = self._warm.load(empty_state(self.config, self.geometry, self._num_slots), self.geometry)
        if found is not None:
            self._lose_track()
            self._copy_now(list(zip(found.slots.tolist(), found.shards.tolist(), strict=True)))
            self.state = found.state
            self._bind()
            self._warm.tell(self.geometry, found)
        if self.config.policy.learn_rates and self._warm.recall(self._observed, self._profiled):
            self._use_observed()

    def _copy_now(self, fills: list[tuple[int, int]]) -> None:
        """Copy shards into slots over the link, a piece of the list at a time: Ctrl-C gets through."""
        for start in range(0, len(fills), FILLS_AT_ONCE):
            self._fills = fills[start : start + FILLS_AT_ONCE]
            self._landed = np.zeros(len(self._fills), np.int64)
            self.device.post_background(self._fill_job())
            self.device.settle_background(let_end=True)
            self._fills = []
            if not self._landed.all():
                raise DeviceError("the link gave a copy up while slots were filled at the start; make a new scheduler")

    def save_warm_start(self) -> Path | None:
        """Keep what the next start should take over; the file, or None if nothing was kept."""
        learned = (self._profiled, self._observed) if self.config.policy.learn_rates else ()
        return self._warm.save(self._warm.take(self.state, self.geometry, *learned))

    # -------------------------------------------------------------------------------------------- looking
    def explain(self, layer: int) -> tuple[Plan, Outcome] | None:
        """The layer's last plan and outcome."""
        found = last_plan(self.journal, self.geometry, self.rates[layer], layer, self._work)
        if found is None or not self._guarded.note:
            return found
        plan, outcome = found
        return replace(plan, why=f"{plan.why}; {self._guarded.note}"), outcome

    def story(self, layer: int, expert: int) -> tuple[StoryEntry, ...]:
        """What happened to an expert lately."""
        return expert_story(self.journal, layer, expert)

    def close(self) -> None:
        """Stop the threads; one that hangs keeps the memory that it may still write to."""
        try:
            if self.recorder is not None:
                self.recorder.close()
            self.save_warm_start()
        finally:
            self._close_device()

    def _close_device(self) -> None:
        if not self.device.close():
            self.device.hold(self)
