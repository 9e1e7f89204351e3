"""How many bytes a step's buffers take: one table for whoever allocates them.

The names are the fields of ``words.TYPES["Step"]``. Nothing here allocates or launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trilane.cpu_kernels.formats import BLOCK
from trilane.gpu_kernels.words import F32_BLOCK_NBYTES, HEADER_NBYTES, RECORD_NBYTES, UPDATE_NBYTES, list_nbytes


class BufferSizes(NamedTuple):
    """Bytes by field name: in device memory, and in mapped host memory; what must start as zeros.

    Attributes
    ----------
    device, mapped : mapping of str to int
    zeroed : frozenset of str
        The other buffers may start with anything in them.
    """

    device: Mapping[str, int]
    mapped: Mapping[str, int]
    zeroed: frozenset[str]


def max_items(num_experts: int, num_shards: int, max_rows: int, top_k: int) -> int:
    """The most items that a list of one step can have."""
    return max(1, min(max_rows * top_k, num_experts)) * num_shards


def buffer_sizes(
    hidden: int, num_shards: int, num_experts: int, max_rows: int, top_k: int, max_updates: int
) -> BufferSizes:
    """Bytes of every buffer of a step of up to ``max_rows`` rows, whatever the formats of the layer.

    Layers that share buffers pass their largest sizes. The caller's own arrays (x, ids, weights, out) and the slot
    table are not among them.
    """
    positions, blocks = max_rows * top_k, max_rows * -(-hidden // BLOCK)
    scratch = positions * num_shards
    rows = {"records": blocks * RECORD_NBYTES, "floats": blocks * F32_BLOCK_NBYTES}
    device = rows | {
        "row_bad": 4 * max_rows,
        "groups": 12 * positions,
        "token_of": 4 * positions,
        "position_of": 4 * positions,
        "hits": list_nbytes(max_items(num_experts, num_shards, max_rows, top_k)),
        "plan": list_nbytes(max_items(num_experts, num_shards, max_rows, top_k)),
        "lane": 4 * scratch,
        "h": F32_BLOCK_NBYTES * scratch,
        "parts": 4 * scratch * hidden,
        "state": HEADER_NBYTES,
    }
    mapped = {f"mail_{name}": nbytes for name, nbytes in rows.items()} | {
        "cpu_parts": 4 * scratch * hidden,
        "pending": HEADER_NBYTES + UPDATE_NBYTES * max_updates,
        "mail": HEADER_NBYTES,
        "mail_groups": 12 * positions,
        "mail_missing": 8 * positions,
        "mail_tokens": 4 * positions,
        "mail_weights": 4 * positions,
        "mail_bad": 4 * max_rows,
        "acknowledged": HEADER_NBYTES,
        "cpu_flag": HEADER_NBYTES,
        "abort": HEADER_NBYTES,
        "error": HEADER_NBYTES,
    }
    return BufferSizes(device, mapped, frozenset({"state", "pending", "acknowledged", "cpu_flag", "abort", "error"}))
