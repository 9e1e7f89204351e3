"""Floats to Q4_K and Q6_K blocks: a search for scales, then a fit of the whole block.

Each sub-block is fitted alone: a few step sizes are tried, the line through the resulting codes is fitted by
least squares, and the best is polished by rounding to the fitted line again. Then the sub-block scales become
small integers times one f16 per block, and that f16 is fitted once more to the codes actually chosen. What is
minimised is the plain squared error: with activations that do not depend on the weights, that is the expected
error of the dot product.

Sums run over integers (weights are put on a grid of 2**20 steps of their range), so the compiler may
vectorise them and yet every machine gets the same bytes. Integer scales are chosen after their f16 has been
rounded, which keeps small weights, whose f16 are subnormal, as good as they can be.
"""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.formats import BLOCK, Float32Array, UInt8Array
from trilane.jit import compiled

GRID = np.float32(1 << 20)  # 32 weights * 2**20 * 15 and 16 * 2**20 * 32 fit in int32
ROUND = np.float32(3 << 22)  # x + ROUND - ROUND is x rounded to an integer, ties to even, for |x| < 2**22
SMALLEST_SPAN = np.float32(1e-30)  # below it a sub-block is constant: its scale as f16 would be 0 anyway
ZERO = np.float32(0)
SMALLEST_HALF = np.float16(2.0**-24)

Q4_STEPS = np.linspace(13.6, 17.2, 10).astype(np.float32)  # codes per range tried; 15 covers it exactly
Q6_STEPS = np.linspace(30.6, 33.4, 8).astype(np.float32)  # codes per largest magnitude; 32 covers it exactly
Q4_POLISH, Q6_POLISH = 3, 2
Q4_TOP = np.float32(15)
Q6_LOW, Q6_TOP = np.float32(-32), np.float32(31)


@compiled
def _rounded(value, low, high):
    """``value`` rounded to an integer and clamped, as float32; vectorisable."""
    q = value + ROUND - ROUND
    q = low if q < low else q
    return high if q > high else q


@compiled
def _to_grid(x, origin, inverse, grid):
    """grid = (x - origin) * inverse as integers of at most 2**20; returns their sum."""
    total = np.int32(0)
    for i in range(x.size):
        grid[i] = np.int32((x[i] - origin) * inverse + ROUND - ROUND)
        total = np.int32(total + grid[i])
    return float(total)


@compiled
def _code_sums(grid, slope, shift, low, high):
    """Codes of ``grid * slope + shift``: their sum, sum of squares and sum of products with ``grid``."""
    total, squares, products = np.int32(0), np.int32(0), np.int32(0)
    for i in range(grid.size):
        q = np.int32(_rounded(np.float32(grid[i]) * slope + shift, low, high))
        total = np.int32(total + q)
        squares = np.int32(squares + np.int32(q * q))
        products = np.int32(products + np.int32(q * grid[i]))
    return float(total), float(squares), float(products)


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
        sums = _code_sums(grid, step / GRID, ZERO, ZERO, Q4_TOP)
        slope, offset, gain = _fit_line(sums, grid_sum, n, largest_offset)
        if gain > best_gain:
            best_slope, best_offset, best_gain = slope, offset, gain
    for _ in range(Q4_POLISH):
        if best_slope <= 0.0:
            break
        inverse = np.float32(1.0 / best_slope)
        sums = _code_sums(grid, inverse, np.float32(-best_offset / best_slope), ZERO, Q4_TOP)
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
                grid_sum = _to_grid(sub, low, GRID / span, grid)
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
            sums = _code_sums(grid, np.float32(inverse), np.float32(-offset * inverse), ZERO, Q4_TOP)
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
                grid_sum = _to_grid(sub, low, GRID / (high - low), grid)
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
                q = _rounded((x[b, j, i] + o) * inverse, ZERO, Q4_TOP)
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


def _nearest_half(values: Float32Array) -> Float32Array:
    """The nearest f16, but not 0 for what is not 0; as float32."""
    half = values.astype(np.float16)
    lost = (half == 0) & (values != 0)
    half[lost] = np.copysign(SMALLEST_HALF, values[lost])
    return half.astype(np.float32)


