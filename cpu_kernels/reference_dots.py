"""Block values and sums of the numerics contract in plain NumPy; the text is in :mod:`.reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

BLOCK = 256
TINY = np.float32(2.0**-100)  # blocks whose largest magnitude is below this count as zero

RECORD = np.dtype(  # one 256-block of an int8 activation as the kernels read it
    {
        "names": ["q", "bs32", "bs16", "d", "bad"],
        "formats": [("i1", 256), ("i2", 8), ("i2", 16), "f4", "i4"],
        "offsets": [0, 256, 272, 304, 308],
        "itemsize": 320,
    }
)


class Quantized(NamedTuple):
    """Blocks of rows of activations: ``q`` (rows, nb, 256), ``d`` (rows, nb), ``bad`` (rows, nb)."""

    q: npt.NDArray[np.int8]
    d: Floats
    bad: npt.NDArray[np.bool_]


# ------------------------------------------------------------------------------------------------ arithmetic
def fma(a: Any, b: Any, c: Any) -> Floats:
    """``a * b + c`` of float32 arrays with one rounding.

    The product of two float32 is exact in float64. The sum is not: its error (TwoSum) moves the sum to its
    odd neighbour (round to odd), which makes the second rounding, to float32, the only one that matters.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        away = np.signbit(total) == np.signbit(error)
        return (bits + np.where(inexact, np.where(away, 1, -1), 0)).view(np.float64).astype(np.float32)


def exp(x: Floats) -> Floats:
    """Our exponential, float32: argument clamped to [-87, 88] (NaN counts as -87), error under 1.2 ulp.

    ``n = rint_even(x * 1.44269504)``, ``r = fma(n, -0.693359375, x)``, ``r = fma(n, 2.12194440e-4, r)``,
    Horner with fma in r over the coefficients below, ``p = fma(p, r * r, r)``, ``p = p + 1``, and
    ``p * 2^n`` with 2^n made from its bits. ``r * r`` is rounded to float32.
    """
    x = np.where(x > np.float32(-87), x, np.float32(-87))
    x = np.where(x < np.float32(88), x, np.float32(88))
    n = np.rint(x * np.float32(1.44269504088896341))
    r = fma(n, np.float32(2.12194440e-4), fma(n, np.float32(-0.693359375), x))
    p = np.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, np.float32(c))
    p = fma(p, r * r, r) + np.float32(1)
    return p * ((n.astype(np.int32) + 127) << 23).view(np.float32)


def quantize(x: Floats) -> Quantized:
    """Quantise rows ``x`` (rows, K) in blocks of 256, the last one padded with zeros."""
    blocks = blocks_of(np.asarray(x, np.float32))
    bad = ~np.isfinite(blocks).all(-1)
    blocks = np.where(bad[..., None], np.float32(0), blocks)
    amax = np.abs(blocks).max(-1)
    dead = amax < TINY
    safe = np.where(dead, np.float32(1), amax)
    inv = np.where(dead, np.float32(0), np.float32(127) / safe)
    d = np.where(dead, np.float32(0), amax / np.float32(127))
    return Quantized(np.rint(blocks * inv[..., None]).astype(np.int8), d, bad)


def records(x: Floats) -> npt.NDArray[np.void]:
    """The int8 activation records (rows, nb) of dtype :data:`RECORD`, pad bytes zero."""
    a = quantize(x)
    out = np.zeros(a.d.shape, RECORD)
    out["q"], out["d"], out["bad"] = a.q, a.d, a.bad
    out["bs32"] = a.q.reshape(*a.d.shape, 8, 32).sum(-1, dtype=np.int16)
    out["bs16"] = a.q.reshape(*a.d.shape, 16, 16).sum(-1, dtype=np.int16)
    return out


def tree(p: Floats) -> Floats:
    """Sum over a last axis of 8 (or 32): each half onto the other, halving until one is left."""
    with np.errstate(all="ignore"):
        while p.shape[-1] > 1:
            half = p.shape[-1] // 2
            p = p[..., :half] + p[..., half:]
        return p[..., 0]


def sum_blocks(v: Floats) -> Floats:
    """Sum ``v`` (..., nb) in the order of a row: 8 accumulators from +0, then the tree."""
    acc = np.zeros((*v.shape[:-1], 8), np.float32)
    with np.errstate(all="ignore"):
        for b in range(v.shape[-1]):
            acc[..., b % 8] += v[..., b]
    return tree(acc)


