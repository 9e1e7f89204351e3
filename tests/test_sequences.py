"""Random sequences of events: invariants, what threads read and write, budgets, and one decision however it runs."""

import numpy as np
import pytest
from decision_runs import run_python
from numba import config
from sequence_cases import play_world, world_after
from sequence_worlds import EVENTS, REACHED, WRONGS
from state_faults import BUDGET, FAULTS, POOL, find_fault

from trilane.state import check

WORLDS, SEQUENCES = (12, 2) if config.DISABLE_JIT else (1000, 100)
PLAIN = "800, 4, 10"  # worlds, sequences, events at most: plain Python takes 4 ms for each of these sequences
needs_both = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")


@pytest.mark.timeout(600)
def test_every_event_of_random_sequences_keeps_what_is_promised():
    """100,000 sequences; `sequence_worlds.WRONGS` lists what is looked at after each event."""
    played = [play_world(seed, SEQUENCES) for seed in range(WORLDS)]
    wrong = [one.wrong for one in played if one.wrong]
    assert not wrong, "\n".join(wrong)
    assert sum(one.sequences for one in played) == WORLDS * SEQUENCES
    if not config.DISABLE_JIT:
        reached = dict(zip(EVENTS + REACHED, sum(one.reached for one in played).tolist(), strict=True))
        assert min(reached.values()) > 2_000, reached


@pytest.mark.timeout(600)
def test_a_seed_gives_the_same_plans_whatever_was_planned_before():
    """Sequences backwards find other leftovers in the arrays of work, which no plan may read."""
    for seed in range(max(4, WORLDS // 10)):
        forwards = play_world(seed, SEQUENCES, checks=False)
        assert forwards.digest == play_world(seed, SEQUENCES).digest
        assert forwards.digest == play_world(seed, SEQUENCES, backwards=True).digest


def digests(worlds, sequences, most_events):
    """A hash for each world over all plans and final states of its sequences, bit for bit."""
    return [play_world(seed, sequences, most_events, checks=False).digest for seed in range(worlds)]


@needs_both
@pytest.mark.timeout(600)
def test_compiled_and_plain_decisions_are_the_same_bits():
    compiled = digests(*map(int, PLAIN.split(",")))
    assert len(set(compiled)) == len(compiled)
    assert run_python(f"import test_sequences; print(test_sequences.digests({PLAIN}))", plain=True) == f"{compiled}\n"


BROKEN = {
    "the step's experts stay victims": "lookup.hold_expert = lambda state, expert: None",
    "a failed step keeps its slots": "planner.empty_slot = lambda state, pool, slot, expert: None",
    "a fill is a hit before it lands": "planner.reserve_slot = lambda state, pool, slot, shard: "
    "residency.fill_slot(state, slot, shard)",
    "a heap is not settled": "eviction.settle_expert = neighbours.settle_expert = lambda state, pool, expert: None",
    "a victim is not named": "placement.fill_slot = lambda *a: min(residency.fill_slot(*a), -1)",
    "a copy goes on too far": "placement._count_lane = lambda work, lane, count, nbytes, rows: "
    "work.run.__setitem__(0, 9)",
}


@needs_both
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_decision_is_found_and_told_with_its_seed(change):
    modules = "eviction, lookup, neighbours, placement, planner, residency"
    code = f"""
import sequence_cases
from trilane import {modules}
{change}
print(next(filter(None, (sequence_cases.play_world(seed, 3).wrong for seed in range(40)))))"""
    text, command = run_python(code, plain=True).rsplit(": ", 1)
    assert text in WRONGS[1:]
    assert command.startswith("python tests/sequence_cases.py ")


@needs_both
def test_a_sequence_can_be_looked_at():
    out = run_python("import sequence_cases; sequence_cases.tell_sequence(6, 6)", plain=True)
    assert "plan " in out and "Options(" in out and "lanes [" in out


NOT_LOOKED_AT = {"pool_of", "first_slot", "first_heap", "slot_nbytes"}  # set once; where they are wrong `check` crashes


def corruptions(rng, state):
    """(name, flat index, value) of changes to single elements; values that may or may not be sound."""
    for name, array in state._asdict().items():
        if not isinstance(array, np.ndarray) or name in NOT_LOOKED_AT or array.size == 0:
            continue
        for _ in range(4):
            at = int(rng.integers(array.size))
            old = array.reshape(-1)[at].item()
            if array.dtype.kind == "f":
                value = rng.choice([np.nan, np.inf, -1.0, old + 1, 0.0])
            else:
                limits = np.iinfo(array.dtype)
                value = min(limits.max, max(limits.min, int(rng.choice([old + 1, old - 1, -1, -2 - old, 0, 5, 200]))))
            if value != old:
                yield name, at, value


def is_sound(state, geometry):
    """Whether `check` passes; it may also stumble over an index."""
    try:
        check(state, geometry)
    except (AssertionError, IndexError, ValueError):
        return False
    return True


@pytest.mark.timeout(600)
def test_both_statements_of_the_invariants_find_the_same_corruptions():
    rng = np.random.default_rng(3)
    found = dict.fromkeys(FAULTS, 0)
    for seed in range(60):
        world = world_after(seed, seed)
        state, geometry, seen = world.state, world.geometry, world.seen
        assert is_sound(state, geometry) and find_fault(state, geometry, seen) == 0
        for name, at, value in corruptions(rng, state):
            flat = getattr(state, name).reshape(-1)
            old = flat[at]
            flat[at] = value
            fault = find_fault(state, geometry, seen)
            assert is_sound(state, geometry) == (fault == 0), (seed, name, at, old, value, FAULTS[fault])
            found[FAULTS[fault]] += 1
            flat[at] = old
    for fault in (POOL, BUDGET):  # no change of a single element does that
        assert found.pop(FAULTS[fault]) == 0
    assert min(found.values()) > 0, found


@pytest.mark.timeout(600)
def test_both_statements_find_a_shard_in_a_slot_that_is_not_for_it():
    moved = 0
    for seed in range(60):
        world = world_after(seed, 1)
        state, geometry, seen = world.state, world.geometry, world.seen
        landed = np.flatnonzero((state.owner >= 0) & (state.filling == 0))
        if landed.size == 0 or landed[0] >= state.first_slot[1] or landed[-1] < state.first_slot[1]:
            continue
        a, b = int(landed[0]), int(landed[-1])
        state.owner[a], state.owner[b] = state.owner[b], state.owner[a]  # two layers swap slots, and all agree on it
        state.slot_of[state.owner[a]], state.slot_of[state.owner[b]] = a, b
        assert not is_sound(state, geometry) and find_fault(state, geometry, seen) == POOL
        moved += 1
    assert moved > 5
    state.slot_nbytes[:] = 1
    assert not is_sound(state, geometry) and find_fault(state, geometry, seen) == POOL
