"""The gates: from gate and up values (and biases) to the intermediate activation h, and on to its record.

A gate is a small kernel of its own, never a specialisation of the dots: compile time is a user's time. The
formulas, all float32, with IEEE division, our exp, and nothing fused but the fma that is written::

    g = g + gate_bias,  u = u + up_bias                                          (where there are biases)
    0 silu_glu          h = (g / (1 + exp(-g))) * u
    1 gelu_tanh_glu     z = g * fma(0.0713548162726, g * g, 1.5957691216057308)
                        h = (g / (1 + exp(-z))) * u
    2 silu_glu_clamped  g = g > L ? L : g,  u = u < -L ? -L : u,  u = u > L ? L : u,  then as 0
    3 swiglu_oai        clamps as 2,  h = (u + 1) * (g / (1 + exp(-(alpha * g))))
    4 relu2             r = u < 0 ? 0 : u,  h = r * r                                  (no gate matrix)

``-x`` flips the sign bit. NaN passes through every gate. Nothing here knows weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from trilane.cpu_kernels import simd_float as sf
from trilane.cpu_kernels.activation import copy_row_f32, quantize_row
from trilane.cpu_kernels.emit import F32X8, Emitter, V, emitted, f32, i64
from trilane.cpu_kernels.reference import GELU_TANH_GLU, RELU2, SILU_GLU, SILU_GLU_CLAMPED, SWIGLU_OAI
from trilane.jit import compiled

GATES: Mapping[str, int] = MappingProxyType(
    {
        "silu_glu": SILU_GLU,
        "gelu_tanh_glu": GELU_TANH_GLU,
        "silu_glu_clamped": SILU_GLU_CLAMPED,
        "swiglu_oai": SWIGLU_OAI,
        "relu2": RELU2,
    }
)

GELU_LINEAR, GELU_CUBIC = 1.5957691216057308, 0.0713548162726  # 2 sqrt(2 / pi), and 0.044715 times that


def _over_one_plus_exp(g: V, negated: V) -> V:
    """g / (1 + exp(negated))"""
    return sf.divide(g, sf.exp(negated) + 1.0)


def _silu_glu(e: Emitter, g: V, u: V, alpha: V, limit: V) -> V:
    return _over_one_plus_exp(g, -g) * u


def _gelu_tanh_glu(e: Emitter, g: V, u: V, alpha: V, limit: V) -> V:
    z = g * e.fma(e.const(F32X8, GELU_CUBIC), g * g, e.const(F32X8, GELU_LINEAR))
    return _over_one_plus_exp(g, -z) * u


def _silu_glu_clamped(e: Emitter, g: V, u: V, alpha: V, limit: V) -> V:
    return _silu_glu(e, sf.clamp_high(g, limit), sf.clamp(u, -limit, limit), alpha, limit)


def _swiglu_oai(e: Emitter, g: V, u: V, alpha: V, limit: V) -> V:
    g, u = sf.clamp_high(g, limit), sf.clamp(u, -limit, limit)
    return (u + 1.0) * _over_one_plus_exp(g, -(alpha * g))


def _relu2(e: Emitter, g: V, u: V, alpha: V, limit: V) -> V:
    r = e.select(sf.compare("<", u, 0.0), e.const(F32X8, 0.0), u)
    return r * r


@emitted(F32X8, i64)
def _load8(e: Emitter, address: V) -> V:
    return e.load(F32X8, address)


@emitted(F32X8, F32X8, i64)
def _add8(e: Emitter, value: V, address: V) -> V:
    return value + e.load(F32X8, address)


def _make_gate(formula: Callable[[Emitter, V, V, V, V], V], has_gate: bool = True) -> Any:
    """A loop over 8 values at a time; without a gate matrix the addresses g and gate_bias are not read."""

    @emitted(None, i64, F32X8, F32X8, f32, f32)
    def apply8(e: Emitter, h: V, g: V, u: V, alpha: V, limit: V) -> None:
        e.store(h, formula(e, g, u, e.splat(alpha, 8), e.splat(limit, 8)))

    @compiled
    def apply(alpha, limit, n, g, u, gate_bias, up_bias, h):  # type: ignore[no-untyped-def]
        for k in range(0, 4 * n, 32):
            up = _load8(u + k)
            if up_bias != 0:
                up = _add8(up, up_bias + k)
            gate = up
            if has_gate:
                gate = _load8(g + k)
                if gate_bias != 0:
                    gate = _add8(gate, gate_bias + k)
            apply8(h + k, gate, up, alpha, limit)

    return apply


_apply_silu_glu = _make_gate(_silu_glu)
_apply_gelu_tanh_glu = _make_gate(_gelu_tanh_glu)
_apply_silu_glu_clamped = _make_gate(_silu_glu_clamped)
_apply_swiglu_oai = _make_gate(_swiglu_oai)
_apply_relu2 = _make_gate(_relu2, has_gate=False)


@compiled
def activate(kind, alpha, limit, n, g, u, gate_bias, up_bias, h):  # type: ignore[no-untyped-def]
    """Write ``h`` from ``g`` and ``u`` (float32[n] each); all addresses, biases 0 where there are none.

    ``n`` is a multiple of 8 and ``h`` may be ``g`` or ``u``. ``alpha`` and ``limit`` are rounded to float32.
    """
    a, limit32 = np.float32(alpha), np.float32(limit)
    if kind == SILU_GLU:
        _apply_silu_glu(a, limit32, n, g, u, gate_bias, up_bias, h)
    elif kind == GELU_TANH_GLU:
        _apply_gelu_tanh_glu(a, limit32, n, g, u, gate_bias, up_bias, h)
    elif kind == SILU_GLU_CLAMPED:
        _apply_silu_glu_clamped(a, limit32, n, g, u, gate_bias, up_bias, h)
    elif kind == SWIGLU_OAI:
        _apply_swiglu_oai(a, limit32, n, g, u, gate_bias, up_bias, h)
    else:
        _apply_relu2(a, limit32, n, g, u, gate_bias, up_bias, h)


@compiled
def finish_hidden(h, n, record, int8_records):  # type: ignore[no-untyped-def]
    """Write the down activation record of ``h`` (float32[n]), int8 or float32; 1 if a value is not finite."""
    if int8_records:
        return quantize_row(h, n, record)
    return copy_row_f32(h, n, record)
