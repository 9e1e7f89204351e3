"""The numerics contract in plain NumPy: slow, obvious, and the oracle of every kernel test.

An expert gives the same bits on every lane because integer arithmetic is exact and float arithmetic happens
in one written order. That order is written here, once; all float steps are float32, every ``fma`` is one
rounding, division is IEEE division, and nothing is contracted or flushed to zero.

Activation of quantised formats, per block of 256 elements (missing elements are zeros)::

    amax = max |x|;  d = amax / 127;  inv = 127 / amax;  q = rint_even(x * inv)   (x * inv in float32)
    amax < 2^-100: d = 0, q = 0.     A non-finite element: d = 0, q = 0 and the block is flagged ``bad``.

Value ``v_b`` of one 256-block of a weight row (I: exact int32; float(I) rounds to nearest even)::

    q4_k          I1 = sum_j sc_j * dot_j,  I2 = sum_j m_j * bsum_j
                  v = fma(d_w * d_x, float(I1), -((dmin_w * d_x) * float(I2)))
    q6_k          I = sum_s sc_s * sum (q - 32) * x;   v = (d_w * d_x) * float(I)
    q8_0, mxfp4   p_j = d_j * float(I_j) for the 8 sub-blocks of 32 (missing ones +0),
                  tree over p, v = tree * d_x
                  (mxfp4: I_j over the doubled values 0 1 2 3 4 6 8 12, d_j = 2^(e - 128))
    f32 f16 bf16  32 accumulators from +0, lane k mod 32, acc = fma(w, x, acc), k ascending;
                  then acc[i] += acc[i ^ s] for s = 16, 8, 4, 2, 1

A row: 8 accumulators from +0, ``acc[b mod 8] += v_b`` with b ascending, then the tree. The tree over 8 is
``(0+4, 1+5, 2+6, 3+7), (0+2, 1+3), (0+1)``. Biases are one add after the tree. The gates are in :func:`gate`,
the exponential in :func:`~trilane.cpu_kernels.reference_dots.exp`. Combine is ``y = fma(w_k, out_k, y)`` from
+0 over a token's experts in rank order; there NaN becomes the canonical 0x7fc00000.

This file knows no layout, no lane and no Numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .reference_dots import (
    BLOCK,
    RECORD,
    Floats,
    block_values,
    blocks_of,
    dot_rows,
    exp,
    fma,
    quantize,
    records,
    source_bytes,
    sum_blocks,
    tree,
)

__all__ = [
    "BLOCK", "GELU_TANH_GLU", "NAN", "RECORD", "RELU2", "SILU_GLU", "SILU_GLU_CLAMPED", "SWIGLU_OAI",
    "ExpertValues", "block_values", "dot_rows", "exp", "fma", "gate", "quantize", "records",
    "reference_combine", "reference_expert", "reference_hidden", "same_bits", "source_bytes", "sum_blocks",
    "tree",
]  # fmt: skip

NAN = np.uint32(0x7FC00000).view(np.float32)
SILU_GLU, GELU_TANH_GLU, SILU_GLU_CLAMPED, SWIGLU_OAI, RELU2 = range(5)


class ExpertValues(NamedTuple):
    """``v`` (rows, shards, hidden): each shard's part; ``out`` (rows, hidden): their sum and the bias."""

    v: Floats
    out: Floats


# -------------------------------------------------------------------------------------------------- the gates
def _silu(g: Floats) -> Floats:
    return g / (np.float32(1) + exp(-g))


def _gelu_tanh(g: Floats) -> Floats:
    z = g * fma(np.float32(0.0713548162726), g * g, np.float32(1.5957691216057308))
    return g / (np.float32(1) + exp(-z))


def _clamp(x: Floats, low: float, high: float) -> Floats:
    x = np.where(x < np.float32(low), np.float32(low), x)
    return np.where(x > np.float32(high), np.float32(high), x)


