"""Rates learned from outcomes: what each lane took against what was predicted, turned into factors of its rates.

A factor moves by clipped exponential averages, so that one spike moves little; many outcomes in a row on one side are
a step, and the factor jumps. The first outcomes of a lane are dropped, factors are bounded, and what plans use follows
only when it is off by more than a band. A lane that is not used for long is slowly believed to be as profiled again,
so that it is tried, at the cost of a few steps. Time is what the caller observed; nothing here reads a clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.cost import Rates
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, decision
from trilane.records import record

NUM_LANES = 4
WARM_UP = 3  # outcomes of a lane that teach nothing: page faults, a link that wakes up
CLIP = 1.5  # an outcome counts as at most so many times off
GAIN = 1.0 / 16.0
STEP_BAND = 1.25  # so far off on one side ...
STEP_COUNT = 8  # ... for so many outcomes in a row is a change of the rate, no noise
BAND = 1.06  # plans keep a factor until it is off by this
LEAST, MOST = 1.0 / 64.0, 64.0
FORGET_AFTER = 512  # steps without the lane, after which its factor drifts back to 1
FORGET = 1.0 / 64.0
INFINITE = float("inf")


@record
class Observed(NamedTuple):
    """What outcomes said of each lane; index by lane.

    Attributes
    ----------
    factor : float64 (4,)
        Observed over profiled time, averaged.
    used : float64 (4,)
        The factor that plans use.
    outcomes, unused, aside : int64 (4,)
        Outcomes so far; steps since the last; outcomes in a row on one side of the factor (its sign says which).
    run : float64 (4,)
        Sum of the ratios of these outcomes to the profile.
    """

    factor: NDArray[np.float64]
    used: NDArray[np.float64]
    outcomes: NDArray[np.int64]
    unused: NDArray[np.int64]
    aside: NDArray[np.int64]
    run: NDArray[np.float64]


def make_observed() -> Observed:
    """Nothing observed: every lane as profiled."""
    ones, zeros = np.ones(NUM_LANES), np.zeros(NUM_LANES, np.int64)
    return Observed(ones, ones.copy(), zeros, zeros.copy(), zeros.copy(), np.zeros(NUM_LANES))


@decision
def observe_lane(observed, lane, profiled_us, observed_us):
    """Take in what a lane took in one step, against what the unscaled profile says.

    Returns
    -------
    bool
        Whether plans should use another factor from now on (`scale_rates`).
    """
    if not (0.0 < profiled_us < INFINITE and 0.0 < observed_us < INFINITE):
        return False
    observed.outcomes[lane] += 1
    if observed.outcomes[lane] <= WARM_UP:
        return False
    ratio = _bounded(observed_us / profiled_us, LEAST, MOST)
    if not _detect_step(observed, lane, ratio):
        factor = observed.factor[lane]
        clipped = _bounded(ratio, factor / CLIP, factor * CLIP)
        observed.factor[lane] = _bounded(factor + GAIN * (clipped - factor), LEAST, MOST)
    return _follow(observed, lane)


@decision
def pass_step(observed, lanes):
    """A step with misses is over that used the lanes of this bit mask; True if an unused one is believed anew."""
    changed = False
    for lane in range(NUM_LANES):
        if (lanes >> lane) & 1:
            observed.unused[lane] = 0
            continue
        observed.unused[lane] += 1
        if observed.unused[lane] > FORGET_AFTER:
            observed.factor[lane] += FORGET * (1.0 - observed.factor[lane])
            changed |= _follow(observed, lane)
    return changed


@decision(inline=True)
def _bounded(value, low, high):
    return low if value < low else (high if value > high else value)


@decision
def _detect_step(observed, lane, ratio):
    """Count outcomes in a row far on one side; the last ones become the factor where they are many."""
    factor = observed.factor[lane]
    side = 1 if ratio > factor * STEP_BAND else (-1 if ratio * STEP_BAND < factor else 0)
    if side == 0 or side * observed.aside[lane] < 0:
        observed.aside[lane], observed.run[lane] = 0, 0.0
    if side == 0:
        return False
    observed.aside[lane] += side
    observed.run[lane] += ratio
    if abs(observed.aside[lane]) < STEP_COUNT:
        return False
    observed.factor[lane] = observed.run[lane] / STEP_COUNT
    observed.aside[lane], observed.run[lane] = 0, 0.0
    return True


@decision
def _follow(observed, lane):
    off = observed.factor[lane] / observed.used[lane]
    if off <= BAND and off * BAND >= 1.0:
        return False
    observed.used[lane] = observed.factor[lane]
    return True


def scale_rates(rates: Rates, observed: Observed) -> Rates:
    """The profile's rates with the factors that plans use; fixed costs of a lane scale with it."""
    hit, stream, in_place, cpu = (float(observed.used[lane]) for lane in (HIT, STREAM, ZERO_COPY, CPU))
    return rates._replace(
        hit_us_per_byte=rates.hit_us_per_byte * hit,
        hit_row_us_per_byte=rates.hit_row_us_per_byte * hit,
        stream_fix_us=rates.stream_fix_us * stream,
        run_fix_us=rates.run_fix_us * stream,
        stream_us_per_byte=rates.stream_us_per_byte * stream,
        zero_copy_fix_us=rates.zero_copy_fix_us * in_place,
        zero_copy_us_per_byte=rates.zero_copy_us_per_byte * in_place,
        cpu_fix_us=rates.cpu_fix_us * cpu,
        cpu_us_per_byte=rates.cpu_us_per_byte * cpu,
        cpu_row_us_per_byte=rates.cpu_row_us_per_byte * cpu,
        cpu_shard_us=rates.cpu_shard_us * cpu,
    )
