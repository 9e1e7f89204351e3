"""A CUDA driver without a GPU, for tests: VRAM is host memory, a stream is a queue and a thread that works it off.

Compiled code calls it through the same table of addresses as NVIDIA's. Kernels are the product's own ``.cu`` files
on the processor (cuda_backends). What they would wait for inside a kernel, the stream's thread waits for before it
runs them, since the processor runs one thread block at a time.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time

import numpy as np
from cuda_backends import Shim
from numba import types

from trilane.cpu_kernels.atomics import futex_wait, futex_wake, load_at, store_at
from trilane.cpu_kernels.words import set_word, word
from trilane.gpu_kernels.driver import DriverError, Encoded, launch_words
from trilane.gpu_kernels.driver_calls import LAUNCH_ARGUMENTS, STREAM_ORDER, Call, make_table
from trilane.gpu_kernels.words import HEADER_NBYTES, TYPES
from trilane.jit import compiled, native

COPY, WRITE, LAUNCH, GRAPH, WAIT = range(5)
ENTRIES, ENTRY = 4096, 16  # of a queue; words of an entry
HEAD, TAIL, FIRST = 0, 1, 16  # words: entries put in, entries done, the first entry
NAP_S = 20e-6
MOST_IDLE_NS = 20_000_000  # until a thread that waits for entries looks whether it is to stop


@compiled
def _slot(queue):
    """Where the next entry of a queue goes."""
    return queue + 8 * (FIRST + ENTRY * (load_at(queue + 8 * HEAD) % ENTRIES))


@compiled
def _push(queue, kind, a, b, c):
    entry = _slot(queue)
    set_word(entry, 0, kind)
    set_word(entry, 1, a)
    set_word(entry, 2, b)
    set_word(entry, 3, c)
    store_at(queue + 8 * HEAD, load_at(queue + 8 * HEAD) + 1)
    futex_wake(queue + 8 * HEAD, 1)


@compiled
def _await_entry(queue):
    """Sleep while all entries are done, for a while: naps of all streams would take a core."""
    futex_wait(queue + 8 * HEAD, load_at(queue + 8 * TAIL), MOST_IDLE_NS)


@functools.cache
def calls():
    """The driver functions that compiled code calls, with the signatures of the real ones."""
    words = [types.int64] * 4

    @native(types.int32(*words))
    def set_context(context, a, b, c):
        return 0 if context != 0 else 201

    @native(types.int32(*words))
    def copy(destination, source, nbytes, stream):
        _push(stream, COPY, destination, source, nbytes)
        return 0

    @native(types.int32(*words))
    def write(stream, address, value, flags):
        _push(stream, WRITE, address, value, 0)
        return 0

    @native(types.int32(*[types.int64] * LAUNCH_ARGUMENTS))
    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        _push(stream, LAUNCH, function, parameters, 0)
        return 0

    @native(types.int32(*[types.int64] * 9))
    def batch(destinations, sources, sizes, count, attributes, firsts, num_attributes, failed, stream):
        if word(attributes, 0) != STREAM_ORDER or num_attributes != 1 or word(firsts, 0) != 0:
            return 1
        for k in range(count - 1, -1, -1):  # in no order that anyone relies on
            _push(stream, COPY, word(destinations, k), word(sources, k), word(sizes, k))
        return 0

    @native(types.int32(*words))
    def graph(handle, stream, a, b):
        _push(stream, GRAPH, handle, 0, 0)
        return 0

    return {
        Call.SET_CONTEXT: set_context.address, Call.COPY_TO_DEVICE: copy.address, Call.WRITE_VALUE: write.address,
        Call.LAUNCH_KERNEL: launch.address, Call.LAUNCH_GRAPH: graph.address, Call.COPY_TO_HOST: copy.address,
        Call.COPY_BATCH: batch.address,
    }  # fmt: skip


class Stream:
    """A queue and the thread that works it off."""

    def __init__(self, driver):
        self.words = np.zeros(FIRST + ENTRY * ENTRIES, np.int64)
        self.handle = self.words.ctypes.data
        self.driver, self.stop, self.error = driver, False, None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def idle(self):
        if self.error is not None:
            raise AssertionError("a played stream failed") from self.error
        return self.words[HEAD] == self.words[TAIL]

    def _work(self):
        try:
            while not self.stop:
                if self.words[HEAD] == self.words[TAIL]:
                    _await_entry(self.handle)
                    continue
                at = FIRST + ENTRY * (self.words[TAIL] % ENTRIES)
                self._run(*self.words[at : at + 4].tolist())
                self.words[TAIL] += 1
        except BaseException as error:
            self.error = error

    def _run(self, kind, a, b, c):
        if kind == COPY:
            time.sleep(self.driver.copy_s)
            starts = {base for base, size in self.driver.registered.items() if base < b + c and b < base + size}
            assert len(starts) < 2, "a copy reaches from one registration into the next"
            self.driver.copies.append((a, b, c))
            ctypes.memmove(a, b, c)
        elif kind == WRITE:
            self.driver.writes.append(a)
            ctypes.c_uint32.from_address(a).value = b & 0xFFFFFFFF
        elif kind == LAUNCH:
            self.driver.run_kernel(a)
        elif kind == WAIT:
            earlier = self.driver.streams[a]
            while earlier.words[TAIL] < b and not self.stop:
                time.sleep(NAP_S)
        else:
            for launch in self.driver.graphs[a]:
                self.driver.run_kernel(launch)


def u32(address):
    return ctypes.c_uint32.from_address(int(address)).value


def struct_at(name, address):
    kind = TYPES[name]
    return np.frombuffer((ctypes.c_uint8 * kind.itemsize).from_address(int(address)), kind)[0]


class PlayedDriver:
    """Plays :class:`trilane.gpu_kernels.driver.Driver`.

    Parameters
    ----------
    vram_nbytes : int
        Device memory in all.
    pin_nbytes : int
        Host memory that can be registered.
    copy_s : float
        What each copy takes.

    Attributes
    ----------
    copies, writes : list
        Copies that were made (destination, source, bytes), and addresses that streams wrote a value to.
    """

    multiprocessor_shared_nbytes = Shim.multiprocessor_shared_nbytes

    def __init__(self, vram_nbytes=1 << 40, pin_nbytes=1 << 40, copy_s=0.0):
        self.vram_nbytes, self.pin_nbytes, self.copy_s = vram_nbytes, pin_nbytes, copy_s
        self.table, self.context = make_table(calls()), 1
        self.blocks, self.registered, self.streams = {}, {}, {}
        self.kernels, self.launches, self.graphs = [], {}, {}
        self.kernel_lock = threading.Lock()  # the shim's fibers are one program's
        self.calls, self.copies, self.writes, self.events = {}, [], [], {}

    def make_current(self):
        pass

    def describe(self):
        return "a played GPU"

    name = describe

    def pci_address(self):
        return "0000:00:00.0"  # no GPU is there

    # --------------------------------------------------------------------------------------------- memory
    def used(self):
        return sum(len(block) for kind, block in self.blocks.values() if kind == "device")

    def free_nbytes(self):
        return self.vram_nbytes - self.used()

    def _allocate(self, kind, nbytes):
        raw = np.zeros(nbytes + 256, np.uint8)
        start = -raw.ctypes.data % 256
        address = raw.ctypes.data + start
        self.blocks[address] = kind, raw
        return address

    def allocate(self, nbytes):
        if nbytes > self.free_nbytes():
            raise DriverError("cuMemAlloc_v2: out of memory (CUDA error 2)")
        return self._allocate("device", nbytes)

    def allocate_mapped(self, nbytes):
        return self._allocate("mapped", nbytes)

    def free(self, address):
        assert self.blocks.pop(address)[0] == "device"

    def free_mapped(self, address):
        assert self.blocks.pop(address)[0] == "mapped"

    def register(self, address, nbytes):
        if sum(self.registered.values()) + nbytes > self.pin_nbytes:
            return "out of memory (CUDA error 2)"
        self.registered[address] = nbytes
        return ""

    def unregister(self, address):
        del self.registered[address]

    # -------------------------------------------------------------------------------------------- streams
    def make_stream(self, priority=0):
        stream = Stream(self)
        self.streams[stream.handle] = stream
        return stream.handle

    def destroy_stream(self, stream):
        self.streams[stream].stop = True
        self.streams.pop(stream).thread.join()

    def finished(self, stream):
        return self.streams[stream].idle()

    def synchronize(self):
        for stream in list(self.streams.values()):
            while not stream.idle():
                time.sleep(NAP_S)

    def is_capturing(self, stream):
        return False

    def order_after(self, stream, earlier):
        while not self.finished(earlier):
            time.sleep(NAP_S)

    def make_event(self):
        self.events[len(self.events) + 1] = None
        return len(self.events)

    def record_event(self, event, stream):
        self.events[event] = stream, int(self.streams[stream].words[HEAD])

    def wait_event(self, stream, event):
        if self.events[event] is not None:
            _push(stream, WAIT, *self.events[event], 0)

    def event_done(self, event):
        if self.events[event] is None:
            return True
        stream, count = self.events[event]
        return self.streams[stream].words[TAIL] >= count

    def destroy_event(self, event):
        self.events[event] = None

    def to_device(self, destination, source, nbytes, stream):
        if self._is_pinned(source):
            return _push(stream, COPY, destination, source, nbytes)
        self.synchronize()
        return ctypes.memmove(destination, source, nbytes)

    def _is_pinned(self, address):
        mapped = [(base, len(block)) for base, (kind, block) in self.blocks.items() if kind == "mapped"]
        return any(base <= address < base + size for base, size in [*mapped, *self.registered.items()])

    def to_host(self, destination, source, nbytes, stream):
        self.synchronize()
        ctypes.memmove(destination, source, nbytes)

    # -------------------------------------------------------------------------------------------- kernels
    def load_kernels(self, variant):
        self.kernels.append(Shim(variant))
        return len(self.kernels) - 1

    def encode(self, kernels, launches, early=True):
        rows, held = [], []
        for launch in launches:
            fixed = tuple(np.array(a) if isinstance(a, np.ndarray) else a for a in launch.arguments)
            number = len(self.launches) + 1
            self.launches[number] = self.kernels[kernels], type(launch)(**{**vars(launch), "arguments": fixed})
            rows.append(launch_words(number, launch, 0))
            held.append(fixed)
        return Encoded(np.array(rows, np.int64), held)

    def make_graph(self, encoded):
        self.graphs[len(self.graphs) + 1] = encoded.words[:, 0].tolist()
        return len(self.graphs)

    def destroy_graph(self, graph):
        del self.graphs[graph]

    def close(self, streams=()):
        for stream in streams:
            self.destroy_stream(stream)

    def run_kernel(self, number):
        shim, launch = self.launches[number]
        self.calls[launch.kernel] = self.calls.get(launch.kernel, 0) + 1
        self._await_host(launch)
        with self.kernel_lock:
            shim.launch(launch)

    def _await_host(self, launch):
        """What a kernel waits for inside: the plan, the copies' flags, the CPU lane."""
        if launch.kernel in ("publish", "read_pieces", "pause_cycles"):
            return
        step = launch.arguments[1]
        state = struct_at("State", step["state"])
        if not state["missing"]:
            return
        if launch.kernel == "experts_plan":
            items = int(launch.arguments[4])
            self._await(step, items, state["sequence"])
            for k in range(u32(items + 4)):
                item = struct_at("Item", items + HEADER_NBYTES + TYPES["Item"].itemsize * k)
                if item["flag"]:
                    self._await_copy(step, item)
        elif launch.kernel == "combine":
            self._await(step, step["cpu_flag"], state["sequence"])

    def _await_copy(self, step, item):
        abort = int(step["abort"])
        while u32(item["flag"]) != item["sequence"] and not u32(abort) and u32(abort + 4) != item["sequence"]:
            time.sleep(NAP_S)

    def _await(self, step, address, value):
        while u32(address) != value and not u32(step["abort"]):
            time.sleep(NAP_S)
