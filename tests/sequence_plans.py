"""What must be true of a plan in a world: each shard served once, by an allowed lane, in slots of its own.

Each look returns a place in `sequence_worlds.WRONGS`, 0 where nothing is wrong.
"""

from __future__ import annotations

from sequence_worlds import (
    EVENTS,
    EVICTED,
    EVICTIONS,
    FILLED,
    IDLE,
    IN_USE,
    LAYER,
    LEFT,
    LEFT_OVER,
    LONG_COPIES,
    NOT_OWNED,
    NOT_SERVED,
    NUM_EXPERTS,
    READ,
    WRITTEN,
    WRONG_BYTES,
    WRONG_COPIES,
    WRONG_HIT,
    WRONG_LANE,
    WRONG_LEFT,
    WRONG_SUMS,
    WRONG_TIME,
    WRONG_VICTIM,
    mix,
)

from trilane.cost import STEP_US, Loads, step_us
from trilane.expert import CPU, HIT, SKIP, STREAM, UNPLACED, ZERO_COPY, decision
from trilane.plan import NUM_COPIES, NUM_EVICTIONS, NUM_FILLS, NUM_MISSING, NUM_RUNS


@decision
def shard_at(world, at):
    """Shard key at an index of the plan."""
    layer, num_shards = world.now[LAYER], world.geometry.num_shards[world.now[LAYER]]
    return int(world.geometry.first_shard[layer] + world.experts[at // num_shards] * num_shards + at % num_shards)


@decision
def num_places(world):
    """Places of the plan: a shard each."""
    return int(world.now[NUM_EXPERTS] * world.geometry.num_shards[world.now[LAYER]])


@decision
def see_slots(world, options, rates, is_wave):
    """Hits are what was resident and is, but for experts that were demoted; then fills, into slots nobody uses."""
    state, work = world.state, world.work
    for at in range(num_places(world)):
        shard, slot = shard_at(world, at), work.slot[at]
        waits = not is_wave or world.lane_before[at] == UNPLACED
        if (work.lane[at] == SKIP) == waits:
            return WRONG_LEFT
        is_there = waits and world.slot_before[shard] >= 0
        if work.lane[at] == HIT and not is_there:
            return WRONG_HIT
        if work.lane[at] != HIT and is_there and (is_wave or not may_be_demoted(world, options, rates, at)):
            return WRONG_HIT
        if work.lane[at] != HIT:
            continue
        if slot != world.slot_before[shard] or work.victim[at] != -1 or world.content[slot] != shard:
            return WRONG_BYTES
        if state.slot_of[shard] != slot:
            return EVICTED
        if world.use[slot] != IDLE:
            return IN_USE
        world.use[slot] = READ
    for at in range(num_places(world)):
        shard, slot = shard_at(world, at), work.slot[at]
        if work.lane[at] == HIT or slot < 0:
            continue
        if world.use[slot] != IDLE or state.slot_of[shard] != slot or world.slot_before[shard] != -1:
            return IN_USE
        owner = world.owner_before[slot]
        if work.victim[at] != owner and not (is_wave and work.victim[at] == -1 and is_done(world, owner)):
            return WRONG_VICTIM
        world.use[slot], world.content[slot] = WRITTEN, shard
    return 0


@decision
def may_be_demoted(world, options, rates, at):
    """Whether lanes share cores, the CPU may serve, and the shard's whole expert was there, is, and takes no slot."""
    num_shards = int(world.geometry.num_shards[world.now[LAYER]])
    first = at - at % num_shards
    for here in range(first, first + num_shards):
        shard = shard_at(world, here)
        if world.work.slot[here] != -1 or world.slot_before[shard] < 0 or world.state.slot_of[shard] < 0:
            return False
        if world.work.lane[here] != CPU and world.work.lane[here] != ZERO_COPY:
            return False
    return rates.num_cores > 0.0 and (options.lanes >> CPU) & 1 == 1


@decision
def is_done(world, shard):
    """Whether an earlier wave of the step has read this shard."""
    for at in range(num_places(world)):
        if shard_at(world, at) == shard:
            return world.work.lane[at] == SKIP
    return False


@decision
def see_lanes(world, options):
    """Misses have lanes that are allowed; what is streamed has a slot, the CPU's has none."""
    work = world.work
    for at in range(num_places(world)):
        lane, slot = int(work.lane[at]), work.slot[at]
        if lane < UNPLACED or lane > CPU or (lane > HIT and (options.lanes >> lane) & 1 == 0):
            return WRONG_LANE
        if lane == STREAM and slot < 0 or (lane < 0 or lane == CPU) and (slot != -1 or work.victim[at] != -1):
            return WRONG_LANE
        if lane == ZERO_COPY and not options.fills and slot != -1 or slot < 0 and work.victim[at] != -1:
            return WRONG_LANE
        if options.lanes != 1 << STREAM and lane == UNPLACED:
            return WRONG_LEFT
    return 0


@decision
def see_copies(world):
    """Copies move neighbouring shards of an expert to neighbouring slots, each streamed shard once."""
    work, geometry, layer = world.work, world.geometry, world.now[LAYER]
    num_shards = geometry.num_shards[layer]
    slot_nbytes = world.state.slot_nbytes[world.state.pool_of[layer]]
    covered = copies = at = 0
    while at < num_places(world):
        run = int(work.run[at])
        if run == 0:
            if work.lane[at] == STREAM:
                return WRONG_COPIES
            at += 1
            continue
        if run < 0 or at % num_shards + run > num_shards:
            return WRONG_COPIES
        for k in range(run):
            if (
                work.lane[at + k] != STREAM
                or work.slot[at + k] != work.slot[at] + k
                or (k > 0 and work.run[at + k] != 0)
            ):
                return WRONG_COPIES
            if k + 1 < run and geometry.shard_nbytes[layer, at % num_shards + k] != slot_nbytes:
                return WRONG_COPIES
        covered, copies, at = covered + run, copies + 1, at + run
    runs = work.counts[NUM_RUNS]
    if covered != work.counts[STREAM] or copies != work.counts[NUM_COPIES] or runs > copies:
        return WRONG_COPIES
    return 0


@decision
def see_sums(world, rates, left):
    """Bytes and counts by lane are those of the shards, all that missed is served once, and the time is their cost."""
    work, sums, counts = world.work, world.sums, world.counts
    sums[:], counts[:] = 0.0, 0
    num_shards = world.geometry.num_shards[world.now[LAYER]]
    missing = waiting = fills = victims = 0
    missed = 0.0
    for at in range(num_places(world)):
        lane, size = int(work.lane[at]), float(world.geometry.shard_nbytes[world.now[LAYER], at % num_shards])
        if lane >= 0:
            counts[lane] += 1
            sums[lane] += size
            sums[4 + lane] += size * world.rows[at // num_shards]
        missing += 1 if lane > HIT or lane == UNPLACED else 0
        missed += size if lane > HIT else 0.0
        waiting += 1 if lane == UNPLACED else 0
        fills += 1 if lane > HIT and work.slot[at] >= 0 else 0
        victims += 1 if work.victim[at] >= 0 else 0
    for lane in range(4):
        if work.counts[lane] != counts[lane] or work.lane_nbytes[lane] != sums[lane]:
            return WRONG_SUMS
        if work.lane_row_nbytes[lane] != sums[4 + lane]:
            return WRONG_SUMS
    if work.counts[NUM_FILLS] != fills or work.counts[NUM_EVICTIONS] != victims or work.counts[NUM_MISSING] != missing:
        return WRONG_SUMS
    if left != waiting:
        return WRONG_LEFT
    if missed != work.lane_nbytes[STREAM] + work.lane_nbytes[ZERO_COPY] + work.lane_nbytes[CPU]:
        return NOT_SERVED
    return see_time(world, rates)


@decision
def see_time(world, rates):
    """The predicted step is what `cost` says of the lanes that were chosen."""
    sums, counts = world.sums, world.counts
    loads = Loads(
        sums[HIT], sums[4 + HIT], float(world.work.counts[NUM_COPIES]), sums[STREAM], sums[4 + STREAM],
        counts[ZERO_COPY], sums[ZERO_COPY], sums[4 + ZERO_COPY], counts[CPU], sums[CPU], sums[4 + CPU],
    )  # fmt: skip
    return 0 if world.work.predicted_us[STEP_US] == step_us(rates, loads) else WRONG_TIME


@decision
def see_held(world, is_wave):
    """The step's experts are held, of a wave those that take part; so nothing takes their slots."""
    num_shards, num = int(world.geometry.num_shards[world.now[LAYER]]), 0
    for i in range(world.now[NUM_EXPERTS]):
        takes_part = not is_wave
        for j in range(num_shards):
            takes_part |= world.work.lane[i * num_shards + j] != SKIP
        num += 1 if takes_part else 0
    return 0 if world.state.num_held[0] == num else EVICTED


@decision
def see_use(world):
    """What a step reads or writes is still its own, fills are under way, and landed shards have their bytes."""
    state = world.state
    for slot in range(world.use.size):
        if (world.use[slot] == FILLED) != (state.filling[slot] != 0):
            return IN_USE
        if (world.use[slot] == READ or world.use[slot] == WRITTEN) and state.owner[slot] != world.content[slot]:
            return EVICTED
        if state.owner[slot] >= 0 and state.filling[slot] == 0 and state.owner[slot] != world.content[slot]:
            return NOT_OWNED
    return 0


@decision
def count_plan(world):
    """What plans were like, so that a test can tell whether sequences come to everything."""
    counts = world.work.counts
    for lane in range(4):
        world.reached[len(EVENTS) + lane] += counts[lane]
    world.reached[EVICTIONS] += counts[NUM_EVICTIONS]
    world.reached[LEFT_OVER] += world.now[LEFT]
    world.reached[LONG_COPIES] += counts[STREAM] - counts[NUM_COPIES]


@decision
def mix_plan(world):
    """All of the last plan into the digest, its times bit for bit."""
    work = world.work
    for at in range(num_places(world)):
        mix(world, work.lane[at] + (work.run[at] << 8))
        mix(world, work.slot[at])
        mix(world, work.victim[at])
    for k in range(10):
        mix(world, work.counts[k])
    for k in range(world.predicted.size):
        mix(world, world.predicted[k])
        mix(world, world.predicted[k] >> 32)
