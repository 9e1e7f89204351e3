"""Never slower than one lane alone: splits and single lanes are compared by short interleaved windows.

What the cost model does not know (a lane that slows another down, a throttled container) shows in the step's time
alone. So now and then steps take turns: a few split as planned, the next few with all misses on one lane. Times are
compared per missed byte, so that a step with more misses proves nothing, and by their medians, so that one step that
was held up proves nothing either. The loser is left until the next window; windows become rare while nothing changes.
This file plans nothing and reads no clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.expert import decision
from trilane.records import record

TURN = 4  # steps with misses in a row that go one way
WINDOW = 4 * TURN  # such steps of a comparison, half of them each way
EACH = WINDOW // 2
FIRST_PERIOD, LONGEST_PERIOD = 64, 4096  # such steps between two comparisons
MARGIN = 0.95  # the other way must be this much better to be taken: hysteresis


@record
class Guard(NamedTuple):
    """Where the comparison stands.

    Attributes
    ----------
    allowed : int64 (1,)
        Bits of the lanes that misses may take.
    lanes : int64 (1,)
        Bits of the lanes that the next step's misses take: `allowed`, or one of them.
    lane : int64 (1,)
        The lane that serves all misses outside of windows; 0 while plans split them.
    tried : int64 (1,)
        The lane that the window compares with; 0 outside of one.
    left, period : int64 (1,)
        Steps with misses until the window is due (0: `begin_window` may be called) or ends; between two windows.
    us_per_byte : float64 (2, EACH)
        Of the window's steps in rising order: as split, on one lane.
    steps : int64 (2,)
        How many of each there are.
    switches : int64 (1,)
        How often the way was changed.
    """

    allowed: NDArray[np.int64]
    lanes: NDArray[np.int64]
    lane: NDArray[np.int64]
    tried: NDArray[np.int64]
    left: NDArray[np.int64]
    period: NDArray[np.int64]
    us_per_byte: NDArray[np.float64]
    steps: NDArray[np.int64]
    switches: NDArray[np.int64]


def make_guard(lanes: int) -> Guard:
    """Plans split misses over these lanes (bits); the first window is soon."""
    return Guard(
        allowed=np.full(1, lanes, np.int64),
        lanes=np.full(1, lanes, np.int64),
        lane=np.zeros(1, np.int64),
        tried=np.zeros(1, np.int64),
        left=np.full(1, FIRST_PERIOD, np.int64),
        period=np.full(1, FIRST_PERIOD, np.int64),
        us_per_byte=np.zeros((2, EACH)),
        steps=np.zeros(2, np.int64),
        switches=np.zeros(1, np.int64),
    )


def compared_us_per_byte(guard: Guard) -> tuple[float, float]:
    """Medians of the last whole window: as split, on one lane."""
    return _median(guard, 0), _median(guard, 1)


@decision
def guard_step(guard, missed_nbytes, step_us):
    """Take in a step that took `Guard.lanes` and missed so many bytes.

    Returns
    -------
    bool
        Whether the way has changed: `Guard.lane` says how misses are served from now on.
    """
    if missed_nbytes <= 0.0 or guard.left[0] == 0:
        return False
    changed = False
    if guard.tried[0] != 0:
        _insert(guard, 1 if _is_alone(guard) else 0, step_us / missed_nbytes)
    guard.left[0] -= 1
    if guard.tried[0] != 0 and guard.left[0] == 0:
        changed = _judge(guard)
    _choose(guard)
    return changed


@decision
def begin_window(guard, lane):
    """Begin the comparison that is due.

    Parameters
    ----------
    lane : int
        The single lane that splits are compared with; where one lane serves all misses already, it is that.
    """
    guard.tried[0] = guard.lane[0] if guard.lane[0] != 0 else lane
    guard.left[0] = WINDOW
    guard.steps[:] = 0
    _choose(guard)


@decision(inline=True)
def _is_alone(guard):
    """Whether the window's next step is one of the single lane's."""
    return (WINDOW - guard.left[0]) // TURN % 2 == 1


@decision
def _choose(guard):
    """Write down which lanes the next step takes."""
    lane = guard.lane[0]
    if guard.tried[0] != 0:
        lane = guard.tried[0] if _is_alone(guard) else 0
    guard.lanes[0] = 1 << lane if lane != 0 else guard.allowed[0]


@decision(inline=True)
def _insert(guard, way, us_per_byte):
    at = guard.steps[way]
    guard.steps[way] += 1
    while at > 0 and guard.us_per_byte[way, at - 1] > us_per_byte:
        guard.us_per_byte[way, at] = guard.us_per_byte[way, at - 1]
        at -= 1
    guard.us_per_byte[way, at] = us_per_byte


@decision
def _median(guard, way):
    return (guard.us_per_byte[way, EACH // 2 - 1] + guard.us_per_byte[way, EACH // 2]) / 2.0


@decision
def _judge(guard):
    """End the window: keep the way unless the other was clearly better."""
    split, alone = _median(guard, 0), _median(guard, 1)
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
