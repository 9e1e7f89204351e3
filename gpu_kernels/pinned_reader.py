"""How fast a kernel that does nothing else reads pinned host memory: the limit of experts that are read in place.

Method: pieces of an expert's size, each read by some blocks, four loads of 16 bytes a thread in flight; graphs of
launches that read other pieces each time, timed by the GPU's events. The bytes that were read are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trilane.gpu_kernels.build import READER
from trilane.gpu_kernels.driver import Driver, put_graph
from trilane.gpu_kernels.events import events_of
from trilane.gpu_kernels.launch import Launch

THREADS = 256
LAUNCHES, SAMPLES = 12, 5
BLOCKS = (4, 8, 16, 32, 64)  # of a piece


class PinnedReader:
    """Reads pieces of a pinned region on a GPU.

    Parameters
    ----------
    driver : Driver
    address, nbytes : int
        Pinned host memory that the GPU sees at the same address.
    piece_nbytes : int
        A multiple of 16, at most ``nbytes``.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int, piece_nbytes: int) -> None:
        self.driver, self.address, self.piece_nbytes = driver, address, piece_nbytes
        self._order, self._next = np.random.default_rng(0).permutation(nbytes // piece_nbytes), 0
        self.kernels, self.stream = driver.load_kernels(READER), driver.make_stream()

    def gb_s(self, in_flight: int) -> float:
        """GB/s with so many pieces in flight, at the best number of blocks."""
        return max(self.by_blocks(in_flight).values())

    def by_blocks(self, in_flight: int, blocks: Sequence[int] | None = None) -> dict[int, float]:
        """GB/s with so many pieces in flight, by blocks of a piece; the median of some samples."""
        return {n: self._gb_s(in_flight, n) for n in blocks or BLOCKS}

    def _gb_s(self, in_flight: int, blocks: int) -> float:
        reading = PieceReading(self, in_flight, blocks, LAUNCHES)
        try:
            us = [reading.run() for _ in range(SAMPLES + 1)][1:]
        finally:
            reading.close()
        return reading.nbytes / float(np.median(us)) / 1e3

    def next_pieces(self, count: int) -> np.ndarray:
        """Addresses of the pieces that come next, scattered, round and round."""
        pieces = self._order[(self._next + np.arange(count)) % len(self._order)]
        self._next += count
        return (self.address + pieces * self.piece_nbytes).astype(np.uint64)

    def close(self) -> None:
        """Give the stream back; the kernel goes with the driver."""
        self.driver.destroy_stream(self.stream)


class PieceReading:
    """A graph of launches that read ``in_flight`` pieces each, with so many blocks a piece.

    Attributes
    ----------
    nbytes : int
        Read by one run.
    """

    def __init__(self, reader: PinnedReader, in_flight: int, blocks: int, launches: int) -> None:
        self.reader, self.driver, self.in_flight, self.threads = reader, reader.driver, in_flight, THREADS
        self.pieces = reader.next_pieces(launches * in_flight)
        self.nbytes, self._graph = len(self.pieces) * reader.piece_nbytes, 0
        self.table = self.driver.allocate(self.pieces.nbytes)
        self.num_sums = in_flight * blocks * THREADS
        self.sums = self.driver.allocate(4 * self.num_sums)
        self.driver.synchronize()  # they are zeroed on another stream
        self.driver.to_device(self.table, self.pieces.ctypes.data, self.pieces.nbytes, reader.stream)
        encoded = self.driver.encode(reader.kernels, [self._launch(k, blocks) for k in range(launches)], early=False)
        self._graph, self._held = self.driver.make_graph(encoded), encoded

    def _launch(self, k: int, blocks: int) -> Launch:
        arguments = (
            np.uint64(self.table + 8 * self.in_flight * k), np.uint64(self.reader.piece_nbytes), np.int32(blocks),
            np.uint64(self.sums),
        )  # fmt: skip
        return Launch("read_pieces", (self.in_flight * blocks, 1), THREADS, 0, arguments)

    def start(self) -> None:
        """Put the graph on the reader's stream."""
        put_graph(self.driver, self._graph, self.reader.stream, "the reading kernel")

    def run(self) -> float:
        """Read all pieces and wait; us by the GPU's clock."""
        events = events_of(self.driver)
        try:
            first = events.record(self.reader.stream)
            self.start()
            last = events.record(self.reader.stream)
            events.wait(last)
            return events.us(first, last)
        finally:
            events.close()

    def checksum(self) -> int:
        """The exclusive or of all 32-bit words that the last launch has read."""
        sums = np.empty(self.num_sums, np.uint32)
        self.driver.to_host(sums.ctypes.data, self.sums, sums.nbytes, self.reader.stream)
        self.driver.synchronize()
        return int(np.bitwise_xor.reduce(sums))

    def close(self) -> None:
        """Give graph and memory back; it must be done."""
        self.driver.synchronize()
        self.driver.destroy_graph(self._graph)
        self.driver.free(self.table)
        self.driver.free(self.sums)
