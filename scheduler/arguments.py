"""A step's arguments, checked at the boundary: shapes, types and ids, each error with the remedy.

How arrays of other libraries are seen is in arrays.py; this file knows what a step needs of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trilane.arrays import HostView, rows_of, view_array
from trilane.errors import ArrayError, ArrayTypeError, RoutingError

ELEMENTS = ("f32", "f16", "bf16")
WEIGHT_DTYPES = {np.dtype(name) for name in ("float32", "float16", "uint16", "float64")}


def check_hidden(hidden: Any, columns: int) -> HostView:
    """Hidden rows of ``columns`` elements of a float type."""
    x = view_array(hidden, "hidden")
    if x.element not in ELEMENTS:
        raise ArrayTypeError(
            f"hidden: dtype {x.element}, but float32, float16 or bfloat16 (NumPy: uint16) is needed; convert it"
        )
    rows_of(x, "hidden", columns, "the store's hidden size")
    return x


def check_out(out: Any, x: HostView) -> HostView:
    """A writable array of the shape of ``x``, of any of the float types."""
    y = view_array(out, "out")
    if y.element not in ELEMENTS:
        raise ArrayTypeError(
            f"out: dtype {y.element}, but float32, float16 or bfloat16 (NumPy: uint16) is needed; pass such an array"
        )
    if not y.array.flags.writeable:
        raise ArrayError("out: the array is read-only, but the result is written there; pass a writable one")
    rows, _ = rows_of(y, "out", x.array.shape[1], "the store's hidden size")
    if rows != len(x.array):
        raise ArrayError(f"out: {rows} rows, but hidden has {len(x.array)}; give both the same number")
    return y


def check_routing(topk_ids: Any, topk_weights: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and float weights, (rows, top_k) each."""
    ids = _view_ids(topk_ids)
    weights = _view_or_list(topk_weights, "topk_weights", np.float32)
    if weights.array.dtype not in WEIGHT_DTYPES:
        raise ArrayTypeError(
            f"topk_weights: dtype {weights.array.dtype}, but floats are needed; convert them to float32"
        )
    for name, view in (("topk_ids", ids), ("topk_weights", weights)):
        if view.array.ndim != 2 or len(view.array) != rows:
            raise ArrayError(
                f"{name}: shape {view.array.shape}, but ({rows}, top_k) is needed: one row for each row of hidden; "
                "reshape it"
            )
    if ids.array.shape != weights.array.shape:
        raise ArrayError(
            f"topk_weights: shape {weights.array.shape}, but topk_ids has {ids.array.shape}, and both are (rows, "
            "top_k); pass one weight for each id"
        )
    return ids.array, _as_float32(weights)


def check_topk_ids(topk_ids: Any) -> np.ndarray:
    """Ids alone, (rows, top_k)."""
    ids = _view_ids(topk_ids).array
    if ids.ndim != 2:
        raise ArrayError(
            f"topk_ids: shape {ids.shape}, but (rows, top_k) is needed; pass one row of ids for each token"
        )
    return ids


def check_ids(layer: int, ids: np.ndarray, num: int) -> None:
    """Raise if an id is neither one of ``num`` experts nor -1 or ``num``, which mean none."""
    bad = (ids < -1) | (ids > num)
    if bad.any():
        row, rank = (int(i) for i in np.argwhere(bad)[0])
        raise RoutingError(bad_id(layer, int(ids[row, rank]), num, f"topk_ids[{row}, {rank}]"))


def bad_id(layer: int, expert: int, num: int, where: str) -> str:
    """The text for an expert id that does not exist."""
    return (
        f"{where}: expert id {expert}, but layer {layer} has experts 0 to {num - 1} (-1 and {num} mean none); "
        "check the router's output"
    )


def apart_from(x: HostView, y: HostView) -> HostView:
    """``x``, copied if writing rows of ``y`` could change rows of it that are read later."""
    same_rows = x.address == y.address and x.array.strides == y.array.strides
    return x if same_rows or not np.may_share_memory(x.array, y.array) else view_array(x.array.copy(), "hidden")


def _view_ids(topk_ids: Any) -> HostView:
    ids = _view_or_list(topk_ids, "topk_ids", np.int64)
    if ids.array.dtype.kind not in "iu" or ids.is_bfloat16:
        kind = "bfloat16" if ids.is_bfloat16 else ids.array.dtype
        raise ArrayTypeError(f"topk_ids: dtype {kind}, but integers are needed; convert them")
    return ids


def _view_or_list(value: Any, name: str, dtype: type) -> HostView:
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ArrayError(f"{name}: a list whose rows differ in length ({error}); pass (rows, top_k)") from None
        if value.size == 0 or value.dtype.kind in "iuf" and np.dtype(dtype).kind == "f":
            value = value.astype(dtype)
    return view_array(value, name)


def _as_float32(weights: HostView) -> np.ndarray:
    if weights.array.dtype == np.uint16:
        return (weights.array.astype(np.uint32) << 16).view(np.float32)
    return weights.array
