"""Routing of one layer-step: ids checked, rows grouped by expert.

Every expert is read once for all of its rows, so rows are put next to each other by expert. A row's
"position" is its place in that order. Ids of -1 and ``num_experts`` mean "no expert" and are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trilane.jit import compiled
from trilane.records import record


@record
class Grouping(NamedTuple):
    """Rows of one layer-step by expert, in preallocated arrays.

    Attributes
    ----------
    ids : int64[max_entries]
        Expert id of each (token, rank) entry.
    experts, rows, first_position : int32[num_experts]
        The experts routed to, ascending; how many rows each has, and where they start.
    position : int32[max_entries]
        Place of an entry among the grouped rows, -1 for a skipped one.
    token : int32[max_entries]
        Token of the row at a position.
    cursor : int32[num_experts]
        Scratch.
    """

    ids: np.ndarray
    experts: np.ndarray
    rows: np.ndarray
    first_position: np.ndarray
    position: np.ndarray
    token: np.ndarray
    cursor: np.ndarray


def make_grouping(max_entries: int, num_experts: int) -> Grouping:
    """Arrays for layer-steps of up to ``max_entries`` = tokens x ranks."""
    entries, experts = max(1, max_entries), max(1, num_experts)
    return Grouping(
        ids=np.zeros(entries, np.int64),
        experts=np.zeros(experts, np.int32),
        rows=np.zeros(experts, np.int32),
        first_position=np.zeros(experts, np.int32),
        position=np.zeros(entries, np.int32),
        token=np.zeros(entries, np.int32),
        cursor=np.zeros(experts, np.int32),
    )


@compiled(counted=False)
def group_rows(grouping, num_tokens, top_k, num_experts):
    """Group the entries of ``grouping.ids`` by expert.

    Returns
    -------
    int64
        Number of distinct experts, or ``-1 - entry`` for the first entry whose id does not exist.
    """
    cursor = grouping.cursor
    for expert in range(num_experts):
        cursor[expert] = 0
    for entry in range(num_tokens * top_k):
        expert = grouping.ids[entry]
        if expert < -1 or expert > num_experts:
            return -1 - entry
        if 0 <= expert < num_experts:
            cursor[expert] += 1
    num = _list_experts(grouping, num_experts)
    for entry in range(num_tokens * top_k):
        expert = grouping.ids[entry]
        grouping.position[entry] = -1
        if 0 <= expert < num_experts:
            position = cursor[expert]
            cursor[expert] = position + 1
            grouping.position[entry] = position
            grouping.token[position] = entry // top_k
    return num


@compiled(counted=False)
def _list_experts(grouping, num_experts):
    """Turn the counts in ``cursor`` into the list of experts; leaves each one's first position there."""
    num = 0
    start = 0
    for expert in range(num_experts):
        rows = grouping.cursor[expert]
        grouping.cursor[expert] = start
        if rows > 0:
            grouping.experts[num] = expert
            grouping.rows[num] = rows
            grouping.first_position[num] = start
            num += 1
            start += rows
    return num
