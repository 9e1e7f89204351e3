"""The guard beside a runner: the options that each step is planned with, and what people are told of it.

`guard` compares; here is what it takes to let it: steps that one lane alone could not serve are left out, options
that are not the policy's are used as they are, and a change of mind is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trilane.expert import CPU, LANE_NAMES, STREAM, ZERO_COPY
from trilane.guard import begin_window, make_guard
from trilane.plan import Options

log = logging.getLogger("trilane")


class GuardedOptions:
    """Options of plans, narrowed to one lane where the guard says so.

    Parameters
    ----------
    options : Options
        The policy's.
    enabled : bool
        Whether there is a guard; it has nothing to do where the options leave a single lane, or a fixed rule.

    Attributes
    ----------
    guard : Guard
        Compiled code calls `guard.guard_step` for the steps of which `options_of` said so.
    """

    def __init__(self, options: Options, *, enabled: bool) -> None:
        self._options = options
        self._enabled = enabled and options.lanes.bit_count() > 1 and not options.by_ratio
        self._alone = {1 << lane: options._replace(lanes=1 << lane) for lane in (STREAM, ZERO_COPY, CPU)}
        self._had: set[int] = set()  # lanes that splits were compared with in this round
        self.guard = make_guard(options.lanes)

    def options_of(self, asked: Options, num_shards: int, num_slots: int) -> tuple[Options, bool]:
        """What a step is planned with that needs so many shards at once, and whether the guard chose it."""
        if not self._enabled or asked is not self._options:
            return asked, False
        options = self._alone.get(int(self.guard.lanes[0]), asked)
        if options.lanes == 1 << STREAM and num_shards > num_slots:
            return asked, False  # alone it would take several waves
        return options, True

    def usual(self, asked: Options) -> Options:
        """What steps are planned with outside of windows."""
        lane = int(self.guard.lane[0])
        return asked if lane == 0 or asked is not self._options else self._alone[1 << lane]

    @property
    def is_due(self) -> bool:
        """Whether `begin_window` should be called."""
        return bool(self.guard.left[0] == 0)

    def begin_window(self, single_lane_us: Mapping[str, float], num_shards: int, num_slots: int) -> None:
        """Compare with a single lane: the best first, by its predicted us of a step like those to come.

        The others have their turn too: predictions that mislead splits mislead here as well. A lane that won the last
        window has the next one too.
        """
        if self.guard.candidate[0] != 0:
            begin_window(self.guard, int(self.guard.candidate[0]))
            return
        lanes = [lane for lane in (STREAM, ZERO_COPY, CPU) if self._options.lanes >> lane & 1]
        lanes = [lane for lane in lanes if lane != STREAM or num_shards <= num_slots]
        if self._had.issuperset(lanes):
            self._had.clear()
        lane = min(set(lanes) - self._had, key=lambda lane: single_lane_us[LANE_NAMES[lane]])
        self._had.add(lane)
        begin_window(self.guard, lane)

    def tell(self) -> None:
        """Log that the way was changed."""
        log.info("%s", self.note or f"the guard found splits over the lanes faster again: {self._medians}")

    @property
    def note(self) -> str:
        """Why splits are not used now; empty while they are."""
        if self.guard.lane[0] == 0:
            return ""
        return f"the guard found {LANE_NAMES[self.guard.lane[0]]} alone faster: {self._medians}"

    @property
    def _medians(self) -> str:
        split, alone = (1e6 * self.guard.verdict[:2]).tolist()
        return f"{alone:.1f} us a {'routed' if self.guard.verdict[2] else 'missed'} MB on one lane, {split:.1f} split"
