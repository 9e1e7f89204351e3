"""Hits that the CPU computes after all: where lanes share cores, a step may wait for a device that has too much to do.

All weights lie in host memory, so an expert in slots can take the CPU lane as well; its slots stay as they are. Where
the device has cores of its own nothing is looked at.
"""

from __future__ import annotations

from trilane.cost import Loads, hits_us, longer, step_us
from trilane.expert import CPU, HIT, decision
from trilane.link_order import BLOCKED
from trilane.plan import allows
from trilane.state import INDEX


@decision(inline=True)
def demote_hits(rates, options, geometry, step, work):
    """Take experts that are whole in slots for missing, the last first, as long as the step is surely shorter for it.

    Surely: with all that misses on the CPU it is shorter than any split could make it before. So no step gets longer,
    and none is longer than it needs to be for the sake of a hit that costs more than a miss.
    """
    if rates.num_cores == 0.0 or not allows(options, CPU) or options.by_ratio:
        return
    num_shards = geometry.num_shards[step.layer]
    whole = work.sizes[num_shards]
    count = 0
    nbytes = row_nbytes = 0.0
    for i in range(step.num_experts):
        if work.missing[i] > 0:
            count += work.missing[i]
            nbytes += work.open_nbytes[i]
            row_nbytes += work.open_nbytes[i] * step.rows[i]
    i = step.num_experts - 1
    while i >= 0:
        rows = whole * step.rows[i]
        if work.missing[i] == 0:
            hits, hit_rows = work.hits[0] - whole, work.hits[1] - rows
            loads = Loads(
                hits, hit_rows, 0.0, 0.0, 0.0, 0, 0.0, 0.0, count + num_shards, nbytes + whole, row_nbytes + rows
            )
            if step_us(rates, loads) >= _least_us(rates, work.hits, nbytes):
                return
            _demote(work, i, num_shards)
            work.hits[0], work.hits[1] = hits, hit_rows
            work.num_hits[0] -= num_shards
            count, nbytes, row_nbytes = count + num_shards, nbytes + whole, row_nbytes + rows
        i -= 1


@decision(inline=True)
def _least_us(rates, hits, nbytes):
    """What no split of so many missed bytes is shorter than: the device's time, and all cores' busy time."""
    device = hits_us(rates, hits[0], hits[1])
    busy = _busy(device, rates.hit_cores)
    if nbytes == 0.0:
        return rates.step_fix_us + longer(device, busy / rates.num_cores)
    cpu = longer(rates.cpu_us_per_byte, rates.cpu_row_us_per_byte)  # each byte has a row, at least
    cheapest = min(_busy(rates.stream_us_per_byte, rates.link_cores), _busy(cpu, rates.cpu_cores))
    in_place = rates.hit_cores if rates.zero_copy_on_device else rates.link_cores
    for k in range(rates.zero_copy_us_per_byte.size):
        cheapest = min(cheapest, _busy(rates.zero_copy_us_per_byte[k], in_place))
    shared = (busy + nbytes * cheapest) / rates.num_cores
    return rates.step_fix_us + rates.miss_fix_us + longer(device, shared)


@decision(inline=True)
def _busy(us, cores):
    return us * cores if cores > 0.0 else 0.0  # an unknown time may be infinite


@decision(inline=True)
def _demote(work, i, num_shards):
    """Mark an expert's hits as what misses and may get no slot: it has them."""
    for j in range(num_shards):
        at = (i * num_shards + j) & INDEX
        work.lane[at] = BLOCKED if work.lane[at] == HIT else work.lane[at]
        work.slot[at] = -1
    work.missing[i] = num_shards
    work.open[i] = 0
    work.open_nbytes[i] = work.open_runs[i] = 0.0
