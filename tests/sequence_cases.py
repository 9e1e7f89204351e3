"""Random sequences of scheduler events in compiled code, with a model of what the device's threads read and write.

A *world* is a geometry with an empty state. A sequence is what one seed makes of it: steps and their waves, learning,
hints, background fills that land or are dropped in any order, failed steps, clocks that jump. The model knows whose
bytes lie in each slot, which slots the step in flight reads or writes, and which a background fill writes. What an
event did is compared with that, and the state's invariants are checked, after each one.

    python tests/sequence_cases.py WORLD SEQUENCE [MOST_EVENTS]

plays one sequence in plain Python, prints its events, and has `trilane.state.check` say what is broken.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import NamedTuple

if __name__ == "__main__":
    os.environ["NUMBA_DISABLE_JIT"] = "1"

import numpy as np
from numba import config, types
from sequence_plans import (
    count_plan,
    mix_plan,
    num_places,
    see_copies,
    see_held,
    see_lanes,
    see_slots,
    see_sums,
    see_use,
    shard_at,
)
from sequence_worlds import (
    ABANDON,
    BACKGROUND,
    CLOCK,
    DIGEST,
    END_FILL,
    EVENT,
    EVENTS,
    EVICTED,
    FILLED,
    FILLS,
    HINT,
    IDLE,
    IN_FLIGHT,
    IN_USE,
    LANDED,
    LAYER,
    LEARN,
    LEARNED,
    LEFT,
    MOST_EVENTS,
    NOT_ABANDONED,
    NOT_NOTHING,
    NUM_EXPERTS,
    NUM_UNDER_WAY,
    OFTEN,
    OPTIONS,
    OPTIONS_OF,
    PLAN,
    RATES,
    RELEASE,
    TOUCH,
    WAVE,
    WORD,
    WRITTEN,
    WRONG_END,
    WRONG_FILL,
    WRONG_FILLS,
    WRONG_VICTIM,
    WRONGS,
    begin_sequence,
    digest_of,
    draw,
    draw_experts,
    draw_ticks,
    make_world,
    mix,
    read_options,
    read_rates,
    remember,
)
from state_faults import find_fault

from trilane.eviction import release_step, touch_expert
from trilane.expert import HIT, decision, expert_of
from trilane.planner import abandon_step, learn_step, plan_background, plan_fills, plan_layer, plan_wave
from trilane.records import record_at
from trilane.residency import drop_fill, land_fill
from trilane.stash import Stash
from trilane.state import check


@decision
def play_plan(world, is_wave):
    """Plan a step, or the rest of the one in flight, and look at what came of it; a place in `WRONGS`."""
    state, geometry, now = world.state, world.geometry, world.now
    if not is_wave:
        now[LAYER], now[OPTIONS], now[RATES] = (
            draw(world, geometry.num_layers),
            draw(world, world.options_at.size),
            draw(world, world.rates_at.size),
        )
        now[NUM_EXPERTS] = draw_experts(world, now[LAYER], world.experts)
        for k in range(now[NUM_EXPERTS]):
            world.rows[k] = 1 if draw(world, 2) == 0 else 1 + draw(world, 5)
        now[CLOCK] += draw_ticks(world)
    options, rates = read_options(world.options_at[now[OPTIONS]]), read_rates(world.rates_at[now[RATES]])
    for slot in range(world.use.size):  # the step before, or the wave, has read its slots
        world.use[slot] = FILLED if world.use[slot] == FILLED else IDLE
    layer, num = int(now[LAYER]), int(now[NUM_EXPERTS])
    if is_wave:
        left = plan_wave(state, geometry, rates, options, layer, world.experts, world.rows, num, world.work)
    else:
        left = plan_layer(
            state, geometry, rates, options, layer, world.experts, world.rows, num, int(now[CLOCK]), world.work
        )
        now[LEARNED] = 0
    now[LEFT], now[IN_FLIGHT] = left, 1
    wrong = see_slots(world, options, rates, is_wave)
    if wrong == 0:
        wrong = see_lanes(world, options)
    if wrong == 0:
        wrong = see_copies(world)
    if wrong == 0:
        wrong = see_sums(world, rates, left)
    return wrong if wrong != 0 else see_held(world, is_wave)


# -------------------------------------------------------------------------------------------------------- fills
@decision
def play_fills(world, is_hint):
    """Reserve slots for hinted experts, or for what is wanted; a place in `WRONGS`."""
    now = world.now
    options, most = read_options(world.options_at[draw(world, world.options_at.size)]), 1 + draw(world, 4)
    layer = draw(world, world.geometry.num_layers)
    if is_hint:
        num_hinted = draw_experts(world, layer, world.hinted)
        now[CLOCK] += draw_ticks(world) if draw(world, 4) == 0 else 0
        num = plan_fills(
            world.state, world.geometry, options, layer, world.hinted, num_hinted, int(now[CLOCK]), world.fills
        )
    else:
        num = plan_background(world.state, world.geometry, options, most, world.fills)
    if num > options.max_fills or (not is_hint and num > most):
        return WRONG_FILLS
    mix(world, num)
    for k in range(num):
        slot, shard = int(world.fills.fill_slot[k]), int(world.fills.fill_shard[k])
        if world.state.slot_of[shard] != -2 - slot or not was_absent(world, shard, k):
            return WRONG_FILLS
        if is_hint and not is_hinted(world, layer, shard):
            return WRONG_FILLS
        if world.use[slot] != IDLE:  # what a step reads, or another fill writes
            return IN_USE
        if world.fills.fill_victim[k] != world.owner_before[slot]:
            return WRONG_VICTIM
        world.use[slot], world.content[slot] = FILLED, -1
        world.fill_slot[now[NUM_UNDER_WAY]], world.fill_shard[now[NUM_UNDER_WAY]] = slot, shard
        now[NUM_UNDER_WAY] += 1
        world.reached[FILLS] += 1
        mix(world, slot)
        mix(world, shard)
        mix(world, world.fills.fill_victim[k])
    return 0


@decision
def was_absent(world, shard, k):
    """Whether the shard was in no slot, or just lost it to one of the ``k`` fills before."""
    absent = world.slot_before[shard] == -1
    for j in range(k):
        absent |= world.fills.fill_victim[j] == shard
    return absent


@decision
def is_hinted(world, layer, shard):
    """Whether the shard is one of the experts of the last `draw_experts`, in this layer."""
    id_ = expert_of(world.geometry, shard) - world.geometry.first_expert[layer]
    return 0 <= id_ and id_ < world.marks.size and world.marks[id_] != 0


@decision
def play_end_fill(world):
    """One of the fills under way lands or is dropped, once; a place in `WRONGS`."""
    now = world.now
    if now[NUM_UNDER_WAY] == 0:
        return 0
    k, last = draw(world, now[NUM_UNDER_WAY]), now[NUM_UNDER_WAY] - 1
    slot, shard = int(world.fill_slot[k]), int(world.fill_shard[k])
    world.fill_slot[k], world.fill_shard[k] = world.fill_slot[last], world.fill_shard[last]
    now[NUM_UNDER_WAY] = last
    lands = draw(world, 3) != 0
    ended = (
        land_fill(world.state, world.geometry, slot, shard)
        if lands
        else drop_fill(world.state, world.geometry, slot, shard)
    )
    world.use[slot], world.content[slot] = IDLE, shard if lands else -1
    world.reached[LANDED] += 1 if lands else 0
    return 0 if ended else WRONG_END


@decision
def play_wrong_fill(world):
    """End what is no fill under way: it is refused, and nothing changes. A place in `WRONGS`."""
    slot, shard = draw(world, world.use.size + 2) - 1, draw(world, world.state.slot_of.size)
    for k in range(world.now[NUM_UNDER_WAY]):
        if world.fill_slot[k] == slot and world.fill_shard[k] == shard:
            return 0
    before = digest_of(world)
    if land_fill(world.state, world.geometry, slot, shard) or drop_fill(world.state, world.geometry, slot, shard):
        return WRONG_END
    return 0 if digest_of(world) == before else NOT_NOTHING


# ------------------------------------------------------------------------------------------------- other events
@decision
def play_abandon(world):
    """The step in flight fails: its fills hold nothing, its hits stay. A place in `WRONGS`."""
    now, work, state = world.now, world.work, world.state
    abandon_step(state, world.geometry, int(now[LAYER]), world.experts, int(now[NUM_EXPERTS]), work)
    now[IN_FLIGHT] = now[LEFT] = 0
    for at in range(num_places(world)):
        slot = work.slot[at]
        if slot >= 0 and world.use[slot] == WRITTEN:
            world.content[slot] = -1
            if state.owner[slot] != -1:
                return NOT_ABANDONED
        elif work.lane[at] == HIT and state.slot_of[shard_at(world, at)] != slot:
            return NOT_ABANDONED
    return end_step(world)


@decision
def end_step(world):
    """Nobody reads for the step any more."""
    for slot in range(world.use.size):
        world.use[slot] = FILLED if world.use[slot] == FILLED else IDLE
    world.now[IN_FLIGHT] = world.now[LEFT] = 0
    return 0 if world.state.num_held[0] == 0 else EVICTED


@decision
def choose_event(world):
    """An event that can happen now."""
    now = world.now
    if now[IN_FLIGHT] != 0 and now[LEARNED] == 0 and draw(world, 2) == 0:
        return LEARN
    kind = OFTEN[draw(world, OFTEN.size)]
    if kind == WAVE and now[LEFT] == 0 or kind == LEARN and (now[IN_FLIGHT] == 0 or now[LEARNED] != 0):
        return PLAN
    if kind == END_FILL and now[NUM_UNDER_WAY] == 0 or kind == ABANDON and now[IN_FLIGHT] == 0:
        return PLAN
    return kind


@decision
def play_event(world, kind):
    """A place in `WRONGS`."""
    now, state, geometry = world.now, world.state, world.geometry
    if kind == PLAN or kind == WAVE:
        return play_plan(world, kind == WAVE)
    if kind == HINT or kind == BACKGROUND:
        return play_fills(world, kind == HINT)
    if kind == END_FILL:
        return play_end_fill(world)
    if kind == WRONG_FILL:
        return play_wrong_fill(world)
    if kind == ABANDON:
        return play_abandon(world)
    if kind == RELEASE:
        release_step(state, geometry)
        return end_step(world)
    if kind == TOUCH:
        now[CLOCK] += draw(world, 2)
        touch_expert(state, geometry, draw(world, state.flags.size), int(now[CLOCK]))
        return 0
    options = read_options(world.options_at[now[OPTIONS]])
    learn_step(state, geometry, options, int(now[LAYER]), world.experts, int(now[NUM_EXPERTS]))
    now[LEARNED] = 1
    return 0


@decision
def play_sequence(world, seed, most_events):
    """Up to so many random events; a place in `WRONGS`, the digest in ``world.now``."""
    begin_sequence(world, seed)
    for event in range(min(most_events, 4 + draw(world, most_events))):
        kind = choose_event(world)
        world.now[EVENT] = event
        remember(world)
        wrong = play_event(world, kind)
        world.reached[kind] += 1
        if wrong == 0:
            wrong = see_use(world)
        if wrong == 0 and world.checks:
            wrong = find_fault(world.state, world.geometry, world.seen)
        if wrong != 0:
            return wrong
        if kind == PLAN or kind == WAVE:
            count_plan(world)
            mix_plan(world)
    world.now[DIGEST] = digest_of(world)
    return 0


@decision
def play_sequences(world, seed, step, number, most_events, results):
    """Play so many, or up to the first that is wrong; `play_world` says what the results are."""
    for _ in range(number):
        wrong = play_sequence(world, seed, most_events)
        results[0] += 1
        results[1] += world.now[EVENT] + 1
        if wrong != 0:
            results[2], results[3] = seed, wrong
            return
        results[4] = (results[4] + (2 * seed + 1) * world.now[DIGEST]) & WORD
        seed += step


@functools.cache
def _compiled_player():
    """`play_sequences` of a world's address, compiled once for all worlds."""
    read_world = record_at(Stash(make_world(0)).kind)

    @decision
    def play(address, seed, step, number, most_events, results):
        play_sequences(read_world(address), seed, step, number, most_events, results)

    play.compile((types.int64,) * 5 + (types.int64[::1],))
    return play


