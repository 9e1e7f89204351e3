"""Experts that were missed of late and may deserve a background fill: a short list, best score first.

An expert of the list may have become resident since, or worth less than any victim; `planner.plan_background` asks
and drops it then. Nothing here moves a slot or knows the link.
"""

from __future__ import annotations

from trilane.expert import decision


@decision
def want_expert(state, expert):
    """Put an expert on the list, in place of the one of least score if it is full and that one is worth less."""
    num = state.num_wanted[0]
    least = 0
    for k in range(num):
        if state.wanted[k] == expert:
            return
        if _precedes(state, state.wanted[least], state.wanted[k]):
            least = k
    if num < state.wanted.size:
        state.wanted[num] = expert
        state.num_wanted[0] = num + 1
    elif _precedes(state, expert, state.wanted[least]):
        state.wanted[least] = expert


@decision(inline=True)
def _precedes(state, a, b):
    return state.score[a] > state.score[b] or (state.score[a] == state.score[b] and a < b)


@decision
def best_wanted(state):
    """Place of the expert of the highest score; the list is not empty."""
    best = 0
    for k in range(1, state.num_wanted[0]):
        if _precedes(state, state.wanted[k], state.wanted[best]):
            best = k
    return best


@decision
def drop_wanted(state, place):
    """Take the expert at this place off the list."""
    last = state.num_wanted[0] - 1
    state.wanted[place] = state.wanted[last]
    state.num_wanted[0] = last
