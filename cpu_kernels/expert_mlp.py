"""One shard of an expert on its rows: gate and up products, activation, down products.

Every lane that a processor serves runs these functions, whole shards or chunks of them, so a shard has the
same bits whoever computes it and however it is cut. Reads each weight row once for all activation rows;
about 2 flops per weight and row.

The blocks that describe a layer and a shard are in words.py. The file knows no lanes and no threads.
"""

from __future__ import annotations

from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES, RECORD_NBYTES
from trilane.cpu_kernels.gate import activate, finish_hidden
from trilane.cpu_kernels.simd import call_rows
from trilane.cpu_kernels.words import Layer, Shard, float_of_bits, set_word, store_f32, word
from trilane.jit import compiled

NAN_BITS = 0x7FC00000


@compiled
def multiply_up(layer, shard, first, last):
    """Gate and up products of neurons ``first`` to ``last`` for all rows, into PRODUCTS."""
    neurons = word(shard, Shard.NEURONS)
    products = word(shard, Shard.PRODUCTS)
    hidden = word(layer, Layer.HIDDEN)
    num_rows = word(shard, Shard.NUM_ROWS)
    gate_rows = word(layer, Layer.GATE_ROWS)
    if gate_rows != 0:
        call_rows(
            gate_rows, word(shard, Shard.GATE), word(shard, Shard.GATE_SIDE), word(layer, Layer.GATE_STRIDE),
            word(layer, Layer.GATE_SIDE_STRIDE), first, last, hidden, word(shard, Shard.GATE_INPUTS), num_rows,
            products, 2 * neurons,
        )  # fmt: skip
    call_rows(
        word(layer, Layer.UP_ROWS), word(shard, Shard.UP), word(shard, Shard.UP_SIDE),
        word(layer, Layer.UP_STRIDE), word(layer, Layer.UP_SIDE_STRIDE), first, last, hidden,
        word(shard, Shard.UP_INPUTS), num_rows, products + 4 * neurons, 2 * neurons,
    )  # fmt: skip


@compiled
def record_nbytes(int8_records):
    """Bytes of the down record of one row of a shard."""
    return RECORD_NBYTES if int8_records else F32_BLOCK_NBYTES


@compiled
def activate_rows(layer, shard):
    """From products to down records, for all rows; rows with a value that is not finite are marked BAD."""
    neurons = word(shard, Shard.NEURONS)
    int8_records = word(layer, Layer.DOWN_INT8)
    alpha, limit = float_of_bits(word(layer, Layer.ALPHA)), float_of_bits(word(layer, Layer.LIMIT))
    for row in range(word(shard, Shard.NUM_ROWS)):
        gate = word(shard, Shard.PRODUCTS) + row * 8 * neurons
        record = word(shard, Shard.RECORDS) + row * record_nbytes(int8_records)
        set_word(word(shard, Shard.DOWN_INPUTS), row, record)
        activate(
            word(layer, Layer.GATE_KIND), alpha, limit, neurons, gate, gate + 4 * neurons,
            word(shard, Shard.GATE_BIAS), word(shard, Shard.UP_BIAS), gate,
        )  # fmt: skip
        set_word(word(shard, Shard.BAD), row, finish_hidden(gate, neurons, record, int8_records))


@compiled
def multiply_down(layer, shard, first, last):
    """Output rows ``first`` to ``last`` of the down product for all rows; BAD rows become NaN."""
    num_rows = word(shard, Shard.NUM_ROWS)
    out, stride = word(shard, Shard.OUT), word(shard, Shard.OUT_STRIDE)
    call_rows(
        word(layer, Layer.DOWN_ROWS), word(shard, Shard.DOWN), word(shard, Shard.DOWN_SIDE),
        word(shard, Shard.DOWN_STRIDE), word(shard, Shard.DOWN_SIDE_STRIDE), first, last,
        word(shard, Shard.NEURONS), word(shard, Shard.DOWN_INPUTS), num_rows, out, stride,
    )  # fmt: skip
    for row in range(num_rows):
        if word(word(shard, Shard.BAD), row) != 0:
            for column in range(first, last):
                store_f32(out + 4 * (row * stride + column), float_of_bits(NAN_BITS))


@compiled
def run_shard(layer, shard):
    """The whole shard, by the calling thread alone."""
    multiply_up(layer, shard, 0, word(shard, Shard.NEURONS))
    activate_rows(layer, shard)
    multiply_down(layer, shard, 0, word(layer, Layer.HIDDEN))
