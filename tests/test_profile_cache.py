"""Saved profiles: found on their machine, refused with every difference elsewhere, never half written."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from made_profile import make_profile

from trilane import start_profile
from trilane.config import Config
from trilane.errors import ProfileError
from trilane.profile import Machine
from trilane.profile_cache import (
    check_machine,
    find_profile,
    profile_folder,
    profile_path,
    read_profile,
    save_profile,
)
from trilane.whole_file import replace_file

HERE = Machine(cpu="Fast 9000", cores_allowed=4, memory_nbytes=8 << 30, version="1")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def save(**changes) -> Path:
    return save_profile(make_profile(machine=replace(HERE, **changes)))


def test_what_is_saved_is_found():
    path = save()
    found, where = find_profile(HERE)
    assert found == make_profile(machine=HERE) and where == str(path)
    assert path.parent == profile_folder() and "fast-9000-host-4-cores" in path.name
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing temporary is left


def test_a_file_that_cannot_be_made_is_named_as_it_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(tmp_path / "none" / "mine.json", b"")
    assert caught.value.filename == str(tmp_path / "none" / "mine.json")


@pytest.mark.parametrize(
    "change, texts",
    [
        ({"version": "0"}, ["version was '0' and is '1'"]),
        ({"memory_nbytes": 4 << 30}, ["memory_nbytes was 4294967296"]),
        ({"driver": "570", "link_width": 8}, ["driver was '570' and is None", "link_width was 8"]),
    ],
)
def test_a_stale_profile_is_refused_with_every_difference(change, texts):
    path = save(**change)
    found, reason = find_profile(HERE)
    assert found is None and all(text in reason for text in [*texts, str(path), "trilane probe"])


def test_memory_may_differ_by_what_a_system_reserves():
    save(memory_nbytes=int(HERE.memory_nbytes * 1.01))
    assert find_profile(HERE)[0] is not None


def test_another_number_of_cores_has_a_file_of_its_own_and_is_named():
    save(cores_allowed=16)
    found, reason = find_profile(HERE)
    assert found is None and "cores_allowed was 16 and is 4" in reason
    save()
    assert len(list(profile_folder().iterdir())) == 2


def test_without_any_profile_the_reason_says_so():
    assert find_profile(HERE) == (None, "no profile of this machine is saved")
    assert profile_path(Machine()).name == "unknown-cpu-host-0-cores.json"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', "\x00\xff"])
def test_a_corrupt_file_is_a_reason_and_no_crash(text):
    save().write_bytes(text.encode("latin-1"))
    found, reason = find_profile(HERE)
    assert found is None and "profile" in reason


def test_a_folder_in_place_of_a_file_is_a_reason():
    profile_path(HERE).mkdir(parents=True)
    assert "cannot be read" in find_profile(HERE)[1]


def test_a_failed_write_leaves_the_old_file(monkeypatch):
    path = save()
    before = path.read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save_profile(make_profile(machine=HERE, both_gb_s=1.0))
    assert path.read_text() == before and len(list(path.parent.iterdir())) == 1


def test_a_missing_file_names_the_remedy(tmp_path):
    with pytest.raises(ProfileError, match="trilane probe"):
        read_profile(tmp_path / "none.json")


def test_a_profile_that_names_no_machine_holds_everywhere():
    check_machine(make_profile(machine=Machine()), HERE)
    with pytest.raises(ProfileError, match="cpu was 'other'"):
        check_machine(make_profile(machine=replace(HERE, cpu="other")), HERE)


# ------------------------------------------------------------------------------------ what a scheduler starts with
@pytest.fixture
def measured(monkeypatch):
    """A calibration that takes no time, and how often it was asked for."""
    calls = []

    class Found:
        profile = make_profile()

    def calibrate(quick):
        calls.append(quick)
        return Found

    monkeypatch.setattr(start_profile, "calibrate", calibrate)
    return calls


def test_the_first_start_measures_quickly_saves_and_says_so(measured, caplog):
    caplog.set_level(logging.INFO, "trilane")
    first = start_profile.start_profile(None, Config())
    assert start_profile.start_profile(None, Config()) == first and measured == [True]
    assert "no profile of this machine" in caplog.text and "saved to" in caplog.text


def test_a_stale_profile_is_measured_again_and_the_log_says_why(measured, caplog):
    caplog.set_level(logging.INFO, "trilane")
    save_profile(make_profile(machine=replace(make_profile().machine, version="0.0.1")))
    start_profile.start_profile(None, Config())
    assert measured == [True] and "version was '0.0.1'" in caplog.text


def test_a_corrupt_profile_is_measured_again(measured, caplog):
    path = save_profile(make_profile())
    path.write_text("{")
    start_profile.start_profile(None, Config())
    assert measured == [True] and json.loads(path.read_text())["schema"] == 1


def test_measuring_can_be_refused(measured):
    with pytest.raises(ProfileError, match="trilane probe"):
        start_profile.start_profile(None, Config(profile={"missing": "refuse"}))
    assert measured == []


def test_a_cache_folder_that_cannot_be_written_is_said_in_the_log(measured, caplog, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert start_profile.start_profile(None, Config()) == make_profile()
    assert "cannot be saved" in caplog.text


def test_a_path_is_read_from_arguments_before_options(measured, tmp_path):
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    save_profile(make_profile(both_gb_s=11.0), mine)
    save_profile(make_profile(both_gb_s=22.0), other)
    config = Config(profile={"path": other})
    assert start_profile.start_profile(None, config).both_gb_s == 22.0
    assert start_profile.start_profile(str(mine), config).both_gb_s == 11.0
    assert measured == []


@pytest.mark.parametrize("as_file", [True, False])
def test_a_foreign_profile_is_refused(as_file, tmp_path):
    foreign = make_profile(machine=HERE)
    given = save_profile(foreign, tmp_path / "foreign.json") if as_file else foreign
    with pytest.raises(ProfileError, match=r"cpu was 'Fast 9000' .*cores_allowed was 4|cpu was 'Fast 9000'"):
        start_profile.start_profile(given, Config())


def test_only_a_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, text in ((tmp_path / "pipe", "no regular file"), (tmp_path / "none" / "a.json", "folder does not exist")):
        with pytest.raises(ProfileError, match=text):
            save_profile(make_profile(), path)
    assert (tmp_path / "pipe").is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]
