"""The metadata of a GGUF file: where each value lies; values are read when they are asked for.

A model's vocabulary has hundreds of thousands of strings that a loader of experts never looks at, so arrays are
passed over when the file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trilane.errors import ModelFileError
from trilane.readers.cursor import U32, U64, Cursor, Data
from trilane.readers.gguf_types import ARRAY, NUMPY_OF, SCALARS, STRING

MAX_KEYS = 1 << 16
MAX_KEY_NBYTES = (1 << 16) - 1  # the format's own rule
SMALLEST_PAIR_NBYTES = 8 + 4 + 1  # an empty key, its type, one byte


class Place(NamedTuple):
    """Where a value lies: its type, of an array the type of its items, the offset, and how many items."""

    kind: int
    item_kind: int
    offset: int
    num_items: int


class GgufMetadata(Mapping[str, Any]):
    """Key-value pairs: numbers, strings, NumPy arrays of numbers, lists of strings."""

    def __init__(self, data: Data, path: Path, places: Mapping[str, Place]) -> None:
        self._data, self._path, self._places = data, path, places

    def __getitem__(self, key: str) -> Any:
        place = self._places[key]
        cursor = Cursor(self._data, self._path, place.offset)
        if place.kind == STRING:
            return cursor.text(key, cursor.end)
        if place.kind != ARRAY:
            return cursor.take(SCALARS[place.kind], key)
        if place.item_kind == STRING:
            return [cursor.text(key, cursor.end) for _ in range(place.num_items)]
        kind = np.dtype(NUMPY_OF[place.item_kind])
        return np.frombuffer(self._data[place.offset : place.offset + place.num_items * kind.itemsize], kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_places(cursor: Cursor, count: int) -> dict[str, Place]:
    """Pass ``count`` key-value pairs and note where their values are."""
    if count > MAX_KEYS:
        raise cursor.error("the header", f"has {count} keys, but at most {MAX_KEYS} are allowed: it is damaged")
    cursor.need(count * SMALLEST_PAIR_NBYTES, f"{count} keys")
    places: dict[str, Place] = {}
    for number in range(count):
        key = cursor.text(f"key {number}", MAX_KEY_NBYTES)
        if key in places:
            raise cursor.error(f"key {key!r}", "is there twice, but keys must be unique; write the file again")
        places[key] = _pass_value(cursor, key)
    return places


def _pass_value(cursor: Cursor, key: str) -> Place:
    kind = cursor.take(U32, f"the type of {key!r}")
    if kind == ARRAY:
        return _pass_array(cursor, key)
    offset = cursor.at
    if kind == STRING:
        cursor.skip_strings(1, f"{key!r}")
    elif kind in SCALARS:
        cursor.skip(SCALARS[kind].size, f"{key!r}")
    else:
        raise _unknown(cursor, key, kind)
    return Place(kind, 0, offset, 1)


def _pass_array(cursor: Cursor, key: str) -> Place:
    item_kind = cursor.take(U32, f"the item type of {key!r}")
    count = cursor.take(U64, f"the length of {key!r}")
    offset = cursor.at
    if item_kind == ARRAY:
        raise cursor.error(f"{key!r}", "is an array of arrays, which no reader takes; write the file without it")
    if item_kind == STRING:
        cursor.skip_strings(count, f"{key!r}")
    elif item_kind in SCALARS:
        cursor.skip(count * SCALARS[item_kind].size, f"{key!r}, {count} items,")
    else:
        raise _unknown(cursor, key, item_kind)
    return Place(ARRAY, item_kind, offset, count)


def _unknown(cursor: Cursor, key: str, kind: int) -> ModelFileError:
    return cursor.error(
        f"{key!r}", f"is of type {kind}, but types are 0 to 12: the file is damaged, or newer than this reader"
    )
