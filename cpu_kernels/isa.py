"""Which instruction sets the kernels are built for, and which of them this CPU has.

All give the same bits; they differ in speed. Nothing here reads the environment: who wants another
instruction set than the best one says so in an argument.
"""

from __future__ import annotations

import functools

import llvmlite.binding as llvm

ISAS = ("avx512", "avx2", "portable")
"""Best first. "portable" is generic vector code for any CPU."""

_NEEDS = {
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}


@functools.cache
def available_isas() -> tuple[str, ...]:
    """The instruction sets of :data:`ISAS` that this CPU and operating system can run, best first."""
    features = llvm.get_host_cpu_features()
    return tuple(isa for isa in ISAS if all(features.get(need, False) for need in _NEEDS[isa]))


def best_isa() -> str:
    """The first of :func:`available_isas`."""
    return available_isas()[0]


def check_isa(isa: str) -> str:
    """Return ``isa`` itself, or raise ValueError if it is unknown or this CPU lacks it."""
    if isa not in ISAS:
        raise ValueError(f"instruction set {isa!r} is unknown; choose one of {', '.join(ISAS)}")
    if isa not in available_isas():
        raise ValueError(
            f"instruction set {isa!r} is not available: this CPU lacks one of {', '.join(_NEEDS[isa])}; "
            f"choose one of {', '.join(available_isas())}"
        )
    return isa
