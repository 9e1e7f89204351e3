"""The table of weight formats: how many bytes a block has, what its bits mean, how the lanes store it.

One :class:`Format` per name. It knows the *source* block (the bytes of a GGUF file), how to turn blocks into
floats, and how a row of blocks is regrouped, without loss, into the two planes that every lane reads:

====== ============ ========================== =============================== ==========
name   source block main plane per 256 weights side plane per 256 weights      activation
====== ============ ========================== =============================== ==========
f32    1:   4 bytes 1024: the floats                                           f32
f16    1:   2 bytes 512: the floats                                            f32
bf16   1:   2 bytes 512: the floats                                            f32
q8_0   32:  34      256: 8 x 32 int8           16: 8 f16 scales                int8
q4_k   256: 144     144: the block as it is                                    int8
q6_k   256: 210     208: ql, qh, scales        2: the f16 scale of the block   int8
mxfp4  32:  17      128: 8 x 16 nibble pairs   8: 8 E8M0 scales                int8
====== ============ ========================== =============================== ==========

NumPy only: nothing here compiles, and the quantisers (quantize.py) are imported when one is first called.
It does not know experts, shards or where in memory a plane lies (layout.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]

BLOCK = 256  # weights that share an activation block: the unit of every kernel
SUB_BLOCK = 32  # the shortest piece of a block that may stand alone at the end of a row
ROW_ALIGNMENT = 16  # bytes: every main row starts at a multiple of it

MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # doubled E2M1
MXFP4_VALUES.flags.writeable = False


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def e8m0_half(exponents: UInt8Array) -> Float32Array:
    """Half of the power of two that an E8M0 byte stands for (2**(e-128)), since MXFP4's values are doubled.

    Exponents 0 and 1 give the float32 denormals 2**-128 and 2**-127; 255 is 2**127 and not NaN, as in GGML.
    """
    e = exponents.astype(np.uint32)
    normal = (np.maximum(e, 1) - np.uint32(1)) << np.uint32(23)
    return np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), normal).view(np.float32)


def _half(two_bytes: UInt8Array) -> Float32Array:
    """(n, 2 m) bytes of little-endian f16 -> (n, m) float32."""
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


def unpack_q8_0(blocks: UInt8Array) -> tuple[Float32Array, NDArray[np.int8]]:
    """(n, 34) -> scale d (n, 1) float32 and quants (n, 32) int8; value = q * d."""
    return _half(blocks[:, :2]), np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def unpack_mxfp4(blocks: UInt8Array) -> tuple[Float32Array, NDArray[np.int8]]:
    """(n, 17) -> scale (n, 1) float32 (half of the power of two) and doubled values (n, 32) int8."""
    nibbles = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    return e8m0_half(blocks[:, :1]), MXFP4_VALUES[nibbles]


def unpack_q4_k(
    blocks: UInt8Array,
) -> tuple[Float32Array, Float32Array, UInt8Array, UInt8Array, UInt8Array]:
    """(n, 144) -> d (n, 1), dmin (n, 1) float32; sc (n, 8), m (n, 8) in 0..63; q (n, 256) in 0..15, uint8.

    Value of weight i of sub-block j = (d * sc[j]) * q[i] - dmin * m[j]. The first eight of the twelve scale
    bytes hold sc[0..3] and m[0..3] in their low six bits; their upper two bits are the upper bits of sc[4..7]
    and m[4..7], whose low nibbles share the last four bytes.
    """
    low_sc, low_m, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    sc = np.concatenate([low_sc & 63, (high & 15) | (low_sc >> 6 << 4)], axis=1)
    m = np.concatenate([low_m & 63, (high >> 4) | (low_m >> 6 << 4)], axis=1)
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)  # low nibbles: sub-block 2 i, high nibbles: 2 i + 1
    q = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, BLOCK)
    return _half(blocks[:, :2]), _half(blocks[:, 2:4]), sc, m, q


def unpack_q6_k(blocks: UInt8Array) -> tuple[Float32Array, NDArray[np.int8], NDArray[np.int8]]:
    """(n, 210) -> d (n, 1) float32, sc (n, 16) int8, q - 32 (n, 256) int8 in -32..31.

    Value of weight i = (d * sc[i // 16]) * (q[i] - 32). Each half of the block (128 weights) has 64 bytes of
    low nibbles and 32 bytes of bit pairs: weight 32 r + l of a half has its bit pair at bits 2 r of byte l.
    """
    ql = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).astype(np.int8) - np.int8(32)
    sc = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _half(blocks[:, 208:]), sc, q.reshape(-1, BLOCK)


def _dequantize_f32(blocks: UInt8Array) -> Float32Array:
    return np.ascontiguousarray(blocks).view(np.float32)


def _dequantize_f16(blocks: UInt8Array) -> Float32Array:
    return _half(blocks)


def _dequantize_bf16(blocks: UInt8Array) -> Float32Array:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _dequantize_q8_0(blocks: UInt8Array) -> Float32Array:
    d, q = unpack_q8_0(blocks)
    return q.astype(np.float32) * d


def _dequantize_mxfp4(blocks: UInt8Array) -> Float32Array:
    d, values = unpack_mxfp4(blocks)
    return d * values.astype(np.float32)


def _dequantize_q4_k(blocks: UInt8Array) -> Float32Array:
    d, dmin, sc, m, q = unpack_q4_k(blocks)
    scale = (d * sc.astype(np.float32))[:, :, None]
    offset = (dmin * m.astype(np.float32))[:, :, None]
    return (scale * q.reshape(-1, 8, 32).astype(np.float32) - offset).reshape(-1, BLOCK)


def _dequantize_q6_k(blocks: UInt8Array) -> Float32Array:
    d, sc, q = unpack_q6_k(blocks)
    scale = (d * sc.astype(np.float32))[:, :, None]
    return (scale * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, BLOCK)


@dataclass(frozen=True)
class Format:
    """One weight format: sizes, meaning and the split into planes.

    Attributes
    ----------
    name : str
    block_size : int
        Weights in a source block (1, 32 or 256).
    block_nbytes : int
        Bytes of a source block.
    activation : str
        What the dot product multiplies with: ``"int8"`` records or ``"f32"`` records.
    main_nbytes, side_nbytes : int
        Bytes of 256 weights in the main and in the side plane (0: no side plane).
    main_bytes, side_bytes : slice
        Which bytes of a source block go to which plane.
    dequantize : callable
        (n, block_nbytes) uint8 -> (n, block_size) float32.
    """

    name: str
    block_size: int
    block_nbytes: int
    activation: str
    main_nbytes: int
    side_nbytes: int
    main_bytes: slice
    side_bytes: slice
    dequantize: Callable[[UInt8Array], Float32Array]

    def __hash__(self) -> int:
        return hash(self.name)  # slices have no hash before Python 3.12

    @property
    def column_multiple(self) -> int:
        """Row lengths must be a multiple of it: 32, or 256 for the K-quants."""
        return max(self.block_size, SUB_BLOCK)

    def check_columns(self, num_columns: int) -> None:
        """Raise ValueError unless rows of ``num_columns`` weights can be stored in this format."""
        if self._takes(num_columns):
            return
        others = ", ".join(name for name, other in FORMATS.items() if other._takes(num_columns))
        remedy = f"use one of {others}" if others else "no format takes such rows: pad them with zeros"
        raise ValueError(
            f"rows of K={num_columns} weights cannot be stored as {self.name}: "
            f"K must be a positive multiple of {self.column_multiple}; {remedy}"
        )

    def _takes(self, num_columns: int) -> bool:
        return num_columns > 0 and num_columns % self.column_multiple == 0

    def row_source_nbytes(self, num_columns: int) -> int:
        """Bytes of a source row of ``num_columns`` weights."""
        return num_columns // self.block_size * self.block_nbytes

    def row_main_nbytes(self, num_columns: int) -> int:
        """Bytes of that row in the main plane, without padding."""
        return num_columns * self.main_nbytes // BLOCK

    def row_side_nbytes(self, num_columns: int) -> int:
        """Bytes of that row in the side plane, 0 if there is none."""
        return num_columns * self.side_nbytes // BLOCK

    def main_stride(self, num_columns: int) -> int:
        """Bytes from one main row to the next (a multiple of 16)."""
        return align_up(self.row_main_nbytes(num_columns), ROW_ALIGNMENT)

    def side_stride(self, num_columns: int) -> int:
        """Bytes from one side row to the next (tight), 0 if there is no side plane."""
        return self.row_side_nbytes(num_columns)

    def _as_blocks(self, source: UInt8Array) -> UInt8Array:
        """(rows, nbytes) -> (rows, num_blocks, block_nbytes), a view; float rows count as one block."""
        if self.block_size == 1:
            return source[:, None, :]
        if source.shape[1] % self.block_nbytes:
            raise ValueError(
                f"a source row of {source.shape[1]} bytes is no whole number of {self.name} blocks of "
                f"{self.block_nbytes} bytes: pass whole rows as (rows, nbytes) uint8"
            )
        return source.reshape(len(source), -1, self.block_nbytes)

    def split(
        self, source: UInt8Array, main: UInt8Array | None = None, side: UInt8Array | None = None
    ) -> tuple[UInt8Array, UInt8Array]:
        """Regroup source rows (rows, row_source_nbytes) into (main, side) rows: no padding, no loss.

        ``main`` and ``side`` may be given (views of a plane); else they are allocated.
        """
        blocks = self._as_blocks(source)
        return _copy_field(blocks[:, :, self.main_bytes], main), _copy_field(blocks[:, :, self.side_bytes], side)

    def join(self, main: UInt8Array, side: UInt8Array) -> UInt8Array:
        """The inverse of :meth:`split`: source rows from main and side rows."""
        rows = len(main)
        if self.block_size == 1:
            return main.copy()
        num_blocks = main.shape[1] * BLOCK // self.main_nbytes // self.block_size
        source = np.empty((rows, num_blocks, self.block_nbytes), np.uint8)
        source[:, :, self.main_bytes] = main.reshape(rows, num_blocks, -1)
        if self.side_nbytes:
            source[:, :, self.side_bytes] = side.reshape(rows, num_blocks, -1)
        return source.reshape(rows, -1)

    def dequantize_rows(self, source: UInt8Array) -> Float32Array:
        """(rows, row_source_nbytes) uint8 -> (rows, K) float32."""
        blocks = np.ascontiguousarray(source).reshape(-1, self.block_nbytes)
        return self.dequantize(blocks).reshape(len(source), -1)

    def quantize(self, values: Any) -> UInt8Array:
        """(n, block_size) float32 -> (n, block_nbytes) uint8 (see quantize.py, imported on first use)."""
        from trilane.cpu_kernels.quantize import quantize_blocks

        return quantize_blocks(values, self)


def _copy_field(field: UInt8Array, out: UInt8Array | None) -> UInt8Array:
    """(rows, num_blocks, bytes) strided -> (rows, num_blocks * bytes), into ``out`` if given."""
    rows, num_blocks, nbytes = field.shape
    if out is None:
        out = np.empty((rows, num_blocks * nbytes), np.uint8)
    if nbytes:
        out.reshape(rows, num_blocks, nbytes)[...] = field  # splitting an axis makes a view, whatever the strides
    return out


_ALL, _NONE = slice(None), slice(0, 0)
_TABLE = (
    Format("f32", 1, 4, "f32", 1024, 0, _ALL, _NONE, _dequantize_f32),
    Format("f16", 1, 2, "f32", 512, 0, _ALL, _NONE, _dequantize_f16),
    Format("bf16", 1, 2, "f32", 512, 0, _ALL, _NONE, _dequantize_bf16),
    Format("q8_0", 32, 34, "int8", 256, 16, slice(2, 34), slice(0, 2), _dequantize_q8_0),
    Format("q4_k", 256, 144, "int8", 144, 0, _ALL, _NONE, _dequantize_q4_k),
    Format("q6_k", 256, 210, "int8", 208, 2, slice(0, 208), slice(208, 210), _dequantize_q6_k),
    Format("mxfp4", 32, 17, "int8", 128, 8, slice(1, 17), slice(0, 1), _dequantize_mxfp4),
)
FORMATS: Mapping[str, Format] = MappingProxyType({f.name: f for f in _TABLE})


def format_of(name: str) -> Format:
    """The format called ``name`` (upper or lower case).

    Raises
    ------
    ValueError
        If there is none; the text lists the names and proposes the nearest.
    """
    found = FORMATS.get(str(name).lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(str(name).lower(), list(FORMATS), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown weight format {name!r}: it must be one of {', '.join(FORMATS)}{hint}")
