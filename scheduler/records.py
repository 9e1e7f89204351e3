"""Tuples of many arrays, handed to compiled code as one address.

Numba hands a tuple over array by array, seven words each: a function that gets the scheduler's state would have
hundreds of arguments, and the compiler would spend most of its time on moving them. A class decorated with
:func:`record` is seen by compiled code as the address of its fields in memory instead: data, size, shape and strides
of each array, plain numbers, and records within it one after the other. Fields are only read; arrays are borrowed, so
whoever passes a record keeps it alive. Plain Python, and code that runs with the JIT off, sees an ordinary tuple.

This file knows no record of the scheduler's.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.typing.templates import AttributeTemplate
from numba.extending import NativeValue, infer_getattr, intrinsic, lower_getattr_generic, typeof_impl, unbox
from numpy.typing import NDArray

Class = TypeVar("Class", bound=type)
_WORD = 8
_WORD_TYPE = ir.IntType(8 * _WORD)
_NUMBERS = (types.int64, types.float64, types.boolean)


class RecordType(types.Type):  # type: ignore[misc]
    """Numba's type of a record class whose fields have these types."""

    def __init__(self, record_class: type, members: tuple[Any, ...]) -> None:
        self.record_class, self.members = record_class, members
        self.names = record_class._fields  # type: ignore[attr-defined]
        for name, member in zip(self.names, members, strict=True):
            if not isinstance(member, types.Array | RecordType) and member not in _NUMBERS:
                raise _refusal(record_class, name, member)
        digest = hashlib.blake2b(repr(members).encode(), digest_size=6).hexdigest()  # the name becomes a symbol
        super().__init__(f"{record_class.__module__}.{record_class.__qualname__}.{digest}")

    @property
    def key(self) -> Any:
        return self.record_class, self.members

    @property
    def num_words(self) -> int:
        """Words of the record in memory."""
        return sum(map(_num_words, self.members))

    def place_of(self, name: str) -> tuple[int, Any]:
        """First word and type of a field."""
        index = self.names.index(name)
        return sum(map(_num_words, self.members[:index])), self.members[index]


def _refusal(record_class: type, name: str, what: Any) -> TypeError:
    return TypeError(
        f"field {name} of {record_class.__qualname__} is {what}: a record may hold arrays, int64, float64, bool and "
        "other records; convert it"
    )


def _num_words(kind: Any) -> int:
    if isinstance(kind, RecordType):
        return kind.num_words
    return 2 + 2 * kind.ndim if isinstance(kind, types.Array) else 1


def record(record_class: Class) -> Class:
    """Class decorator: compiled code gets instances of this NamedTuple class as one address."""

    @typeof_impl.register(record_class)
    def typeof_record(value: Any, context: Any) -> RecordType:
        return RecordType(record_class, tuple(typeof_impl(field, context) for field in value))

    record_class.is_record = True  # type: ignore[attr-defined]
    return record_class


def record_words(value: Any) -> NDArray[np.int64]:
    """The record as compiled code reads it; good for as long as its arrays live.

    Raises
    ------
    TypeError
        A field is of a type that records do not hold.
    """
    words: list[int] = []
    _write_words(value, words)
    return np.array(words, np.int64)


def _write_words(value: Any, words: list[int]) -> None:
    """Append the words of a record."""
    for name, field in zip(value._fields, value, strict=True):
        if isinstance(field, np.ndarray):
            words += (field.__array_interface__["data"][0], field.size, *field.shape, *field.strides)
        elif getattr(field, "is_record", False):
            _write_words(field, words)
        elif isinstance(field, float):
            words += struct.unpack("q", struct.pack("d", field))
        elif isinstance(field, int | np.int64 | np.bool_):
            words.append(int(field))
        else:
            raise _refusal(type(value), name, type(field))


def record_at(kind: RecordType) -> Any:
    """An intrinsic ``read(address)`` that gives the record of this type whose words are there."""

    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], cgutils.voidptr_t)

        return kind(types.int64), codegen

    return read


@register_default(RecordType)
class _RecordModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: RecordType) -> None:
        super().__init__(manager, kind, cgutils.voidptr_t)


@infer_getattr
class _RecordAttributes(AttributeTemplate):  # type: ignore[misc]
    key = RecordType

    def generic_resolve(self, kind: RecordType, name: str) -> Any:
        return kind.place_of(name)[1] if name in kind.names else None


@lower_getattr_generic(RecordType)
def _lower_field(context: Any, builder: Any, kind: RecordType, pointer: Any, name: str) -> Any:
    word, member = kind.place_of(name)
    if isinstance(member, RecordType):
        return builder.gep(pointer, [_constant(_WORD * word)], inbounds=True)
    if isinstance(member, types.Array):
        return _load_array(context, builder, member, pointer, word)
    value = _load(builder, pointer, word, _WORD_TYPE if member == types.boolean else context.get_value_type(member))
    return builder.icmp_signed("!=", value, _constant(0)) if member == types.boolean else value


def _load_array(context: Any, builder: Any, kind: Any, pointer: Any, word: int) -> Any:
    """An array that owns nothing: there is no count to keep, whoever copies it."""
    array = context.make_array(kind)(context, builder)
    data_type = context.get_data_type(kind.dtype)
    itemsize = context.get_abi_sizeof(data_type)
    shape = [_load(builder, pointer, word + 2 + i, _WORD_TYPE) for i in range(kind.ndim)]
    strides = [_load(builder, pointer, word + 2 + kind.ndim + i, _WORD_TYPE) for i in range(kind.ndim)]
    array.data = _load(builder, pointer, word, data_type.as_pointer())
    array.nitems = _load(builder, pointer, word + 1, _WORD_TYPE)
    array.itemsize = _constant(itemsize)
    array.shape = cgutils.pack_array(builder, shape)
    array.strides = cgutils.pack_array(builder, strides)
    array.meminfo = ir.Constant(array.meminfo.type, None)
    array.parent = ir.Constant(array.parent.type, None)
    return array._getvalue()


def _load(builder: Any, pointer: Any, word: int, wanted: Any) -> Any:
    """A word of the record. It never changes while compiled code has the record, which the optimiser is told."""
    place = builder.gep(pointer, [_constant(_WORD * word)], inbounds=True)
    value = builder.load(builder.bitcast(place, wanted.as_pointer()), align=_WORD)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _constant(value: int) -> Any:
    return ir.Constant(_WORD_TYPE, value)


def _packed(value: Any) -> bytes:
    return record_words(value).tobytes()


@unbox(RecordType)
def _unbox_record(kind: RecordType, value: Any, c: Any) -> NativeValue:
    """The words of a record in a bytes object, which lives until the call returns."""
    pack = c.pyapi.unserialize(c.pyapi.serialize_object(_packed))
    packed = c.pyapi.call_function_objargs(pack, (value,))
    c.pyapi.decref(pack)
    failed = cgutils.is_null(c.builder, packed)
    place = cgutils.alloca_once_value(c.builder, ir.Constant(cgutils.voidptr_t, None))
    with c.builder.if_then(c.builder.not_(failed)):
        c.builder.store(c.pyapi.bytes_as_string(packed), place)
    return NativeValue(c.builder.load(place), is_error=failed, cleanup=lambda: c.pyapi.decref(packed))