class Played(NamedTuple):
    """What came of sequences of one world."""

    sequences: int
    events: int
    digest: int  # of all plans and final states, in whatever order they were played
    wrong: str  # empty, or what was wrong with which sequence, and how to see it
    reached: np.ndarray


def _play(world, *order):
    """`play_sequences`, compiled unless the JIT is off."""
    results = np.zeros(5, np.int64)
    if config.DISABLE_JIT:
        play_sequences(world, *order, results)
    else:
        stash = Stash(world)
        _compiled_player()(stash.address, *order, results)
    return results


def world_after(seed, sequence, most_events=MOST_EVENTS):
    """The world as one sequence leaves it."""
    world = make_world(seed)
    assert _play(world, sequence, 1, 1, most_events)[3] == 0
    return world


def play_world(seed, number, most_events=MOST_EVENTS, *, checks=True, backwards=False):
    """Play the first sequences of one world, until one is wrong."""
    world = make_world(seed)._replace(checks=checks)
    results = (
        _play(world, number - 1, -1, number, most_events) if backwards else _play(world, 0, 1, number, most_events)
    )
    sequences, events, sequence, wrong, digest = results.tolist()
    text = f"{WRONGS[wrong]}: python tests/sequence_cases.py {seed} {sequence} {most_events}" if wrong else ""
    return Played(sequences, events, digest, text, world.reached)


