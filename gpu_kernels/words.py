"""The structs that the host and the kernels share, said once: NumPy types here, C structs for the ``.cu`` files.

One table of C declarations makes both, so a field cannot be in two places. ``docs/cuda.md`` says what each
field means and who writes it. The file knows names, offsets and a layer's layout; it launches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.cpu_kernels import layout as lay
from trilane.cpu_kernels.formats import BLOCK
from trilane.cpu_kernels.layout import ExpertLayout

UP_CHUNK = 16  # neurons of a shard whose gate and up rows one thread block multiplies
DOWN_CHUNK = 128  # output columns that are combined at a time
CHUNKS = BLOCK // UP_CHUNK  # thread blocks of an item
ROW_TILE = 16  # rows of an expert that one load of weights is multiplied with in prefill
NUM_USES = 64  # steps without misses of which the host can still learn what they used
USE_WORDS = 16  # of one of them
USE_IDS = 22  # experts that it names at most
MAILED_ROWS = 4  # up to so many are in the mailbox at once, whether anything is missing or not
RECORD_NBYTES = 320
SPREAD_RECORD_NBYTES = 352  # in shared memory
F32_BLOCK_NBYTES = 4 * BLOCK
ERRORS = ("bad_id", "stale_plan", "aborted")  # words of Step.error; a word is the clock of the last such step
HIDDEN_F32, HIDDEN_F16, HIDDEN_BF16 = range(3)

_NUMPY = {"int": "i4", "u32": "u4", "float": "f4", "i64": "i8", "u64": "u8"}
_STRUCTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "ShardPlace": (  # the columns of layout.py's descriptor, and where what follows the matrices starts
        ("int", "nbytes"), ("int", "neurons"), ("int", "gate_main"), ("int", "gate_side"), ("int", "up_main"),
        ("int", "up_side"), ("int", "down_main"), ("int", "down_side"), ("int", "gate_bias"), ("int", "up_bias"),
        ("int", "down_stride"), ("int", "down_side_stride"), ("int", "tail"), ("int", "unused"),
    ),
    "Layer": (
        ("const int*", "slot_of"), ("u64", "slots"), ("i64", "slot_nbytes"), ("const float*", "down_bias"),
        ("u32*", "stamps"), ("int", "layer"), ("int", "hidden"), ("int", "num_shards"), ("int", "num_experts"),
        ("int", "gate_kind"), ("float", "alpha"), ("float", "limit"), ("int", "gate_stride"),
        ("int", "gate_side_stride"), ("int", "up_stride"), ("int", "up_side_stride"), ("int", "unused"),
        ("ShardPlace[2]", "place"),
    ),
    "Item": (  # sixteen bytes at a time, each with the step's number, so that they can be read in one look
        ("const u8*", "weights"), ("u32", "sequence"), ("int", "shard"), ("u8*", "fill"), ("u32", "sequence_2"),
        ("int", "first_position"), ("const u32*", "flag"), ("u32", "sequence_3"), ("int", "num_rows"),
        ("int[4]", "unused"),
    ),
    "WorkList": (("u32", "sequence"), ("int", "count"), ("int", "num_updates"), ("int[13]", "unused")),
    "Update": (("int", "entry"), ("int", "slot"), ("u32", "sequence"), ("int", "unused")),
    "Updates": (("u32", "sequence"), ("int", "count"), ("int", "at_end"), ("int[13]", "unused")),
    "State": (
        ("u32", "clock"), ("u32", "sequence"), ("u32", "missing"), ("u32", "num_groups"), ("u32", "failed"),
        ("u32", "applied"), ("u32", "arrived"), ("u32", "summable"), ("u64", "routed"), ("u32", "epoch"),
        ("u32", "rescued"), ("u32", "published"), ("u32", "owes"), ("u32[2]", "unused"),
    ),
    "Mailbox": (
        ("u32", "begin"), ("u32", "layer"), ("u32", "num_rows"), ("u32", "top_k"), ("u32", "num_groups"),
        ("u32", "num_missing"), ("u32", "clock"), ("u32[8]", "unused"), ("u32", "end"),
    ),
    "Progress": (("u32*", "hidden"), ("u32*", "parts")),
    "Tiles": (("int", "whole"), ("int", "up"), ("int", "down")),
    "Prefill": (
        ("u64*", "source"), ("int*", "first"), ("int*", "rows"), ("int*", "order"), ("int*", "batch"),
        ("u8*", "hidden"), ("int*", "hidden_bad"), ("float*", "outs"), ("u64", "host"), ("i64", "host_stride"),
    ),
    "Batches": (("int", "count"), ("int", "copied"), ("int[14]", "unused")),
    "Step": (
        ("const void*", "x"), ("i64", "x_stride"), ("const void*", "ids"), ("const void*", "weights"),
        ("void*", "out"), ("i64", "out_stride"), ("u8*", "records"), ("float*", "floats"), ("int*", "row_bad"),
        ("int*", "groups"), ("int*", "token_of"), ("int*", "position_of"), ("WorkList*", "hits"),
        ("WorkList*", "plan"), ("int*", "lane"),
        ("float*", "h"), ("float*", "parts"), ("const float*", "cpu_parts"),
        ("State*", "state"), ("int*", "table"), ("const Updates*", "pending"), ("u32*", "acknowledged"),
        ("Mailbox*", "mail"), ("int*", "mail_groups"), ("u64*", "mail_missing"), ("int*", "mail_tokens"),
        ("float*", "mail_weights"), ("u8*", "mail_records"), ("float*", "mail_floats"), ("int*", "mail_bad"),
        ("uint4*", "brief"), ("uint4*", "told"), ("uint4*", "uses"),
        ("const u32*", "cpu_flag"), ("const u32*", "abort"), ("u32*", "error"), ("int", "x_element"),
        ("int", "id_nbytes"), ("int", "out_element"), ("int", "num_rows"), ("int", "top_k"), ("int", "weight_element"),
    ),
}  # fmt: skip


def _field_type(declared: str, known: Mapping[str, np.dtype[Any]]) -> Any:
    """The NumPy type of a C declaration; pointers are addresses."""
    base, bracket, count = declared.partition("[")
    if base.endswith("*"):
        return "u8"
    kind = known[base] if base in known else np.dtype(_NUMPY[base])
    return (kind, (int(count.rstrip("]")),)) if bracket else kind


def _make_types() -> Mapping[str, np.dtype[Any]]:
    known: dict[str, np.dtype[Any]] = {}
    for name, fields in _STRUCTS.items():
        known[name] = np.dtype([(field, _field_type(declared, known)) for declared, field in fields], align=True)
    return MappingProxyType(known)


TYPES: Mapping[str, np.dtype[Any]] = _make_types()
ITEM_NBYTES, UPDATE_NBYTES = TYPES["Item"].itemsize, TYPES["Update"].itemsize
HEADER_NBYTES = TYPES["WorkList"].itemsize
USES_NBYTES = 4 * USE_WORDS * NUM_USES
BRIEF_NBYTES = 16 * (1 + 32)  # of a single row: a header, and sixteen bytes for each expert
TOLD_NBYTES = 16 * 32  # of a block of a single row's records: sixteen bytes for each eight elements
TOLD_BAD = 0xFFFFFFFF  # in place of the scale: an element is not finite


def _c_field(declared: str, name: str) -> str:
    base, bracket, count = declared.partition("[")
    return f"{base} {name}{bracket}{count};"


def c_header() -> str:
    """The text of ``words.cuh``: the structs, their sizes as checks, and the constants that both sides use."""
    lines = ["#pragma once"]
    for name in ("UP_CHUNK", "CHUNKS", "DOWN_CHUNK", "ROW_TILE", "MAILED_ROWS", "NUM_USES", "USE_WORDS", "USE_IDS"):
        lines.append(f"constexpr int {name} = {globals()[name]};")
    lines.append(f"constexpr u32 TOLD_BAD = {TOLD_BAD}u;")
    lines.append("enum ErrorWord { " + ", ".join(f"ERROR_{name.upper()}" for name in ERRORS) + " };")
    for name, fields in _STRUCTS.items():
        body = " ".join(_c_field(declared, field) for declared, field in fields)
        lines.append(f"struct {name} {{ {body} }};")
        lines.append(f'static_assert(sizeof({name}) == {TYPES[name].itemsize}, "{name}");')
    return "\n".join(lines) + "\n"


def shard_place(layout: ExpertLayout, shard: int) -> NDArray[np.void]:
    """A ShardPlace of one shard; offsets of absent parts are -1."""
    row = layout.descriptor[shard]
    place = np.zeros((), TYPES["ShardPlace"])
    columns = {
        "nbytes": lay.NBYTES, "neurons": lay.NEURONS, "gate_main": lay.GATE_MAIN, "gate_side": lay.GATE_SIDE,
        "up_main": lay.UP_MAIN, "up_side": lay.UP_SIDE, "down_main": lay.DOWN_MAIN, "down_side": lay.DOWN_SIDE,
        "gate_bias": lay.GATE_BIAS, "up_bias": lay.UP_BIAS, "down_stride": lay.DOWN_STRIDE,
        "down_side_stride": lay.DOWN_SIDE_STRIDE,
    }  # fmt: skip
    for name, column in columns.items():
        place[name] = row[column]
    end = place["down_main"] + layout.hidden * place["down_stride"]
    if place["down_side"] >= 0:
        end = place["down_side"] + layout.hidden * place["down_side_stride"]
    place["tail"] = -(-int(end) // lay.PLANE_ALIGNMENT) * lay.PLANE_ALIGNMENT
    return place


def layer_words(
    layout: ExpertLayout,
    *,
    layer: int,
    num_experts: int,
    gate_kind: int,
    alpha: float = 1.0,
    limit: float = float("inf"),
    slot_of: int = 0,
    slots: int = 0,
    slot_nbytes: int = 0,
    down_bias: int = 0,
    stamps: int = 0,
) -> NDArray[np.void]:
    """The Layer struct (0-d array) of a layer whose experts have this layout; addresses as in docs/cuda.md."""
    words = np.zeros((), TYPES["Layer"])
    given = {
        "layer": layer, "num_experts": num_experts, "gate_kind": gate_kind, "alpha": alpha, "limit": limit,
        "slot_of": slot_of, "slots": slots, "slot_nbytes": slot_nbytes, "down_bias": down_bias, "stamps": stamps,
        "hidden": layout.hidden, "num_shards": layout.num_shards,
    }  # fmt: skip
    for name, value in given.items():
        words[name] = value
    words["gate_stride"], words["gate_side_stride"] = layout.gate_strides()
    words["up_stride"], words["up_side_stride"] = layout.up_strides()
    words["place"][0] = shard_place(layout, 0)
    words["place"][1] = shard_place(layout, layout.num_shards - 1)
    return words


def down_chunks(hidden: int) -> int:
    """Thread blocks of the down rows of a shard."""
    return -(-hidden // DOWN_CHUNK)


def list_nbytes(max_items: int) -> int:
    """Bytes of a WorkList with room for that many items."""
    return HEADER_NBYTES + max_items * ITEM_NBYTES


def progress_words(address: int, max_items: int) -> NDArray[np.void]:
    """The Progress struct of the flags at ``address``; the memory must be zeros before its first use."""
    words = np.zeros((), TYPES["Progress"])
    words["hidden"] = address
    words["parts"] = address + 4 * max_items * CHUNKS
    return words


def progress_nbytes(max_items: int) -> int:
    """Bytes of the flags of a list of up to ``max_items`` items: two a thread block."""
    return 8 * max_items * CHUNKS
