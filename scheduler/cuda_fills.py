"""Background fills on the CUDA device: slots change hands while the GPU looks slots up without asking anybody.

The slot table is written by the GPU's own stream alone: it applies a *pending* list of changes in ``publish``, after
the look-ups of that step, and acknowledges it. So a fill goes through stages, each ended by such an answer:

1. INVALIDATING: the victims' entries become -1. The step that does it may still read their slots, so it acknowledges at
   its end.
2. COPYING: as many shards at a time as will have come when the next step may want the link.
3. VALIDATING: the new entries are acknowledged. Only now may the planner hit or evict them.

That takes three steps and more, so what is filled is what the layers after these will likely need
(`policy.gpu_options`). How much of it depends on the time in which the link has nothing else to do: between the end of
an answer and the next mailbox, averaged.
"""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels import layout
from trilane.cpu_kernels.atomics import mono_ns, store32_at
from trilane.cuda_copier import copy_by_segment, post_fills
from trilane.cuda_plan import add_update, release_list
from trilane.cuda_tape import tape_background, tape_given_up, tape_hint, tape_settled
from trilane.cuda_words import (
    AT_END,
    COPY_FROM,
    COPY_NBYTES,
    COPY_TO,
    Control,
    Failure,
    Fills,
    Place,
    Stage,
    u32_at,
)
from trilane.expert import decision, expert_of
from trilane.host_step import source_address
from trilane.jit import compiled
from trilane.planner import plan_background, plan_fills
from trilane.residency import drop_fill, land_fill
from trilane.stats import Total
from trilane.traces.trace import LANDED, UNDER_WAY
from trilane.wanted import list_coming

MOST_AT_ONCE, LEAST_IDLE = 8, 3
NEVER_US = 1e12
MARGIN_NS = 5_000  # what a step is heard of late, and a copy begins late


@compiled(counted=False)
def _may_begin(wire):
    """Whether no fill is under way, and slots may change hands."""
    control = wire.control
    if control[Control.FILL_STAGE] != Stage.IDLE or control[Control.FAILURE] != Failure.NONE:
        return False
    return control[Control.FROZEN] == 0 and u32_at(wire.places[Place.ACKNOWLEDGED]) == control[Control.PENDING]


@compiled(counted=False)
def begin_fills(run):
    """Reserve slots for the hinted experts and post their victims; how many fills are on their way."""
    control = run.wire.control
    if not _may_begin(run.wire):
        return 0
    layer, num_hints, clock = control[Control.HINT_LAYER], control[Control.NUM_HINTS], run.state.clock[0]
    num = plan_fills(run.state, run.geometry, run.options, layer, run.hints, num_hints, clock, run.fills)
    tape_hint(run, layer, num_hints, num)
    return _post_victims(run, num)


@compiled(counted=False)
def begin_background(run, layer):
    """The same for what the policy wants in slots after a step of a layer, if the link is idle for long enough."""
    control = run.wire.control
    if not run.options.background or control[Control.NO_FILLS] != 0 or not _may_begin(run.wire):
        return 0
    most = fills_at_once(control[Control.IDLE_NS], control[Control.FILL_NS])
    if most == 0:
        return 0
    if run.state.past.shape[2] > 0:
        list_coming(run.state, run.geometry, run.options, layer)
    num = plan_background(run.state, run.geometry, run.options, most, run.fills)
    tape_background(run, most, num)
    return _post_victims(run, num)


@decision
def fill_ns(rates, nbytes):
    """What the copy of a shard takes; for ever, as far as whole numbers go, where the link's rate is not known."""
    return np.int64(1e3 * min(rates.run_fix_us + nbytes * rates.stream_us_per_byte, NEVER_US))


@decision
def fills_at_once(idle_ns, fill_ns):
    """Fills to begin together: none where the link is idle for less than LEAST_IDLE copies of a shard between two
    steps with misses, since such a step would often wait for one; else what two such pauses hold, each but one."""
    fits = idle_ns // max(1, fill_ns)
    return 0 if fits < LEAST_IDLE else min(MOST_AT_ONCE, 2 * (fits - 1))


@compiled(counted=False)
def _post_victims(run, num):
    """Post the victims of the fills that were planned; how many are on their way."""
    control = run.wire.control
    fills = Fills(run.fills.fill_shard, run.fills.fill_slot, run.fills.fill_victim)
    kept = victims = 0
    settled = -1
    for k in range(num):
        if fills.victim[k] >= 0:
            add_update(run.wire.places[Place.PENDING], victims, fills.victim[k], -1, _next_list(run.wire))
            victims += 1
        source, nbytes = _source(run.geometry, run.tables, fills.shard[k])
        if source + nbytes <= run.wire.places[Place.PINNED_END]:
            fills.shard[kept], fills.slot[kept] = fills.shard[k], fills.slot[k]
            kept += 1
        else:  # a copy from pageable memory would hold this thread up
            settled = tape_settled(run, num, UNDER_WAY) if settled < 0 else settled
            tape_given_up(run, settled, k)
            drop_fill(run.state, run.geometry, fills.slot[k], fills.shard[k])
    run.totals[Total.EVICTIONS] += victims
    if num > 0:
        control[Control.NUM_FILLS], control[Control.FILLS_DONE] = kept, 0
        _post(run.wire, victims, Stage.INVALIDATING)
    return kept


