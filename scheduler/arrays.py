"""Arrays at the edge: what callers pass, seen as an address, a shape, strides and an element type.

Takes NumPy arrays, ``__array_interface__`` and DLPack on the CPU (torch, jax, ...), without importing any of
their libraries and without copying. bfloat16, which NumPy lacks, is carried as uint16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.errors import ArrayError, ArrayTypeError

ELEMENT_OF = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(np.uint16): "bf16"}


@dataclass(frozen=True)
class HostView:
    """A caller's array in host memory: a NumPy view (bfloat16 as uint16) and what it must outlive."""

    array: np.ndarray
    element: str  # "f32", "f16", "bf16", or NumPy's name of another type
    owner: Any
    is_bfloat16: bool = False  # told apart from uint16 by its producer

    @property
    def address(self) -> int:
        return int(self.array.__array_interface__["data"][0])


def view_array(value: Any, name: str) -> HostView:
    """See ``value`` as host memory without a copy.

    Parameters
    ----------
    value : array
        NumPy, or anything with ``__array_interface__`` or ``__dlpack__`` on the CPU.
    name : str
        The argument's name, for errors.

    Raises
    ------
    ArrayError
        The value is no array, or lives on another device.
    """
    if isinstance(value, np.ndarray):
        view = HostView(value, _element(value), value)
    elif hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        view = HostView(array, _element(array), value)
    elif hasattr(value, "__dlpack__"):
        view = _view_dlpack(value, name)
    else:
        raise ArrayTypeError(
            f"{name}: a {type(value).__name__} is no array; pass NumPy, or an object with "
            "__array_interface__ or __dlpack__ in host memory"
        )
    if not view.array.dtype.isnative:
        raise ArrayTypeError(
            f"{name}: byte order of {view.array.dtype.str!r} is not this machine's; convert it with "
            f"{name}.astype({view.array.dtype.name!r})"
        )
    return view


def _element(array: np.ndarray) -> str:
    return ELEMENT_OF.get(array.dtype) or array.dtype.name  # the name is slow to make


def _view_dlpack(value: Any, name: str) -> HostView:
    device_type = int(value.__dlpack_device__()[0])
    if device_type != 1:
        raise ArrayError(
            f"{name}: the array is on DLPack device type {device_type}; the host device needs type 1 "
            "(CPU): move it to host memory first"
        )
    try:
        tensor = _BorrowedTensor(_export(value))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayTypeError(
            f"{name}: DLPack refused ({error}); pass a plain, detached host tensor of a standard type"
        ) from error
    array = np.asarray(tensor)
    return HostView(array, _element(array), value, tensor.is_bfloat16)


def _export(value: Any) -> Any:
    """A capsule; of version 1 where the producer has it, since only that tells read-only arrays."""
    try:
        return value.__dlpack__(max_version=(1, 0))
    except TypeError:
        return value.__dlpack__()


class _DLTensor(ctypes.Structure):
    """DLPack's ``DLTensor``, which a capsule of version 0 starts with."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _VersionedTensor(ctypes.Structure):
    """DLPack's ``DLManagedTensorVersioned``, in a capsule of version 1."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


KIND_OF_CODE = {0: "i", 1: "u", 2: "f", 4: "u", 6: "b"}  # DLDataTypeCode to NumPy's kinds
BFLOAT, READ_ONLY = 4, 1


class _BorrowedTensor:
    """A DLPack capsule read in place: NumPy's own reader knows no bfloat16 and makes old capsules read-only.

    The capsule is never renamed to "used", so its own destructor frees the producer's tensor when this
    object, kept alive as the base of the array, goes.
    """

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule
        tensor, read_only = _open_capsule(capsule)
        if tensor.code not in KIND_OF_CODE or tensor.lanes != 1 or tensor.bits % 8:
            raise TypeError(f"type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes is unknown")
        self.is_bfloat16 = tensor.code == BFLOAT
        size = tensor.bits // 8
        strides = tuple(size * tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(f"{KIND_OF_CODE[tensor.code]}{size}").str,
            "shape": tuple(tensor.shape[i] for i in range(tensor.ndim)),
            "strides": strides,
            "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
        }


def _open_capsule(capsule: Any) -> tuple[_DLTensor, bool]:
    """The tensor in a fresh capsule, and whether it may only be read."""
    get, is_valid = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_IsValid
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    is_valid.restype, is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    if not is_valid(capsule, b"dltensor_versioned"):
        return _DLTensor.from_address(get(capsule, b"dltensor")), False
    versioned = _VersionedTensor.from_address(get(capsule, b"dltensor_versioned"))
    if versioned.major != 1:
        raise ValueError(f"DLPack version {versioned.major}.{versioned.minor} is unknown")
    return versioned.tensor, bool(versioned.flags & READ_ONLY)


def like_input(value: Any, shape: tuple[int, ...]) -> Any:
    """A new output array of the caller's own kind and element type, uninitialised."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.empty(shape, view_array(value, "hidden").array.dtype)
    if hasattr(value, "new_empty"):
        return value.new_empty(shape)
    namespace = value.__array_namespace__() if hasattr(value, "__array_namespace__") else np
    return namespace.empty(shape, dtype=value.dtype)


def rows_of(view: HostView, name: str, columns: int, columns_are: str) -> tuple[int, int]:
    """Check a (rows, columns) array with packed rows; return (rows, row stride in bytes).

    Raises
    ------
    ArrayError
        Wrong number of dimensions or columns, or elements of a row that are not adjacent.
    """
    array = view.array
    if array.ndim != 2 or array.shape[1] != columns:
        raise ArrayError(
            f"{name}: shape {tuple(array.shape)}, but (rows, {columns}) is needed: {columns_are}; "
            "reshape it to two dimensions"
        )
    if array.size == 0:  # strides of an empty array say nothing
        return array.shape[0], array.strides[0]
    if array.shape[0] > 1 and array.shape[1] > 1 and array.strides[0] < array.shape[1] * array.itemsize:
        raise ArrayError(
            f"{name}: rows overlap or run backwards (strides {array.strides} bytes); pass a copy, "
            f"such as numpy.ascontiguousarray({name})"
        )
    if array.shape[1] > 1 and array.strides[1] != array.itemsize:
        raise ArrayError(
            f"{name}: elements of a row are {array.strides[1]} bytes apart, but must be adjacent "
            f"({array.itemsize}); pass numpy.ascontiguousarray({name})"
        )
    return array.shape[0], array.strides[0]
