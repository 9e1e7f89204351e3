"""Never slower than one lane alone: splits and single lanes are compared by short windows, then by a trial.

What the cost model does not know (a lane that slows another down, a throttled container) shows in the step's time
alone. So now and then steps take turns: a few split as planned, the next few with all misses on one lane. There, times
are compared per missed byte, so that a step with more misses proves nothing, and by their medians, so that one step
that was held up proves nothing either. But a lane can serve misses sooner and bring more of them, since lanes fill
slots differently. So who wins two windows in a row is only on trial: all steps, those without misses too, are added
up in blocks, and a lane goes on only while its blocks take less per routed byte than those of the splits before it.
Windows become rare while nothing changes. This file plans nothing and reads no clock.
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
FIRST_PERIOD, LONGEST_PERIOD = 128, 4096  # such steps between two comparisons
MARGIN = 0.95  # the other way must be this much better to be taken: hysteresis
BLOCK, BLOCKS = 16, 8  # steps of any kind in a block, and blocks that a way is judged by


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
    candidate : int64 (1,)
        The lane that won the last window and must win the next one too; else 0.
    left, period : int64 (1,)
        Steps with misses until the window is due (0: `begin_window` may be called) or ends; between two windows.
    us_per_byte : float64 (2, EACH)
        Of the window's steps in rising order: as split, on one lane.
    steps : int64 (2,)
        How many of each there are.
    switches : int64 (1,)
        How often the way was changed.
    block_us, block_nbytes : float64 (1,), block_steps : int64 (1,)
        Us and routed bytes of the steps in the block under way, and how many they are.
    blocks : float64 (2, BLOCKS), num_blocks : int64 (2,)
        Us per routed byte of the last whole blocks outside of windows, as split and on the lane, the oldest
        overwritten first; and how many there were of each since that way was taken.
    verdict : float64 (3,)
        What the last change of the way was made for: us per byte as split and on the lane, of missed bytes (0) or
        routed ones (1).
    """

    allowed: NDArray[np.int64]
    lanes: NDArray[np.int64]
    lane: NDArray[np.int64]
    tried: NDArray[np.int64]
    candidate: NDArray[np.int64]
    left: NDArray[np.int64]
    period: NDArray[np.int64]
    us_per_byte: NDArray[np.float64]
    steps: NDArray[np.int64]
    switches: NDArray[np.int64]
    block_us: NDArray[np.float64]
    block_nbytes: NDArray[np.float64]
    block_steps: NDArray[np.int64]
    blocks: NDArray[np.float64]
    num_blocks: NDArray[np.int64]
    verdict: NDArray[np.float64]


def make_guard(lanes: int) -> Guard:
    """Plans split misses over these lanes (bits); the first window is soon."""
    return Guard(
        allowed=np.full(1, lanes, np.int64),
        lanes=np.full(1, lanes, np.int64),
        lane=np.zeros(1, np.int64),
        tried=np.zeros(1, np.int64),
        candidate=np.zeros(1, np.int64),
        left=np.full(1, FIRST_PERIOD, np.int64),
        period=np.full(1, FIRST_PERIOD, np.int64),
        us_per_byte=np.zeros((2, EACH)),
        steps=np.zeros(2, np.int64),
        switches=np.zeros(1, np.int64),
        block_us=np.zeros(1),
        block_nbytes=np.zeros(1),
        block_steps=np.zeros(1, np.int64),
        blocks=np.zeros((2, BLOCKS)),
        num_blocks=np.zeros(2, np.int64),
        verdict=np.zeros(3),
    )


