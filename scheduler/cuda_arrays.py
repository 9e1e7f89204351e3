"""Arrays and streams of callers on the CUDA device: an address, a shape, an element type, and a stream's handle.

Takes torch tensors, anything with ``__cuda_array_interface__`` (CuPy, Numba, ...), and host arrays as arrays.py
does; none of their libraries is imported, and nothing is copied.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.errors import ArrayError, ArrayTypeError

ELEMENTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint16": "bf16"}
NBYTES = {"f32": 4, "f16": 2, "bf16": 2}
ITEMSIZE = {"int32": 4, "int64": 8, **{dtype: NBYTES[element] for dtype, element in ELEMENTS.items()}}


@dataclass(frozen=True)
class DeviceView:
    """A caller's array in device memory; strides in bytes, ``dtype`` as NumPy or torch names it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    owner: Any

    @property
    def element(self) -> str | None:
        """ "f32", "f16" or "bf16" where the type is one of them."""
        return ELEMENTS.get(self.dtype)


def is_on_device(value: Any) -> bool:
    """Whether a caller's array is in device memory (of whatever GPU)."""
    if hasattr(value, "data_ptr"):
        return bool(getattr(value, "is_cuda", False))
    return hasattr(value, "__cuda_array_interface__")


def view_device(value: Any, name: str) -> DeviceView:
    """See ``value`` as device memory.

    Raises
    ------
    ArrayError
        It is not in device memory.
    """
    if not is_on_device(value):
        raise ArrayError(
            f"{name}: a {type(value).__name__} in host memory beside arrays on the GPU; move it to the GPU, or pass "
            "all arrays in host memory"
        )
    if hasattr(value, "data_ptr"):
        itemsize = int(value.element_size())
        strides = tuple(itemsize * int(step) for step in value.stride())
        dtype = str(value.dtype).rpartition(".")[2]
        return DeviceView(int(value.data_ptr()), tuple(map(int, value.shape)), strides, dtype, value)
    facts = value.__cuda_array_interface__
    dtype, shape = np.dtype(facts["typestr"]), tuple(map(int, facts["shape"]))
    strides = facts.get("strides") or _contiguous(shape, dtype.itemsize)
    return DeviceView(int(facts["data"][0] or 0), shape, tuple(map(int, strides)), dtype.name, value)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def device_rows(value: Any, name: str, columns: int, rows: int | None = None) -> DeviceView:
    """Rows of ``columns`` floats whose elements lie side by side."""
    view = view_device(value, name)
    if view.element is None:
        raise ArrayTypeError(f"{name}: dtype {view.dtype}, but float32, float16 or bfloat16 is needed; convert it")
    if len(view.shape) != 2 or view.shape[1] != columns or (rows is not None and view.shape[0] != rows):
        wanted = f"({'rows' if rows is None else rows}, {columns})"
        raise ArrayError(f"{name}: shape {view.shape}, but {wanted} is needed")
    if view.strides[1] != NBYTES[view.element]:
        raise ArrayError(f"{name}: strides {view.strides}, but elements of a row must lie side by side; copy it")
    return view


def device_routing(ids: Any, weights: Any, rows: int) -> tuple[DeviceView, DeviceView]:
    """Ids (int32 or int64) and weights (float32, float16 or bfloat16), (rows, top_k) each and contiguous."""
    views = view_device(ids, "topk_ids"), view_device(weights, "topk_weights")
    for name, view, kinds in (
        ("topk_ids", views[0], ("int32", "int64")),
        ("topk_weights", views[1], tuple(ELEMENTS)),
    ):
        if view.dtype not in kinds:
            raise ArrayTypeError(
                f"{name}: dtype {view.dtype}, but {' or '.join(kinds)} is needed on the GPU; convert it there"
            )
        if len(view.shape) != 2 or view.shape[0] != rows:
            raise ArrayError(f"{name}: shape {view.shape}, but ({rows}, top_k) is needed: one row for each of hidden")
        itemsize = ITEMSIZE[view.dtype]
        if view.shape[0] > 1 and view.strides != _contiguous(view.shape, itemsize):
            raise ArrayError(f"{name}: strides {view.strides}, but a contiguous array is needed; copy it")
    if views[0].shape != views[1].shape:
        raise ArrayError(
            f"topk_weights: shape {views[1].shape}, but topk_ids has {views[0].shape}; both are (rows, top_k)"
        )
    return views


def stream_handle(stream: Any, value: Any = None) -> int | None:
    """The handle of a caller's stream; None: the framework's current one for ``value``, if that is an array of it.

    Takes an int, objects with ``__cuda_stream__`` (CUDA Python's protocol), ``cuda_stream`` (torch) or ``ptr`` (CuPy).
    """
    if stream is None:
        return _current_stream(value)
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise ArrayError(
        f"stream: a {type(stream).__name__} is no stream; pass a handle as int, a torch or CuPy stream, or an object "
        "with __cuda_stream__"
    )


def _current_stream(value: Any) -> int | None:
    library = type(value).__module__.partition(".")[0]
    module = sys.modules.get(library)
    if library == "torch" and module is not None:
        return int(module.cuda.current_stream(value.device).cuda_stream)
    if library == "cupy" and module is not None:
        return int(module.cuda.get_current_stream().ptr)
    return None


def empty_like(value: Any, name: str) -> Any:
    """A new array of the kind, shape and type of a caller's device array, in that library's memory."""
    library = type(value).__module__.partition(".")[0]
    module = sys.modules.get(library)
    if library in ("torch", "cupy") and module is not None:
        return module.empty_like(value)
    raise ArrayError(
        f"{name}: {type(value).__name__} cannot be allocated here; pass out=, an array of the shape of hidden"
    )
