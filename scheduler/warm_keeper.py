"""One scheduler's warm start from its begin to its end: asks the file, says in the log what came of it, saves.

What cannot be loaded or saved costs a cold start, and never more: it is logged once, told by ``stats``, and the
scheduler goes on. The runner copies the bytes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trilane.config import Config
from trilane.cost import Rates
from trilane.expert import Geometry
from trilane.observed import Observed
from trilane.state import State
from trilane.warm_start import HotSet, Unusable, WarmState, rates_name, take_hot_set, warm_state

if TYPE_CHECKING:
    from trilane.warm_file import WarmFile

log = logging.getLogger("trilane")


class WarmKeeper:
    """Loads and saves for one scheduler; does nothing until `begin`.

    Attributes
    ----------
    num_shards : int
        Shards that were taken over.
    notes : dict of str to str
        Why nothing is taken over or saved, for ``stats``.
    """

    def __init__(self, config: Config) -> None:
        self.num_shards = 0
        self.notes: dict[str, str] = {}
        self._half_life = config.cache.half_life_steps
        self._file: WarmFile | None = None
        self._pid, self._clock, self._start = os.getpid(), 0, 0.0
        self._num_saved = 0  # shards in the file
        self._factors: NDArray[np.float64] | None = None  # learned by the run before
        self._profile = ""

    @property
    def is_on(self) -> bool:
        """Whether anything is loaded and saved."""
        return self._file is not None

    def begin(self, file: WarmFile, clock: int) -> None:
        """Load from and save to this file from now on; a state whose clock is still that one is not saved."""
        self._file, self._clock, self._start = file, clock, time.perf_counter()

    def load(self, empty: State, geometry: Geometry) -> WarmState | None:
        """An empty state with what was saved in its slots; None where there is nothing to be used."""
        assert self._file is not None
        try:
            hot = self._file.load(geometry)
            if hot is None:
                log.info("warm start: nothing is saved yet in %s", self._file.path)
                self.notes["warm_start"] = f"nothing was saved yet in {self._file.path}"
                return None
            found = warm_state(hot, empty, geometry, self._half_life)
        except Unusable as error:
            self._warn(f"{self._file.path} cannot be used: {error}")
            return None
        self._num_saved = int(hot.is_resident.sum())
        self._factors, self._profile = hot.factors, hot.profile
        return found

    def recall(self, observed: Observed, profiled: Sequence[Rates]) -> bool:
        """Put back what was learned of these rates; False where there is nothing."""
        if self._factors is None:
            return False
        if self._profile != rates_name(profiled):
            log.info("warm start: the rates that were learned are of another profile, and begin anew")
            return False
        observed.factor[:] = observed.used[:] = self._factors
        return True

    def tell(self, geometry: Geometry, warm: WarmState) -> None:
        """Say what was taken over, and what that took."""
        assert self._file is not None
        self.num_shards = len(warm.shards)
        layer = np.searchsorted(geometry.first_shard, warm.shards, side="right") - 1
        inner = (warm.shards - geometry.first_shard[layer]) % geometry.num_shards[layer]
        megabytes = geometry.shard_nbytes[layer, inner].sum() / 1e6
        seconds = time.perf_counter() - self._start
        log.info(
            "warm start: %d of %d shards (%.1f MB) are in slots again after %.2f s, from %s",
            self.num_shards, self._num_saved, megabytes, seconds, self._file.path,
        )  # fmt: skip

    def take(
        self, state: State, geometry: Geometry, profiled: Sequence[Rates] = (), learned: Observed | None = None
    ) -> HotSet | None:
        """What `save` is to save; None if no step was run (what is there is no worse), or in a forked child."""
        if self._file is None or os.getpid() != self._pid or state.clock[0] == self._clock:
            return None
        return take_hot_set(state, geometry, self._half_life, profiled, learned)

    def save(self, hot: HotSet | None) -> Path | None:
        """Save; the file, or None if nothing was saved."""
        if self._file is None or hot is None:
            return None
        try:
            self._file.save(hot)
        except OSError as error:
            self._warn(f"{self._file.path} cannot be written ({error.strerror or error}): the next start is colder")
            return None
        return self._file.path

    def _warn(self, reason: str) -> None:
        if self.notes.get("warm_start") != reason:
            log.warning("warm start: %s", reason)
        self.notes["warm_start"] = reason
