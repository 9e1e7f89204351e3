"""Floats to Q4_K blocks: 8 sub-blocks of 32, each ``(d * sc) * code - dmin * m``, codes in 0..15.

See quantize_k.py for the method. Here the line has an offset, and after ``d`` and ``dmin`` have been
rounded the neighbours of each pair of integer scales are tried: the rounding of ``sc`` wants another ``m``.
"""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.formats import BLOCK, Float32Array, UInt8Array
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

STEPS = np.linspace(13.6, 17.2, 10).astype(np.float32)  # codes per range tried; 15 covers it exactly
NUM_POLISH = 3
TOP = np.float32(15)


@compiled
def _gain(slope, offset, sums, grid_sum, n):
    """By how much ``slope * code + offset`` lowers the squared error of fitting nothing."""
    total, squares, products = sums
    squared = slope * slope * squares + 2.0 * slope * offset * total + n * offset * offset
    return 2.0 * (slope * products + offset * grid_sum) - squared


@compiled
def _fit_line(sums, grid_sum, n, largest_offset):
    """Least squares ``grid = slope * code + offset`` with offset <= largest_offset: slope, offset, gain."""
    total, squares, products = sums
    determinant = n * squares - total * total
    slope, offset = 0.0, np.inf
    if determinant > 0.0:
        slope = (n * products - total * grid_sum) / determinant
        offset = (grid_sum - slope * total) / n
    if offset > largest_offset:
        offset = largest_offset
        slope = (products - offset * total) / squares if squares > 0.0 else 0.0
    return slope, offset, _gain(slope, offset, sums, grid_sum, n)


@compiled
def _search_q4(grid, grid_sum, largest_offset, steps):
    """Best (slope, offset) for a sub-block that spans the whole grid."""
    n = float(grid.size)
    best_slope, best_offset, best_gain = 0.0, 0.0, -np.inf
    for step in steps:
        sums = code_sums(grid, step / GRID, ZERO, ZERO, TOP)
        slope, offset, gain = _fit_line(sums, grid_sum, n, largest_offset)
        if gain > best_gain:
            best_slope, best_offset, best_gain = slope, offset, gain
    for _ in range(NUM_POLISH):
        if best_slope <= 0.0:
            break
        inverse = np.float32(1.0 / best_slope)
        sums = code_sums(grid, inverse, np.float32(-best_offset / best_slope), ZERO, TOP)
        slope, offset, gain = _fit_line(sums, grid_sum, n, largest_offset)
        if gain <= best_gain:
            break
        best_slope, best_offset, best_gain = slope, offset, gain
    return best_slope, best_offset


@compiled
def _fit_q4_k(x, steps, scale, minimum):
    """Each sub-block of ``x`` (n, 8, 32) is about ``scale * code - minimum``, both at least 0."""
    grid = np.empty(x.shape[2], np.int32)
    for b in range(x.shape[0]):
        for j in range(x.shape[1]):
            sub = x[b, j]
            low, high = min(sub.min(), ZERO), sub.max()
            span = high - low
            scale[b, j], minimum[b, j] = ZERO, ZERO - low
            if span > SMALLEST_SPAN:
                grid_sum = to_grid(sub, low, GRID / span, grid)
                unit = float(span) / float(GRID)
                slope, offset = _search_q4(grid, grid_sum, float(-low) / unit, steps)
                scale[b, j] = np.float32(max(slope, 0.0) * unit)
                minimum[b, j] = np.float32(-(float(low) + offset * unit))


@compiled
def _settle_q4(grid, grid_sum, origin, unit, d, dmin, sc, m):
    """The best neighbours of integer scales ``sc``, ``m`` once they are multiples of ``d`` and ``dmin``."""
    n = float(grid.size)
    best_sc, best_m, best_gain = sc, m, -np.inf
    for try_sc in range(max(sc - 1, 0), min(sc + 1, 63) + 1):
        slope = float(d) * try_sc / unit
        inverse = 1.0 / slope if slope > 0.0 else 0.0
        for try_m in range(max(m - 1, 0), min(m + 1, 63) + 1):
            offset = (-float(dmin) * try_m - origin) / unit
            sums = code_sums(grid, np.float32(inverse), np.float32(-offset * inverse), ZERO, TOP)
            gain = _gain(slope, offset, sums, grid_sum, n)
            if gain > best_gain:
                best_sc, best_m, best_gain = try_sc, try_m, gain
    return best_sc, best_m


