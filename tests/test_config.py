"""The configuration: defaults, sizes, freezing, and errors that list everything at once."""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from trilane import Config, ConfigError, config
from trilane.settings import config_problems


def problems_of(options: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(options)
    return {problem.path: problem.message for problem in caught.value.problems}


def sections() -> dict[str, type[BaseModel]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def test_the_default_plays_no_rate_and_allows_every_lane() -> None:
    default = Config()
    assert set(default.host_device.model_dump().values()) == {None}
    assert default.policy.lanes == ("stream", "zero_copy", "cpu") and default.policy.force is None
    assert default == Config.from_mapping({}) == Config.from_mapping({"cache": None})


def test_every_option_says_in_one_line_what_it_is() -> None:
    for section in sections().values():
        for name, field in section.model_fields.items():
            assert field.description and "\n" not in field.description, name


def test_a_config_is_frozen_comparable_and_hashable() -> None:
    first, second = Config(cache={"slots": 8}), Config(cache={"slots": 8})
    assert first == second and hash(first) == hash(second) and first != Config()
    for target, name in ((first, "cache"), (first.cache, "slots")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, name, None)


def test_all_problems_are_reported_at_once_with_paths() -> None:
    found = problems_of(
        {
            "cache": {"slots": -1, "polcy": 3, "eviction": "lur"},
            "polcy": {},
            "policy": {"lanes": ["stream", "zerocopy"]},
            "cpu": {"threads": 0, "stall_timeout_s": math.nan},
            "host_device": {"link_gb_s": 0},
        }
    )
    assert set(found) == {
        "cache.slots",
        "cache.polcy",
        "cache.eviction",
        "polcy",
        "policy.lanes.1",
        "cpu.threads",
        "cpu.stall_timeout_s",
        "host_device.link_gb_s",
    }
    assert found["polcy"].endswith("Did you mean 'policy'?")
    assert found["cache.eviction"].endswith("Did you mean 'lru'?")
    assert found["policy.lanes.1"].endswith("Did you mean 'zero_copy'?")
    assert "is -1" in found["cache.slots"] and "greater than or equal to 0" in found["cache.slots"]


def test_the_source_is_named() -> None:
    with pytest.raises(ConfigError, match="1 problem in a.yaml:"):
        Config.from_mapping({"cache": {"slots": "many"}}, source="a.yaml")


@pytest.mark.parametrize(
    ("options", "path", "text"),
    [
        ({"cache": {"slots": 1, "fraction": 0.5}}, "cache.fraction", "slots sets the size of the cache already"),
        ({"policy": {"lanes": ["cpu"], "force": "stream"}}, "policy.force", "add it to lanes"),
        ({"policy": {"lanes": ["cpu", "cpu"]}}, "policy.lanes", "name each lane once"),
        ({"policy": {"lanes": "cpu"}}, "policy.lanes", "must be a list"),
        ({"policy": {"lanes": []}}, "policy.lanes", "must not be empty: name one or more of stream, zero_copy, cpu"),
        ({"cache": {"slots": 1, "nbytes": "4G"}}, "cache.nbytes", "It stands beside cache.slots: keep one of them."),
        ({"cache": 3}, "cache", "must be a mapping of options"),
        ({"cache": {3: 4}}, "cache.3", "must be the name of an option"),
        ({"cache": {"slots": True}}, "cache.slots", "must be a whole number"),
        ({"cache": {"slots": "5"}}, "cache.slots", "must be a whole number"),
        ({"cache": {"nbytes": "4G"}}, "cache.nbytes", "'4.5GiB'"),
        ({"cpu": {"threads": "many"}}, "cpu.threads", "must be a whole number or 'auto'"),
        ({"cache": [{"slots": 3}]}, "cache", "Leave out the dashes."),
        ({"record": {"path": "\ud800"}}, "record.path", "a character that no file's name can have"),
        ({"cache": "slots:3"}, "cache", "Write a space after the colon."),
        ({"cpu": {"threads": "8"}}, "cpu.threads", "Leave out the quotes."),
        ({"policy": {"force": "None"}}, "policy.force", "or null (send"),
        ({"policy": {"force": "None"}}, "policy.force", "Did you mean null"),
        ({"policy": {"fills": "always"}}, "policy.fills", "must be true or false (let"),
        ({"cpu": {"spin_us": True}}, "cpu.spin_us", "must be a number or 'auto'"),
        ({"cache": {"slots": 10**5000}}, "cache.slots", "less than or equal to"),
        ({"cache": {"nbytes": "9" * 30 + "GiB"}}, "cache.nbytes", "less than or equal to"),
        ({"cache": {"nbytes": "9" * 400}}, "cache.nbytes", "must be a number of bytes"),
        ({"record": {"path": ""}}, "record.path", "must be the name of a file"),
        ({"profile": {"path": 3}}, "profile.path", "must be the name of a file"),
        ({"profile": {"missing": "refused"}}, "profile.missing", "Did you mean 'refuse'?"),
        ({"polcy": None}, "polcy", "Did you mean 'policy'?"),
        ({"self": 3}, "self", "is no section"),
        ({"host_device": {"link_gb_s": math.inf}}, "host_device.link_gb_s", "finite"),
    ],
)
def test_impossible_values_say_the_rule(options: dict[str, Any], path: str, text: str) -> None:
    assert text in problems_of(options)[path]


@pytest.mark.parametrize(
    ("options", "path", "hint"),
    [
        ({"cache": {"half-life-steps": 3}}, "cache.half-life-steps", "Did you mean 'half_life_steps'?"),
        ({"cache": {"Slots": 3}}, "cache.Slots", "Did you mean 'slots'?"),
        ({"policy": {"eviction": "lru"}}, "policy.eviction", "'eviction' is an option of section 'cache': move it"),
        ({"policy": {"evictoin": "lru"}}, "policy.evictoin", "Did you mean 'eviction' of section 'cache'?"),
        ({"slots": 3}, "slots", "'slots' is an option of section 'cache': write it below 'cache:'"),
        ({"cache.slots": 3}, "'cache.slots'", "write it below 'cache:'"),
        ({"cache": {"policy": {}}}, "cache.policy", "'policy' is a section"),
        ({"cache": {"a\nb\x1b[0m": 1}}, "cache.'a\\nb\\x1b[0m'", "is no option"),
    ],
)
def test_names_that_do_not_exist_are_told_where_they_belong(options: dict[str, Any], path: str, hint: str) -> None:
    assert hint in problems_of(options)[path]


def test_rules_across_options_are_checked_beside_options_that_are_wrong() -> None:
    found = problems_of(
        {
            "cache": {"slots": 1, "fraction": 0.5, "nbytes": "1GiB", "pool": "none"},
            "policy": {"lanes": ["cpu"], "force": "stream", "fills": 3},
        }
    )
    assert set(found) == {"cache.pool", "cache.fraction", "cache.nbytes", "policy.fills", "policy.force"}


def test_files_are_paths_with_the_home_folder_written_out(monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    given = Config(record={"path": "~/routing"}, profile={"path": Path("p.json")})
    assert given.record.path == Path("/home/someone/routing") and given.profile.path == Path("p.json")
    assert Config().record.path is None and Config().profile.missing == "measure"


def test_something_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping of sections"):
        Config.from_mapping(["cache"])  # type: ignore[arg-type]


def test_section_objects_and_mappings_mean_the_same() -> None:
    assert Config(cache=config.CacheConfig(slots=3)) == Config(cache={"slots": 3})
    assert Config(cache={"nbytes": "1.5KiB"}).cache.nbytes == 1536


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 25),
        ({"slots": 7}, 7),
        ({"slots": 700}, 100),
        ({"fraction": 0.0}, 0),
        ({"fraction": 1.0}, 100),
        ({"nbytes": "1KiB"}, 10),
        ({"nbytes": "1GiB"}, 100),
    ],
)
def test_the_number_of_slots_is_resolved_for_a_store(options: dict[str, Any], expected: int) -> None:
    assert config.CacheConfig(**options).num_slots(num_shards=100, slot_nbytes=100) == expected


@given(st.integers(0, 10**6), st.sampled_from(["B", "kB", "MiB", "gib", " GB", ""]))
def test_sizes_with_units(number: int, unit: str) -> None:
    factor = {"b": 1, "kb": 1000, "mib": 2**20, "gib": 2**30, "gb": 10**9, "": 1}[unit.strip().lower()]
    assert config.parse_nbytes(f"{number}{unit}") == number * factor


@pytest.mark.parametrize("text", ["", "-1", "1e9", "4G", "GiB", "1 2", True, None, 1.5])
def test_texts_that_are_no_size_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes"):
        config.parse_nbytes(text)


def test_examples_in_docstrings_run() -> None:
    for module, least in ((config, 2), (config_problems, 2)):
        result = doctest.testmod(module)
        assert result.attempted >= least and result.failed == 0
