"""The words of the scheduler: lanes, the numbering of experts and shards, a plan and an outcome as data.

A *shard* is 256 intermediate neurons of one expert, the unit of placement. Experts and shards of all layers are
numbered through: ``expert key = first_expert[layer] + e`` and ``shard key = first_shard[layer] + e *
num_shards[layer] + j``. This file knows no bytes, no devices and no policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.jit import compiled
from trilane.records import record

UNPLACED = -2  # wanted, but no place could be had in this wave
SKIP = -1  # nothing to do: no such shard, or done in an earlier wave
HIT = 0
STREAM = 1
ZERO_COPY = 2
CPU = 3
LANE_NAMES = ("hit", "stream", "zero_copy", "cpu")


def decision(fn: Callable[..., Any] | None = None, *, inline: bool = False) -> Any:
    """Compile a decision function: `jit.compiled`, without reference counts; ``inline`` merges it into callers.

    A decision gets its state as tuples of some twenty arrays, and allocates nothing.
    """
    if fn is None:
        return functools.partial(decision, inline=inline)
    return compiled(fn, merge=inline, counted=False)


@record
class Geometry(NamedTuple):
    """How the experts and shards of all layers are numbered, and how large the shards are.

    Attributes
    ----------
    num_layers : int
    first_expert : int64 (num_layers + 1,)
        Key of each layer's expert 0; the last entry counts all experts.
    num_shards : int64 (num_layers,)
        Shards of one expert of the layer.
    first_shard : int64 (num_layers + 1,)
        Key of each layer's first shard; the last entry counts all shards.
    shard_nbytes : int64 (num_layers, max num_shards)
        Bytes of shard ``j``; 0 past the layer's last shard.
    layer_of : int16 (all experts,)
        Layer of an expert key.
    """

    num_layers: int
    first_expert: NDArray[np.int64]
    num_shards: NDArray[np.int64]
    first_shard: NDArray[np.int64]
    shard_nbytes: NDArray[np.int64]
    layer_of: NDArray[np.int16]


def make_geometry(num_experts: Sequence[int], shard_nbytes: Sequence[Sequence[int]]) -> Geometry:
    """Number the experts and shards of a model.

    Parameters
    ----------
    num_experts : sequence of int
        Experts of each MoE layer.
    shard_nbytes : sequence of sequences of int
        For each layer the bytes of each shard of an expert.

    Examples
    --------
    >>> g = make_geometry([4, 4], [[100, 100, 20]] * 2)
    >>> int(g.first_shard[1]), int(g.first_expert[2])
    (12, 8)
    """
    if len(num_experts) == 0 or len(num_experts) != len(shard_nbytes):
        raise ValueError(
            f"num_experts has {len(num_experts)} layers and shard_nbytes {len(shard_nbytes)}: "
            "give one entry for each MoE layer, at least one"
        )
    for layer, (count, sizes) in enumerate(zip(num_experts, shard_nbytes, strict=True)):
        if count < 1 or len(sizes) == 0 or min(sizes) < 1:
            raise ValueError(
                f"layer {layer} has {count} experts with shards of {list(sizes)} bytes: a layer "
                "needs at least one expert, and each expert shards of at least one byte"
            )
    num_shards = np.array([len(sizes) for sizes in shard_nbytes], np.int64)
    table = np.zeros((len(num_experts), int(num_shards.max())), np.int64)
    for layer, row in enumerate(shard_nbytes):
        table[layer, : len(row)] = row
    experts = np.array(num_experts, np.int64)
    return Geometry(
        len(num_experts),
        _running(experts),
        num_shards,
        _running(experts * num_shards),
        table,
        np.repeat(np.arange(len(num_experts), dtype=np.int16), experts),
    )


def _running(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


@decision(inline=True)
def first_shard_of(geometry, expert):
    """Shard key of an expert's shard 0."""
    layer = geometry.layer_of[expert]
    return geometry.first_shard[layer] + (expert - geometry.first_expert[layer]) * geometry.num_shards[layer]


@decision(inline=True)
def expert_of(geometry, shard):
    """Expert key of a shard key (bisects the layers: a table would cost four bytes a shard)."""
    low = 0
    high = geometry.num_layers
    while high - low > 1:
        middle = (low + high) // 2
        if geometry.first_shard[middle] <= shard:
            low = middle
        else:
            high = middle
    return geometry.first_expert[low] + (shard - geometry.first_shard[low]) // geometry.num_shards[low]


@dataclass(frozen=True)
class ExpertPlan:
    """What a plan does with one expert: a lane, slot and victim for each of its shards.

    ``slots`` holds where a shard is (hit) or goes (stream, zero-copy with fill), -1 for neither; ``victims``
    the shard key that loses the slot, -1 for none.
    """

    expert: int
    rows: int
    lanes: tuple[int, ...]
    slots: tuple[int, ...]
    victims: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One layer-step's decision, for people and for comparing: ``predicted_us`` by term, ``why`` in words."""

    layer: int
    clock: int
    experts: tuple[ExpertPlan, ...]
    predicted_us: tuple[tuple[str, float], ...]
    why: str

    def __str__(self) -> str:
        terms = ", ".join(f"{name} {us:.1f}" for name, us in self.predicted_us if us)
        lines = [f"layer {self.layer}, clock {self.clock}: {self.why}", f"predicted us: {terms}"]
        lines += [
            f"  expert {e.expert} rows {e.rows}: {' '.join(map(_lane_text, e.lanes, e.slots))}" for e in self.experts
        ]
        return "\n".join(lines)


def _lane_text(lane: int, slot: int) -> str:
    name = LANE_NAMES[lane] if lane >= 0 else ("unplaced" if lane == UNPLACED else "skip")
    return f"{name}@{slot}" if slot >= 0 else name


@dataclass(frozen=True)
class Outcome:
    """What a layer-step took: observed us by the same terms as ``Plan.predicted_us``; None if not measured."""

    layer: int
    clock: int
    observed_us: tuple[tuple[str, float | None], ...]
    error: str | None = None
