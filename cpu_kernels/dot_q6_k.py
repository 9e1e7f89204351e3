"""Q6_K rows times int8 activations: 256 weights in 208 + 2 bytes, 16 sub-blocks of 16 with a signed scale.

Main plane: ql[128] (low nibbles), qh[64] (bit pairs), scales[16]; side plane: d (f16). Half h of a block (128
weights) has ql[64 h ..] and qh[32 h ..]: byte l of its 32 qh bytes holds the upper bits of weights l, l + 32,
l + 64, l + 96. The contract: ``I = sum_s sc_s * sum (q - 32) * x`` exactly in int32, then
``v_b = (d_w * d_x) * float(I)``. Here the sum over q (0..63) and the 32 are taken apart:
``I = sum_s sc_s * sum q * x - 32 * sum_s sc_s * bsum_s``.

Bytes moved: 210 a block of weights; 512 operations and the unpacking.
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
    I16X16,
    I16X32,
    I32X8,
    I32X16,
    Emitter,
    V,
    emitted,
    f32,
)
from trilane.cpu_kernels.rows import BLOCK4_ARGS
from trilane.cpu_kernels.rows import make_rows as make_row_loop

MAIN_NBYTES, SIDE_NBYTES = 208, 2
_QH, _SCALES = 128, 192  # offsets in a block
_BS16, _D = 272, 304  # offsets in an activation record
_UNPACK = [  # lanes of (u, v): four of each, interleaved, from either half of each 128 bits
    [8 * half + base + at + k for half in (0, 1) for k in range(4) for base in (0, 16)] for at in (0, 4)
]
_EVEN_ODD = [*range(0, 16, 2), *range(1, 16, 2)]


def _quants(e: Emitter, p: V, half: int) -> list[V]:
    """Weights 0-31, 32-63, 64-95, 96-127 of a half as bytes 0..63."""
    q = [e.load(I8X32, p + (64 * half + k)) for k in (0, 32)]
    h = e.load(I8X32, p + (_QH + 32 * half))
    low = [q[0] & 15 | (h << 4) & 0x30, q[1] & 15 | (h << 2) & 0x30]
    return [*low, q[0] >> 4 | h & 0x30, q[1] >> 4 | (h >> 2) & 0x30]


def _sums_avx2(e: Emitter, rows: Sequence[V], record: V) -> list[V]:
    """Words hold four products (4 * 63 * 127); the 128-bit lanes of 32 weights are two sub-blocks, so scales
    are kept as even ones in the lower, odd ones in the upper lane and meet the words in pairs."""
    bsums = e.load(I16X16, record + _BS16).shuffle(_EVEN_ODD)
    scales = [e.load(I8X16, p + _SCALES).shuffle(_EVEN_ODD).sext(I16X16) for p in rows]
    sums = [e.const(I32X8, 0) - (e.madd(s, bsums) << 5) for s in scales]
    for half in (0, 1):
        x = [e.load(I8X32, record + (128 * half + 32 * k)) for k in range(4)]
        for r, p in enumerate(rows):
            words = [e.maddubs(q, x_k) for q, x_k in zip(_quants(e, p, half), x, strict=True)]
            for k in (0, 1):
                u, v = words[2 * k], words[2 * k + 1]
                at = 4 * half + 2 * k
                pair = scales[r].shuffle([at, at + 1] * 4 + [8 + at, 9 + at] * 4)
                sums[r] = sums[r] + e.madd(u.shuffle(_UNPACK[0], v) + u.shuffle(_UNPACK[1], v), pair)
    return sums


def _quants_avx512(e: Emitter, p: V, half: int) -> tuple[V, V]:
    """Weights 0-63 and 64-127 of a half."""
    q = e.load(I8X64, p + 64 * half)
    h = e.load(I8X32, p + (_QH + 32 * half)).shuffle(list(range(32)) * 2).view(I16X32)
    low = (h << [4] * 16 + [2] * 16).view(I8X64) & 0x30
    high = (h >> [0] * 16 + [2] * 16).view(I8X64) & 0x30
    return q & 15 | low, q >> 4 | high


def _sums_avx512(e: Emitter, rows: Sequence[V], record: V) -> list[V]:
    """128-bit lane k of 64 weights is sub-block k: its four-product sums (4 * 63 * 127) fit words."""
    scales = [e.load(I8X16, p + _SCALES).sext(I16X16) for p in rows]
    bsums = e.load(I16X16, record + _BS16)
    corrections = [e.const(I32X8, 0) - (e.madd(s, bsums) << 5) for s in scales]
    sums = [e.const(I32X16, 0)] * 4
    for half in (0, 1):
        x_low, x_high = (e.load(I8X64, record + (128 * half + k)) for k in (0, 64))
        for r, p in enumerate(rows):
            low, high = _quants_avx512(e, p, half)
            zero = e.const(I32X16, 0)
            words = e.pack_words(e.dot_bytes(zero, low, x_low), e.dot_bytes(zero, high, x_high))
            pick = [at + 8 * half for k in range(4) for at in [k] * 4 + [4 + k] * 4]
            sums[r] = e.dot_words(sums[r], words, scales[r].shuffle(pick))
    return [s.fold(8) + c for s, c in zip(sums, corrections, strict=True)]


def _sums_portable(e: Emitter, rows: Sequence[V], record: V) -> list[V]:
    """Which two products share a word (2 * 63 * 127) does not matter: halves are added, nothing shuffled."""
    scales = [e.load(I8X16, p + _SCALES).sext(I16X16) for p in rows]
    bsums = e.load(I16X16, record + _BS16)
    sums = [e.const(I32X8, 0) - (e.madd(s, bsums) << 5) for s in scales]
    for half in (0, 1):
        x = [e.load(I8X16, record + (128 * half + 16 * k)).sext(I16X16) for k in range(8)]
        for r, p in enumerate(rows):
            for k, quants in enumerate(_quants(e, p, half)):
                parts = (quants.shuffle(range(16)), quants.shuffle(range(16, 32)))
                words = [(q.zext(I16X16) * x[2 * k + i]).fold(8) for i, q in enumerate(parts)]
                at = 8 * half + 2 * k
                pair = scales[r].shuffle([at] * 8 + [at + 1] * 8)
                sums[r] = sums[r] + e.madd(words[0].shuffle(range(16), words[1]), pair)
    return sums


_SUMS = {"avx2": _sums_avx2, "avx512": _sums_avx512, "portable": _sums_portable}


def _block4(e: Emitter, *args: V) -> V:
    rows, sides, record = args[:4], args[4:8], args[8]
    total = e.sum4(_SUMS[e.isa](e, rows, record))
    d = e.half_to_float(e.gather(I16X4, sides)) * e.splat(e.load(f32, record + _D), 4)
    return d * total.to_float(F32X4)


def make_rows(isa: str) -> Any:
    """The row kernel of this format for one instruction set; see :mod:`trilane.cpu_kernels.rows`."""
    block4 = emitted(F32X4, *BLOCK4_ARGS, isa=isa)(_block4)
    return make_row_loop(__name__, block4, MAIN_NBYTES, SIDE_NBYTES)