def tell_sequence(seed, sequence, most_events=MOST_EVENTS):
    """Play one sequence, with `check` after each event; for plain Python, whose errors name the line."""
    world = make_world(seed)
    state = world.state
    print(
        f"{world.geometry.num_layers} layers, {state.owner.size} slots, {state.num_free.size} pools, {state.eviction=}"
    )
    begin_sequence(world, sequence)
    for event in range(min(most_events, 4 + draw(world, most_events))):
        kind = choose_event(world)
        remember(world)
        wrong = play_event(world, kind)
        layer, experts = int(world.now[LAYER]), world.experts[: world.now[NUM_EXPERTS]].tolist()
        print(f"{event:3d} {EVENTS[kind]:10s} clock {world.now[CLOCK]}, step of layer {layer}: {experts}")
        if kind in (PLAN, WAVE):
            places = int(num_places(world))
            print(f"      {OPTIONS_OF[int(world.now[OPTIONS])].held}")
            print(f"      lanes {world.work.lane[:places].tolist()} slots {world.work.slot[:places].tolist()}")
        wrong = wrong or see_use(world)
        if wrong:
            raise AssertionError(WRONGS[wrong])
        check(state, world.geometry)


if __name__ == "__main__":
    tell_sequence(*map(int, sys.argv[1:]))
