"""Work descriptions for compiled code: int64 words in memory, read and written by address.

Compiled threads get one address and find everything from there; a NumPy int64 array is the Python side of
such a block. The word numbers of every block are here, so that who fills a block and who reads it agree.
The file knows names and numbers only.
"""

from __future__ import annotations

from enum import IntEnum

from llvmlite import ir
from numba.core import cgutils

from trilane.cpu_kernels.emit import Emitter, V, emitted, f32, i32, i64

_FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), ir.IntType(32)


class Layer(IntEnum):
    """What all shards of a layer share."""

    GATE_ROWS = 0  # addresses of row kernels; GATE_ROWS is 0 where there is no gate
    UP_ROWS = 1
    DOWN_ROWS = 2
    HIDDEN = 3
    GATE_STRIDE = 4  # bytes from row to row, main and side plane
    GATE_SIDE_STRIDE = 5
    UP_STRIDE = 6
    UP_SIDE_STRIDE = 7
    GATE_KIND = 8
    ALPHA = 9  # bits of a float32
    LIMIT = 10
    DOWN_INT8 = 11  # 1: the down projection takes int8 records, 0: float32 ones
    SIZE = 16


class Shard(IntEnum):
    """One shard with its rows: where its weights, inputs, scratch and outputs are."""

    GATE = 0  # addresses of the planes in whichever memory serves this shard
    GATE_SIDE = 1
    UP = 2
    UP_SIDE = 3
    DOWN = 4
    DOWN_SIDE = 5
    GATE_BIAS = 6  # 0: none
    UP_BIAS = 7
    NEURONS = 8
    DOWN_STRIDE = 9
    DOWN_SIDE_STRIDE = 10
    NUM_ROWS = 11  # activation rows
    GATE_INPUTS = 12  # address of int64[NUM_ROWS]: records of the rows
    UP_INPUTS = 13
    PRODUCTS = 14  # scratch float32[NUM_ROWS, 2, NEURONS]: gate and up products
    RECORDS = 15  # scratch: down records of the rows
    DOWN_INPUTS = 16  # address of int64[NUM_ROWS]: filled with the addresses of the records
    BAD = 17  # address of int64[NUM_ROWS]: 1 where a hidden value is not finite
    OUT = 18  # float32: row i at OUT + 4 * i * OUT_STRIDE
    OUT_STRIDE = 19
    NBYTES = 20
    # What changes while the shard is computed, apart from what everybody reads (cores fetch 128 bytes at a time).
    PROGRESS = 32  # gate/up chunks done; one more once the records are there
    SLEEPERS = 33  # threads that sleep until one of the two moves on
    LANDED = 34  # 1 once the bytes may be read
    SIZE = 48


class TeamJob(IntEnum):
    """The CPU lane's job: gate/up chunks of all shards first, then down chunks."""

    LAYER = 0
    SHARDS = 1  # address of the first Shard block
    NUM_SHARDS = 2
    UP_CHUNKS = 3  # chunks of neurons per shard
    DOWN_CHUNKS = 4  # chunks of output rows per shard
    ABORT = 5  # not 0: give up waiting
    DUE_NS = 6  # a played lane is not finished before this time
    POSTED_NS = 7
    DONE = 16  # tasks finished, of a played lane; in lines of its own, since each task writes it
    END_NS = 17  # when the last task finished
    SIZE = 32


class DeviceJob(IntEnum):
    """The device thread's job: resident shards, then streamed ones as they land."""

    LAYER = 0
    SHARDS = 1
    NUM_HITS = 2
    NUM_STREAMED = 3
    HIT_PS = 4  # played picoseconds a byte, 0: not played
    ABORT = 5
    HITS_END_NS = 6
    END_NS = 7
    START_NS = 8
    POSTED_NS = 9  # played times count from here; 0: from when the thread begins
    SIZE = 16


class LinkJob(IntEnum):
    """The link thread's job: pieces in order."""

    LAYER = 0
    PIECES = 1
    NUM_PIECES = 2
    URGENT = 3  # background pieces stop when this word is not 0; demand jobs ignore it
    BACKGROUND = 4
    START_NS = 5
    END_NS = 6
    ABORT = 7
    POSTED_NS = 8  # played times count from here; 0: from when the thread begins
    SIZE = 16


class Piece(IntEnum):
    """One shard over the link: a copy (DESTINATION, LANDED) or a computation in place (SHARD)."""

    SOURCE = 0
    DESTINATION = 1  # 0: read in place without filling a slot
    NBYTES = 2
    SHARD = 3  # address of a Shard block to compute in place, 0: copy only
    LANDED = 4  # address of the word to set
    PLAYED_NS = 5  # how long this piece takes at the played rate, 0: as long as it takes
    SIZE = 8


class Publish(IntEnum):
    """Hidden rows to activation records."""

    INPUT = 0
    INPUT_STRIDE = 1  # bytes from row to row
    ELEMENT = 2  # activation.HIDDEN_F32, HIDDEN_F16 or HIDDEN_BF16
    HIDDEN = 3
    FLOATS = 4  # float32 records of the rows
    FLOATS_STRIDE = 5
    INT8 = 6  # int8 records of the rows, 0: not wanted
    INT8_STRIDE = 7
    BAD = 8  # address of int64[rows]: 1 where an element is not finite
    ROWS_PER_TASK = 9
    NUM_ROWS = 10
    SIZE = 16


class Combine(IntEnum):
    """Shard outputs to one hidden row per token."""

    PARTS = 0  # float32[positions, NUM_SHARDS, HIDDEN]
    NUM_SHARDS = 1
    HIDDEN = 2
    TOP_K = 3
    IDS = 4  # address of int64[tokens * TOP_K]
    POSITION = 5  # address of int32[tokens * TOP_K], -1: skipped
    WEIGHTS = 6  # address of float32[tokens * TOP_K]
    DOWN_BIAS = 7  # address of expert 0's, 0: none
    DOWN_BIAS_STRIDE = 8  # bytes to the next expert's
    BAD = 9  # address of int64[tokens]
    OUT = 10
    OUT_STRIDE = 11  # bytes from token to token
    ELEMENT = 12
    ROWS_PER_TASK = 13
    NUM_ROWS = 14
    SIZE = 16


@emitted(i64, i64, i64)
def word(e: Emitter, block: V, index: V) -> V:
    """Word ``index`` of the block at an address."""
    return e.load(i64, block + index * 8)


@emitted(None, i64, i64, i64)
def set_word(e: Emitter, block: V, index: V, value: V) -> None:
    e.store(block + index * 8, value)


@emitted(f32, i64)
def float_of_bits(e: Emitter, bits: V) -> V:
    """The float32 whose bits are the low 32 of an int64."""
    low = e.builder.trunc(bits.ir, _INT)
    return V(e, e.builder.bitcast(low, _FLOAT))


@emitted(f32, i64)
def load_f32(e: Emitter, address: V) -> V:
    return e.load(f32, address)


@emitted(None, i64, f32)
def store_f32(e: Emitter, address: V, value: V) -> None:
    e.store(address, value)


@emitted(i32, i64)
def load_i32(e: Emitter, address: V) -> V:
    return e.load(i32, address)


@emitted(None, i64, i64, i64)
def copy_bytes(e: Emitter, destination: V, source: V, nbytes: V) -> None:
    """memcpy; the ranges must not overlap."""
    cgutils.raw_memcpy(e.builder, e.pointer(destination, _BYTE), e.pointer(source, _BYTE), nbytes.ir, 1)