def _half_above(values: Float32Array) -> Float32Array:
    """The nearest f16 that is not smaller in magnitude (so that no multiple must be clamped), as float32."""
    half = (values + ZERO).astype(np.float16)  # + 0 makes -0 a plain 0
    away = np.nextafter(half, np.where(values < 0, -np.inf, np.inf).astype(np.float16))
    return np.where(np.abs(half) < np.abs(values), away, half).astype(np.float32)


def _multiples(values: Float32Array, unit: Float32Array, low: int, high: int) -> Float32Array:
    """``values / unit`` rounded and clamped; 0 where the unit is 0."""
    ratio = np.divide(values, unit[:, None], out=np.zeros_like(values), where=unit[:, None] != 0)
    return np.clip(np.rint(ratio), low, high)


def _pack_scales_q4_k(sc: UInt8Array, m: UInt8Array) -> UInt8Array:
    """sc, m (n, 8) in 0..63 -> the twelve scale bytes (see formats.unpack_q4_k)."""
    low_sc = sc[:, :4] | sc[:, 4:] >> 4 << 6
    low_m = m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([low_sc, low_m, sc[:, 4:] & 15 | m[:, 4:] << 4], axis=1)


def quantize_q4_k(blocks: Float32Array) -> UInt8Array:
    """(n, 256) finite float32 -> (n, 144) uint8."""
    x = blocks.reshape(-1, 8, 32)
    scale, minimum = np.empty((2, len(x), 8), np.float32)
    _fit_q4_k(x, Q4_STEPS, scale, minimum)
    d, dmin = _half_above(scale.max(axis=1) / 63), _half_above(minimum.max(axis=1) / 63)
    sc, m = _multiples(scale, d, 0, 63), _multiples(minimum, dmin, 0, 63)
    _settle_q4_k(x, d, dmin, sc, m)
    codes, fitted = np.empty(x.shape, np.uint8), np.empty((len(x), 2), np.float32)
    _encode_q4_k(x, d, dmin, sc, m, codes, fitted)
    d, dmin = _nearest_half(fitted[:, 0]), _nearest_half(fitted[:, 1])
    _encode_q4_k(x, d, dmin, sc, m, codes, fitted)
    head = np.stack([d, dmin], axis=1).astype(np.float16).view(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    quants = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, BLOCK // 2)
    return np.concatenate([head, _pack_scales_q4_k(sc.astype(np.uint8), m.astype(np.uint8)), quants], axis=1)


@compiled
def _search_q6(grid, steps):
    """Best slope of ``grid = slope * code`` for a sub-block whose largest magnitude is -2**20 on the grid."""
    best_slope, best_gain = 0.0, 0.0
    for step in steps:
        _, squares, products = _code_sums(grid, step / GRID, ZERO, Q6_LOW, Q6_TOP)
        if squares > 0.0 and products * products > best_gain * squares:
            best_slope, best_gain = products / squares, products * products / squares
    for _ in range(Q6_POLISH):
        if best_slope <= 0.0:
            break
        _, squares, products = _code_sums(grid, np.float32(1.0 / best_slope), ZERO, Q6_LOW, Q6_TOP)
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
                _to_grid(sub, ZERO, -GRID / largest, grid)
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
                q = _rounded(x[b, j, i] * inverse, Q6_LOW, Q6_TOP)
                codes[b, j, i] = np.uint8(q - Q6_LOW)
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
    _fit_q6_k(x, Q6_STEPS, scale)
    d = _half_above(_signed_largest(scale) / -128)
    sc = _multiples(scale, d, -128, 127)
    codes, fitted = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    _encode_q6_k(x, d, sc, codes, fitted)
    d = _nearest_half(fitted)
    _encode_q6_k(x, d, sc, codes, fitted)
    tail = d[:, None].astype(np.float16).view(np.uint8)
    return np.concatenate([_pack_codes_q6_k(codes), sc.astype(np.int8).view(np.uint8), tail], axis=1)
