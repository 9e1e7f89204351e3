"""Whether where experts lie changes the text: decoding compared with an all-resident run, token by token, bit by bit.

A model keeps its trunk; its scheduler is replaced by one with other options over the same store. The first difference
ends a comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from trilane.engine import ExpertScheduler
from trilane.errors import TrilaneError
from trilane.integrations.generation.decode import Step, decode
from trilane.integrations.transformers import OffloadedModel
from trilane.integrations.transformers.experts import is_experts
from trilane.integrations.transformers.forward import bind, bound_layer

EXPERTS_A_STEP = 8
ALL_RESIDENT = {"cache": {"fraction": 1.0}, "policy": {"force": "stream"}}


@dataclass(frozen=True)
class Difference:
    """The first place where two decodings differ.

    Attributes
    ----------
    row, token : int
        Which prompt, and which of its tokens, from 0.
    wanted, found : int
        Ids of the tokens there.
    num_logits : int
        Logits of other bits, out of ``vocabulary``.
    """

    row: int
    token: int
    wanted: int
    found: int
    num_logits: int
    vocabulary: int

    def __str__(self) -> str:
        ids = f"id {self.wanted}" if self.wanted == self.found else f"id {self.found} instead of {self.wanted}"
        return (
            f"prompt {self.row}, token {self.token}: {ids}, {self.num_logits} of {self.vocabulary} logits have other "
            "bits than in the all-resident run"
        )


@contextmanager
def other_scheduler(handle: OffloadedModel, options: Mapping[str, Any]) -> Iterator[OffloadedModel]:
    """The same model over another scheduler of the same store, until the end of the block."""
    modules = [module for module in handle.model.modules() if is_experts(module)]
    device = "cuda" if handle.scheduler.on_gpu else "host"
    before, lock = [bound_layer(module) for module in modules], threading.RLock()
    with ExpertScheduler(handle.store, config=options, device=device) as scheduler:
        try:
            for index, module in enumerate(modules):
                bind(module, scheduler, index, lock)
            yield OffloadedModel(handle.model, scheduler)
        finally:
            for module, layer in zip(modules, before, strict=True):
                bind(module, layer.scheduler, layer.index, layer.lock)


def make_resident(scheduler: ExpertScheduler) -> None:
    """Bring every expert of every layer into its slot, by steps of one row: many rows a GPU may stream past them."""
    x = np.zeros((1, scheduler.store.hidden), np.float32)
    for index, layer in enumerate(scheduler.store.layers):
        for first in range(0, layer.num_experts, EXPERTS_A_STEP):
            ids = np.arange(first, min(layer.num_experts, first + EXPERTS_A_STEP), dtype=np.int64)[None]
            scheduler.forward(index, x, ids, np.ones(ids.shape, np.float32))


@contextmanager
def all_resident(handle: OffloadedModel, options: Mapping[str, Any] | None = None) -> Iterator[OffloadedModel]:
    """The same model with every expert in a slot.

    Raises
    ------
    TrilaneError
        At the end of the block: some expert was not, so what was compared with is no all-resident run.
    """
    merged = {**ALL_RESIDENT, **(options or {})}
    with other_scheduler(handle, merged) as resident:
        make_resident(resident.scheduler)
        with resident.scheduler.request() as request:
            yield resident
        if request.stats.hit_rate not in (None, 1.0):
            raise TrilaneError(
                f"all-resident run: its hit rate was {request.stats.hit_rate:.2%}, so some experts were not in slots; "
                "the device's memory is too small for a run to compare with: use a smaller model"
            )


def decode_all(handle: OffloadedModel, ids: torch.Tensor, mask: torch.Tensor, max_tokens: int) -> list[Step]:
    """All greedy steps, kept."""
    return list(decode(handle, ids, mask, max_tokens))


def compare_steps(wanted: Iterable[Step], found: Iterable[Step], rows: Sequence[int] | None = None) -> list[Difference]:
    """The differences of the first step that has some, one for each row that differs; empty if there are none."""
    for token, (one, other) in enumerate(zip_longest(wanted, found)):
        if one is None or other is None:
            raise TrilaneError(f"token {token}: one run ended before the other, so they cannot be compared further")
        differ = bits(one.logits) != bits(other.logits)
        wrong = differ.any(-1) | (one.ids.cpu() != other.ids.cpu())
        if wrong.any():
            return [
                Difference(
                    int(row), token, int(one.ids[row]), int(other.ids[row]), int(differ[row].sum()), differ.shape[-1]
                )
                for row in torch.nonzero(wrong)[:, 0]
            ]
    return []


def bits(logits: torch.Tensor) -> torch.Tensor:
    """Logits as integers with the same bits, on the CPU: equal floats may differ in them (0.0 and -0.0)."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[logits.element_size()]
    return logits.detach().cpu().contiguous().view(kind)


def compare_decoding(
    handle: OffloadedModel, ids: torch.Tensor, mask: torch.Tensor, wanted: list[Step]
) -> list[Difference]:
    """Decode as many tokens as ``wanted`` has and compare; it stops at the first step that differs."""
    return compare_steps(wanted, decode(handle, ids, mask, len(wanted)))
