"""What a layer-step costs: arithmetic on measured rates, each term one function with its formula.

Units are us and bytes. A term of a lane that has nothing to do is 0, so an unknown rate (infinite us a byte)
never reaches the sum of a step which does not use it. Nothing here knows residency or policy.

The lanes: the device computes what its slots hold (hit) and what was copied there (stream); it may read host
memory in place (zero-copy); stream and zero-copy share one link, so their times add; the CPU computes beside
them. Where lanes share cores (the host device) the step cannot end before all their busy time was served.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trilane.expert import decision
from trilane.records import record

# Places in the array of predicted us; the first four are the lanes' own numbers.
DEVICE_US = 4
BOTH_US = 5
SHARED_US = 6
STEP_US = 7
NUM_TERMS = 8
TERM_NAMES = ("hit", "stream", "zero_copy", "cpu", "device", "both", "shared", "step")


@record
class Rates(NamedTuple):
    """Every constant of the cost model, for one format and shard size of one machine.

    ``row_us_per_byte`` is the price of the arithmetic: us for one row and one byte of weights (so a row-shard
    costs ``row_us_per_byte * shard nbytes``). The ``*_cores`` say how many cores a lane keeps busy while it
    runs: 0 for a GPU, a DMA engine or a played lane, which sleeps. ``num_cores`` is 0 where lanes run side by
    side.
    """

    step_fix_us: float  # publish and combine: every step
    miss_fix_us: float  # plan and hand-over: a step in which anything misses
    hit_fix_us: float
    hit_us_per_byte: float
    hit_row_us_per_byte: float
    stream_fix_us: float  # once, when anything is streamed
    run_fix_us: float  # each copy (a run of neighbouring shards)
    stream_us_per_byte: float
    stream_tail_us: float  # the device computes the last shard after its copy landed
    zero_copy_fix_us: float
    zero_copy_us_per_byte: NDArray[np.float64]  # by shards in flight; the last entry holds beyond
    zero_copy_on_device: bool  # hits and in-place reads run after each other, not side by side
    cpu_fix_us: float
    cpu_us_per_byte: float
    cpu_row_us_per_byte: float
    cpu_shard_us: float  # each shard: a task, and its result on the way to the device
    both_us_per_byte: float  # link and CPU together on the host's memory; 0 if it never limits
    num_cores: float
    hit_cores: float
    link_cores: float
    cpu_cores: float
    hit_slowdown: float  # part of its rate that the device loses while the CPU lane reads the same memory
    link_slowdown: float  # the same of the link
    cpu_slowdown: float  # part of its rate that the CPU lane loses while the link reads the same memory


class Loads(NamedTuple):
    """How much a split gives each lane; ``row_nbytes`` sums rows x bytes over the shards.

    Bytes are floats (exact to 2**53), so that the scan over splits converts nothing.
    """

    hit_nbytes: float
    hit_row_nbytes: float
    stream_runs: float
    stream_nbytes: float
    stream_row_nbytes: float
    zero_copy_shards: int
    zero_copy_nbytes: float
    zero_copy_row_nbytes: float
    cpu_shards: int
    cpu_nbytes: float
    cpu_row_nbytes: float


def make_rates(**us: float | NDArray[np.float64]) -> Rates:
    """Rates from keywords, every unnamed one 0; converts types, so that compiled code sees one signature."""
    unknown = sorted(set(us) - set(Rates._fields))
    if unknown:
        raise ValueError(f"rates {unknown} are unknown: use {', '.join(Rates._fields)}")
    curve = np.atleast_1d(np.array(us.pop("zero_copy_us_per_byte", 0.0), np.float64))
    values = {name: float(us.get(name, 0.0)) for name in Rates._fields}
    on_device = bool(us.get("zero_copy_on_device", False))
    return Rates(**{**values, "zero_copy_us_per_byte": curve, "zero_copy_on_device": on_device})  # type: ignore


@decision(inline=True)
def longer(a, b):
    """The larger of two times (one instruction; compiled `max` also looks for NaN)."""
    return a if a > b else b


@decision(inline=True)
def hits_us(rates, nbytes, row_nbytes):
    """Device time for shards in slots: ``fix + max(bytes, row work)``; 0 without any."""
    if nbytes == 0:
        return 0.0
    return rates.hit_fix_us + longer(nbytes * rates.hit_us_per_byte, row_nbytes * rates.hit_row_us_per_byte)


@decision(inline=True)
def stream_us(rates, num_runs, nbytes):
    """Link time for copies: ``fix + runs * fix of a copy + bytes``; a run of neighbouring shards is one copy."""
    if nbytes == 0:
        return 0.0
    return rates.stream_fix_us + num_runs * rates.run_fix_us + nbytes * rates.stream_us_per_byte


@decision(inline=True)
def zero_copy_us(rates, num_shards, nbytes, row_nbytes):
    """Time for in-place reads: ``fix + max(bytes at the rate of so many in flight, row work)``."""
    if num_shards == 0:
        return 0.0
    curve = rates.zero_copy_us_per_byte
    rate = curve[min(num_shards, curve.size) - 1]
    return rates.zero_copy_fix_us + longer(nbytes * rate, row_nbytes * rates.hit_row_us_per_byte)


@decision(inline=True)
def link_us(rates, stream, zero_copy):
    """Time until all that crossed the link is computed: one link, so the times add; then a copy's tail."""
    return stream + zero_copy + (rates.stream_tail_us if stream > 0.0 else 0.0)


