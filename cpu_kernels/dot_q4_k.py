"""Q4_K rows times int8 activations: 256 weights in 144 bytes, 8 sub-blocks of 32 with a scale and a minimum.

Block: d (f16), dmin (f16), 12 bytes of 6-bit scales and minimums, 128 bytes of nibbles (group g of 32 bytes:
low nibbles = sub-block 2 g, high nibbles = sub-block 2 g + 1). The contract: ``I1 = sum_j sc_j * dot_j`` and
``I2 = sum_j m_j * bsum_j`` exactly in int32, then
``v_b = fma(d_w * d_x, float(I1), -((dmin_w * d_x) * float(I2)))``.

Bytes moved: 144 a block of weights; 512 operations. The headers of four rows are transposed, so that one
instruction decodes all four; what differs between instruction sets is how I1 is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trilane.cpu_kernels.emit import (
    F32X4,
    I8X16,
    I8X32,
    I8X64,
    I16X4,
    I16X8,
    I16X16,
    I16X32,
    I32X4,
    I32X8,
    I32X16,
    Emitter,
    V,
    Vec,
    emitted,
    f32,
)
from trilane.cpu_kernels.rows import BLOCK4_ARGS
from trilane.cpu_kernels.rows import make_rows as make_row_loop

BLOCK_NBYTES = 144
_QUANTS = 16  # offset in a block
_BS32, _D = 256, 304  # offsets in an activation record


def _transpose(rows: Sequence[V]) -> list[V]:
    """Four ``<4 x i32>`` -> the four columns."""
    low = [a.shuffle([0, 4, 1, 5], b) for a, b in (rows[:2], rows[2:])]
    high = [a.shuffle([2, 6, 3, 7], b) for a, b in (rows[:2], rows[2:])]
    return [pair[0].shuffle(lanes, pair[1]) for pair in (low, high) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])]


def _headers(e: Emitter, rows: Sequence[V]) -> tuple[V, V, V, V, V]:
    """d and dmin as f16, scales 0-3, scales 4-7, minimums 0-3, minimums 4-7: lane r belongs to row r."""
    dm, low, mid, high = _transpose([e.load(I32X4, p) for p in rows])
    sc_high = (high & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)
    mn_high = ((high >> 4) & 0x0F0F0F0F) | ((mid >> 2) & 0x30303030)
    return dm, low & 0x3F3F3F3F, sc_high, mid & 0x3F3F3F3F, mn_high


def _min_sums(e: Emitter, mn_low: V, mn_high: V, record: V) -> V:
    """I2 of the four rows."""
    parts = []
    for k, mins in enumerate((mn_low, mn_high)):
        sums = e.load(I16X4, record + (_BS32 + 8 * k)).shuffle(list(range(4)) * 4)
        parts.append(e.madd(mins.view(I8X16).zext(I16X16), sums))
    total = parts[0] + parts[1]
    above = (total.view(Vec("i64", 4)) >> 32).view(I32X8)  # not vphaddd: that takes longer
    return (total + above).shuffle([0, 2, 4, 6])


def _value(e: Emitter, dm: V, i1: V, i2: V, record: V) -> V:
    halves = dm.view(I16X8).shuffle([0, 2, 4, 6, 1, 3, 5, 7])  # d of the four rows, then dmin
    both = e.half_to_float(halves) * e.splat(e.load(f32, record + _D), 8)
    d, dmin = both.shuffle(range(4)), both.shuffle(range(4, 8))
    return e.fma(d, i1.to_float(F32X4), -(dmin * i2.to_float(F32X4)))


# ---- I1 of the four rows, one way per instruction set
_UNPACK = [  # lanes of (u, v): four of each, interleaved, from either half of each 128 bits
    [8 * half + base + at + k for half in (0, 1) for k in range(4) for base in (0, 16)] for at in (0, 4)
]


def _sums_avx2(e: Emitter, rows: Sequence[V], scales: Sequence[V], record: V) -> V:
    """Pair sums are at most 2 * 15 * 127, so words hold four products; a low word beside its high word
    meets the pair of scales (2 g, 2 g + 1)."""
    words = [s.shuffle(list(range(4)) * 2).view(I8X32) for s in scales]
    sums = [e.const(I32X8, 0)] * 4
    for g in range(4):
        x_low, x_high = (e.load(I8X32, record + (64 * g + k)) for k in (0, 32))
        for r, p in enumerate(rows):
            quants = e.load(I8X32, p + (_QUANTS + 32 * g))
            u, v = e.maddubs(quants & 15, x_low), e.maddubs(quants >> 4, x_high)
            at = 4 * r + 2 * (g % 2)
            pair = e.shuffle_bytes(words[g // 2], e.const(I8X32, [at, 128, at + 1, 128] * 8)).view(I16X16)
            sums[r] = sums[r] + e.madd(u.shuffle(_UNPACK[0], v) + u.shuffle(_UNPACK[1], v), pair)
    return e.sum4(sums)


def _sums_avx512(e: Emitter, rows: Sequence[V], scales: Sequence[V], record: V) -> V:
    """Four-product sums are at most 4 * 15 * 127: packed to words, two rows in a vector, they meet their scales
    in one vpdpwssd."""
    sums = [e.const(I32X16, 0)] * 2
    for half in (0, 1):
        words = scales[half].shuffle(list(range(4)) * 4).view(I8X64)
        x = [e.load(I8X32, record + (128 * half + 32 * k)) for k in range(4)]
        xs = x[0].shuffle(range(64), x[2]), x[1].shuffle(range(64), x[3])
        quants = [e.load(I8X64, p + (_QUANTS + 64 * half)) for p in rows]
        for pair in (0, 1):
            for k in (0, 1):
                a, b = (
                    e.dot_bytes(e.const(I32X16, 0), q >> 4 if k else q & 15, xs[k])
                    for q in quants[2 * pair : 2 * pair + 2]
                )
                at = 8 * pair + k
                pick = [[at + g, 128] * 4 + [at + g + 4, 128] * 4 for g in (0, 0, 2, 2)]
                factors = e.shuffle_bytes(words, e.const(I8X64, sum(pick, []))).view(I16X32)
                sums[pair] = e.dot_words(sums[pair], e.pack_words(a, b), factors)
    u, v = sums
    even, odd = ([4 * q + lane for q in range(4) for lane in lanes] for lanes in ((0, 2, 16, 18), (1, 3, 17, 19)))
    return (u.shuffle(even, v) + u.shuffle(odd, v)).fold(4)


def _sums_portable(e: Emitter, rows: Sequence[V], scales: Sequence[V], record: V) -> V:
    """Which four products share a word (4 * 15 * 127) does not matter: halves are added, nothing shuffled."""
    factors = [s.view(I8X16).zext(I16X16) for s in scales]
    sums = [e.const(I32X8, 0)] * 4
    for g in range(4):
        x = [e.load(I8X16, record + (64 * g + 16 * k)).sext(I16X16) for k in range(4)]
        for r, p in enumerate(rows):
            a, b = (e.load(I8X16, p + (_QUANTS + 32 * g + k)) for k in (0, 16))
            low = (a & 15).zext(I16X16) * x[0] + (b & 15).zext(I16X16) * x[1]
            high = (a >> 4).zext(I16X16) * x[2] + (b >> 4).zext(I16X16) * x[3]
            at = 4 * r + 2 * (g % 2)
            pair = factors[g // 2].shuffle([at] * 8 + [at + 1] * 8)
            sums[r] = sums[r] + e.madd(low.fold(8).shuffle(range(16), high.fold(8)), pair)
    return e.sum4(sums)


_SUMS = {"avx2": _sums_avx2, "avx512": _sums_avx512, "portable": _sums_portable}


def _block4(e: Emitter, p0: V, p1: V, p2: V, p3: V, *rest: V) -> V:
    rows, record = (p0, p1, p2, p3), rest[4]
    dm, sc_low, sc_high, mn_low, mn_high = _headers(e, rows)
    sums, scales = _SUMS[e.isa], (sc_low, sc_high)
    if e.isa == "portable":  # the order decides what is kept in registers: each is the faster one
        i1, i2 = sums(e, rows, scales, record), _min_sums(e, mn_low, mn_high, record)
    else:
        i2, i1 = _min_sums(e, mn_low, mn_high, record), sums(e, rows, scales, record)
    return _value(e, dm, i1, i2, record)


def make_rows(isa: str) -> Any:
    """The row kernel of this format for one instruction set; see :mod:`trilane.cpu_kernels.rows`."""
    block4 = emitted(F32X4, *BLOCK4_ARGS, isa=isa)(_block4)
    return make_row_loop(__name__, block4, BLOCK_NBYTES, 0)