@decision
def guard_step(guard, missed_nbytes, routed_nbytes, step_us):
    """Take in a step that took `Guard.lanes`, was routed to so many bytes, and missed so many of them.

    Returns
    -------
    bool
        Whether the way has changed: `Guard.lane` says how misses are served from now on.
    """
    changed = False
    if guard.tried[0] == 0:
        changed = _add_to_block(guard, routed_nbytes, step_us)
    if missed_nbytes <= 0.0 or guard.left[0] == 0 or changed:
        return changed
    if guard.tried[0] != 0:
        _insert(guard, 1 if _is_alone(guard) else 0, step_us / missed_nbytes)
    guard.left[0] -= 1
    if guard.tried[0] != 0 and guard.left[0] == 0:
        changed = _judge(guard)
    _choose(guard)
    return changed


@decision
def _add_to_block(guard, routed_nbytes, step_us):
    """Count a step outside of windows; true if its block ends the trial of a lane."""
    guard.block_us[0] += step_us
    guard.block_nbytes[0] += routed_nbytes
    guard.block_steps[0] += 1
    if guard.block_steps[0] < BLOCK:
        return False
    way = 1 if guard.lane[0] != 0 else 0
    if guard.block_nbytes[0] > 0.0:
        guard.blocks[way, guard.num_blocks[way] % BLOCKS] = guard.block_us[0] / guard.block_nbytes[0]
        guard.num_blocks[way] += 1
    _empty_block(guard)
    if way == 0 or guard.num_blocks[1] < BLOCKS:
        return False
    split, alone = _median_block(guard, 0), _median_block(guard, 1)
    if alone < split:
        return False
    guard.period[0] = min(LONGEST_PERIOD, 2 * guard.period[0])
    _take(guard, 0, split, alone, 1.0)
    return True


@decision(inline=True)
def _empty_block(guard):
    guard.block_us[0] = guard.block_nbytes[0] = 0.0
    guard.block_steps[0] = 0


@decision
def _median_block(guard, way):
    """Median of a way's last blocks, of which there are BLOCKS."""
    low = high = 0.0
    for k in range(BLOCKS):
        value, below = guard.blocks[way, k], 0
        for j in range(BLOCKS):
            other = guard.blocks[way, j]
            below += int(other < value or (other == value and j < k))
        low = value if below == BLOCKS // 2 - 1 else low
        high = value if below == BLOCKS // 2 else high
    return (low + high) / 2.0


@decision
def _take(guard, lane, split, alone, by_routed):
    """Serve misses another way from now on, judged by blocks of its own."""
    guard.verdict[0], guard.verdict[1], guard.verdict[2] = split, alone, by_routed
    guard.lane[0] = lane
    guard.num_blocks[1 if lane != 0 else 0] = 0
    _empty_block(guard)
    guard.left[0] = guard.period[0]
    guard.switches[0] += 1
    _choose(guard)


@decision
def begin_window(guard, lane):
    """Begin the comparison that is due.

    Parameters
    ----------
    lane : int
        The single lane that splits are compared with; where one lane serves all misses already, or won the window
        before, it is that.
    """
    guard.tried[0] = guard.lane[0] if guard.lane[0] != 0 else lane
    if guard.candidate[0] != 0:
        guard.tried[0] = guard.candidate[0]
    guard.left[0] = WINDOW
    _empty_block(guard)
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
    """End the window: keep the way unless the other was clearly better, a lane in two windows.

    Between the two, splits fill all their blocks anew: what a lane is judged by is as new as what it won.
    """
    split, alone, tried = _median(guard, 0), _median(guard, 1), guard.tried[0]
    is_split = guard.lane[0] == 0
    better = alone < split * MARGIN and guard.num_blocks[0] >= BLOCKS if is_split else split < alone * MARGIN
    is_first = better and is_split and guard.candidate[0] == 0
    guard.candidate[0] = tried if is_first else 0
    if not better:
        guard.period[0] = min(LONGEST_PERIOD, 2 * guard.period[0])
    elif not is_split:
        guard.period[0] = FIRST_PERIOD
    guard.tried[0], guard.left[0] = 0, FIRST_PERIOD if is_first else guard.period[0]
    _empty_block(guard)
    if better and not is_first:
        _take(guard, tried if is_split else 0, split, alone, 0.0)
        return True
    return False