@compiled
def _settle_q4_k(x, d, dmin, sc, m):
    """Choose the integer scales of each sub-block of ``x`` (n, 8, 32) again, knowing ``d`` and ``dmin``."""
    grid = np.empty(x.shape[2], np.int32)
    for b in range(x.shape[0]):
        for j in range(x.shape[1]):
            sub = x[b, j]
            low, high = min(sub.min(), ZERO), sub.max()
            if high - low > SMALLEST_SPAN:
                grid_sum = to_grid(sub, low, GRID / (high - low), grid)
                unit = float(high - low) / float(GRID)
                sc[b, j], m[b, j] = _settle_q4(
                    grid, grid_sum, float(low), unit, d[b], dmin[b], int(sc[b, j]), int(m[b, j])
                )


@compiled
def _encode_q4_k(x, d, dmin, sc, m, codes, fitted):
    """Codes of ``x`` (n, 8, 32) for given scales; ``fitted`` (n, 2) = d and dmin that suit them best."""
    for b in range(x.shape[0]):
        aa, ab, bb, ax, bx = 0.0, 0.0, 0.0, 0.0, 0.0  # normal equations of x = d * (sc q) - dmin * m
        for j in range(x.shape[1]):
            s, o = d[b] * sc[b, j], dmin[b] * m[b, j]
            inverse = np.float32(1) / s if s > ZERO else ZERO
            total, squares, plain, products = 0.0, 0.0, 0.0, 0.0
            for i in range(x.shape[2]):
                q = rounded((x[b, j, i] + o) * inverse, ZERO, TOP)
                codes[b, j, i] = np.uint8(q)
                total += float(q)
                squares += float(q * q)
                plain += float(x[b, j, i])
                products += float(q * x[b, j, i])
            f, g = float(sc[b, j]), float(m[b, j])
            aa += f * f * squares
            ab += f * g * total
            bb += g * g * x.shape[2]
            ax += f * products
            bx += g * plain
        determinant = aa * bb - ab * ab
        fit_d, fit_dmin = 0.0, 0.0
        if determinant > 1e-6 * aa * bb:
            fit_d, fit_dmin = (ax * bb - bx * ab) / determinant, (ax * ab - bx * aa) / determinant
        elif bb == 0.0 and aa > 0.0:
            fit_d = ax / aa
        usable = fit_d > 0.0 and fit_dmin >= 0.0  # else the codes say too little: keep the scales
        fitted[b, 0] = fit_d if usable else d[b]
        fitted[b, 1] = fit_dmin if usable else dmin[b]


def _pack_scales_q4_k(sc: UInt8Array, m: UInt8Array) -> UInt8Array:
    """sc, m (n, 8) in 0..63 -> the twelve scale bytes (see formats.unpack_q4_k)."""
    low_sc = sc[:, :4] | sc[:, 4:] >> 4 << 6
    low_m = m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([low_sc, low_m, sc[:, 4:] & 15 | m[:, 4:] << 4], axis=1)


def quantize_q4_k(blocks: Float32Array) -> UInt8Array:
    """(n, 256) finite float32 -> (n, 144) uint8."""
    x = blocks.reshape(-1, 8, 32)
    scale, minimum = np.empty((2, len(x), 8), np.float32)
    _fit_q4_k(x, STEPS, scale, minimum)
    d, dmin = half_above(scale.max(axis=1) / 63), half_above(minimum.max(axis=1) / 63)
    sc, m = multiples(scale, d, 0, 63), multiples(minimum, dmin, 0, 63)
    _settle_q4_k(x, d, dmin, sc, m)
    codes, fitted = np.empty(x.shape, np.uint8), np.empty((len(x), 2), np.float32)
    _encode_q4_k(x, d, dmin, sc, m, codes, fitted)
    d, dmin = nearest_half(fitted[:, 0]), nearest_half(fitted[:, 1])
    _encode_q4_k(x, d, dmin, sc, m, codes, fitted)
    head = np.stack([d, dmin], axis=1).astype(np.float16).view(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    quants = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, BLOCK // 2)
    return np.concatenate([head, _pack_scales_q4_k(sc.astype(np.uint8), m.astype(np.uint8)), quants], axis=1)
