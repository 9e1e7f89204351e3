"""Q8_0 rows times int8 activations: 32 int8 weights share an f16 scale.

Main plane: 256 int8 a block; side plane: 8 f16. The contract: ``I_j`` of the 8 sub-blocks exactly in int32,
``p_j = d_j * float(I_j)``, the tree over p, times ``d_x``. A byte of -128 is allowed in the weights; in the
activation there is none, so that pair sums of bytes stay below 2^15. 272 bytes and 512 operations a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trilane.cpu_kernels.emit import I8X32, I16X4, I16X8, I16X16, I32X8, Emitter, V
from trilane.cpu_kernels.rows import make_rows as make_row_loop
from trilane.cpu_kernels.sub_blocks import ORDER, fold8, gather, make_block4

MAIN_NBYTES, SIDE_NBYTES = 256, 16
_VNNI_OFFSET = 128  # q + 128 is the unsigned byte that vpdpbusd wants


def _dot32(e: Emitter, main: V, x: V) -> V:
    """``<8 x i32>`` whose lanes add up to the dot of 32 bytes (of q + 128 with VNNI)."""
    w, a = e.load(I8X32, main), e.load(I8X32, x)
    if e.isa == "avx512":
        return e.dot_bytes(e.const(I32X8, 0), w ^ 0x80, a)
    if e.isa == "avx2":
        return e.madd(e.maddubs(e.sign_bytes(w, w), e.sign_bytes(a, w)), e.const(I16X16, 1))
    parts = [[v.shuffle(range(k, k + 16)).sext(I16X16) for v in (w, a)] for k in (0, 16)]
    return e.madd(*parts[0]) + e.madd(*parts[1])


def _row_dots(e: Emitter, main: V, record: V) -> V:
    return fold8([_dot32(e, main + 32 * j, record + 32 * j) for j in range(8)])


def _row_scales(e: Emitter, side: V) -> V:
    return e.half_to_float(e.load(I16X8, side).shuffle(ORDER))


def _sub_scales(e: Emitter, sides: Sequence[V]) -> V:
    return e.half_to_float(gather(e, I16X4, sides))


def make_rows(isa: str) -> Any:
    """The row kernel of this format for one instruction set; see :func:`.rows.make_rows`."""
    offset = _VNNI_OFFSET if isa == "avx512" else 0
    block4 = make_block4(isa, _row_dots, _row_scales, _dot32, _sub_scales, offset, 32, 2)
    return make_row_loop(__name__, block4, MAIN_NBYTES, SIDE_NBYTES)