@decision(inline=True)
def cpu_us(rates, num_shards, nbytes, row_nbytes):
    """CPU time: ``fix + shards * overhead + max(bytes, row work)`` for all its threads together."""
    if num_shards == 0:
        return 0.0
    work = longer(nbytes * rates.cpu_us_per_byte, row_nbytes * rates.cpu_row_us_per_byte)
    return rates.cpu_fix_us + num_shards * rates.cpu_shard_us + work


@decision(inline=True)
def both_us(rates, link_nbytes, cpu_nbytes):
    """Host memory's limit where link and CPU read it together: all missed bytes at the joint rate."""
    if link_nbytes == 0 or cpu_nbytes == 0:
        return 0.0
    return (link_nbytes + cpu_nbytes) * rates.both_us_per_byte


@decision(inline=True)
def beside_us(us, slowdown, cpu):
    """What a lane takes beside the CPU lane: ``us`` at its own rate, less of it until the CPU is done.

    ``min(us / (1 - slowdown), us + slowdown * cpu)``: it ends before the CPU does, or after.
    """
    if slowdown == 0.0 or us == 0.0:
        return us
    during, beyond = us / (1.0 - slowdown), us + slowdown * cpu
    return during if during < beyond else beyond


@decision(inline=True)
def device_us(rates, loads, zero_copy):
    """Device time for hits and streamed shards, and for in-place reads where they run after each other."""
    nbytes = loads.hit_nbytes + loads.stream_nbytes
    rows = loads.hit_row_nbytes + loads.stream_row_nbytes
    return hits_us(rates, nbytes, rows) + (zero_copy if rates.zero_copy_on_device else 0.0)


@decision(inline=True)
def shared_us(rates, device, stream, zero_copy, cpu):
    """Where lanes share cores: all busy core-us over the cores; 0 where they do not.

    An in-place read keeps the link's core busy, unless it is the device's work and counted there.
    """
    if rates.num_cores == 0.0:
        return 0.0
    link = stream + (0.0 if rates.zero_copy_on_device else zero_copy)
    busy = _busy_us(device, rates.hit_cores) + _busy_us(link, rates.link_cores) + _busy_us(cpu, rates.cpu_cores)
    return busy / rates.num_cores


@decision(inline=True)
def _busy_us(us, cores):
    return us * cores if cores > 0.0 else 0.0  # an unknown time may be infinite


@decision(inline=True)
def step_us(rates, loads):
    """The layer-step: ``fixed + max(device, link, cpu, both, shared)``, each lane beside those of the same memory."""
    stream = stream_us(rates, loads.stream_runs, loads.stream_nbytes)
    in_place = zero_copy_us(rates, loads.zero_copy_shards, loads.zero_copy_nbytes, loads.zero_copy_row_nbytes)
    cpu = cpu_us(rates, loads.cpu_shards, loads.cpu_nbytes, loads.cpu_row_nbytes)
    device = device_us(rates, loads, in_place)
    link = link_us(rates, stream, in_place)
    ends = longer(beside_us(link, rates.link_slowdown, cpu), beside_us(cpu, rates.cpu_slowdown, link))
    lanes = longer(beside_us(device, rates.hit_slowdown, cpu), ends)
    both = both_us(rates, loads.stream_nbytes + loads.zero_copy_nbytes, loads.cpu_nbytes)
    longest = longer(longer(lanes, both), shared_us(rates, device, stream, in_place, cpu))
    missed = loads.stream_nbytes + loads.zero_copy_nbytes + loads.cpu_nbytes
    return rates.step_fix_us + (rates.miss_fix_us if missed else 0.0) + longest


@decision
def write_terms(rates, loads, terms):
    """Write every term of the step into float64[8] by ``TERM_NAMES``; the step is `step_us` itself."""
    stream = stream_us(rates, loads.stream_runs, loads.stream_nbytes)
    in_place = zero_copy_us(rates, loads.zero_copy_shards, loads.zero_copy_nbytes, loads.zero_copy_row_nbytes)
    cpu = cpu_us(rates, loads.cpu_shards, loads.cpu_nbytes, loads.cpu_row_nbytes)
    terms[0] = hits_us(rates, loads.hit_nbytes, loads.hit_row_nbytes)
    terms[1] = stream
    terms[2] = in_place
    terms[3] = cpu
    device = device_us(rates, loads, in_place)
    terms[DEVICE_US] = beside_us(device, rates.hit_slowdown, cpu)
    terms[BOTH_US] = both_us(rates, loads.stream_nbytes + loads.zero_copy_nbytes, loads.cpu_nbytes)
    terms[SHARED_US] = shared_us(rates, device, stream, in_place, cpu)
    terms[STEP_US] = step_us(rates, loads)
