"""The files of compiled code: one that cannot be read costs a compilation, no start; versions stand side by side."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from trilane.jit import _KeyedCacheFile, prune_cache


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


def test_two_versions_of_a_function_are_kept_side_by_side(tmp_path: Path) -> None:
    old, new = (_KeyedCacheFile(cache_path=str(tmp_path), filename_base="f", source_stamp=s) for s in ("old", "new"))
    for files, code in ((old, "old code"), (new, "new code")):
        files.save("key", code)
    assert (old.load("key"), new.load("key")) == ("old code", "new code")


def test_code_that_nobody_used_for_long_is_deleted(tmp_path: Path) -> None:
    used, unused = (_KeyedCacheFile(cache_path=str(tmp_path), filename_base="f", source_stamp=s) for s in "ab")
    for files in (used, unused):
        files.save("first", 1)
        files.save("second", 2)
    (tmp_path / "f.c.nbi.tmp.0123").touch()  # left by a process that was killed
    for path in tmp_path.iterdir():
        os.utime(path, (1000, 1000))
    assert used.load("first") == 1
    assert prune_cache(tmp_path, before_s=2000.0) == 4
    assert used.load("second") == 2 and unused.load("first") is None
    assert len(list(tmp_path.iterdir())) == 3
    assert prune_cache(tmp_path / "nowhere", before_s=2000.0) == 0
