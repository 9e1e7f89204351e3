"""How fast a kernel that does nothing else reads pinned host memory: the curve that reads in place are held against.

Method: pieces of an expert's size, each read by some blocks, four loads of 16 bytes a thread in flight; graphs of
launches that read other pieces each time; the best of several numbers of blocks, by the GPU's events.
"""

from __future__ import annotations

import numpy as np

from trilane.gpu_kernels import nvrtc
from trilane.gpu_kernels.driver import Encoded
from trilane.gpu_kernels.driver_calls import launch_graph
from trilane.gpu_kernels.events import events_of

SOURCE = """
extern "C" __global__ void read_pieces(const unsigned long long *pieces, unsigned long long nbytes, unsigned blocks,
                                       unsigned *sink) {
    const uint4 *from = reinterpret_cast<const uint4 *>(pieces[blockIdx.x / blocks]);
    const unsigned long long count = nbytes / 16, step = 1ull * blocks * blockDim.x;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (unsigned long long i = (blockIdx.x % blocks) * blockDim.x + threadIdx.x; i < count; i += 4 * step) {
        uint4 part[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            part[k] = i + k * step < count ? from[i + k * step] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum.x ^= part[k].x; sum.y ^= part[k].y; sum.z ^= part[k].z; sum.w ^= part[k].w;
        }
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9E3779B9u) sink[0] = sum.x;  // nobody reads it, but the loads are needed
}
"""
THREADS = 256
LAUNCHES, SAMPLES = 12, 5
BLOCKS = (4, 8, 16, 32, 64)  # of a piece


def compile_reader(architecture):
    """The kernel's cubin."""
    return nvrtc.compile_cubin(SOURCE, {}, [f"--gpu-architecture=sm_{architecture}", "--std=c++17"])


class PinnedReader:
    """Reads pieces of a pinned region on a GPU.

    Parameters
    ----------
    driver : CudaDriver
    address, nbytes : int
        Pinned host memory.
    piece_nbytes : int
        A multiple of 16.
    """

    def __init__(self, driver, address, nbytes, piece_nbytes):
        import ctypes

        self.driver, self.address, self.piece_nbytes = driver, address, piece_nbytes
        self.num_pieces, self._next = nbytes // piece_nbytes, 0
        module = driver._out("cuModuleLoadData", ctypes.c_char_p(compile_reader(driver.architecture)))
        self.function = driver._out("cuModuleGetFunction", module, ctypes.c_char_p(b"read_pieces"))
        self.stream = driver.make_stream()

    def gb_s(self, in_flight):
        """GB/s with so many pieces in flight, at the best number of blocks."""
        return max(self._gb_s(in_flight, blocks) for blocks in BLOCKS)

    def _gb_s(self, in_flight, blocks):
        order = (self._next + 7 * np.arange(LAUNCHES * in_flight)) % self.num_pieces
        self._next += 3 * LAUNCHES * in_flight
        pieces = (self.address + order * self.piece_nbytes).astype(np.uint64)
        table, sink = self.driver.allocate(pieces.nbytes), self.driver.allocate(64)
        self.driver.synchronize()  # they are zeroed on another stream
        self.driver.to_device(table, pieces.ctypes.data, pieces.nbytes, self.stream)
        rows, held = [], []
        for k in range(LAUNCHES):
            values = [np.array(table + 8 * in_flight * k, np.uint64), np.array(self.piece_nbytes, np.uint64),
                      np.array(blocks, np.uint32), np.array(sink, np.uint64)]  # fmt: skip
            pointers = np.array([value.ctypes.data for value in values], np.uint64)
            rows.append([self.function, in_flight * blocks, 1, 1, THREADS, 1, 1, 0, 0, int(pointers.ctypes.data), 0, 0])
            held.append((values, pointers))
        graph = self.driver.make_graph(Encoded(np.array(rows, np.int64), held))
        try:
            us = [self._run(graph) for _ in range(SAMPLES + 1)][1:]
        finally:
            self.driver.destroy_graph(graph)
            self.driver.free(table)
            self.driver.free(sink)
        return pieces.size * self.piece_nbytes / float(np.median(us)) / 1e3

    def _run(self, graph):
        events = events_of(self.driver)
        first = events.record(self.stream)
        status = launch_graph(self.driver.table.ctypes.data, graph, self.stream)
        assert status == 0, f"CUDA error {status}"
        last = events.record(self.stream)
        events.wait(last)
        us = events.us(first, last)
        events.close()
        return us
