"""How fast the link copies weights into slots, by the size of a copy.

On a machine without a GPU the link is a thread of the host device that copies; what is timed is that thread with
its own jobs. A job has many copies of one size, so that what each costs beside its bytes is in the rate and what
the hand-over costs is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.cpu_kernels.arena import Arena
from trilane.cpu_kernels.words import LinkJob, Piece
from trilane.errors import ProbeError
from trilane.probes.lane_jobs import Lanes, lanes_call
from trilane.probes.timing import NUM_WORDS, Case, scattered, time_cases

JOB_NBYTES = 8 << 20  # of the copies of one job together
SAMPLE_US = 1000.0


@dataclass(frozen=True)
class CopyRates:
    """Copies of ``nbytes[i]`` each move ``gb_s[i]`` (1e9 bytes a second)."""

    nbytes: tuple[int, ...]
    gb_s: tuple[float, ...]


def measure_copies(
    lanes: Lanes, source: Arena, slots: Arena, sizes: Sequence[int], *, num_samples: int = 15
) -> CopyRates:
    """Rates of the link's copies from ``source`` into ``slots``; sizes are bytes, up to those of ``slots``."""
    cases = [_copy_case(lanes, source, slots, size) for size in sizes]
    timings = time_cases(cases, num_samples=num_samples, sample_us=SAMPLE_US)
    return CopyRates(tuple(sizes), tuple(timing.gb_s for timing in timings))


def _copy_case(lanes: Lanes, source: Arena, slots: Arena, nbytes: int) -> Case:
    """Each step copies about ``JOB_NBYTES`` in pieces of ``nbytes``."""
    per_step = max(1, min(JOB_NBYTES, slots.nbytes) // nbytes)
    num_steps = max(1, source.nbytes // (per_step * nbytes))
    pieces = np.zeros((num_steps, per_step, Piece.SIZE), np.int64)
    where = scattered(num_steps * per_step).reshape(num_steps, per_step)
    landed = np.zeros(1, np.int64)
    pieces[:, :, Piece.SOURCE] = source.address + where * nbytes
    slot = np.arange(num_steps * per_step).reshape(num_steps, per_step) % (slots.nbytes // nbytes)
    pieces[:, :, Piece.DESTINATION] = slots.address + slot * nbytes
    pieces[:, :, Piece.NBYTES], pieces[:, :, Piece.LANDED] = nbytes, landed.ctypes.data
    jobs = np.zeros((num_steps, LinkJob.SIZE), np.int64)
    jobs[:, LinkJob.PIECES] = pieces.ctypes.data + pieces.strides[0] * np.arange(num_steps)
    jobs[:, LinkJob.NUM_PIECES] = per_step
    calls = np.zeros((1, num_steps, NUM_WORDS), np.int64)
    calls[:, :, 0], calls[:, :, 1] = lanes_call().address, lanes.control.ctypes.data
    calls[:, :, 4] = jobs.ctypes.data + jobs.strides[0] * np.arange(num_steps)

    def verify() -> None:
        for piece in pieces[0]:
            begin, to = piece[Piece.SOURCE] - source.address, piece[Piece.DESTINATION] - slots.address
            if not np.array_equal(source.view(int(begin), nbytes), slots.view(int(to), nbytes)):
                raise ProbeError("the link copied other bytes, so its rates are worthless: please report this")

    held = (jobs, pieces, landed)
    return Case(f"copy {nbytes}", per_step * nbytes, calls, verify, waits=True, held=held)
