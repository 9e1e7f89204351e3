"""Which experts of a layer go together through a stage, and which bytes are copied for them: arrays, nothing is moved.

A stage holds whole experts side by side, each as it lies in the arena, so neighbours are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.gpu_kernels.cuda_device import DeviceLayer

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Batches(NamedTuple):
    """The experts of a pass, ascending.

    Attributes
    ----------
    resident : int64 array
        Those of which nothing is copied.
    copied : int64 array
        The others; they fill stages in this order.
    per_stage : int
        Experts that fit in one.
    """

    resident: Ints
    copied: Ints
    per_stage: int

    @property
    def staged(self) -> list[Ints]:
        """The copied ones by stage."""
        return [self.copied[k : k + self.per_stage] for k in range(0, len(self.copied), self.per_stage)]

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
    return Batches(np.flatnonzero(needed & ~copied), np.flatnonzero(copied), per_stage)


def place_shards(
    layer: DeviceLayer, batches: Batches, missing: Bools, stages: Sequence[int]
) -> tuple[NDArray[np.uint64], list[list[Copy]]]:
    """Where shards are copied to, and the copies of each stage in turn.

    Parameters
    ----------
    stages : sequence of int
        Addresses, in the order in which they are filled, again and again.

    Returns
    -------
    staged : uint64 (experts, shards)
        0: not copied.
    copies : list of lists of Copy
        Neighbouring shards are one copy.
    """
    experts, index = batches.copied, np.arange(len(batches.copied))
    turn, offsets = index // batches.per_stage, layer.layout.shard_offset
    bases = np.asarray(stages, np.int64)[turn % len(stages)] + layer.expert_stride * (index % batches.per_stage)
    staged = np.zeros(missing.shape, np.uint64)
    staged[experts] = np.where(missing[experts], bases[:, None] + offsets[None, :], 0)
    return staged, _copies(layer, batches, missing, turn, bases)


def _copies(layer: DeviceLayer, batches: Batches, missing: Bools, turn: Ints, bases: Ints) -> list[list[Copy]]:
    """Runs of shards that are neighbours in the arena and in one stage, by stage."""
    made: list[list[Copy]] = [[] for _ in batches.staged]
    at, shard = np.nonzero(missing[batches.copied])
    if not len(at):
        return made
    keys = batches.copied[at] * missing.shape[1] + shard
    first = np.flatnonzero((np.diff(keys, prepend=-2) != 1) | (np.diff(turn[at], prepend=-1) != 0))
    last = np.append(first[1:], len(keys)) - 1
    offsets = layer.layout.shard_offset[shard]
    sources = layer.expert_base + layer.expert_stride * batches.copied[at] + offsets
    nbytes = sources[last] + layer.layout.shard_nbytes[shard[last]] - sources[first]
    table = np.stack([turn[at[first]], sources[first], (bases[at] + offsets)[first], nbytes], axis=1)
    for stage, source, place, size in table.tolist():
        made[stage].append(Copy(source, place, size))
    return made