def gate(kind: int, g: Floats | None, u: Floats, alpha: float = 1.0, limit: float = np.inf) -> Floats:
    """The intermediate activation ``h`` from gate and up values (biases already added), float32.

    Clamps are compares that keep NaN: ``x < low ? low : x``, then ``x > high ? high : x``. No step is
    fused but the fma that is written::

        0 silu_glu          h = (g / (1 + exp(-g))) * u
        1 gelu_tanh_glu     z = g * fma(0.0713548162726, g * g, 1.5957691216057308)
                            h = (g / (1 + exp(-z))) * u
        2 silu_glu_clamped  g = min(g, L), u = clamp(u, -L, L), then as 0
        3 swiglu_oai        g = min(g, L), u = clamp(u, -L, L)
                            h = (u + 1) * (g / (1 + exp(-(alpha * g))))
        4 relu2             r = u < 0 ? 0 : u,  h = r * r                       (no gate matrix)

    The gelu constants are 2 sqrt(2 / pi) and 0.044715 times that, each rounded to float32.
    """
    with np.errstate(all="ignore"):
        if kind == RELU2:
            r = np.where(u < 0, np.float32(0), u)
            return r * r
        assert g is not None
        if kind in (SILU_GLU_CLAMPED, SWIGLU_OAI):
            g, u = _clamp(g, -np.inf, limit), _clamp(u, -limit, limit)
        if kind == SWIGLU_OAI:
            return (u + np.float32(1)) * (g / (np.float32(1) + exp(-(np.float32(alpha) * g))))
        return (_gelu_tanh(g) if kind == GELU_TANH_GLU else _silu(g)) * u


# ---------------------------------------------------------------------------------------------- whole experts
def _project(name: str, w: npt.NDArray[Any], x: Floats, bias: Floats | None) -> Floats:
    out = dot_rows(name, w, x)
    return out if bias is None else out + np.asarray(bias, np.float32)


def reference_hidden(
    x: Floats,
    gate_weights: tuple[str, npt.NDArray[Any]] | None,
    up_weights: tuple[str, npt.NDArray[Any]],
    kind: int = SILU_GLU,
    alpha: float = 1.0,
    limit: float = np.inf,
    gate_bias: Floats | None = None,
    up_bias: Floats | None = None,
) -> Floats:
    """``h`` (rows, intermediate) of float32 rows ``x``; rows of ``x`` with a non-finite element give NaN."""
    with np.errstate(all="ignore"):
        g = None if gate_weights is None else _project(*gate_weights, x, gate_bias)
        h = gate(kind, g, _project(*up_weights, x, up_bias), alpha, limit)
    return np.where(np.isfinite(x).all(1, keepdims=True), h, NAN)


def reference_expert(
    x: Floats,
    gate_weights: tuple[str, npt.NDArray[Any]] | None,
    up_weights: tuple[str, npt.NDArray[Any]],
    down_weights: tuple[str, npt.NDArray[Any]],
    kind: int = SILU_GLU,
    alpha: float = 1.0,
    limit: float = np.inf,
    gate_bias: Floats | None = None,
    up_bias: Floats | None = None,
    down_bias: Floats | None = None,
) -> ExpertValues:
    """One expert on rows ``x`` (rows, hidden), float32.

    Parameters
    ----------
    gate_weights, up_weights, down_weights : (format name, matrix)
        Matrices as source (GGUF) bytes (rows, row bytes), or float32 / float16 / bfloat16-as-uint16 values;
        gate and up have ``intermediate`` rows, down ``hidden``. No gate for relu2.
    kind, alpha, limit
        The gate, see :func:`gate`.

    Returns
    -------
    ExpertValues
        NaN (canonical) wherever a non-finite activation reached the value.
    """
    x = np.asarray(x, np.float32)
    h = reference_hidden(x, gate_weights, up_weights, kind, alpha, limit, gate_bias, up_bias)
    name, down = down_weights
    bad = ~np.isfinite(blocks_of(h)).all(-1)
    v = block_values(name, down, h).transpose(0, 2, 1) + np.float32(0)
    v = np.where(bad[..., None], NAN, v)
    out = sum_blocks(v.transpose(0, 2, 1))
    return ExpertValues(v, out if down_bias is None else out + np.asarray(down_bias, np.float32))


def reference_combine(weights: Floats, outs: Floats, skip: npt.NDArray[np.bool_] | None = None) -> Floats:
    """Combine ``outs`` (rows, k, hidden) with router ``weights`` (rows, k) in rank order; ``skip`` (rows, k)
    leaves an expert out. NaN results are canonical."""
    y = np.zeros((outs.shape[0], outs.shape[2]), np.float32)
    for k in range(outs.shape[1]):
        step = fma(np.asarray(weights, np.float32)[:, k, None], outs[:, k], y)
        y = step if skip is None else np.where(skip[:, k, None], y, step)
    return np.where(np.isnan(y), NAN, y)


def same_bits(a: Floats, b: Floats) -> bool:
    """Whether two float32 arrays have the same bits (NaN equals NaN, whatever its payload)."""
    if a.shape != b.shape:
        return False
    equal = np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)
    return bool((equal | (np.isnan(a) & np.isnan(b))).all())
