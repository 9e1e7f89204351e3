"""Grouping rows by expert: against a plain Python grouping, with sentinels, duplicates and bad ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.routing import group_rows, make_grouping


def group(ids, num_experts):
    ids = np.asarray(ids, np.int64)
    grouping = make_grouping(ids.size, num_experts)
    for array in (grouping.experts, grouping.rows, grouping.position, grouping.token, grouping.cursor):
        array[:] = 77  # what an earlier step left must not matter
    grouping.ids[: ids.size] = ids.ravel()
    return grouping, group_rows(grouping, ids.shape[0], ids.shape[1], num_experts)


def check_against_plain(ids, num_experts):
    grouping, num = group(ids, num_experts)
    ids = np.asarray(ids, np.int64)
    wanted = {}  # expert -> its tokens, in token and rank order
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if 0 <= expert < num_experts:
                wanted.setdefault(expert, []).append(token)
    assert num == len(wanted)
    assert grouping.experts[:num].tolist() == sorted(wanted)
    assert grouping.rows[:num].tolist() == [len(wanted[e]) for e in sorted(wanted)]
    starts = np.cumsum([0, *(len(wanted[e]) for e in sorted(wanted))])
    assert grouping.first_position[:num].tolist() == starts[:-1].tolist()
    assert grouping.token[: starts[-1]].tolist() == [t for e in sorted(wanted) for t in wanted[e]]
    positions = grouping.position[: ids.size].tolist()
    assert sorted(p for p in positions if p >= 0) == list(range(starts[-1]))
    for entry, position in enumerate(positions):
        expert = int(ids.flat[entry])
        if position < 0:
            assert expert in (-1, num_experts)
        else:
            place = sorted(wanted).index(expert)
            assert starts[place] <= position < starts[place + 1]
            assert grouping.token[position] == entry // ids.shape[1]


@given(st.data())
def test_against_a_plain_grouping(data):
    num_experts = data.draw(st.integers(1, 12))
    rows, top_k = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 5))
    entries = st.lists(st.integers(-1, num_experts), min_size=rows * top_k, max_size=rows * top_k)
    check_against_plain(np.array(data.draw(entries), np.int64).reshape(rows, top_k), num_experts)


@pytest.mark.parametrize(
    "ids",
    [[[-1]], [[4]], [[-1, 4, -1]], [[2, 2, 2, 2]], [[0], [0], [0]], [[3, 0], [0, 3]]],
    ids=["none", "num_experts", "all skipped", "duplicates", "one expert", "both"],
)
def test_sentinels_and_duplicates(ids):
    check_against_plain(ids, 4)


@pytest.mark.parametrize("bad", [-2, 5, 2**40, -(2**62), 2**63 - 1])
@pytest.mark.parametrize("entry", [0, 3, 5])
def test_the_first_bad_entry_is_told(bad, entry):
    ids = np.zeros((3, 2), np.int64)
    ids.flat[entry:] = bad
    assert group(ids, 4)[1] == -1 - entry


def test_a_grouping_may_be_used_again():
    grouping, _ = group([[9, 0], [0, 0]], 4)  # a bad id ends it early
    grouping.ids[:4] = 1, 2, 2, -1
    assert group_rows(grouping, 2, 2, 4) == 2
    assert grouping.experts[:2].tolist() == [1, 2] and grouping.token[:3].tolist() == [0, 0, 1]
