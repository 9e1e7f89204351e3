"""GGUF files, versions 2 and 3: the header, checked, as records of tensors; sharded files as one model.

Layout: "GGUF", the version, the numbers of tensors and keys; the keys; per tensor name, dimensions, type and offset;
padding to ``general.alignment``; the bytes of the tensors, from which their offsets count. Everything in the header
is untrusted: counts are held against what is left of the file before anything is made of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from trilane.errors import ModelFileError
from trilane.readers.cursor import U32, U64, Cursor, Data
from trilane.readers.gguf_types import BLOCK_TYPES, UINT32
from trilane.readers.gguf_values import GgufMetadata, Place, read_places
from trilane.readers.model_file import ModelFile, ModelFiles, TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
ALIGNMENT_KEY = "general.alignment"
MAX_RANK = 4
MAX_TENSORS = 1 << 17  # of a file
MAX_NAME_NBYTES = 1 << 10  # ggml itself allows 63
SMALLEST_INFO_NBYTES = 8 + 4 + 4 + 8  # of a tensor without name and dimensions
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parse_gguf(data: Data, path: Path) -> tuple[dict[str, TensorInfo], GgufMetadata]:
    """Read the header of a GGUF file.

    Parameters
    ----------
    data : Data
        The whole file: bytes, or an open file, of which only the header is read.
    path : Path
        For records and errors.

    Raises
    ------
    ModelFileError
        With the file, the place, the value, the rule and the remedy.
    """
    cursor = Cursor(data, path)
    _check_version(cursor)
    num_tensors = cursor.take(U64, "the number of tensors")
    num_keys = cursor.take(U64, "the number of keys")
    places = read_places(cursor, num_keys)
    metadata = GgufMetadata(data, path, places)
    alignment = _read_alignment(cursor, places, metadata)
    tensors = _read_tensors(cursor, num_tensors, alignment)
    return tensors, metadata


def _check_version(cursor: Cursor) -> None:
    magic = cursor.peek(len(MAGIC), "the magic number")
    if magic != MAGIC:
        raise cursor.error("the file", f"starts with {magic!r}, but a GGUF file starts with {MAGIC!r}; is it another?")
    cursor.at = len(MAGIC)
    version = cursor.take(U32, "the version")
    if version in VERSIONS:
        return
    if version & 0xFFFF == 0 and version:  # the byte order that all numbers of the file have
        raise cursor.error(
            "the file", "is big-endian, but the weights are used as they are, on a little-endian machine; convert it"
        )
    raise cursor.error("the file", f"has version {version}, but versions 2 and 3 are known; convert it again")


def _read_alignment(cursor: Cursor, places: Mapping[str, Place], metadata: GgufMetadata) -> int:
    if ALIGNMENT_KEY not in places:
        return DEFAULT_ALIGNMENT
    alignment = metadata[ALIGNMENT_KEY]
    is_number = places[ALIGNMENT_KEY].kind == UINT32
    if not is_number or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            ALIGNMENT_KEY, f"is {alignment!r}, but must be a power of two up to {MAX_ALIGNMENT}, as uint32; write it so"
        )
    return int(alignment)


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    if count > MAX_TENSORS:
        raise cursor.error("the header", f"has {count} tensors, but at most {MAX_TENSORS} are allowed: it is damaged")
    cursor.need(count * SMALLEST_INFO_NBYTES, f"{count} tensors")
    tensors: dict[str, TensorInfo] = {}
    for number in range(count):
        tensor = _read_tensor(cursor, number, alignment)
        if tensor.name in tensors:
            raise cursor.error(f"tensor {tensor.name!r}", "is there twice, but names must be unique")
        tensors[tensor.name] = tensor
    start = -(-cursor.at // alignment) * alignment
    placed = {
        name: TensorInfo(name, t.format, t.shape, t.path, start + t.offset, t.nbytes) for name, t in tensors.items()
    }
    check_places(placed.values(), cursor.end)
    return placed


def _read_tensor(cursor: Cursor, number: int, alignment: int) -> TensorInfo:
    """One tensor; its offset counts from the start of the data."""
    name = cursor.text(f"the name of tensor {number}", MAX_NAME_NBYTES)
    rank = cursor.take(U32, f"the rank of {name!r}")
    if rank > MAX_RANK:
        raise cursor.error(f"tensor {name!r}", f"has {rank} dimensions, but at most {MAX_RANK} are allowed")
    dimensions = [cursor.take(U64, f"a dimension of {name!r}") for _ in range(rank)]
    number_of_type = cursor.take(U32, f"the type of {name!r}")
    offset = cursor.take(U64, f"the offset of {name!r}")
    if 0 in dimensions:
        raise cursor.error(f"tensor {name!r}", f"has dimensions {dimensions}, but each must be at least 1")
    if number_of_type not in BLOCK_TYPES:
        raise cursor.error(
            f"tensor {name!r}", f"has type {number_of_type}, which is unknown; convert the file to another type"
        )
    kind = BLOCK_TYPES[number_of_type]
    columns = dimensions[0] if dimensions else 1
    if columns % kind.block_size:
        raise cursor.error(
            f"tensor {name!r}", f"has rows of {columns} weights, but {kind.name} needs multiples of {kind.block_size}"
        )
    if offset % alignment:
        raise cursor.error(f"tensor {name!r}", f"has offset {offset}, but it must be a multiple of {alignment}")
    nbytes = math.prod(dimensions) // kind.block_size * kind.block_nbytes
    return TensorInfo(name, kind.name, tuple(reversed(dimensions)), cursor.path, offset, nbytes)


def check_places(tensors: Any, end: int) -> None:
    """Raise ModelFileError if a tensor ends behind byte ``end``, or two of one file share bytes."""
    ordered = sorted(tensors, key=lambda t: t.offset)
    for tensor in ordered:
        if tensor.offset + tensor.nbytes > end:
            raise ModelFileError(
                f"{tensor}: its {tensor.nbytes} bytes from byte {tensor.offset} on end behind the file, which has "
                f"{end}: it is damaged or was not copied to its end; copy it again"
            )
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise ModelFileError(
                f"{after}: starts at byte {after.offset}, inside of tensor {before.name!r}, which ends at byte "
                f"{before.offset + before.nbytes}; tensors may not overlap: write the file again"
            )


def open_gguf(path: str | Path) -> ModelFiles:
    """Open a GGUF model: a file, any one of its shards (``-00001-of-00003.gguf``), or a folder that holds one model.

    Raises
    ------
    ModelFileError
        A file is missing, damaged, or not of this kind.
    """
    given = Path(path)
    paths = _shard_paths(_model_file(given))
    files = {each: ModelFile(each) for each in paths}
    parsed = {each: parse_gguf(file, each) for each, file in files.items()}
    if len(paths) > 1 or _SHARD.fullmatch(paths[0].name):
        _check_shards(paths, parsed)
    else:
        _check_whole(paths[0], parsed[paths[0]][1])
    model = ModelFiles("gguf", given, _merge(parsed), parsed[paths[0]][1], files)
    model.check_unchanged()
    return model


def _model_file(path: Path) -> Path:
    """The file itself, or the first of the one model in a folder."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    models = {_SHARD.sub(r"\1-of-\3", file.name): file for file in reversed(found)}
    if len(models) != 1:
        names = ", ".join(file.name for file in found[:8]) or "no file of that kind"
        raise ModelFileError(f"{path}: must hold one model in .gguf files, but holds {names}; pass the path of a file")
    return next(iter(models.values()))


