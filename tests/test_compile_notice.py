"""What is said of compiling: once and only when it takes long; and a folder that cannot be written costs only time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from trilane import jit
from trilane.compile_notice import CompileNotice

SHORT_S, LONG_S = 0.05, 5.0


def _notice(after_s: float) -> CompileNotice:
    return CompileNotice(lambda: "a-folder", after_s)


def _said(caplog: Any) -> int:
    return sum("kept in a-folder" in record.getMessage() for record in caplog.records)


def _wait_until_said(caplog: Any) -> None:
    end_s = time.perf_counter() + LONG_S
    while not _said(caplog) and time.perf_counter() < end_s:
        time.sleep(0.005)


def test_one_long_compilation_is_announced_while_it_lasts_and_once(caplog: pytest.LogCaptureFixture) -> None:
    notice = _notice(SHORT_S)
    with caplog.at_level(logging.WARNING, "trilane"):
        with notice.around():
            notice.begin()
            with notice.around():
                notice.begin()  # nested
            _wait_until_said(caplog)
            assert _said(caplog) == 1
        with notice.around():
            notice.begin()
            time.sleep(4 * SHORT_S)
        assert _said(caplog) == 1


def test_many_short_compilations_are_announced_and_the_time_between_them_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notice = _notice(LONG_S)
    with caplog.at_level(logging.WARNING, "trilane"):
        for _ in range(3):
            with notice.around():
                notice.begin()
                notice._begin_s -= 0.3 * LONG_S  # as if it had begun so long ago
        assert _said(caplog) == 0
        with notice.around():
            notice.begin()
            assert notice._timer is not None and 0 < notice._timer.interval <= 0.1 * LONG_S
            _wait_until_said(caplog)
        assert _said(caplog) == 1


def test_what_is_cached_and_what_fails_stays_silent(caplog: pytest.LogCaptureFixture) -> None:
    notice = _notice(SHORT_S)
    with caplog.at_level(logging.WARNING, "trilane"):
        with notice.around():
            time.sleep(4 * SHORT_S)  # found in the cache: nothing was begun
        with pytest.raises(ValueError, match="no code"), notice.around():
            notice.begin()
            raise ValueError("no code")
        time.sleep(4 * SHORT_S)
        assert _said(caplog) == 0
        assert notice._timer is None


def test_a_first_replay_says_soon_that_it_compiles_and_on_stderr_alone(tmp_path) -> None:
    """With an empty cache: the line is there before the program has been compiled, whose result is the table."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        "from trilane.cli import main; main()",
        "replay",
        "--tokens",
        "1",
        "--no-single-lanes",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    try:
        line = process.stderr.readline()  # type: ignore[union-attr]  # a pipe
        compiled = list(tmp_path.glob("compiled/*replay*.nbc"))
        assert process.poll() is None and not compiled
    finally:
        process.kill()
        out, _ = process.communicate()
    assert line == (
        "trilane compiles its code for this processor, which can take minutes once; it is kept in "
        f"{tmp_path / 'compiled'}\n"
    )
    assert out == ""


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
        cache.save_overload("signature", "code")
    assert "No space left on device" in caplog.text
