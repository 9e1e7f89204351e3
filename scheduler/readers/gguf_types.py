"""The types of GGUF files by number: of tensors, with their blocks, and of metadata values.

From ggml's public headers; types that ggml has removed are not in it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class BlockType(NamedTuple):
    """A tensor type: weights and bytes of one block."""

    name: str
    block_size: int
    block_nbytes: int


BLOCK_TYPES = {
    0: BlockType("f32", 1, 4),
    1: BlockType("f16", 1, 2),
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    9: BlockType("q8_1", 32, 40),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    15: BlockType("q8_k", 256, 292),
    16: BlockType("iq2_xxs", 256, 66),
    17: BlockType("iq2_xs", 256, 74),
    18: BlockType("iq3_xxs", 256, 98),
    19: BlockType("iq1_s", 256, 50),
    20: BlockType("iq4_nl", 32, 18),
    21: BlockType("iq3_s", 256, 110),
    22: BlockType("iq2_s", 256, 82),
    23: BlockType("iq4_xs", 256, 136),
    24: BlockType("i8", 1, 1),
    25: BlockType("i16", 1, 2),
    26: BlockType("i32", 1, 4),
    27: BlockType("i64", 1, 8),
    28: BlockType("f64", 1, 8),
    29: BlockType("iq1_m", 256, 56),
    30: BlockType("bf16", 1, 2),
    34: BlockType("tq1_0", 256, 54),
    35: BlockType("tq2_0", 256, 66),
    39: BlockType("mxfp4", 32, 17),
    40: BlockType("nvfp4", 64, 36),
    41: BlockType("q1_0", 128, 18),
}

#: Metadata values of a fixed size, by number: how Python's struct and NumPy call them.
SCALARS = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
NUMPY_OF = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
UINT32, STRING, ARRAY = 4, 8, 9
