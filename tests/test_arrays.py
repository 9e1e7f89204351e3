"""Arrays at the edge: NumPy, __array_interface__, DLPack of both versions; seen in place or refused with a reason."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest

from trilane import ArrayError, ArrayTypeError
from trilane.arrays import _DLTensor, _VersionedTensor, like_input, rows_of, view_array

BFLOAT, FLOAT, COMPLEX, CPU, CUDA = 4, 2, 5, 1, 2
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CAPSULE_END = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
pythonapi = ctypes.pythonapi
new_capsule = pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor:
    """A producer with torch's manners over a NumPy array: bfloat16 is kept as uint16."""

    def __init__(self, array, code=None, *, version=0, flags=0, major=1, device=CPU, offset=0, lanes=1):
        self.array, self.version, self.flags, self.major = array, version, flags, major
        self.code = {"f": FLOAT, "i": 0, "u": 1, "b": 6, "c": COMPLEX}[array.dtype.kind] if code is None else code
        self.device, self.offset, self.lanes = device, offset, lanes
        self.exports = []

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return "torch.bfloat16" if self.code == BFLOAT else self.array.dtype

    def new_empty(self, shape):
        return Tensor(np.full(shape, 77, self.array.dtype), self.code, version=self.version)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **options):
        if options and self.version == 0:
            raise TypeError("unexpected keyword argument 'max_version'")
        assert options in ({}, {"max_version": (1, 0)})
        managed, name, keep = self._managed()
        self.exports.append((managed, keep))
        return new_capsule(ctypes.addressof(managed), name, None)

    def _managed(self):
        array, size = self.array, self.array.itemsize
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // size for s in array.strides))
        tensor = _DLTensor(
            array.ctypes.data - self.offset, self.device, 0, array.ndim, self.code, 8 * size, self.lanes, shape,
            None if array.flags.c_contiguous and self.version == 0 else strides, self.offset,
        )  # fmt: skip
        if self.version == 0:
            return tensor, b"dltensor", (shape, strides)
        return _VersionedTensor(self.major, 0, None, None, self.flags, tensor), b"dltensor_versioned", (shape, strides)


class Interface:
    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


def values(dtype=np.float32, shape=(3, 8)):
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


# ------------------------------------------------------------------------------------------------- what it sees
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "int64", "int32", "uint8", "float64", "bool"])
def test_every_way_sees_the_same_memory(dtype):
    array = values(dtype)
    ways = [array, Interface(array), Tensor(array), Tensor(array, version=1), Tensor(array, offset=16)]
    for way in ways:
        view = view_array(way, "x")
        assert view.address == array.ctypes.data and view.array.strides == array.strides
        np.testing.assert_array_equal(view.array, array)
        assert view.element == {"float32": "f32", "float16": "f16", "uint16": "bf16"}.get(dtype, dtype)
        assert view.array.flags.writeable and not view.is_bfloat16
        view.array[1, 1] = 1
        assert array[1, 1] == 1


@pytest.mark.parametrize("version", [0, 1])
def test_bfloat16(version):
    array = values(np.uint16)
    view = view_array(Tensor(array, BFLOAT, version=version), "x")
    assert view.element == "bf16" and view.is_bfloat16 and view.array.dtype == np.uint16
    assert view.address == array.ctypes.data


def test_strides_and_empty_arrays():
    array = values(shape=(6, 16))[::2, :8]
    for version in (0, 1):
        view = view_array(Tensor(array, version=version), "x")
        assert view.array.strides == (128, 4) and (view.array == array).all()
        assert view_array(Tensor(values(shape=(0, 8)), version=version), "x").array.shape == (0, 8)
    backwards = values()[::-1]
    assert view_array(Tensor(backwards), "x").array.strides == (-32, 4)


def test_read_only_is_kept():
    array = values()
    assert not view_array(Tensor(array, version=1, flags=1), "x").array.flags.writeable
    array.flags.writeable = False
    assert not view_array(array, "x").array.flags.writeable
    assert not view_array(Interface(array), "x").array.flags.writeable


