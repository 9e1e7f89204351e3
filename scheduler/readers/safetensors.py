"""safetensors files: the header, checked, as records of tensors; sharded checkpoints as one model.

Layout: eight bytes with the header's length, a JSON object that gives each tensor its dtype, shape and
``data_offsets`` (counted from the end of the header), and the bytes. The format allows neither holes nor overlaps, and
promises no alignment. A model's folder has ``config.json`` beside, and ``model.safetensors.index.json`` if it
is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from trilane.errors import ModelFileError
from trilane.readers.cursor import U64, Cursor, Data
from trilane.readers.json_text import ALWAYS_NBYTES, largest_text, parse_object, read_object
from trilane.readers.model_file import ModelFile, ModelFiles, TensorInfo

INDEX_NAME, CONFIG_NAME, WHOLE_NAME = "model.safetensors.index.json", "config.json", "model.safetensors"
METADATA_KEY = "__metadata__"
MAX_TENSORS = 1 << 17  # of a file
MAX_RANK = 8
#: Bits of an element by dtype.
ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip


def parse_safetensors(data: Data, path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file.

    Parameters
    ----------
    data : Data
        The whole file: bytes, or an open file, of which only the header is read.
    path : Path
        For records and errors.

    Raises
    ------
    ModelFileError
        With the file, the tensor, the value, the rule and the remedy.
    """
    cursor = Cursor(data, path)
    nbytes = cursor.take(U64, "the length of the header")
    limit = largest_text(cursor.end)
    if nbytes > limit:
        raise cursor.error(
            "the header",
            f"has {nbytes} bytes, but at most {limit} are allowed in a file of {cursor.end}: it is another file, "
            "damaged, or has very many tiny tensors; write them stacked",
        )
    cursor.need(nbytes, "the header")
    start = cursor.at + nbytes
    header = parse_object(data[cursor.at : start], path, "the header")
    header.pop(METADATA_KEY, None)
    if len(header) > MAX_TENSORS:
        raise cursor.error("the header", f"has {len(header)} tensors, but at most {MAX_TENSORS} are allowed")
    tensors = {name: _read_tensor(name, entry, path, start) for name, entry in header.items()}
    _check_places(tensors, path, start, cursor.end)
    return tensors


def _read_tensor(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ModelFileError(f"{path}: tensor {name!r} is {_short(entry)}, but must be an object; write the file again")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise ModelFileError(
            f"{path}: tensor {name!r} has dtype {_short(dtype)}, but must have one of {', '.join(ELEMENT_BITS)}; "
            "convert it"
        )
    if not _are_counts(shape) or len(shape) > MAX_RANK:
        raise ModelFileError(
            f"{path}: tensor {name!r} has shape {_short(shape)}, but must have a list of at most {MAX_RANK} numbers "
            "that are not negative; write the file again"
        )
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(
            f"{path}: tensor {name!r} has data_offsets {_short(offsets)}, but must have its start and its end; "
            "write the file again"
        )
    begin, end = offsets
    bits = math.prod(shape) * ELEMENT_BITS[dtype]
    if bits != 8 * (end - begin):
        raise ModelFileError(
            f"{path}: tensor {name!r} ({dtype}, shape {_short(shape)}) needs {bits} bits, but its data_offsets "
            f"{_short(offsets)} hold {8 * (end - begin)}; the header is damaged: copy the file again"
        )
    return TensorInfo(name, dtype.lower(), tuple(shape), path, start + begin, end - begin)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    """A list of integers that fit 64 bits and are not negative (JSON's true is an int to Python)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_places(tensors: Mapping[str, TensorInfo], path: Path, start: int, end: int) -> None:
    """The tensors must follow one another from the end of the header to the end of the file."""
    at = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            what = "there is a hole before it" if tensor.offset > at else "it shares bytes with another"
            raise ModelFileError(
                f"{tensor}: starts at byte {tensor.offset}, but must start at {at}: {what}, "
                "which the format does not allow; write the file again"
            )
        at += tensor.nbytes
    if at != end:
        raise ModelFileError(
            f"{path}: has {end} bytes, but its header promises {at}: it is damaged or was not copied to its end; "
            "copy it again"
        )


def open_safetensors(path: str | Path) -> ModelFiles:
    """Open a checkpoint: its folder, its index, any one of its files; ``config.json`` is read where it is beside.

    Raises
    ------
    ModelFileError
        A file is missing, damaged, or not of this kind.
    """
    given = Path(path)
    names = _file_names(given)
    folder = given if given.is_dir() else given.parent
    files = {folder / name: ModelFile(folder / name) for name in names}
    tensors: dict[str, TensorInfo] = {}
    for each, file in files.items():
        for name, tensor in parse_safetensors(file, each).items():
            if name in tensors:
                raise ModelFileError(f"{tensor}: is in {tensors[name].path.name} too; the files are not of one model")
            tensors[name] = tensor
    _check_index(names, tensors, folder)
    config = folder / CONFIG_NAME
    model = ModelFiles(
        "safetensors", given, tensors, read_object(config, ALWAYS_NBYTES) if config.exists() else {}, files
    )
    model.check_unchanged()
    return model


def _file_names(path: Path) -> dict[str, list[str]]:
    """The files of the model, with the tensors that the index wants in each (none without an index)."""
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if path.is_dir():
        if (path / INDEX_NAME).exists():
            return _read_index(path / INDEX_NAME)
        return {_only_file(path): []}
    index = path.parent / INDEX_NAME
    if index.exists() and path.name in (names := _read_index(index)):
        return names
    return {path.name: []}


def _only_file(folder: Path) -> str:
    if (folder / WHOLE_NAME).exists():
        return WHOLE_NAME
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(found[:8]) or "none"
        raise ModelFileError(
            f"{folder}: must hold {INDEX_NAME}, {WHOLE_NAME} or one other .safetensors file, but of these holds "
            f"{names}; pass the path of a file"
        )
    return found[0]


def _read_index(path: Path) -> dict[str, list[str]]:
    described = sum(file.stat().st_size for file in path.parent.glob("*.safetensors") if file.is_file())
    weight_map = read_object(path, largest_text(described)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: weight_map is {_short(weight_map)}, but must name a file for each tensor")
    names: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name or name in ("", ".", ".."):
            raise ModelFileError(
                f"{path}: the file of tensor {tensor!r} is {_short(name)}, but must be a name in the same folder"
            )
        names.setdefault(name, []).append(tensor)
    missing = [name for name in sorted(names) if not (path.parent / name).exists()]
    if missing:
        listed = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise ModelFileError(
            f"{path}: {len(missing)} of {len(names)} files are missing from {path.parent}: {listed}; "
            "put all into one folder"
        )
    return dict(sorted(names.items()))


def _check_index(names: Mapping[str, list[str]], tensors: Mapping[str, TensorInfo], folder: Path) -> None:
    for name, wanted in names.items():
        for tensor in wanted:
            if tensor not in tensors or tensors[tensor].path.name != name:
                raise ModelFileError(
                    f"{folder / name}: tensor {tensor!r} is not in it, but the index says so; they are not of one model"
                )
