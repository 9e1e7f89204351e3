"""Q4_K rows times int8 activations: 256 weights in 144 bytes, 8 sub-blocks of 32 with a scale and a minimum.

Block: d (f16), dmin (f16), 12 bytes of 6-bit scales and minimums, 128 bytes of nibbles (group g of 32 bytes:
low nibbles = sub-block 2 g, high nibbles = sub-block 2 g + 1). The contract: ``I1 = sum_j sc_j * dot_j`` and
``I2 = sum_j m_j * bsum_j`` exactly in int32, then
``v_b = fma(d_w * d_x, float(I1), -((dmin_w * d_x) * float(I2)))``.

144 bytes and 512 operations a block; one core computes this two to three times as fast as its memory delivers.
The headers of four rows are transposed, so that one instruction decodes all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trilane.cpu_kernels.emit import (
    F32X4,
    I8X16,
    I8X32,
    I16X4,
    I16X16,
    I32X4,
    Emitter,
    V,
    emitted,
    f32,
)
from trilane.cpu_kernels.rows import BLOCK4_ARGS
from trilane.cpu_kernels.rows import make_rows as make_row_loop

BLOCK_NBYTES = 144
_BS32, _D = 256, 304  # offsets in an activation record
_INTERLEAVE = [[base + half + k for k in range(4) for base in (0, 16)] for half in (0, 4)]
_UNPACK = [[lane * 8 + i for lane in range(2) for i in half] for half in _INTERLEAVE]


def _transpose(rows: Sequence[V]) -> list[V]:
    """Four ``<4 x i32>`` -> the four columns."""
    low = [a.shuffle([0, 4, 1, 5], b) for a, b in (rows[:2], rows[2:])]
    high = [a.shuffle([2, 6, 3, 7], b) for a, b in (rows[:2], rows[2:])]
    return [pair[0].shuffle(lanes, pair[1]) for pair in (low, high) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])]


def _headers(e: Emitter, rows: Sequence[V]) -> tuple[V, V, V, V, V]:
    """(d and dmin as f16, scales 0-3, scales 4-7, minimums 0-3, minimums 4-7): lane r belongs to row r."""
    dm, low, mid, high = _transpose([e.load(I32X4, p) for p in rows])
    sc_high = (high & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)
    mn_high = ((high >> 4) & 0x0F0F0F0F) | ((mid >> 2) & 0x30303030)
    return dm, low & 0x3F3F3F3F, sc_high, mid & 0x3F3F3F3F, mn_high


def _min_sums(e: Emitter, mn_low: V, mn_high: V, record: V) -> V:
    """I2 of the four rows."""
    total = None
    for k, mins in enumerate((mn_low, mn_high)):
        sums = e.load(I16X4, record + (_BS32 + 8 * k)).shuffle(list(range(4)) * 4)
        part = e.madd(mins.view(I8X16).zext(I16X16), sums)
        total = part if total is None else total + part
    return total.shuffle([0, 2, 4, 6]) + total.shuffle([1, 3, 5, 7])


def _finish(e: Emitter, dm: V, i1: V, i2: V, record: V) -> V:
    d_x = e.splat(e.load(f32, record + _D), 4)
    d = e.half_to_float(dm.trunc(I16X4)) * d_x
    dmin = e.half_to_float((dm >> 16).trunc(I16X4)) * d_x
    return e.fma(d, i1.to_float(F32X4), -(dmin * i2.to_float(F32X4)))


def _products(e: Emitter, quants: V, x_low: V, x_high: V, scales: V) -> V:
    """Scaled sums of 64 products as ``<8 x i32>``: pair sums are at most 2 * 15 * 127, so words hold four."""
    u, v = e.maddubs(quants & 15, x_low), e.maddubs(quants >> 4, x_high)
    return e.madd(u.shuffle(_UNPACK[0], v) + u.shuffle(_UNPACK[1], v), scales)


def _block4(e: Emitter, p0: V, p1: V, p2: V, p3: V, *rest: V) -> V:
    """256-bit vectors: group g of all four rows, then the next group."""
    rows, record = (p0, p1, p2, p3), rest[4]
    dm, sc_low, sc_high, mn_low, mn_high = _headers(e, rows)
    words = [s.shuffle(list(range(4)) * 2).view(I8X32) for s in (sc_low, sc_high)]
    sums: list[Any] = [None] * 4
    for g in range(4):
        x_low, x_high = (e.load(I8X32, record + (64 * g + k)) for k in (0, 32))
        for r, p in enumerate(rows):
            pick = [4 * r + 2 * (g % 2), 128, 4 * r + 2 * (g % 2) + 1, 128] * 8
            scales = e.shuffle_bytes(words[g // 2], e.const(I8X32, pick)).view(I16X16)
            part = _products(e, e.load(I8X32, p + (16 + 32 * g)), x_low, x_high, scales)
            sums[r] = part if sums[r] is None else sums[r] + part
    return _finish(e, dm, e.sum4(sums), _min_sums(e, mn_low, mn_high, record), record)


def make_rows(isa: str) -> Any:
    """The row kernel of this format for one instruction set; see :func:`trilane.cpu_kernels.rows.make_rows`."""
    block4 = emitted(F32X4, *BLOCK4_ARGS, isa=isa)(_block4)
    return make_row_loop(__name__, block4, BLOCK_NBYTES, 0)