def test_numpy_as_a_producer():
    """NumPy's own DLPack, wrapped so that nothing else of it can be seen."""

    class Wrapped:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    array = values()
    view = view_array(Wrapped(array), "x")
    assert view.address == array.ctypes.data and view.array.flags.writeable
    array.flags.writeable = False
    assert not view_array(Wrapped(array), "x").array.flags.writeable
    ended = weakref.ref(array)
    del array
    gc.collect()
    assert ended() is not None and (view.array == values()).all()  # the view keeps the producer's memory
    del view
    gc.collect()
    assert ended() is None


def test_the_owner_is_kept():
    tensor = Tensor(values())
    view, ended = view_array(tensor, "x"), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert ended() is view.owner


# -------------------------------------------------------------------------------------------------- what it refuses
def test_no_array():
    for thing in ([1.0], 3, None, "x", memoryview(b"abcd")):
        with pytest.raises(ArrayTypeError, match=rf"hidden: a {type(thing).__name__} is no array; pass NumPy"):
            view_array(thing, "hidden")


def test_another_device():
    with pytest.raises(ArrayError, match="hidden: the array is on DLPack device type 2.*move it to host memory"):
        view_array(Tensor(values(), device=CUDA), "hidden")


@pytest.mark.parametrize("error", [RuntimeError, BufferError])
def test_a_producer_that_refuses(error):
    class Refusing(Tensor):
        def __dlpack__(self, **options):
            raise error("requires grad")

    for code in (FLOAT, BFLOAT):
        with pytest.raises(ArrayTypeError, match=r"hidden: DLPack refused \(requires grad\).*detached"):
            view_array(Refusing(values(np.uint16), code), "hidden")


def test_types_and_versions_that_are_unknown():
    unknown = Tensor(values(), 9), Tensor(values(np.complex64)), Tensor(values(), lanes=4)
    for tensor in (*unknown, Tensor(values(), version=1, major=2)):
        with pytest.raises(ArrayTypeError, match=r"x: DLPack refused \(.* unknown\)"):
            view_array(tensor, "x")


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">u2", ">i8"])
def test_foreign_byte_order(dtype):
    with pytest.raises(ArrayTypeError, match=r"x: byte order of '>.*' is not this machine's; convert it with x.astype"):
        view_array(values(dtype), "x")


# ---------------------------------------------------------------------------------------------------- rows
def rows(array):
    return rows_of(view_array(array, "x"), "x", 8, "the hidden size")


def test_rows():
    assert rows(values()) == (3, 32)
    assert rows(values(shape=(3, 16))[:, 4:12]) == (3, 64)
    assert rows(values(np.float16)[:1]) == (1, 16)
    assert rows(values(shape=(0, 8)))[0] == 0
    assert rows(np.broadcast_to(values(shape=(1, 8)), (1, 8)))[0] == 1


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (values(shape=(8,)), r"x: shape \(8,\), but \(rows, 8\) is needed: the hidden size; reshape"),
        (values(shape=(2, 9)), r"x: shape \(2, 9\)"),
        (values(shape=(1, 2, 8)), r"x: shape \(1, 2, 8\)"),
        (values(shape=(3, 16))[:, ::2], "x: elements of a row are 8 bytes apart, but must be adjacent"),
        (values(shape=(8, 8)).T, "x: "),
        (values(shape=(1, 16))[:, ::2], "x: elements of a row are 8 bytes apart"),
        (values()[:, ::-1], "x: elements of a row are -4 bytes apart"),
        (values()[::-1], r"x: rows overlap or run backwards \(strides \(-32, 4\) bytes\); pass a copy"),
        (np.broadcast_to(values(shape=(1, 8)), (3, 8)), "x: rows overlap"),
    ],
)
def test_rows_that_are_refused(array, text):
    with pytest.raises(ArrayError, match=text):
        rows(array)


# ------------------------------------------------------------------------------------------------------ outputs
def test_outputs_are_of_the_inputs_kind():
    assert like_input(values(np.float16), (2, 8)).dtype == np.float16
    assert type(like_input(Interface(values(np.uint16)), (2, 8))) is np.ndarray
    made = like_input(Tensor(values(np.uint16), BFLOAT), (2, 8))
    assert isinstance(made, Tensor) and made.code == BFLOAT and made.shape == (2, 8)

    class Namespaced(Tensor):
        new_empty = property()  # as if it had none

        def __array_namespace__(self):
            return np

    assert like_input(Namespaced(values(np.float16)), (2, 8)).dtype == np.float16
