"""What the control thread of the CUDA device writes down while a run is recorded: all that its decisions depend on.

Every function does nothing unless `Control.TAPING` is set. What does not fit the tape, or is no event (slots that are
frozen), ends the taping; cuda_recorder.py begins anew then, with the state as it is. Nothing here decides.
"""

from __future__ import annotations

from trilane.cuda_words import Control
from trilane.digest import fills_digest, plan_digest
from trilane.jit import compiled
from trilane.tape import NO_EXPERT, write_event
from trilane.traces.trace import BACKGROUND, GAP, GIVEN_UP, HINT, NOT_PLANNED, NUMBER_NBYTES, SETTLED, STEP, TOUCHED

MOST_TOLD = 256**NUMBER_NBYTES


@compiled(counted=False)
def _is_taping(wire):
    if wire.control[Control.FROZEN] != 0:  # plans follow other options
        wire.control[Control.TAPING] = 0
    return wire.control[Control.TAPING] != 0


@compiled(counted=False)
def _add(run, kind, layer, rows, top_k, digest):
    """Add an event; where its entries go, -1 if nothing is taped any more."""
    entry = write_event(run.tape, kind, layer, rows, top_k, digest)
    if entry < 0:
        run.wire.control[Control.TAPING] = 0
        return entry
    for k in range(rows * top_k):
        run.tape.weights[entry + k] = 0.0
    return entry


@compiled(counted=False)
def _write_number(run, entry, number):
    """A number as entries of a byte each; what is too large ends the taping."""
    if number < 0 or number >= MOST_TOLD:
        run.wire.control[Control.TAPING] = 0
    for k in range(NUMBER_NBYTES):
        run.tape.ids[entry + k] = (number >> 8 * k) & 0xFF


@compiled(counted=False)
def _tell_clock(run, clock):
    """Before a step: how many the control thread has not heard of since the last one. False if nothing is taped."""
    control = run.wire.control
    unknown = clock - control[Control.TAPED_CLOCK] - 1
    control[Control.TAPED_CLOCK] = clock
    if unknown != 0:
        entry = _add(run, GAP, 0, 1, NUMBER_NBYTES, 0)
        if entry >= 0:
            _write_number(run, entry, unknown)
    return control[Control.TAPING] != 0


@compiled(counted=False)
def tape_plan(run, layer, clock, num_experts):
    """The plan of the mailbox in hand, with its routing: ranks in the order of experts, weights unknown."""
    if not _is_taping(run.wire) or not _tell_clock(run, clock):
        return
    g, rows, positions = run.grouping, run.wire.control[Control.NUM_ROWS], 0
    for i in range(num_experts):
        positions += g.rows[i]
    top_k = positions if rows == 1 else run.wire.control[Control.RANKS]
    digest = plan_digest(layer, g.experts, g.rows, num_experts, run.geometry.num_shards[layer], run.work)
    entry = _add(run, STEP, layer, rows, top_k, digest)
    if entry < 0:
        return
    for k in range(rows * top_k):
        run.tape.ids[entry + k] = NO_EXPERT
    for i in range(num_experts):
        for position in range(g.first_position[i], g.first_position[i] + g.rows[i]):
            rank = 0
            place = entry + (g.token[position] if rows > 1 else 0) * top_k
            while rank < top_k - 1 and run.tape.ids[place + rank] != NO_EXPERT:
                rank += 1
            run.tape.ids[place + rank] = g.experts[i]


@compiled(counted=False)
def tape_use(run, layer, clock, num_experts):
    """A step without misses, which nobody planned."""
    if not _is_taping(run.wire) or not _tell_clock(run, clock):
        return
    entry = _add(run, STEP, layer, 1, num_experts, NOT_PLANNED)
    for i in range(num_experts if entry >= 0 else 0):
        run.tape.ids[entry + i] = run.grouping.experts[i]


@compiled(counted=False)
def tape_touch(run, expert, stamp):
    """A use that only the GPU's stamp tells of, and when it was."""
    if not _is_taping(run.wire):
        return
    layer = run.geometry.layer_of[expert]
    entry = _add(run, TOUCHED, layer, 1, 1 + NUMBER_NBYTES, 0)
    if entry >= 0:
        run.tape.ids[entry] = expert - run.geometry.first_expert[layer]
        _write_number(run, entry + 1, run.wire.control[Control.TAPED_CLOCK] - stamp)


@compiled(counted=False)
def tape_background(run, most, num):
    """How many fills were asked for, and what was reserved."""
    if not _is_taping(run.wire):
        return
    entry = _add(run, BACKGROUND, 0, 1, 1, fills_digest(0, num, run.fills))
    if entry >= 0:
        run.tape.ids[entry] = most


@compiled(counted=False)
def tape_hint(run, layer, num_hints, num):
    """Experts that were hinted, and what was reserved for them."""
    if not _is_taping(run.wire):
        return
    entry = _add(run, HINT, layer, 1, num_hints, fills_digest(layer, num, run.fills))
    for k in range(num_hints if entry >= 0 else 0):
        run.tape.ids[entry + k] = run.hints[k]


@compiled(counted=False)
def tape_settled(run, num, how):
    """The fills under way end alike; where its entries go, -1 if nothing is taped."""
    if num == 0 or not _is_taping(run.wire):
        return -1
    entry = _add(run, SETTLED, 0, 1, num, 0)
    for k in range(num if entry >= 0 else 0):
        run.tape.ids[entry + k] = how
    return entry


@compiled(counted=False)
def tape_given_up(run, entry, k):
    """Of the fills of such an event, the one that is given up."""
    if entry >= 0:
        run.tape.ids[entry + k] = GIVEN_UP
