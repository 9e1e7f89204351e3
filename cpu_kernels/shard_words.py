"""The blocks of words.py that say where a layer's kernels and a shard's weights are, filled from a layout.

Both who runs steps and who measures lanes fill them here. The file knows layouts and words, and no lanes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels import layout as column
from trilane.cpu_kernels.kernels import rows_kernel
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cpu_kernels.words import Layer, Shard
from trilane.jit import compiled

#: Words of a Shard block and the columns of a descriptor row that they come from: addresses of planes, and sizes.
PLANES = (
    (Shard.GATE, column.GATE_MAIN), (Shard.GATE_SIDE, column.GATE_SIDE), (Shard.UP, column.UP_MAIN),
    (Shard.UP_SIDE, column.UP_SIDE), (Shard.DOWN, column.DOWN_MAIN), (Shard.DOWN_SIDE, column.DOWN_SIDE),
    (Shard.GATE_BIAS, column.GATE_BIAS), (Shard.UP_BIAS, column.UP_BIAS),
)  # fmt: skip
SIZES = (
    (Shard.NBYTES, column.NBYTES), (Shard.NEURONS, column.NEURONS), (Shard.DOWN_STRIDE, column.DOWN_STRIDE),
    (Shard.DOWN_SIDE_STRIDE, column.DOWN_SIDE_STRIDE),
)  # fmt: skip


def set_all_weights(blocks: NDArray[np.int64], where: NDArray[np.int64], weights: NDArray[np.int64]) -> None:
    """`set_weights` for many Shard blocks (n, Shard.SIZE) of one descriptor row at once; ``weights`` (n,)."""
    for word, at in PLANES:
        blocks[:, word] = weights + where[at] if where[at] >= 0 else 0
    for word, at in SIZES:
        blocks[:, word] = where[at]


def layer_words(layout: ExpertLayout, gate_kind: int, alpha: float, limit: float, isa: str) -> NDArray[np.int64]:
    """The Layer block, int64 (Layer.SIZE,), for row kernels of an instruction set."""
    words = np.zeros(Layer.SIZE, np.int64)
    words[Layer.GATE_ROWS] = rows_kernel(layout.gate.name, isa) if layout.gate is not None else 0
    words[Layer.UP_ROWS] = rows_kernel(layout.up.name, isa)
    words[Layer.DOWN_ROWS] = rows_kernel(layout.down.name, isa)
    words[Layer.HIDDEN] = layout.hidden
    words[Layer.GATE_STRIDE], words[Layer.GATE_SIDE_STRIDE] = layout.gate_strides()
    words[Layer.UP_STRIDE], words[Layer.UP_SIDE_STRIDE] = layout.up_strides()
    words[Layer.GATE_KIND] = gate_kind
    words[Layer.ALPHA] = int(np.float32(alpha).view(np.uint32))
    words[Layer.LIMIT] = int(np.float32(limit).view(np.uint32))
    words[Layer.DOWN_INT8] = layout.down.activation == "int8"
    return words


@compiled(counted=False)
def _plane(weights, offset):
    return weights + offset if offset >= 0 else 0


@compiled(counted=False)
def set_weights(block, where, weights):
    """Planes and sizes of the shard with descriptor row ``where`` and bytes at ``weights``, into a Shard block."""
    block[Shard.GATE] = _plane(weights, where[column.GATE_MAIN])
    block[Shard.GATE_SIDE] = _plane(weights, where[column.GATE_SIDE])
    block[Shard.UP] = _plane(weights, where[column.UP_MAIN])
    block[Shard.UP_SIDE] = _plane(weights, where[column.UP_SIDE])
    block[Shard.DOWN] = _plane(weights, where[column.DOWN_MAIN])
    block[Shard.DOWN_SIDE] = _plane(weights, where[column.DOWN_SIDE])
    block[Shard.GATE_BIAS] = _plane(weights, where[column.GATE_BIAS])
    block[Shard.UP_BIAS] = _plane(weights, where[column.UP_BIAS])
    block[Shard.NBYTES] = where[column.NBYTES]
    block[Shard.NEURONS] = where[column.NEURONS]
    block[Shard.DOWN_STRIDE] = where[column.DOWN_STRIDE]
    block[Shard.DOWN_SIDE_STRIDE] = where[column.DOWN_SIDE_STRIDE]
