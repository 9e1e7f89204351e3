"""Row kernels by format and instruction set: compiled when first asked for, then found in the cache."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.isa import check_isa

MODULES = MappingProxyType(
    {
        "f32": "dot_float",
        "f16": "dot_float",
        "bf16": "dot_float",
        "q8_0": "dot_q8_0",
        "q4_k": "dot_q4_k",
        "q6_k": "dot_q6_k",
        "mxfp4": "dot_mxfp4",
    }
)
"""The file that holds each format's dot product: it exports ``make_rows(isa)``, or ``make_rows_<format>``."""


def _factory(format_name: str) -> Callable[[str], Any]:
    module = importlib.import_module(f"{__package__}.{MODULES[format_name]}")
    return getattr(module, f"make_rows_{format_name}", None) or module.make_rows


@functools.cache
def _kernel(format_name: str, isa: str) -> Any:
    return _factory(format_name)(isa)  # kept: the code lives as long as this object


def rows_kernel(format_name: str, isa: str) -> int:
    """Address of the row kernel of a format, for compiled callers (``simd.call_rows``).

    Parameters
    ----------
    format_name : str
        One of :data:`trilane.cpu_kernels.formats.FORMATS`.
    isa : str
        One of :func:`trilane.cpu_kernels.isa.available_isas`.

    Returns
    -------
    int
        See :func:`trilane.cpu_kernels.rows.make_rows` for the signature. Valid until the process ends.

    Raises
    ------
    ValueError
        Unknown format, or an instruction set that is unknown or that this CPU lacks.
    """
    return int(_kernel(format_of(format_name).name, check_isa(isa)).address)
