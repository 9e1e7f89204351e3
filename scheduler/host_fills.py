"""Background fills of the host device in compiled code: reserve slots for a hint or by the policy, and end a fill.

All of it is reached by one address, since Python takes a third of a millisecond to hand a state over array by array.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from trilane.digest import fills_digest
from trilane.expert import Geometry
from trilane.jit import compiled
from trilane.plan import Options, Work
from trilane.planner import plan_background, plan_fills
from trilane.records import record
from trilane.residency import drop_fill, land_fill
from trilane.state import State


class Fill(IntEnum):
    """Places in the array of what is asked and answered."""

    LAYER = 0  # of a hint: its layer, how many experts it names, and the clock
    NUM_EXPERTS = 1
    CLOCK = 2
    MOST = 3  # fills that the policy may reserve
    NUM = 4  # fills reserved, and their hash
    DIGEST = 5
    SLOT = 6  # of the fill that ends: its slot, its shard, and whether it landed
    SHARD = 7
    LANDED = 8
    SIZE = 9


@record
class HostFills(NamedTuple):
    """Everything that fills need, in one argument; reserved ones are listed in ``work``."""

    state: State
    geometry: Geometry
    options: Options
    work: Work
    experts: np.ndarray  # int32 (most experts of a layer,): those of a hint
    asked: np.ndarray  # int64 (Fill.SIZE,)


@compiled(counted=False)
def reserve_hinted(fills):
    """Reserve slots for hinted experts (`planner.plan_fills`)."""
    asked = fills.asked
    asked[Fill.NUM] = plan_fills(
        fills.state, fills.geometry, fills.options, asked[Fill.LAYER], fills.experts, asked[Fill.NUM_EXPERTS],
        asked[Fill.CLOCK], fills.work,
    )  # fmt: skip
    asked[Fill.DIGEST] = fills_digest(asked[Fill.LAYER], asked[Fill.NUM], fills.work)


@compiled(counted=False)
def reserve_own(fills):
    """Reserve slots for what the policy wants (`planner.plan_background`)."""
    asked = fills.asked
    asked[Fill.NUM] = plan_background(fills.state, fills.geometry, fills.options, asked[Fill.MOST], fills.work)
    asked[Fill.DIGEST] = fills_digest(0, asked[Fill.NUM], fills.work)


@compiled(counted=False)
def end_fill(fills):
    """Take a fill in that landed, or give its slot back."""
    slot, shard = fills.asked[Fill.SLOT], fills.asked[Fill.SHARD]
    if fills.asked[Fill.LANDED] != 0:
        land_fill(fills.state, fills.geometry, slot, shard)
    else:
        drop_fill(fills.state, fills.geometry, slot, shard)
