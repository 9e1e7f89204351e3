"""Whether a recorded live run's plans come out the same: the decision code once more, from the recorded state.

A trace file is not believed: a state that breaks an invariant would make compiled code write outside its arrays, so
every baseline is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_type_hints

import numpy as np

from trilane.cost import Rates, make_rates
from trilane.errors import TraceError
from trilane.expert import Geometry, make_geometry
from trilane.plan import Options
from trilane.replay import make_run, run_events, trace_events
from trilane.replay_run import Sum
from trilane.state import EVICTIONS, NUM_COMING, NUM_NEAR, NUM_PAST, NUM_WANTED, PREDICTED, State, check, make_state
from trilane.traces.trace import Baseline, Trace

ALL_LANES = 0b1110
ADDED_OPTIONS: dict[str, Any] = {  # what older recordings did
    "by_ratio": False, "background": False, "counts_copies": False, "coming_from": 1, "coming_layers": 1,
    "least_rate": 0,
}  # fmt: skip
ADDED_STATE = (
    "past", "row", "last_layer", "last_clock", "alike", "near", "near_rate", "num_near", "tally", "ahead",
    "ahead_layer", "ahead_passes", "boost", "boost_unit", "coming", "coming_score", "num_coming", "scatter", "wanted",
    "num_wanted", "prediction", "coming_worth",
)  # fmt: skip
CURVE = "zero_copy_us_per_byte"
KIND_NAMES = {1: "step", 2: "wave", 3: "hint", 4: "end of fills", 6: "choice of fills", 8: "late use"}
FIXED = ("pool_of", "first_slot", "slot_nbytes", "first_heap")  # they follow from the geometry


@dataclass(frozen=True)
class Verification:
    """What a verifying replay found.

    Attributes
    ----------
    baselines : int
        Stretches of the recording that were replayed, each from its own baseline.
    plans : int
        Plans and hints whose hashes were compared.
    differences : tuple of str
        The first difference of each stretch that has one; empty if all plans are identical.
    """

    baselines: int
    plans: int
    differences: tuple[str, ...]


def verify(trace: Trace) -> Verification:
    """Replay a recorded run and compare every plan with the one that was made live.

    Raises
    ------
    TraceError
        The trace was not recorded live, or its baselines are of another version or inconsistent.
    """
    if not trace.baselines or not trace.meta.shard_nbytes:
        raise TraceError("the trace holds no live run (it was imported): there are no plans to compare with")
    geometry = make_geometry(trace.meta.num_experts, trace.meta.shard_nbytes)
    events, plans, differences = trace_events(trace), 0, []
    bounds = [base.event for base in trace.baselines] + [trace.num_events]
    for base, (first, stop) in zip(trace.baselines, pairwise(bounds), strict=True):
        state = restore_state(base, geometry)
        options, clock = _options(base), _clock(base)
        run = make_run(events, geometry, state, options, clock=clock, verify=True)
        event, status = run_events(run, restore_rates(base, geometry), first, stop)
        plans += int(run.sums[Sum.CHECKED])
        if status != 0:
            kind = KIND_NAMES.get(int(events.kind[event]), "event")
            differences.append(f"event {event}, a {kind} of layer {events.layer[event]}")
    return Verification(len(trace.baselines), plans, tuple(differences))


def _refused(what: str) -> TraceError:
    return TraceError(f"the recording's baseline cannot be used: {what}; it is damaged, or of another version")


def _clock(base: Baseline) -> int:
    clock = base.settings.get("clock")
    if type(clock) is not int or not 0 <= clock < 1 << 60:
        raise _refused(f"clock {str(clock)[:40]}")
    return clock


def _options(base: Baseline) -> Options:
    found = base.settings.get("options")
    if not isinstance(found, dict) or set(ADDED_OPTIONS | found) != set(Options._fields):
        raise _refused("its options have other names")
    found = ADDED_OPTIONS | found
    for name, kind in get_type_hints(Options).items():
        if type(found[name]) is not kind:
            raise _refused(f"option {name} is {str(found[name])[:40]}")
    options = Options(**found)
    sane = options.lanes & ALL_LANES == options.lanes > 0 and 0 <= options.max_fills < 1 << 31
    sane = sane and 1 <= options.coming_from < 1 << 16 and 0 <= options.coming_layers < 1 << 16
    sane = sane and 0 <= options.least_rate < 1 << 16
    if not sane or not 0 <= options.slack_runs < 1e9:
        raise _refused("its options are out of range")
    return options


def restore_rates(base: Baseline, geometry: Geometry) -> list[Rates]:
    """The cost model's constants of a baseline, by layer.

    Raises
    ------
    TraceError
    """
    if len(base.rates) != geometry.num_layers:
        raise _refused(f"rates of {len(base.rates)} layers for {geometry.num_layers}")
    made: dict[int, Rates] = {}
    for values in base.rates:
        if id(values) not in made:
            made[id(values)] = _rates(values)
    return [made[id(values)] for values in base.rates]


def _rates(values: dict[str, Any]) -> Rates:
    if set(values) != set(Rates._fields):
        raise _refused("its rates have other names")
    curve = np.asarray(values[CURVE])
    numbers = [value for name, value in values.items() if name != CURVE]
    if curve.ndim != 1 or not 1 <= curve.size <= 1 << 12 or any(np.ndim(value) for value in numbers):
        raise _refused("its rates have other shapes")
    if not (curve >= 0).all() or not all(value >= 0 for value in numbers):
        raise _refused("a rate is no number of 0 or more")
    return make_rates(**values)


def restore_state(base: Baseline, geometry: Geometry) -> State:
    """The scheduler's state of a baseline, with every invariant checked.

    Raises
    ------
    TraceError
    """
    found = base.state
    if set(found) | set(ADDED_STATE) != set(State._fields):
        raise _refused("its state has other names")
    model = _empty_like(found, geometry)
    found = {name: getattr(model, name) for name in ADDED_STATE} | found
    for name, wanted in model._asdict().items():
        value = found[name]
        if isinstance(wanted, np.ndarray):
            if not isinstance(value, np.ndarray) or value.shape != wanted.shape or value.dtype != wanted.dtype:
                raise _refused(f"{name} of its state has another shape or type")
            if name in FIXED and (value != wanted).any():
                raise _refused(f"{name} of its state does not fit the model")
        elif type(value) is not type(wanted) or not 0 <= value < 2.0**62:
            raise _refused(f"{name} of its state is {str(value)[:40]}")
    copies: dict[str, Any] = {name: v.copy() if isinstance(v, np.ndarray) else v for name, v in found.items()}
    state = State(**copies)
    _check_counts(state, _clock(base))
    if state.eviction >= len(EVICTIONS) or state.growth < 1 or state.max_jump < 1 or state.filling.any():
        raise _refused("its state was taken with fills under way, or its eviction is unknown")
    try:
        check(state, geometry)
    except (AssertionError, IndexError, ValueError, OverflowError) as error:
        raise _refused(f"its state breaks an invariant ({str(error)[:80]})") from None
    return state


def _check_counts(state: State, clock: int) -> None:
    """What slices of plain Python would forgive and compiled code would not."""
    limits = (
        ("num_free", np.diff(state.first_slot)),
        ("heap_size", np.int64(len(state.heap))),
        ("num_held", np.int64(len(state.held))),
        ("clock", np.int64(clock)),
        ("num_wanted", np.int64(NUM_WANTED)),
        ("num_coming", np.int64(NUM_COMING)),
        ("row", np.int64(NUM_PAST - 1)),
        ("num_near", np.int64(NUM_NEAR)),
        ("near", np.int64(NUM_PAST - 1)),
    )
    for name, most in limits:
        values = getattr(state, name)
        if (values < 0).any() or (values > most).any():
            raise _refused(f"{name} of its state is out of range")


def _empty_like(found: dict[str, Any], geometry: Geometry) -> State:
    """An empty state with the pools and slots that a found one claims, if it holds them."""
    first, owner = found["first_slot"], found["owner"]
    for name, array in (("first_slot", first), ("owner", owner)):
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.int64:
            raise _refused(f"{name} of its state has another shape or type")
    pools = len(first) - 1
    if pools not in (1, geometry.num_layers) or first[0] != 0 or first[-1] != len(owner) or (np.diff(first) < 0).any():
        raise _refused("its pools do not fit the model")
    is_shared = pools == 1
    eviction = "predicted" if found.get("eviction") == PREDICTED else "lru"
    return make_state(geometry, np.diff(first).tolist(), pool="shared" if is_shared else "layer", eviction=eviction)
