"""Floats to Q6_K blocks: 16 sub-blocks of 16, each ``(d * sc) * code``, codes in -32..31.

See quantize_k.py for the method. The largest magnitude of a sub-block, and the largest scale of a block,
take the longer negative side of their integers, so scales have signs.
"""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.formats import Float32Array, UInt8Array
from trilane.cpu_kernels.quantize_k import (
    GRID,
    SMALLEST_SPAN,
    ZERO,
    code_sums,
    half_above,
    multiples,
    nearest_half,
    rounded,
    to_grid,
)
from trilane.jit import compiled

STEPS = np.linspace(30.6, 33.4, 8).astype(np.float32)  # codes per largest magnitude; 32 covers it exactly
NUM_POLISH = 2
LOW, TOP = np.float32(-32), np.float32(31)


@compiled
def _search_q6(grid, steps):
    """Best slope of ``grid = slope * code`` for a sub-block whose largest magnitude is -2**20 on the grid."""
    best_slope, best_gain = 0.0, 0.0
    for step in steps:
        _, squares, products = code_sums(grid, step / GRID, ZERO, LOW, TOP)
        if squares > 0.0 and products * products > best_gain * squares:
            best_slope, best_gain = products / squares, products * products / squares
    for _ in range(NUM_POLISH):
        if best_slope <= 0.0:
            break
        _, squares, products = code_sums(grid, np.float32(1.0 / best_slope), ZERO, LOW, TOP)
        if squares <= 0.0 or products * products <= best_gain * squares:
            break
        best_slope, best_gain = products / squares, products * products / squares
    return best_slope


@compiled
def _fit_q6_k(x, steps, scale):
    """Each sub-block of ``x`` (n, 16, 16) is about ``scale * code``, codes in -32..31."""
    grid = np.empty(x.shape[2], np.int32)
    for b in range(x.shape[0]):
        for j in range(x.shape[1]):
            sub = x[b, j]
            low, high = sub.min(), sub.max()
            largest = low if -low >= high else high  # becomes code -32: the longer side of the codes
            scale[b, j] = ZERO
            if abs(largest) > SMALLEST_SPAN:
                to_grid(sub, ZERO, -GRID / largest, grid)
                scale[b, j] = np.float32(_search_q6(grid, steps) * (float(-largest) / float(GRID)))


@compiled
def _encode_q6_k(x, d, sc, codes, fitted):
    """Codes + 32 of ``x`` (n, 16, 16) for given scales; ``fitted`` (n,) = the d that suits them best."""
    for b in range(x.shape[0]):
        aa, ax = 0.0, 0.0
        for j in range(x.shape[1]):
            s = d[b] * sc[b, j]
            inverse = np.float32(1) / s if s != ZERO else ZERO
            squares, products = 0.0, 0.0
            for i in range(x.shape[2]):
                q = rounded(x[b, j, i] * inverse, LOW, TOP)
                codes[b, j, i] = np.uint8(q - LOW)
                squares += float(q * q)
                products += float(q * x[b, j, i])
            f = float(sc[b, j])
            aa += f * f * squares
            ax += f * products
        fitted[b] = ax / aa if aa > 0.0 else d[b]


def _pack_codes_q6_k(codes: UInt8Array) -> UInt8Array:
    """Codes (n, 16, 16) in 0..63 -> 128 bytes of low nibbles and 64 of bit pairs (formats.unpack_q6_k)."""
    halves = codes.reshape(-1, 2, 4, 32)
    low, high = halves & 15, halves >> 4
    ql = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate([ql, qh.reshape(-1, 64)], axis=1)


def _signed_largest(values: Float32Array) -> Float32Array:
    """The element of each row with the largest magnitude, with its sign."""
    low, high = values.min(axis=1), values.max(axis=1)
    return np.where(-low >= high, low, high)


def quantize_q6_k(blocks: Float32Array) -> UInt8Array:
    """(n, 256) finite float32 -> (n, 210) uint8."""
    x = blocks.reshape(-1, 16, 16)
    scale = np.empty((len(x), 16), np.float32)
    _fit_q6_k(x, STEPS, scale)
    d = half_above(_signed_largest(scale) / np.float32(-128))
    sc = multiples(scale, d, -128, 127)
    codes, fitted = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    _encode_q6_k(x, d, sc, codes, fitted)
    d = nearest_half(fitted)
    _encode_q6_k(x, d, sc, codes, fitted)
    tail = d[:, None].astype(np.float16).view(np.uint8)
    return np.concatenate([_pack_codes_q6_k(codes), sc.astype(np.int8).view(np.uint8), tail], axis=1)