@compiled(counted=False)
def _source(geometry, tables, shard):
    """Address and bytes of a shard key in host memory."""
    expert = expert_of(geometry, shard)
    layer = np.int64(geometry.layer_of[expert])
    inner = expert - geometry.first_expert[layer]
    j = shard - geometry.first_shard[layer] - inner * geometry.num_shards[layer]
    return source_address(tables, layer, inner, j), tables.descriptor[layer, j, layout.NBYTES]


@compiled(counted=False)
def _copy_of(wire, geometry, tables, shard, slot):
    """A fill's copy: where to, where from, and bytes."""
    source, nbytes = _source(geometry, tables, shard)
    return wire.places[Place.SLOTS] + slot * wire.places[Place.SLOT_NBYTES], source, nbytes


@compiled(counted=False)
def copy_listed(run):
    """Put the copies of the listed shards on the stream of fills, whose slots nobody looks at; the driver's status."""
    wire = run.wire
    for k in range(wire.control[Control.NUM_FILLS]):
        shard, slot = run.fills.fill_shard[k], run.fills.fill_slot[k]
        target, source, nbytes = _copy_of(wire, run.geometry, run.tables, shard, slot)
        status = copy_by_segment(wire, target, source, nbytes, wire.places[Place.FILL_STREAM])
        if status != 0:
            return status
    return 0


@compiled(counted=False)
def _next_list(wire):
    """The number of the pending list that is posted next."""
    return (wire.control[Control.PENDING] + 1) & 0xFFFFFFFF


@compiled(counted=False)
def _post(wire, count, stage):
    wire.control[Control.PENDING] = _next_list(wire)
    store32_at(wire.places[Place.PENDING] + AT_END, np.int32(stage == Stage.INVALIDATING))
    release_list(wire.places[Place.PENDING], count, wire.control[Control.PENDING])
    wire.control[Control.FILL_STAGE] = stage


@compiled(counted=False)
def forget_fills(wire):
    """Between steps: give up what is under way; nothing of it may be applied any more. False while a copy is."""
    stage, begun = wire.control[Control.FILL_STAGE], wire.control[Control.FILL_COUNT]
    if stage == Stage.COPYING and u32_at(wire.places[Place.FILL_FLAG]) != begun & 0xFFFFFFFF:
        return False
    if stage != Stage.IDLE:
        _post(wire, 0, Stage.IDLE)
    return True


@compiled(counted=False)
def tend_fills(run):
    """Move background fills on as far as they can; True if something was done."""
    wire = run.wire
    stage = wire.control[Control.FILL_STAGE]
    if stage == Stage.IDLE or wire.control[Control.FAILURE] != Failure.NONE:
        return False
    if stage == Stage.COPYING:
        return _tend_copies(wire, run.geometry, run.tables, run.fills.fill_shard, run.fills.fill_slot)
    if u32_at(wire.places[Place.ACKNOWLEDGED]) != wire.control[Control.PENDING]:
        return False
    if stage == Stage.INVALIDATING:
        wire.control[Control.FILL_STAGE] = Stage.COPYING
    else:  # the GPU knows the new entries: from here on they are the planner's too
        tape_settled(run, wire.control[Control.NUM_FILLS], LANDED)
        for k in range(wire.control[Control.NUM_FILLS]):
            land_fill(run.state, run.geometry, run.fills.fill_slot[k], run.fills.fill_shard[k])
            run.totals[Total.BACKGROUND_FILLS] += 1
        wire.control[Control.FILL_STAGE] = Stage.IDLE
    return True


@decision
def fits_in_pause(control, now, most):
    """How many copies that begin now, one behind the other, will be over when the next step may ask for the link.

    Where no copy ever would be, or the step is late, one begins all the same.
    """
    pause, fill = control[Control.PAUSE_NS + control[Control.MISSED]], control[Control.FILL_NS]
    since = now - control[Control.FREE_NS]
    if since + fill <= pause:
        return min(most, MOST_AT_ONCE, (pause - since) // max(1, fill))
    return 1 if fill + MARGIN_NS > pause or since > 2 * pause else 0


@compiled(counted=False)
def _tend_copies(wire, geometry, tables, shards, slots):
    """Begin the next copies when those before have landed; the stream itself says so."""
    done, begun = wire.control[Control.FILLS_DONE], wire.control[Control.FILL_COUNT]
    if u32_at(wire.places[Place.FILL_FLAG]) != begun & 0xFFFFFFFF:
        return False
    num = wire.control[Control.NUM_FILLS]
    if done == num:
        for k in range(num):
            add_update(wire.places[Place.PENDING], k, shards[k], slots[k], _next_list(wire))
        _post(wire, num, Stage.VALIDATING)
        return True
    size = fits_in_pause(wire.control, mono_ns(), num - done)
    if size == 0:
        return False
    wire.control[Control.FILLS_DONE], wire.control[Control.FILL_COUNT] = done + size, begun + 1
    for k in range(size):
        target, source, nbytes = _copy_of(wire, geometry, tables, shards[done + k], slots[done + k])
        wire.fill_copies[COPY_TO, k], wire.fill_copies[COPY_FROM, k] = target, source
        wire.fill_copies[COPY_NBYTES, k] = nbytes
    post_fills(wire, size)
    return True
