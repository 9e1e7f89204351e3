"""Which experts of a layer go together through a stage, and which bytes are copied for them: arrays, nothing is moved.

A stage holds whole experts side by side, each as it lies in the arena, so neighbours are one copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.gpu_kernels.cuda_device import DeviceLayer

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Batches(NamedTuple):
    """The experts of a pass.

    Attributes
    ----------
    resident : int64 array
        Those of which nothing is copied.
    staged : list of int64 arrays
        The others, ascending, by the stage that they fill.
    """

    resident: Ints
    staged: list[Ints]

    @property
    def in_order(self) -> list[Ints]:
        """As the kernels number them: those that need no copy first, if there are any."""
        return ([self.resident] if len(self.resident) else []) + self.staged


class Copy(NamedTuple):
    """Neighbouring bytes of the arena that go to a stage."""

    source: int
    destination: int
    nbytes: int


def routed_experts(ids: NDArray[np.integer], num_experts: int) -> Ints:
    """The experts that rows are routed to, ascending; ids that mean "none" are left out."""
    return np.unique(ids[(ids >= 0) & (ids < num_experts)]).astype(np.int64)


def cut_batches(needed: Bools, missing: Bools, per_stage: int) -> Batches:
    """Batches of up to ``per_stage`` experts.

    Parameters
    ----------
    needed : bool (experts,)
    missing : bool (experts, shards)
        Shards to copy, of needed experts only.
    """
    copied = missing.any(axis=1)
    experts = np.flatnonzero(copied)
    staged = [experts[k : k + per_stage] for k in range(0, len(experts), per_stage)]
    return Batches(np.flatnonzero(needed & ~copied), staged)


def place_shards(layer: DeviceLayer, batches: Batches, missing: Bools, stages: list[int]) -> NDArray[np.uint64]:
    """Where each shard is copied to, uint64 (experts, shards), 0: not at all.

    ``stages`` are the stages' addresses in the order in which the batches take them, again and again.
    """
    staged = np.zeros(missing.shape, np.uint64)
    offsets = layer.layout.shard_offset
    for k, experts in enumerate(batches.staged):
        places = stages[k % len(stages)] + layer.expert_stride * np.arange(len(experts))[:, None] + offsets[None, :]
        staged[experts] = np.where(missing[experts], places, 0)
    return staged


def copies_of(layer: DeviceLayer, experts: Ints, missing: Bools, stage: int) -> list[Copy]:
    """The copies that bring the missing shards of a batch to its stage; neighbouring shards are one copy."""
    at, shard = np.nonzero(missing[experts])
    keys = experts[at] * missing.shape[1] + shard
    first = np.flatnonzero(np.diff(keys, prepend=-2) != 1)
    last = np.append(first[1:], len(keys)) - 1
    offsets, sizes = layer.layout.shard_offset, layer.layout.shard_nbytes
    sources = layer.expert_base + layer.expert_stride * experts[at] + offsets[shard]
    places = stage + layer.expert_stride * at + offsets[shard]
    nbytes = sources[last] + sizes[shard[last]] - sources[first]
    return [Copy(*row) for row in np.stack([sources[first], places[first], nbytes], axis=1).tolist()]
