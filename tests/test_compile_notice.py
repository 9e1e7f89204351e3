"""What is said of compiling: once and only when it takes long; and a folder that cannot be written costs only time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trilane import jit
from trilane.jit import NOTICE_S, CompileNotice


def _said(caplog: Any) -> int:
    return sum("trilane compiles its code" in record.getMessage() for record in caplog.records)


def test_long_compiling_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    notice = CompileNotice()
    with caplog.at_level(logging.WARNING, "trilane"):
        notice.begin(0.0)
        notice.begin(0.5)  # nested
        notice.end(NOTICE_S - 0.1)
        assert _said(caplog) == 0
        notice.begin(NOTICE_S + 0.1)  # still within the first
        notice.end(3.0)
        notice.end(4.0)
        notice.begin(100.0)
        assert _said(caplog) == 1


def test_time_between_compilations_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    notice = CompileNotice()
    with caplog.at_level(logging.WARNING, "trilane"):
        for begin_s in (0.0, 1e3, 2e3):
            notice.begin(begin_s)
            notice.end(begin_s + 0.3 * NOTICE_S)
        assert _said(caplog) == 0
        for begin_s in (3e3, 4e3):
            notice.begin(begin_s)
            notice.end(begin_s + 0.3 * NOTICE_S)
        assert _said(caplog) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, caplog) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(jit, "cache_folder", lambda: file / "compiled")
    jit._warn_not_kept.cache_clear()
    with caplog.at_level(logging.WARNING, "trilane"):
        for _ in range(2):
            assert jit._PackageLocator.from_function(jit.module_stamp.__wrapped__, jit.__file__) is None
    (record,) = caplog.records
    assert str(file / "compiled") in record.getMessage() and "NUMBA_CACHE_DIR" in record.getMessage()


def test_a_full_disk_loses_the_cache_and_nothing_else(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    jit._warn_not_kept.cache_clear()
    cache = jit._PackageCache(jit.module_stamp.__wrapped__)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_save_overload", fail)
    with caplog.at_level(logging.WARNING, "trilane"):
        cache._notice.begin(0.0)
        cache.save_overload("signature", "code")
    assert "No space left on device" in caplog.text
