"""How fast threads can read host memory: the limit that no kernel beats.

Each thread reads four distant streams at once with 32-byte loads, the pattern that memory serves best, from
private memory in huge pages that is larger than the caches. The rates of the kernels are compared with this
one, measured in the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.arena import Arena, allocate_arena
from trilane.cpu_kernels.rows import ROWS_SIGNATURE
from trilane.cpu_kernels.simd import I32X8, Emitter, V, emitted, i64, vadd, zero
from trilane.errors import ProbeError
from trilane.jit import native
from trilane.probes.machine import available_nbytes, largest_cache_nbytes
from trilane.probes.timing import NUM_WORDS, Case, Timing, scattered, time_cases

LEAST_NBYTES = 512 << 20  # of the memory that is read, if the machine has four times as much to spare
PIECE_NBYTES = 4 << 20  # what one step reads, over all threads
_LINE = 64  # bytes of each of the four streams in a turn of the loop


@dataclass(frozen=True)
class ReadRate:
    """``num_threads`` threads together read ``gb_s`` (1e9 bytes a second)."""

    num_threads: int
    gb_s: float
    timing: Timing


@emitted(I32X8, I32X8, i64)
def _add_line(e: Emitter, total: V, address: V) -> V:
    """Add the 64 bytes at an address, as int32."""
    return total + e.load(I32X8, address) + e.load(I32X8, address + 32)


@emitted(None, i64, I32X8)
def _store_sum(e: Emitter, address: V, total: V) -> None:
    half = total.shuffle(range(4)) + total.shuffle(range(4, 8))
    pair = half.shuffle([0, 1]) + half.shuffle([2, 3])
    e.store(address, pair.lane(0) + pair.lane(1))


def read_kernel() -> int:
    """Address of a function with the row kernels' signature that reads the main plane and does nothing else.

    It reads whole lines of each quarter of the rows and writes one int32 to ``out``, the sum of all that it
    read, so that no load can be left out.
    """
    return int(_compiled_read().address)


@functools.cache
def _compiled_read() -> Any:
    zeros = zero(I32X8)

    @native(ROWS_SIGNATURE)
    def read(w, side, w_stride, side_stride, r0, r1, num_columns, xs, num_x, out, out_stride):
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        begin = w + r0 * w_stride
        quarter = (r1 - r0) * w_stride // 4 // _LINE * _LINE
        for i in range(begin, begin + quarter, _LINE):
            a = _add_line(a, i)
            b = _add_line(b, i + quarter)
            c = _add_line(c, i + 2 * quarter)
            d = _add_line(d, i + 3 * quarter)
        _store_sum(out, vadd(vadd(a, b), vadd(c, d)))

    return read  # kept by the cache: its code lives as long as this object


def probe_arena(*, num_regions: int = 1, least_nbytes: int = LEAST_NBYTES, most_nbytes: int | None = None) -> Arena:
    """Private memory in huge pages: larger than the caches, but at most a quarter of what is free.

    ``num_regions`` shares the quarter among so many arenas; ``most_nbytes`` bounds the size of one.
    """
    wanted = max(least_nbytes, 4 * (largest_cache_nbytes() or 0))
    room = min(available_nbytes() // (4 * num_regions), most_nbytes or wanted)
    return allocate_arena(min(wanted, room) // PIECE_NBYTES * PIECE_NBYTES)


def read_case(arena: Arena, piece_nbytes: int, num_threads: int, sums: NDArray[np.int32]) -> Case:
    """Each step reads one piece of the arena, split evenly over the threads.

    ``sums`` (num_threads int32) receives what the threads read; the first step is checked against NumPy.
    """
    num_steps = arena.nbytes // piece_nbytes
    share = piece_nbytes // num_threads // (4 * _LINE) * (4 * _LINE)  # four whole streams
    calls = np.zeros((num_threads, num_steps, NUM_WORDS), np.int64)
    calls[:, :, 0] = read_kernel()
    calls[:, :, 1] = arena.address + scattered(num_steps) * piece_nbytes
    calls[:, :, 3] = share  # one row a thread
    calls[:, :, 5] = np.arange(num_threads)[:, None]
    calls[:, :, 6] = calls[:, :, 5] + 1
    calls[:, :, 10] = sums.ctypes.data + 4 * np.arange(num_threads)[:, None]

    def verify() -> None:
        begin = int(calls[0, 0, 1]) - arena.address
        first = arena.view(begin, share * num_threads).view(np.int32).reshape(num_threads, -1)
        if not np.array_equal(first.sum(axis=1, dtype=np.int64).astype(np.int32), sums):
            raise ProbeError("the read probe's sums are wrong, so its rates are worthless: please report this")

    return Case("read", share * num_threads, calls, verify)


def measure_read(num_threads: Sequence[int], *, arena: Arena | None = None, num_samples: int = 31) -> list[ReadRate]:
    """Read rates of host memory for each number of threads.

    Parameters
    ----------
    num_threads : sequence of int
    arena : Arena, optional
        What to read; by default a new one, filled with a pattern.
    num_samples : int
        For each number of threads.
    """
    if arena is None:
        arena = probe_arena()
        arena.bytes[: arena.nbytes].view(np.int32)[:] = 0x01020304  # pages that nobody wrote are all one page
    return [_read_rate(arena, n, num_samples) for n in num_threads]


def _read_rate(arena: Arena, num_threads: int, num_samples: int) -> ReadRate:
    sums = np.zeros(num_threads, np.int32)
    (timing,) = time_cases([read_case(arena, PIECE_NBYTES, num_threads, sums)], num_samples=num_samples)
    return ReadRate(num_threads, timing.gb_s, timing)
