"""Never slower than one lane alone: splits and the best single lane are compared by short interleaved windows.

What the cost model does not know (a lane that slows another down, a throttled container) shows in the step's time
alone. So now and then steps take turns: one split as planned, the next with all misses on one lane. Times are
compared per missed byte, so that a step with more misses proves nothing. The loser is left until the next window;
windows become rare while the split wins. This file plans nothing and reads no clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.expert import decision
from trilane.records import record

WINDOW = 16  # steps with misses of a comparison, half of them each way
FIRST_PERIOD, LONGEST_PERIOD = 64, 4096  # such steps between two comparisons
MARGIN = 0.95  # the other way must be this much better to be taken: hysteresis


@record
class Guard(NamedTuple):
    """Where the comparison stands.

    Attributes
    ----------
    lane : int64 (1,)
        The lane that serves all misses; 0 while plans split them.
    tried : int64 (1,)
        The lane that the window compares with; 0 outside of one.
    left, period : int64 (1,)
        Steps with misses until the window begins or ends; between two windows.
    us, nbytes : float64 (2,)
        Of the window's steps: as split, on one lane.
    switches : int64 (1,)
        How often the way was changed.
    """

    lane: NDArray[np.int64]
    tried: NDArray[np.int64]
    left: NDArray[np.int64]
    period: NDArray[np.int64]
    us: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    switches: NDArray[np.int64]


def make_guard() -> Guard:
    """Plans split misses; the first window is soon."""
    zero, first = np.zeros(1, np.int64), np.full(1, FIRST_PERIOD, np.int64)
    return Guard(zero, zero.copy(), first, first.copy(), np.zeros(2), np.zeros(2), zero.copy())


@decision
def guarded_lanes(guard, lanes):
    """The bits of the lanes that the next step's misses may take, of those allowed."""
    lane = guard.lane[0]
    if guard.tried[0] != 0:
        lane = guard.tried[0] if _is_alone(guard) else 0
    return 1 << lane if lane != 0 and (lanes >> lane) & 1 else lanes


@decision(inline=True)
def _is_alone(guard):
    """Whether the window's next step is one of the single lane's."""
    return guard.left[0] % 2 == 1


@decision
def guard_step(guard, best_lane, missed_nbytes, step_us):
    """A step is over that missed so many bytes.

    Parameters
    ----------
    best_lane : int
        The single lane that would serve its misses soonest, by the cost model.

    Returns
    -------
    bool
        Whether the way has changed: `Guard.lane` says how misses are served from now on.
    """
    if missed_nbytes <= 0.0:
        return False
    if guard.tried[0] != 0:
        way = 1 if _is_alone(guard) else 0
        guard.us[way] += step_us
        guard.nbytes[way] += missed_nbytes
    guard.left[0] -= 1
    if guard.left[0] > 0:
        return False
    if guard.tried[0] == 0:
        guard.tried[0] = guard.lane[0] if guard.lane[0] != 0 else best_lane
        guard.left[0] = WINDOW
        guard.us[:], guard.nbytes[:] = 0.0, 0.0
        return False
    return _judge(guard)


@decision
def _judge(guard):
    """End the window: keep the way unless the other was clearly better."""
    split, alone = guard.us[0] / guard.nbytes[0], guard.us[1] / guard.nbytes[1]
    before = guard.lane[0]
    if before == 0 and alone < split * MARGIN:
        guard.lane[0] = guard.tried[0]
    elif before != 0 and split < alone * MARGIN:
        guard.lane[0] = 0
    changed = guard.lane[0] != before
    guard.period[0] = FIRST_PERIOD if changed else min(LONGEST_PERIOD, 2 * guard.period[0])
    guard.tried[0], guard.left[0] = 0, guard.period[0]
    guard.switches[0] += 1 if changed else 0
    return changed
