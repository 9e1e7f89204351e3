"""Floats to source bytes: the entry points, and the quantisers whose rule needs no search.

F32, F16 and BF16 round to nearest even and keep NaN; Q8_0 and MXFP4 give the very bytes of the gguf
package. The K-quants search their scales (quantize_q4_k.py, quantize_q6_k.py; compiled, imported on first
use). Everything works on chunks that fit in a core's cache and lets go of the interpreter lock inside, so
several Python threads may quantise parts of a matrix at once, each with its own rows of ``values`` and
``out``.

The bytes depend on the values alone: not on the machine, the chunks or the number of threads. It knows rows
and blocks, not experts or files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels.formats import Float32Array, Format, UInt8Array, e8m0_half

CHUNK_WEIGHTS = 1 << 16  # 256 KiB of float32: chunk and temporaries stay in the second-level cache

F16_MAX = 65504.0
# The largest magnitude whose scales are surely finite f16. For K-quants half of what they hold: a fit may
# reach beyond the data.
LARGEST_WEIGHT = {
    "q8_0": F16_MAX * 127,
    "q4_k": F16_MAX * 63 / 2,
    "q6_k": F16_MAX * 128 * 32 / 2,
    "mxfp4": 2.0**127,  # its scale has room for more, but its values would not be float32
}
VALUE_TYPES = (np.float32, np.float16, np.uint16)
MXFP4_MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between the doubled values 0 1 2 3 4 6 8 12


def quantize_matrix(values: NDArray[Any], fmt: Format, out: UInt8Array | None = None) -> UInt8Array:
    """Quantise the rows of a matrix.

    Parameters
    ----------
    values : (rows, K) float32, float16, or uint16 holding bfloat16 bits
        Any strides; K must be a multiple of 32, or of 256 for the K-quants.
    fmt : Format
    out : (rows, row_source_nbytes) uint8, optional
        Where to write; any strides.

    Returns
    -------
    (rows, row_source_nbytes) uint8
        ``out``, or a new array.

    Raises
    ------
    ValueError
        If K does not suit the format, a shape is wrong, or a weight cannot be represented (not finite, or its
        scale would not be a finite f16).
    TypeError
        If ``values`` or ``out`` has another dtype.

    Examples
    --------
    >>> from trilane.cpu_kernels.formats import format_of
    >>> quantize_matrix(np.ones((2, 64), np.float32), format_of("q8_0")).shape
    (2, 68)
    """
    _check_values(values)
    rows, columns = values.shape
    fmt.check_columns(columns)
    out = _check_out(out, (rows, fmt.row_source_nbytes(columns)))
    step = max(1, CHUNK_WEIGHTS // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[start:stop] = _quantize_rows(values[start:stop], fmt, start)
    return out


def quantize_blocks(values: NDArray[Any], fmt: Format) -> UInt8Array:
    """(n, block_size) values, types as in :func:`quantize_matrix`, -> (n, block_nbytes) uint8."""
    _check_values(values)
    if values.shape[1] != fmt.block_size:
        raise ValueError(f"blocks of {fmt.name} have {fmt.block_size} weights, not {values.shape[1]}")
    return _quantize_rows(values, fmt, 0)


def _quantize_rows(values: NDArray[Any], fmt: Format, first_row: int) -> UInt8Array:
    if fmt.name == _STORED_AS[values.dtype.type]:
        return np.ascontiguousarray(values).view(np.uint8)
    floats = _as_float32(values)
    if fmt.name in LARGEST_WEIGHT:
        _check_weights(floats, fmt, first_row)
    blocks = _quantizer(fmt)(floats.reshape(-1, fmt.block_size))
    return blocks.reshape(len(values), -1)


_STORED_AS = {np.float32: "f32", np.float16: "f16", np.uint16: "bf16"}


def _as_float32(values: NDArray[Any]) -> Float32Array:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def _check_values(values: NDArray[Any]) -> None:
    if not isinstance(values, np.ndarray) or values.dtype.type not in VALUE_TYPES:
        kind = getattr(values, "dtype", type(values).__name__)
        raise TypeError(
            f"weights to quantise must be a float32, float16 or uint16 (bfloat16 bits) array, not {kind}:"
            " convert them, or view bfloat16 as uint16"
        )
    if values.ndim != 2:
        raise ValueError(f"weights to quantise must be (rows, K), not of shape {values.shape}: reshape them")


def _check_out(out: UInt8Array | None, shape: tuple[int, int]) -> UInt8Array:
    if out is None:
        return np.empty(shape, np.uint8)
    if out.dtype != np.uint8:
        raise TypeError(f"out must be uint8, not {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape} but these rows make {shape} bytes")
    return out


def _check_weights(floats: Float32Array, fmt: Format, first_row: int) -> None:
    """Refuse what the format cannot represent; a NaN scale would surface far from its cause."""
    limit = LARGEST_WEIGHT[fmt.name]
    if floats.size == 0 or np.abs(floats).max() <= limit:  # false for NaN
        return
    row, column = np.argwhere(~(np.abs(floats) <= limit))[0]
    raise ValueError(
        f"weight [{row + first_row}, {column}] is {floats[row, column]}: {fmt.name} needs finite weights of "
        f"at most {limit:.4g} in magnitude; repair the tensor, or keep it as f32, f16 or bf16"
    )


def _quantize_f32(values: Float32Array) -> UInt8Array:
    return values.view(np.uint8)


def _quantize_f16(values: Float32Array) -> UInt8Array:
    with np.errstate(over="ignore"):  # beyond the range is infinity, as IEEE 754 rounds
        return values.astype(np.float16).view(np.uint8)


def _quantize_bf16(values: Float32Array) -> UInt8Array:
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    # A NaN must not round to infinity or wrap: keep its upper bits and set the quiet bit.
    return np.where(nan, bits >> 16 | 0x40, rounded).astype(np.uint16).view(np.uint8)


def _round_half_away(values: Float32Array) -> Float32Array:
    magnitude = np.abs(values)
    whole = np.floor(magnitude)
    whole += magnitude - whole >= 0.5
    return np.copysign(whole, values)


def _quantize_q8_0(blocks: Float32Array) -> UInt8Array:
    """d = max|x| / 127, q = x * (1 / d) rounded half away from zero."""
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    invertible = d > 2.0**-127  # below, 1 / d overflows and d is 0 as f16 anyway
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=invertible)
    quants = _round_half_away(blocks * inverse).astype(np.int8)
    return np.concatenate([d.astype(np.float16).view(np.uint8), quants.view(np.uint8)], axis=1)


def _mxfp4_exponents(largest: Float32Array) -> UInt8Array:
    """E8M0 byte whose doubled values reach up to the largest magnitude (0 for zeros and tiny blocks)."""
    with np.errstate(divide="ignore"):
        log = np.log2(largest.astype(np.float64)).astype(np.float32)
    return np.clip(np.floor(log) + 125, 0, 255).astype(np.uint8)


def _quantize_mxfp4(blocks: Float32Array) -> UInt8Array:
    """Nearest of the 16 values, the smaller magnitude where two are as near, and +0 for -0."""
    magnitude = np.abs(blocks)
    e = _mxfp4_exponents(magnitude.max(axis=1, keepdims=True))
    d = e8m0_half(e)
    code = np.zeros(blocks.shape, np.uint8)
    for midpoint in MXFP4_MIDPOINTS:
        code += magnitude > d * np.float32(midpoint)
    code |= ((blocks < 0) & (code > 0)).view(np.uint8) << 3
    return np.concatenate([e, code[:, :16] | code[:, 16:] << 4], axis=1)


def _quantizer(fmt: Format) -> Callable[[Float32Array], UInt8Array]:
    if fmt.name in _QUANTIZERS:
        return _QUANTIZERS[fmt.name]
    from trilane.cpu_kernels.quantize_q4_k import quantize_q4_k
    from trilane.cpu_kernels.quantize_q6_k import quantize_q6_k

    return quantize_q4_k if fmt.name == "q4_k" else quantize_q6_k


_QUANTIZERS: dict[str, Callable[[Float32Array], UInt8Array]] = {
    "f32": _quantize_f32,
    "f16": _quantize_f16,
    "bf16": _quantize_bf16,
    "q8_0": _quantize_q8_0,
    "mxfp4": _quantize_mxfp4,
}
