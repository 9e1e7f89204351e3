"""What a layer-step would take if it came now: the live planner on a copy of the state, which is then thrown away.

An engine that may choose how many rows to run (draft tokens of speculative decoding, a batch that could wait) asks
what one more row costs: its experts may be those of the other rows, or in slots, or all to be fetched. Nothing of
the scheduler changes, and what is said is what the plan would say. This file knows no device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import STEP_US, Rates
from trilane.expert import Geometry
from trilane.jit import compiled
from trilane.plan import Options, Work, make_work
from trilane.planner import plan_layer, plan_wave
from trilane.records import record
from trilane.routing import Grouping, group_rows, make_grouping
from trilane.stash import Stash, on_stashes
from trilane.state import State

NEVER = float("inf")


@record
class Trial(NamedTuple):
    """A copy of a state with all that planning on it takes; ``asked`` is layer, rows and top_k of `Grouping.ids`."""

    asked: np.ndarray  # int64 (3,)
    grouping: Grouping
    state: State
    geometry: Geometry
    options: Options
    work: Work


@compiled(counted=False)
def predict_step(trial, rates):
    """Plan the asked step on the copy; us of all its waves, infinite where it finds no slot at all."""
    layer, g, state, work = trial.asked[0], trial.grouping, trial.state, trial.work
    num_experts = trial.geometry.first_expert[layer + 1] - trial.geometry.first_expert[layer]
    num = group_rows(g, trial.asked[1], trial.asked[2], num_experts)
    clock = state.clock[0] + 1
    left = plan_layer(state, trial.geometry, rates, trial.options, layer, g.experts, g.rows, num, clock, work)
    us = work.predicted_us[STEP_US]
    while left > 0:
        before = left
        left = plan_wave(state, trial.geometry, rates, trial.options, layer, g.experts, g.rows, num, work)
        if left >= before:
            return NEVER
        us += work.predicted_us[STEP_US]
    return us


def make_trial(state: State, geometry: Geometry, options: Options, max_entries: int) -> Trial:
    """A trial for steps of up to ``max_entries`` = rows x ranks."""
    most = int(np.diff(geometry.first_expert).max())
    parts: list[Any] = [part.copy() if isinstance(part, np.ndarray) else part for part in state]
    grouping, work = make_grouping(max_entries, most), make_work(geometry)
    return Trial(np.zeros(3, np.int64), grouping, State(*parts), geometry, options, work)


def ask(trial: Trial, state: State, layer: int, ids: NDArray[np.integer]) -> None:
    """Copy the state as it is now, and the ids (rows, top_k), all of which exist, into the trial."""
    for into, source in zip(trial.state, state, strict=True):
        if isinstance(into, np.ndarray):
            into[...] = source
    trial.asked[:] = layer, *ids.shape
    trial.grouping.ids[: ids.size].reshape(ids.shape)[...] = ids


class Forecast:
    """Trials of one state under fixed options.

    Parameters
    ----------
    state, geometry, options
        Those of the scheduler; the arrays are read at each question.
    """

    def __init__(self, state: State, geometry: Geometry, options: Options) -> None:
        self.state, self.geometry, self.options = state, geometry, options
        self._rates: Stash | None = None
        self._reserve(64)
        self._predict: Any = None

    @classmethod
    def of(cls, runner: Any, before: Forecast | None) -> Forecast:
        """The one from before, if the runner still has that state and these options; else a new one."""
        options = runner.usual_options
        if before is not None and before.state is runner.state and before.options == options:
            return before
        return cls(runner.state, runner.geometry, options)

    def _reserve(self, entries: int) -> None:
        self._entries = entries
        self._trial = Stash(make_trial(self.state, self.geometry, self.options, entries))

    def ask(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Take down the state as it is now, and the ids (rows, top_k) of a step."""
        if ids.size > self._entries:
            self._reserve(2 * ids.size)
        ask(self._trial.held, self.state, layer, ids)

    def predict_us(self, rates: Rates) -> float:
        """What was asked about, at these rates."""
        if self._rates is None or self._rates.held is not rates:
            self._rates = Stash(rates)
        if self._predict is None:
            self._predict = on_stashes(predict_step, self._trial.kind, self._rates.kind)
        return float(self._predict(self._trial.address, self._rates.address))
