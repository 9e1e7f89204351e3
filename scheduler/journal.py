"""What was decided lately: the last plan of each layer, and a bounded log of every expert's treatment.

Compiled code writes, people read: :func:`last_plan` for ``explain(layer)``, :func:`expert_story` for
``story(expert)``. Nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trilane.cost import NUM_TERMS, TERM_NAMES, Rates
from trilane.expert import CPU, HIT, STREAM, ZERO_COPY, Geometry, Outcome, Plan
from trilane.jit import compiled
from trilane.plan import Work, freeze_plan
from trilane.records import record

LOG_ROWS = 1 << 14
# Columns of Journal.log
CLOCK, LAYER, EXPERT, ROWS, FIRST_LANE, FILLS, LOST = 0, 1, 2, 3, 4, 8, 9
NUM_COLUMNS = 10


@record
class Journal(NamedTuple):
    """Arrays of the journal.

    Attributes
    ----------
    log : int64 (LOG_ROWS, NUM_COLUMNS)
        A ring: clock, layer, expert, rows, shards by lane (4), slots filled, slots that others lost to it.
    next_row : int64 (1,)
        Rows written since the start.
    clock, num_experts : int64 (layers,)
        Of each layer's last step; clock 0: none yet.
    experts, rows : int32 (layers, max experts)
    lane, slot, victim : int8, int32, int64 (layers, max experts * max shards)
    counts : int64 (layers, 16)
        As in Work.
    predicted_us, observed_us : float64 (layers, terms)
    """

    log: np.ndarray
    next_row: np.ndarray
    clock: np.ndarray
    num_experts: np.ndarray
    experts: np.ndarray
    rows: np.ndarray
    lane: np.ndarray
    slot: np.ndarray
    victim: np.ndarray
    counts: np.ndarray
    predicted_us: np.ndarray
    observed_us: np.ndarray


def make_journal(geometry: Geometry) -> Journal:
    """An empty journal for a model."""
    layers = geometry.num_layers
    experts = int(np.diff(geometry.first_expert).max())
    shards = experts * int(geometry.num_shards.max())
    return Journal(
        log=np.zeros((LOG_ROWS, NUM_COLUMNS), np.int64),
        next_row=np.zeros(1, np.int64),
        clock=np.zeros(layers, np.int64),
        num_experts=np.zeros(layers, np.int64),
        experts=np.zeros((layers, experts), np.int32),
        rows=np.zeros((layers, experts), np.int32),
        lane=np.zeros((layers, shards), np.int8),
        slot=np.zeros((layers, shards), np.int32),
        victim=np.zeros((layers, shards), np.int64),
        counts=np.zeros((layers, 16), np.int64),
        predicted_us=np.zeros((layers, NUM_TERMS)),
        observed_us=np.zeros((layers, NUM_TERMS)),
    )


@compiled(counted=False)
def write_plan(journal, geometry, layer, clock, experts, rows, num_experts, work):
    """Keep a plan: as the layer's last one, and a row of the log for each expert."""
    num_shards = geometry.num_shards[layer]
    journal.clock[layer] = clock
    journal.num_experts[layer] = num_experts
    for k in range(work.counts.size):  # loops: copies of arrays may allocate
        journal.counts[layer, k] = work.counts[k]
    for k in range(NUM_TERMS):
        journal.predicted_us[layer, k] = work.predicted_us[k]
        journal.observed_us[layer, k] = np.nan
    for i in range(num_experts):
        journal.experts[layer, i] = experts[i]
        journal.rows[layer, i] = rows[i]
        entry = journal.log[journal.next_row[0] % LOG_ROWS]
        entry[:] = 0
        entry[CLOCK], entry[LAYER], entry[EXPERT], entry[ROWS] = clock, layer, experts[i], rows[i]
        for at in range(i * num_shards, (i + 1) * num_shards):
            lane = work.lane[at]
            journal.lane[layer, at] = lane
            journal.slot[layer, at] = work.slot[at]
            journal.victim[layer, at] = work.victim[at]
            if lane >= 0:
                entry[FIRST_LANE + lane] += 1
                entry[FILLS] += lane != HIT and work.slot[at] >= 0
                entry[LOST] += work.victim[at] >= 0
        journal.next_row[0] += 1


@compiled(counted=False)
def write_wave(journal, layer, num, work):
    """Add a further wave to the layer's last plan: what it placed, and its predicted times."""
    for k in range(work.counts.size):
        journal.counts[layer, k] += work.counts[k]
    for k in range(NUM_TERMS):
        journal.predicted_us[layer, k] += work.predicted_us[k]
    for at in range(num):
        if work.lane[at] >= 0:
            journal.lane[layer, at] = work.lane[at]
            journal.slot[layer, at] = work.slot[at]
            journal.victim[layer, at] = work.victim[at]


def _terms(values: np.ndarray) -> tuple[tuple[str, float | None], ...]:
    return tuple((name, None if np.isnan(us) else float(us)) for name, us in zip(TERM_NAMES, values, strict=True))


def last_plan(
    journal: Journal, geometry: Geometry, rates: Rates, layer: int, work: Work
) -> tuple[Plan, Outcome] | None:
    """The last decision of a layer and what it took, or None before the first.

    ``work`` lends the arrays of its type that a frozen plan does not show.
    """
    clock = int(journal.clock[layer])
    if clock == 0:
        return None
    kept = work._replace(
        lane=journal.lane[layer],
        slot=journal.slot[layer],
        victim=journal.victim[layer],
        counts=journal.counts[layer],
        predicted_us=journal.predicted_us[layer],
    )
    experts, num = journal.experts[layer], int(journal.num_experts[layer])
    plan = freeze_plan(geometry, rates, layer, experts, journal.rows[layer], num, clock, kept)
    return plan, Outcome(layer, clock, _terms(journal.observed_us[layer]))


@dataclass(frozen=True)
class StoryEntry:
    """One step of an expert: shards by lane, slots it filled, slots that others lost to it."""

    clock: int
    rows: int
    hit: int
    stream: int
    zero_copy: int
    cpu: int
    filled: int
    evicted: int


def expert_story(journal: Journal, layer: int, expert: int) -> tuple[StoryEntry, ...]:
    """What the log still holds of an expert, oldest first."""
    written = int(journal.next_row[0])
    order = np.arange(max(0, written - LOG_ROWS), written) % LOG_ROWS
    log = journal.log[order]
    mine = log[(log[:, LAYER] == layer) & (log[:, EXPERT] == expert)]
    lanes = [FIRST_LANE + lane for lane in (HIT, STREAM, ZERO_COPY, CPU)]
    return tuple(StoryEntry(*(int(x) for x in row[[CLOCK, ROWS, *lanes, FILLS, LOST]])) for row in mine)
