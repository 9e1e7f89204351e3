"""What the Q4_K and Q6_K quantisers share: integer sums over codes, and scales as f16.

Each sub-block is fitted alone: a few step sizes are tried, a line through the resulting codes is fitted by
least squares, and the best is polished by rounding to the fitted line again. Then the sub-block scales
become small integers times one f16 per block, and that f16 is fitted once more to the codes actually
chosen. What is minimised is the plain squared error: with activations that do not depend on the weights,
that is the expected error of the dot product.

Sums run over integers (weights are put on a grid of 2**20 steps of their range), so the compiler may
vectorise them and yet every machine gets the same bytes. Integer scales are chosen after their f16 has been
rounded, which keeps small weights, whose f16 are subnormal, as good as they can be.
"""

from __future__ import annotations

import numpy as np

from trilane.cpu_kernels.formats import Float32Array
from trilane.jit import compiled

GRID = np.float32(1 << 20)  # 32 weights * 2**20 * 15 and 16 * 2**20 * 32 fit in int32
ROUND = np.float32(3 << 22)  # x + ROUND - ROUND is x rounded to an integer, ties to even, for |x| < 2**22
SMALLEST_SPAN = np.float32(1e-30)  # below it a sub-block is constant: its scale as f16 would be 0 anyway
ZERO = np.float32(0)
SMALLEST_HALF = np.float16(2.0**-24)


@compiled
def rounded(value, low, high):
    """``value`` rounded to an integer and clamped, as float32; vectorisable."""
    q = value + ROUND - ROUND
    q = low if q < low else q
    return high if q > high else q


@compiled
def to_grid(x, origin, inverse, grid):
    """grid = (x - origin) * inverse as integers of at most 2**20; returns their sum."""
    total = np.int32(0)
    for i in range(x.size):
        grid[i] = np.int32((x[i] - origin) * inverse + ROUND - ROUND)
        total = np.int32(total + grid[i])
    return float(total)


@compiled
def code_sums(grid, slope, shift, low, high):
    """Codes of ``grid * slope + shift``: their sum, sum of squares and sum of products with ``grid``."""
    total, squares, products = np.int32(0), np.int32(0), np.int32(0)
    for i in range(grid.size):
        q = np.int32(rounded(np.float32(grid[i]) * slope + shift, low, high))
        total = np.int32(total + q)
        squares = np.int32(squares + np.int32(q * q))
        products = np.int32(products + np.int32(q * grid[i]))
    return float(total), float(squares), float(products)


def nearest_half(values: Float32Array) -> Float32Array:
    """The nearest f16, but not 0 for what is not 0; as float32."""
    half = values.astype(np.float16)
    lost = (half == 0) & (values != 0)
    half[lost] = np.copysign(SMALLEST_HALF, values[lost])
    return half.astype(np.float32)


def half_above(values: Float32Array) -> Float32Array:
    """The nearest f16 that is not smaller in magnitude (so that no multiple must be clamped), as float32."""
    half = (values + ZERO).astype(np.float16)  # + 0 makes -0 a plain 0
    away = np.nextafter(half, np.where(values < 0, -np.inf, np.inf).astype(np.float16))
    return np.where(np.abs(half) < np.abs(values), away, half).astype(np.float32)


def multiples(values: Float32Array, unit: Float32Array, low: int, high: int) -> Float32Array:
    """``values / unit`` rounded and clamped; 0 where the unit is 0."""
    ratio = np.divide(values, unit[:, None], out=np.zeros_like(values), where=unit[:, None] != 0)
    return np.clip(np.rint(ratio), low, high)
