"""What is measured on a GPU for its profile, on a store of random experts of one format.

A probe is a row of the table: it gives fields of the profile, or raises `Skipped` with the reason why it cannot run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from trilane.calibrate import Skipped
from trilane.config import Config
from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cuda_beside import measure_beside, measure_link, measure_together
from trilane.cuda_copies import CopyProbe
from trilane.cuda_probe import Kind, kind_of, measure_kind, rate_fields, step_fields
from trilane.cuda_runner import CudaRunner
from trilane.errors import ProbeError
from trilane.gpu_kernels import pinned_reader
from trilane.gpu_kernels.cuda_device import array_at
from trilane.gpu_kernels.pinned_reader import PieceReading, PinnedReader
from trilane.probes.machine import available_nbytes, largest_cache_nbytes
from trilane.profile import Curve
from trilane.random_store import StepShape, random_store

STORE_NBYTES, QUICK_STORE_NBYTES, MOST_STORE_NBYTES = 256 << 20, 160 << 20, 1 << 30
LEAST_EXPERTS = 24
RESIDENT = 0.5  # part of the experts that have slots: more than the GPU's caches hold, and room for misses
SHAPE = StepShape()
IN_FLIGHT, QUICK_IN_FLIGHT = (1, 2, 4, 8, 16), (1, 4, 8)
QUICK_BLOCKS = (8, 16, 32)


class GpuProbe(NamedTuple):
    """A measurement: fields of the profile from a bench."""

    name: str
    title: str
    measure: Callable[[Bench], dict[str, Any]]


@dataclass
class Bench:
    """A store of random experts of one format on the GPU, and what measures on it."""

    runner: CudaRunner
    format: str
    quick: bool
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def kind(self) -> Kind:
        """The store's one layer."""
        return kind_of(self.runner, 0, [self.format], self.quick)

    @cached_property
    def copies(self) -> CopyProbe:
        """Copies from the store's memory."""
        return self.stack.enter_context(contextlib.closing(CopyProbe(self.runner)))

    @cached_property
    def reader(self) -> PinnedReader:
        """Reads the store's memory in place, an expert at a time."""
        self.need_pinned()
        store, nbytes = self.runner.store, self.kind.nbytes // 16 * 16
        reader = PinnedReader(self.runner.driver, store.arena.address, self.runner.pinned_nbytes, nbytes)
        return self.stack.enter_context(contextlib.closing(reader))

    def need_pinned(self) -> None:
        """Raise Skipped where the store is not pinned."""
        if self.runner.pinned_nbytes < self.runner.store.nbytes:
            raise Skipped(f"its memory could not be pinned: {self.runner.notes().get('pinned', 'no reason is known')}")


# ---------------------------------------------------------------------------------------------- the probes
def _measure_copies(bench: Bench) -> dict[str, Any]:
    bench.need_pinned()
    return bench.copies.curves()


def _measure_link(bench: Bench) -> dict[str, Any]:
    bench.need_pinned()
    found = measure_link(bench.runner, bench.copies)
    if found.width is None and found.generation is None:
        raise Skipped("neither NVML nor the system tells width and generation of this GPU's link")
    known = {"link_width": found.width, "link_generation": found.generation}
    return {name: None if value is None else float(value) for name, value in known.items()}


def _measure_in_place(bench: Bench) -> dict[str, Any]:
    """Reads by pieces in flight and blocks of a piece."""
    _check_reads(bench.reader)
    blocks = QUICK_BLOCKS if bench.quick else pinned_reader.BLOCKS
    rates = {n: bench.reader.by_blocks(n, blocks) for n in (QUICK_IN_FLIGHT if bench.quick else IN_FLIGHT)}
    pieces = tuple(map(float, rates))
    return {
        "zero_copy": Curve(pieces, tuple(max(by.values()) for by in rates.values())),
        "zero_copy_nbytes": float(bench.reader.piece_nbytes),
        "zero_copy_blocks": {str(n): Curve(pieces, tuple(by[n] for by in rates.values())) for n in blocks},
    }


def _check_reads(reader: PinnedReader) -> None:
    """The bytes that the kernel reads are those that the host sees."""
    with contextlib.closing(PieceReading(reader, 2, 4, 1)) as reading:
        reading.run()
        words = [array_at(int(piece), np.uint32, (reader.piece_nbytes // 4,)) for piece in reading.pieces]
        if reading.checksum() != int(np.bitwise_xor.reduce(np.concatenate(words))):
            raise ProbeError("the reading kernel saw other bytes than the host, so its rates are worthless")


def _measure_steps(bench: Bench) -> dict[str, Any]:
    times = measure_kind(bench.runner, bench.kind, streams=True)
    return {**rate_fields(times), **step_fields(times)}


def measure_rates(bench: Bench) -> dict[str, Any]:
    """Rates of the bench's format, as fields of the profile."""
    return rate_fields(measure_kind(bench.runner, bench.kind, streams=False))


def _measure_together(bench: Bench) -> dict[str, Any]:
    bench.need_pinned()
    kind, runner = bench.kind, bench.runner
    rest = kind.layers, kind.counts[-1], kind.nbytes
    pair = measure_beside(runner, bench.copies, *rest)
    return {**pair, **measure_together(runner, bench.copies, bench.reader, *rest)}


BASE_PROBES = (
    GpuProbe("copies", "GPU: copies over the link", _measure_copies),
    GpuProbe("link", "GPU: the link while it copies", _measure_link),
    GpuProbe("in_place", "GPU: reads in place", _measure_in_place),
    GpuProbe("steps", "GPU: whole steps", _measure_steps),
    GpuProbe("together", "GPU: all lanes together", _measure_together),
)


@contextlib.contextmanager
def open_bench(name: str, quick: bool) -> Iterator[Bench]:
    """A store of random experts of a format on the GPU, some of them with slots."""
    store = random_store(replace(SHAPE, format=name, num_experts=_num_experts(name, quick)))
    runner = CudaRunner(store, Config(cache={"fraction": RESIDENT}))
    try:
        bench = Bench(runner, name, quick)
        with bench.stack:
            yield bench
    finally:
        runner.close()


def _num_experts(name: str, quick: bool) -> int:
    """Experts of more bytes than caches hold, of a quarter of the free memory at most."""
    fmt = format_of(name)
    nbytes = ExpertLayout(SHAPE.hidden, SHAPE.intermediate, fmt, fmt, fmt).expert_nbytes
    wanted = max(QUICK_STORE_NBYTES if quick else STORE_NBYTES, 2 * (largest_cache_nbytes() or 0))
    experts = max(LEAST_EXPERTS, min(MOST_STORE_NBYTES, wanted) // nbytes)
    room = available_nbytes() // 4 // nbytes
    if room < LEAST_EXPERTS:
        raise Skipped(f"a quarter of the free memory holds {room} experts of {nbytes} bytes in {name}: free some")
    return min(experts, room)
