"""How fast the product's row kernels read expert weights, by format, shape and number of threads.

Each step multiplies one matrix with one activation: the rows of a whole expert, or of a shard of 256 neurons.
Matrices lie one after the other in memory that is larger than the caches and are visited in scattered order,
so that each byte comes from memory, as at decode. In the same rounds, threads read the same memory and do no
more (the limit), and where ggml can be found, its dot product does the same work. Rates count the bytes that
weights have in their source format. The result of each kernel is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.activation import copy_row_f32, quantize_row, row_nbytes
from trilane.cpu_kernels.arena import Arena
from trilane.cpu_kernels.formats import FORMATS, Format, align_up, format_of
from trilane.cpu_kernels.isa import best_isa
from trilane.cpu_kernels.kernels import rows_kernel
from trilane.errors import ProbeError
from trilane.probes.ggml import Ggml, ggml_rows_kernel
from trilane.probes.host_memory import probe_arena, read_case
from trilane.probes.timing import NUM_WORDS, Case, Timing, scattered, time_cases

#: (rows, columns) of gate or up, then of down: of a whole expert with 2048 hidden and 768 intermediate
#: neurons, then of one of its shards.
SHAPES = ((768, 2048), (2048, 768), (256, 2048), (2048, 256))
_NUM_DISTINCT = 32  # different rows in a matrix
_TOLERANCE = 0.03  # of |w| |x|: eight-bit activations, and room for ggml's other order


@dataclass(frozen=True)
class ExpertRate:
    """What ``num_threads`` threads reach together.

    Attributes
    ----------
    format, isa : str
    shape : tuple of int
        Rows and columns of the matrix.
    num_threads : int
    gb_s, limit_gb_s : float
        Of the row kernel, and of reading alone in the same rounds; 1e9 bytes a second.
    ggml_gb_s : float or None
        Of ggml's dot product; None where there is none to compare with.
    disturbed : bool
        The machine was so busy that the figures are estimates.
    """

    format: str
    isa: str
    shape: tuple[int, int]
    num_threads: int
    gb_s: float
    limit_gb_s: float
    ggml_gb_s: float | None
    disturbed: bool

    @property
    def ratio(self) -> float:
        """Part of the read limit that is reached."""
        return self.gb_s / self.limit_gb_s


@dataclass(frozen=True)
class _Matrices:
    """One matrix, repeated over an arena: main plane at 0 of each piece, side plane at ``side``."""

    arena: Arena
    piece_nbytes: int
    side: int
    main_stride: int
    side_stride: int


def measure_cpu_experts(
    formats: Sequence[str] = tuple(FORMATS),
    num_threads: Sequence[int] = (1,),
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    isa: str | None = None,
    ggml: Ggml | None = None,
    arenas: tuple[Arena, Arena] | None = None,
    num_samples: int = 31,
) -> Iterator[ExpertRate]:
    """Measure, format by format, shape by shape; yields each rate as it is known.

    Parameters
    ----------
    formats : sequence of str
        Names of the format table.
    num_threads : sequence of int
        Each at most the number of CPUs that this process may use.
    shapes : sequence of (rows, columns)
        A shape that a format cannot store is left out for it.
    isa : str, optional
        Instruction set of the kernels; the best one by default.
    ggml : Ggml, optional
        What to compare with.
    arenas : pair of Arena, optional
        Memory to use, for our weights and for ggml's.
    num_samples : int
        Of each case; the median counts.
    """
    isa = isa or best_isa()
    ours, theirs = arenas or (probe_arena(num_regions=2), probe_arena(num_regions=2))
    for fmt in map(format_of, formats):
        for rows, columns in shapes:
            if columns % fmt.column_multiple == 0:
                bench = _Bench(fmt, rows, columns, isa, ours)
                if ggml is not None and ggml.dot(fmt.name):
                    bench.add_ggml(ggml, theirs)
                yield from (bench.rate(n, num_samples) for n in num_threads)


class _Bench:
    """One format and shape: the weights in memory, the activation, and the cases made of them."""

    def __init__(self, fmt: Format, rows: int, columns: int, isa: str, arena: Arena) -> None:
        self.fmt, self.rows, self.columns, self.isa = fmt, rows, columns, isa
        self.nbytes = rows * fmt.row_source_nbytes(columns)
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal(columns).astype(np.float32)
        weights = rng.standard_normal((min(rows, _NUM_DISTINCT), columns)).astype(np.float32)
        blocks = fmt.quantize(weights.reshape(-1, fmt.block_size))
        self.source = np.resize(blocks.reshape(len(weights), -1), (rows, fmt.row_source_nbytes(columns)))
        self.matrices = _fill_planes(arena, fmt, self.source, columns)
        self.record = _record(fmt, self.x)
        self.ggml: Ggml | None = None

    def add_ggml(self, ggml: Ggml, arena: Arena) -> None:
        """Compare with ggml on the same weights (in its own layout, which may be the same bytes)."""
        self.ggml, self.ggml_record = ggml, ggml.activation(self.fmt.name, self.x)
        same = self.fmt.side_nbytes == 0 and self.matrices.main_stride == self.source.shape[1]
        self.ggml_matrices = self.matrices if same else _fill_source(arena, self.source)

    def rate(self, num_threads: int, num_samples: int) -> ExpertRate:
        sums, outs = np.zeros(num_threads, np.int32), np.full((2, self.rows), np.nan, np.float32)
        limit = read_case(self.matrices.arena, self.matrices.piece_nbytes, num_threads, sums)
        kernel = rows_kernel(self.fmt.name, self.isa)
        cases = [limit, self._case(kernel, self.matrices, self.record, num_threads, outs[0])]
        if self.ggml is not None:
            dot = (ggml_rows_kernel(), self.ggml_matrices, self.ggml_record, num_threads, outs[1])
            cases.append(self._case(*dot, side=self.ggml.dot(self.fmt.name)))
        return self._result(num_threads, time_cases(cases, num_samples=num_samples))

    def _result(self, num_threads: int, timings: Sequence[Timing]) -> ExpertRate:
        limit, kernel, *rest = timings
        return ExpertRate(
            format=self.fmt.name,
            isa=self.isa,
            shape=(self.rows, self.columns),
            num_threads=num_threads,
            gb_s=kernel.gb_s,
            limit_gb_s=limit.gb_s,
            ggml_gb_s=rest[0].gb_s if rest else None,
            disturbed=any(timing.disturbed for timing in timings),
        )

    def _case(
        self,
        kernel: int,
        matrices: _Matrices,
        record: NDArray[np.uint8],
        num_threads: int,
        out: NDArray[np.float32],
        *,
        side: int | None = None,
    ) -> Case:
        """Calls that give each thread its rows (in fours) of the matrix of each step."""
        num_steps = matrices.arena.nbytes // matrices.piece_nbytes
        main = matrices.arena.address + scattered(num_steps) * matrices.piece_nbytes
        ends = np.arange(num_threads + 1) * (self.rows // 4) // num_threads * 4
        ends[-1] = self.rows
        xs = np.array([record.ctypes.data], np.int64)
        calls = np.zeros((num_threads, num_steps, NUM_WORDS), np.int64)
        calls[:, :, 0] = kernel
        calls[:, :, 1] = main
        calls[:, :, 2] = main + matrices.side if side is None else side
        calls[:, :, 3:5] = matrices.main_stride, matrices.side_stride
        calls[:, :, 5], calls[:, :, 6] = ends[:-1, None], ends[1:, None]
        calls[:, :, 7:] = self.columns, xs.ctypes.data, 1, out.ctypes.data, self.rows

        def verify() -> None:
            assert xs.size  # the calls hold its address
            self._check(out)

        return Case("rows", self.nbytes, calls, verify)

    def _check(self, out: NDArray[np.float32]) -> None:
        weights = self.fmt.dequantize_rows(self.source[:_NUM_DISTINCT])
        expected = np.resize(weights @ self.x, self.rows)
        allowed = _TOLERANCE * np.linalg.norm(weights, axis=1).max() * np.linalg.norm(self.x)
        if not np.all(np.abs(out - expected) <= allowed):
            raise ProbeError(
                f"a {self.fmt.name} kernel ({self.isa}, {self.rows}x{self.columns}) gave a wrong product: "
                "its speed would be worthless; please report this with the output of 'trilane bench cpu'"
            )


def _record(fmt: Format, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The activation as the row kernels read it, at a multiple of 64 bytes."""
    room = np.zeros(row_nbytes(fmt.activation, len(x)) + 64, np.uint8)
    record = room[-room.ctypes.data % 64 :]
    write = quantize_row if fmt.activation == "int8" else copy_row_f32
    write(int(x.ctypes.data), len(x), int(record.ctypes.data))
    return record


def _fill_planes(arena: Arena, fmt: Format, source: NDArray[np.uint8], columns: int) -> _Matrices:
    """Repeat the matrix, split into planes, over the arena."""
    main, side = fmt.split(source)
    stride = fmt.main_stride(columns)
    padded = np.zeros((len(main), stride), np.uint8)
    padded[:, : main.shape[1]] = main
    piece_nbytes = _repeat(arena, np.concatenate([padded.reshape(-1), side.reshape(-1)]))
    return _Matrices(arena, piece_nbytes, padded.nbytes, stride, side.shape[1])


def _fill_source(arena: Arena, source: NDArray[np.uint8]) -> _Matrices:
    return _Matrices(arena, _repeat(arena, source.reshape(-1)), 0, source.shape[1], 0)


def _repeat(arena: Arena, piece: NDArray[Any]) -> int:
    """Write copies of ``piece`` one after the other; the bytes from one to the next."""
    piece_nbytes = align_up(piece.nbytes, 64)
    whole = arena.view(0, arena.nbytes // piece_nbytes * piece_nbytes).reshape(-1, piece_nbytes)
    whole[:, : piece.nbytes] = piece
    return piece_nbytes