def blocks_of(x: npt.NDArray[Any], block: int = BLOCK) -> npt.NDArray[Any]:
    """(rows, K) -> (rows, ceil(K / block), block), padded with zeros."""
    rows, k = x.shape
    out = np.zeros((rows, -(-k // block) * block), x.dtype)
    out[:, :k] = x
    return out.reshape(rows, -1, block)


# ------------------------------------------------------------------------------- block values, one per format
def _f16(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _integer_dots(w: Ints, q: npt.NDArray[np.int8], parts: int) -> npt.NDArray[np.int64]:
    """Exact dots of the parts of blocks: (rows, nb, 256), (num_x, nb, 256) -> (num_x, rows, nb, parts)."""
    a = w.reshape(*w.shape[:2], parts, -1).transpose(1, 2, 0, 3).astype(np.float64)
    b = q.reshape(*q.shape[:2], parts, -1).transpose(1, 2, 3, 0).astype(np.float64)
    return (a @ b).transpose(3, 2, 0, 1).astype(np.int64)  # sums of integers under 2^53: exact in any order


def _float(i: npt.NDArray[np.int64]) -> Floats:
    return i.astype(np.int32).astype(np.float32)


def _q4_k(w: Bytes, a: Quantized) -> Floats:
    blk = w.reshape(len(w), -1, 144)
    d, dmin, s, qs = _f16(blk[..., 0:2]), _f16(blk[..., 2:4]), blk[..., 4:16].astype(np.int64), blk[..., 16:]
    low, mid, high = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    sc = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    mn = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], -1)
    nibbles = qs.reshape(*qs.shape[:2], 4, 32)
    q = np.stack([nibbles & 15, nibbles >> 4], 3).reshape(*qs.shape[:2], 256).astype(np.int32)
    i1 = (_integer_dots(q, a.q, 8) * sc).sum(-1)
    sums = a.q.reshape(*a.d.shape, 8, 32).sum(-1, dtype=np.int64)
    i2 = (sums[:, None] * mn).sum(-1)
    dx = a.d[:, None]
    return fma(d * dx, _float(i1), -((dmin * dx) * _float(i2)))


def _q6_k(w: Bytes, a: Quantized) -> Floats:
    blk = w.reshape(len(w), -1, 210)
    d, sc = _f16(blk[..., 208:210]), blk[..., 192:208].view(np.int8).astype(np.int64)
    ql, qh = blk[..., :128].reshape(*d.shape, 2, 64), blk[..., 128:192].reshape(*d.shape, 2, 32)
    low = np.concatenate([ql & 15, ql >> 4], -1).reshape(*d.shape, 2, 4, 32)
    high = np.stack([(qh >> shift) & 3 for shift in (0, 2, 4, 6)], -2)
    q = (low | high << 4).reshape(*d.shape, 256).astype(np.int32) - 32
    i = (_integer_dots(q, a.q, 16) * sc).sum(-1)
    return (d * a.d[:, None]) * _float(i)


def _sub_blocks(d: Floats, q: npt.NDArray[np.int8], a: Quantized) -> Floats:
    """The rule of formats with sub-blocks of 32: d (rows, n), q (rows, n, 32)."""
    d, q = blocks_of(d, 8), blocks_of(q.reshape(len(q), -1))
    p = d * _float(_integer_dots(q.astype(np.int32), a.q, 8))
    return tree(p) * a.d[:, None]


def _q8_0(w: Bytes, a: Quantized) -> Floats:
    blk = w.reshape(len(w), -1, 34)
    return _sub_blocks(_f16(blk[..., :2]), blk[..., 2:].view(np.int8), a)


def _mxfp4(w: Bytes, a: Quantized) -> Floats:
    doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
    blk = w.reshape(len(w), -1, 17)
    d = np.ldexp(np.float32(1), blk[..., 0].astype(np.int32) - 128).astype(np.float32)
    return _sub_blocks(d, doubled[np.concatenate([blk[..., 1:] & 15, blk[..., 1:] >> 4], -1)], a)


def _floats(w: Floats, x: Floats) -> Floats:
    lanes = blocks_of(w).reshape(len(w), -1, 8, 32)
    acc = np.zeros((len(x), len(w), lanes.shape[1], 32), np.float32)
    xs = blocks_of(x).reshape(len(x), -1, 8, 32)
    for step in range(8):
        acc = fma(lanes[None, :, :, step], xs[:, None, :, step], acc)
    return tree(acc)


def _f32_values(w: Bytes, x: Floats) -> Floats:
    return _floats(w.view(np.float32), x)


def _f16_values(w: Bytes, x: Floats) -> Floats:
    return _floats(w.view(np.float16).astype(np.float32), x)


def _bf16_values(w: Bytes, x: Floats) -> Floats:
    return _floats((w.view(np.uint16).astype(np.uint32) << 16).view(np.float32), x)


INT8_FORMATS: dict[str, Callable[[Bytes, Quantized], Floats]] = {
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "q8_0": _q8_0,
    "mxfp4": _mxfp4,
}
FLOAT_FORMATS: dict[str, Callable[[Bytes, Floats], Floats]] = {
    "f32": _f32_values,
    "f16": _f16_values,
    "bf16": _bf16_values,
}


def source_bytes(w: npt.NDArray[Any]) -> Bytes:
    """A matrix of float values, or of source bytes already, as (rows, row bytes) uint8."""
    return np.ascontiguousarray(w).view(np.uint8).reshape(len(w), -1)


def block_values(name: str, w: npt.NDArray[Any], x: Floats) -> Floats:
    """``v_b`` of every 256-block: w (rows, ...) in the source bytes of format ``name``, x (num_x, K)
    -> (num_x, rows, nb). Blocks of ``x`` with a non-finite element count as zeros here."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        if name in FLOAT_FORMATS:
            return FLOAT_FORMATS[name](source_bytes(w), x)
        return INT8_FORMATS[name](source_bytes(w), quantize(x))


def dot_rows(name: str, w: npt.NDArray[Any], x: Floats) -> Floats:
    """What a row kernel computes: (num_x, rows) from w (rows, ...) and x (num_x, K)."""
    return sum_blocks(block_values(name, w, x))
