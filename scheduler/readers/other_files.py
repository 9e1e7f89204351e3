"""Files that are no model, told by how they begin: named, rather than read as a model and found damaged."""

from __future__ import annotations

from pathlib import Path

from trilane.errors import ModelFileError

MODEL_SUFFIXES = (".gguf", ".safetensors", ".json")  # what is named so is read as that, and its damage told
_KINDS = (
    (b"trilanetrace", "a routing trace: trilane replay takes it, and trilane plan by --trace"),
    (b"PK\x03\x04", "a zip archive, such as a .npz of a trace or a checkpoint of PyTorch (.pt, .bin)"),
    (b"\x93NUMPY", "an array of NumPy"),
    (b"\x80", "a pickle, such as a checkpoint of PyTorch (.pt, .bin)"),
    (b"ggml", "a file of ggml from before GGUF: convert it"),
    (b"GGUF", "a GGUF file whose name does not end in .gguf: rename it"),
)


def refuse_other(path: Path) -> None:
    """Raise if a file, by its name and its first bytes, is no model.

    Raises
    ------
    ModelFileError
    """
    if path.suffix.lower() in MODEL_SUFFIXES or not path.is_file():
        return
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError:
        return  # who opens it next says why
    kind = next((kind for magic, kind in _KINDS if head.startswith(magic)), None)
    if kind is None and not head:
        kind = "an empty file"
    if kind is None and head[8:9] == b"{":  # the length of a header, then its JSON
        return
    is_text = all(byte >= 32 or byte in b"\t\n\r" for byte in head)
    kind = kind or ("a text file" if is_text else "a file of no kind that is known here")
    raise ModelFileError(
        f"{path}: is no model but {kind}; pass a .gguf file, a .safetensors file, a config.json, or a folder with one"
    )
