"""The index of compiled code: one that cannot be read costs a compilation, never a start."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from trilane.jit import _KeyedCacheFile


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"\x80\x04",
        pickle.dumps(("stamp", {}))[:-3],
        b"ctrilane.gone\nKind\n.",
        b"cbuiltins\ngone\n.",
        b"\xff" * 50,
    ],
    ids=["empty", "cut", "cut later", "a module that is gone", "a name that is gone", "noise"],
)
def test_an_index_that_cannot_be_read_is_written_anew(tmp_path: Path, rest: bytes) -> None:
    files = _KeyedCacheFile(cache_path=str(tmp_path), filename_base="f", source_stamp="stamp")
    files.save("key", "code")
    assert files.load("key") == "code"
    (index,) = tmp_path.glob("*.nbi")
    version = pickle.dumps(files._version)
    index.write_bytes(version + rest)
    assert files.load("key") is None
    files.save("key", "code")
    assert files.load("key") == "code"
    index.write_bytes(version[:-2])
    assert files.load("key") is None