def _shard_paths(path: Path) -> list[Path]:
    """All files of the model that ``path`` belongs to, in order."""
    match = _SHARD.fullmatch(path.name)
    if not match:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise ModelFileError(f"{path}: is named shard {number} of {count}; rename it, counting from 1")
    names = [f"{stem}-{k:05}-of-{count:05}.gguf" for k in range(1, count + 1)]
    present = {file.name for file in path.parent.iterdir()} if path.parent.is_dir() else set()
    missing = [name for name in names if name not in present]
    if missing:
        listed = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise ModelFileError(
            f"{path}: {len(missing)} of {count} shards are missing from {path.parent}: {listed}; put all in one folder"
        )
    return [path.with_name(name) for name in names]


def _check_shards(paths: list[Path], parsed: Mapping[Path, tuple[dict[str, TensorInfo], GgufMetadata]]) -> None:
    total = 0
    for number, path in enumerate(paths):
        tensors, metadata = parsed[path]
        total += len(tensors)
        for key, wanted in (("split.count", len(paths)), ("split.no", number)):
            found = metadata.get(key)
            if found != wanted:
                raise ModelFileError(
                    f"{path}: {key} is {found}, but its name says {wanted}; give each shard its first name"
                )
    promised = parsed[paths[0]][1].get("split.tensors.count")
    if promised is not None and promised != total:
        raise ModelFileError(
            f"{paths[0]}: split.tensors.count is {promised}, but the {len(paths)} shards hold {total} tensors; "
            "they are not of one model: copy them again"
        )


def _check_whole(path: Path, metadata: GgufMetadata) -> None:
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count > 1:
        raise ModelFileError(
            f"{path}: is one of {count} shards (split.count), but its name does not say which; give all of them names "
            "such as model-00001-of-00003.gguf"
        )


def _merge(parsed: Mapping[Path, tuple[dict[str, TensorInfo], GgufMetadata]]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for tensors, _ in parsed.values():
        for name, tensor in tensors.items():
            if name in merged:
                raise ModelFileError(f"{tensor}: is in {merged[name].path.name} too; the shards are not of one model")
            merged[name] = tensor
    return merged
