"""The proof that placement changes no bit: prompts decoded under many settings, compared with the all-resident run.

A setting is how many slots there are, which lanes serve misses, how many CPU threads compute, and whether the slots
start empty or as the run before left them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from trilane.errors import TrilaneError
from trilane.integrations.generation.decode import Step
from trilane.integrations.generation.identity import (
    Difference,
    all_resident,
    compare_decoding,
    decode_all,
    other_scheduler,
)
from trilane.integrations.transformers import OffloadedModel
from trilane.stats import Stats

FRACTIONS = (0.125, 0.25, 0.5)
LANES = ("stream", "zero_copy", "cpu", "all")
THREADS = (1, 2)


@dataclass(frozen=True)
class Setting:
    """Slots as a part of all experts, the lane that misses are forced to or "all", CPU threads, and the start."""

    fraction: float
    lanes: str
    threads: int
    is_warm: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As the configuration has them."""
        force = {} if self.lanes == "all" else {"force": self.lanes}
        return {"cache": {"fraction": self.fraction}, "policy": force, "cpu": {"threads": self.threads}}

    def __str__(self) -> str:
        start = "warm" if self.is_warm else "cold"
        plural = "s" if self.threads > 1 else ""
        return f"slots {self.fraction:.1%}, {self.lanes}, {self.threads} thread{plural}, {start}"


@dataclass(frozen=True)
class Outcome:
    """What came of a setting: a difference for each prompt that has one, seconds, and what the lanes did."""

    setting: Setting
    num_prompts: int
    num_tokens: int
    differences: tuple[Difference, ...]
    seconds: float
    stats: Stats

    @property
    def num_identical(self) -> int:
        """Prompts without a difference."""
        return self.num_prompts - len(self.differences)


def all_settings(
    fractions: Sequence[float] = FRACTIONS, lanes: Sequence[str] = LANES, threads: Sequence[int] = THREADS
) -> list[Setting]:
    """Every combination, cold; each is then run warm too."""
    return [Setting(*one) for one in product(fractions, lanes, threads)]


def decode_resident(handle: OffloadedModel, ids: torch.Tensor, mask: torch.Tensor, max_tokens: int) -> list[Step]:
    """What all settings are compared with."""
    with all_resident(handle) as resident:
        return decode_all(resident, ids, mask, max_tokens)


def prove(
    handle: OffloadedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    wanted: list[Step],
    settings: Sequence[Setting],
    warm_tokens: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Outcome]:
    """Decode under each setting, cold and then warm, and compare.

    Parameters
    ----------
    handle : OffloadedModel
    ids, mask : (prompts, tokens) int64 tensors
    wanted : list of Step
        Of :func:`decode_resident`.
    settings : sequence of Setting
    warm_tokens : int, optional
        Tokens of the warm runs; None: as many as of the cold ones.

    Raises
    ------
    TrilaneError
        A setting in which nothing was missed, or whose lane was not used: it would prove nothing.
    """
    for setting in settings:
        with other_scheduler(handle, setting.options) as other:
            for one in (setting, replace(setting, is_warm=True)):
                steps = wanted[:warm_tokens] if one.is_warm else wanted
                began = clock()
                with other.scheduler.request() as request:
                    found = compare_decoding(other, ids, mask, steps)
                outcome = Outcome(one, len(ids), len(steps), tuple(found), clock() - began, request.stats)
                if not found:
                    _check_meaning(outcome)
                yield outcome


def _check_meaning(outcome: Outcome) -> None:
    """Refuse an identity that rests on nothing: all hits, or another lane than the one that was asked for."""
    shards = {name: lane.shards for name, lane in outcome.stats.lanes.items() if name != "hit"}
    lanes = outcome.setting.lanes
    if sum(shards.values()) == 0 or (lanes != "all" and shards[lanes] != sum(shards.values())):
        raise TrilaneError(
            f"{outcome.setting}: misses went {shards}, so it proves nothing about {lanes}; take fewer slots"
        )
