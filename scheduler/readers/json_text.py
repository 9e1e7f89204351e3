"""JSON from an untrusted file: a small object without repeated keys, or an error that names the file.

Python's parser follows nesting with its own stack and makes numbers of any length; both end in exceptions, which
become ours here. What it makes of a text takes up to fifty times the text's room, so texts are bounded by the size
of the files that they describe. It knows nothing of what the objects mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trilane.errors import ModelFileError

MAX_NBYTES = 100_000_000  # the limit that the safetensors format sets for its header
ALWAYS_NBYTES = 1 << 20  # of the text that describes files of any size
SHARE = 64  # a larger text may be this part of its files; checkpoints have a thousandth or less


def largest_text(described_nbytes: int) -> int:
    """Bytes that a text about files of that size may have, so that parsing needs no more memory than they have."""
    return min(MAX_NBYTES, max(ALWAYS_NBYTES, described_nbytes // SHARE))


def parse_object(raw: bytes, path: Path, what: str) -> dict[str, Any]:
    """A JSON object from UTF-8 bytes.

    Raises
    ------
    ModelFileError
        It is no JSON, no object, or has a key twice.
    """
    try:
        found = json.loads(raw.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ModelFileError(f"{path}: {what} is nested too deeply; it is damaged, or no such file") from None
    except ValueError as error:  # also of the decoder, and of numbers with thousands of digits
        raise ModelFileError(f"{path}: {what} is no valid JSON ({error}); it is damaged, copy it again") from None
    if not isinstance(found, dict):
        raise ModelFileError(f"{path}: {what} is a JSON {type(found).__name__}, but must be an object; copy it again")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes.

    Raises
    ------
    ModelFileError
        It cannot be read, is too large, or is no JSON object.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    if len(raw) > limit:
        raise ModelFileError(
            f"{path}: has more than {limit} bytes, which is out of proportion to the model beside it; copy it again"
        )
    return parse_object(raw, path, "the file")
