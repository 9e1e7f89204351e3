"""From how many rows on a batch streams its layer once, past the slots, instead of going through decode steps.

Arithmetic on the layer's rates and on who is resident, no constant of a machine. A decode step splits what is missing
over link and processor, but takes few rows at a time; prefill fetches all of it once, over the link alone. The file
knows costs, and neither arrays nor streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from trilane.cost import Rates
from trilane.expert import CPU, STREAM, ZERO_COPY
from trilane.plan import Options


@dataclass(frozen=True)
class Batch:
    """A layer-step as far as its cost matters.

    Attributes
    ----------
    rows, top_k, num_experts : int
    considered : float
        Experts that prefill would look at, all of which are copied where they are missing.
    missing : float
        Part of the layer's bytes that is not resident.
    expert_nbytes : float
    step_rows : int
        Rows that one decode step takes.
    """

    rows: int
    top_k: int
    num_experts: int
    considered: float
    missing: float
    expert_nbytes: float
    step_rows: int


def distinct_experts(rows: int, top_k: int, num_experts: int) -> float:
    """Experts that so many rows are routed to, were all experts equally likely: ``E (1 - (1 - k / E)^rows)``."""
    return num_experts * (1.0 - (1.0 - min(1.0, top_k / num_experts)) ** rows)


def lane_allowed(options: Options, lane: int) -> bool:
    """Whether misses may take a lane."""
    return bool(options.lanes >> lane & 1)


def decode_us(rates: Rates, options: Options, batch: Batch) -> float:
    """Decode steps of ``step_rows`` rows each, one after the other.

    Each is ``fixed + max(missing bytes over link and processor together, row work of the device)``. Where the row work
    was not measured, a row costs as much as reading its bytes once more, since the step's kernels take rows in turn.
    """
    steps = ceil(batch.rows / batch.step_rows)
    rows = batch.rows / steps
    experts = max(1.0, min(batch.considered, distinct_experts(ceil(rows), batch.top_k, batch.num_experts)))
    row_bytes = rows * batch.top_k * batch.expert_nbytes
    in_row = max(1.0, rows * batch.top_k / experts)
    link = min(
        rates.stream_us_per_byte if lane_allowed(options, STREAM) else inf,
        rates.zero_copy_us_per_byte[-1] if lane_allowed(options, ZERO_COPY) else inf,
    )
    cpu = max(rates.cpu_us_per_byte, in_row * rates.cpu_row_us_per_byte) if lane_allowed(options, CPU) else inf
    missing = batch.missing * experts * batch.expert_nbytes
    fetched = missing * _together(link, cpu) if missing else 0.0
    device = row_bytes * (rates.hit_row_us_per_byte or _known(rates.hit_us_per_byte))
    return float(steps * (rates.step_fix_us + rates.miss_fix_us + max(fetched, device)))


def _together(a: float, b: float) -> float:
    """us a byte of two lanes at once."""
    if min(a, b) == 0.0 or max(a, b) == inf:
        return min(a, b)
    return 1.0 / (1.0 / a + 1.0 / b)


def _known(us_per_byte: float) -> float:
    return us_per_byte if us_per_byte < inf else 0.0


def prefill_us(rates: Rates, batch: Batch, submit_us: float = 0.0) -> float:
    """``submission + fixed + max(missing bytes over the link, bytes of the experts on the device) + the last experts``.

    The device reads an expert's weights once for many rows, and does so beside the copies but for the last ones.
    """
    nbytes = batch.considered * batch.missing * batch.expert_nbytes
    copies = rates.stream_fix_us + nbytes * rates.stream_us_per_byte if nbytes else 0.0
    hit = _known(rates.hit_us_per_byte)
    experts = min(batch.considered, distinct_experts(batch.rows, batch.top_k, batch.num_experts))
    device = experts * batch.expert_nbytes * hit
    return float(submit_us + rates.step_fix_us + max(copies, device) + batch.expert_nbytes * hit)


def prefill_is_faster(rates: Rates, options: Options, batch: Batch, submit_us: float = 0.0) -> bool:
    """Whether to stream the layer; never where there is less than a row an expert, or the link may not be used.

    ``submit_us`` is what the host takes to submit a pass.
    """
    if batch.rows * batch.top_k < batch.num_experts or not lane_allowed(options, STREAM):
        return False
    if rates.stream_us_per_byte == inf:  # pageable experts, say, were not measured
        return batch.rows > batch.step_rows
    return prefill_us(rates, batch, submit_us) < decode_us(rates, options, batch)
