"""Who sets what: file, environment and arguments, one over the other, and where each value comes from."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from trilane import Config, ConfigError, load_config
from trilane.settings.config_reference import all_options
from trilane.settings.config_sources import RESERVED
from trilane.settings.effective_config import resolve_config

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text("cache:\n  slots: 64\n  pool: layer\npolicy: {lanes: [cpu, stream], force: stream}\n")
    return path


def problems_of(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return [str(problem) for problem in caught.value.problems]


def test_nothing_given_is_the_default_and_says_so() -> None:
    found = load_config(environment={})
    assert found.config == Config() and {str(origin) for origin in found.origins.values()} == {"default"}
    assert list(found.origins) == [option.path for option in all_options()]


def test_each_source_goes_over_the_one_before(file: Path) -> None:
    environment = {"TRILANE_CACHE_POOL": "shared", "TRILANE_CPU_THREADS": "3", "TRILANE_POLICY_FORCE": "null"}
    found = load_config(file, environment=environment, arguments=["cpu.threads=2"])
    assert found.config == Config(
        cache={"slots": 64, "pool": "shared"}, policy={"lanes": ["cpu", "stream"]}, cpu={"threads": 2}
    )
    origins = {path: str(origin) for path, origin in found.origins.items() if origin.kind != "default"}
    assert origins == {
        "cache.slots": f"{file}:2",
        "cache.pool": "TRILANE_CACHE_POOL",
        "policy.lanes": f"{file}:4",
        "policy.force": "TRILANE_POLICY_FORCE",
        "cpu.threads": "--set",
    }
    assert f"cache.slots = 64  # {file}:2\n" in str(found) and "cpu.isa = auto  # default" in str(found)


@pytest.mark.parametrize(
    ("variable", "arguments", "size", "origin"),
    [
        ({"TRILANE_CACHE_FRACTION": "0.5"}, None, {"fraction": 0.5}, "TRILANE_CACHE_FRACTION"),
        ({"TRILANE_CACHE_NBYTES": "2 GiB"}, None, {"nbytes": 2 << 30}, "TRILANE_CACHE_NBYTES"),
        ({"TRILANE_CACHE_FRACTION": "0.5"}, ["cache.nbytes=1kB"], {"nbytes": 1000}, "--set"),
        ({}, {"cache": {"fraction": 0.5}}, {"fraction": 0.5}, "argument"),
        ({}, {"cache": Config(cache={"fraction": 0.5}).cache}, {"fraction": 0.5}, "argument"),
        ({"TRILANE_CACHE_FRACTION": "null"}, None, {"slots": 64}, "a.yaml:2"),
        ({"TRILANE_CACHE_SLOTS": "null"}, None, {"slots": None}, "TRILANE_CACHE_SLOTS"),
    ],
)
def test_a_size_replaces_the_other_kind_of_size_of_a_weaker_source(
    file: Path, variable: dict[str, str], arguments: Any, size: dict[str, Any], origin: str
) -> None:
    found = load_config(file, environment=variable, arguments=arguments)
    assert found.config.cache == Config(cache={"pool": "layer", **size}).cache
    assert str(found.origins[f"cache.{next(iter(size))}"]).endswith(origin)


def test_two_sizes_of_one_source_are_an_error() -> None:
    both = {"TRILANE_CACHE_SLOTS": "3", "TRILANE_CACHE_FRACTION": "0.5"}
    assert problems_of(environment=both)[0].startswith("TRILANE_CACHE_FRACTION: cache.fraction: is 0.5, but slots")
    assert problems_of(environment={}, arguments=["cache.slots=3", "cache.nbytes=1kB"])[0].startswith("--set: cache.n")


def test_sources_that_do_not_go_together_are_both_named(file: Path) -> None:
    (problem,) = problems_of(file, environment={"TRILANE_POLICY_FORCE": "zero_copy"})
    assert problem == (
        "TRILANE_POLICY_FORCE: policy.force: is 'zero_copy', but policy.lanes allows only cpu, stream: "
        f"add it to lanes. policy.lanes comes from {file}:4."
    )


def test_problems_of_all_sources_come_at_once(file: Path) -> None:
    file.write_text("cache: {slots: -1}\npolicy: {lanes: [cpu]}\n")
    found = problems_of(
        file,
        environment={"TRILANE_CPU_ISA": "sse", "TRILANE_POLICY_FORCE": "stream"},
        arguments=["cpu.threads=0", "cpu.thread=1"],
    )
    assert [line.split(": ")[:2] for line in found] == [
        [f"{file}:1", "cache.slots"],
        ["TRILANE_CPU_ISA", "cpu.isa"],
        ["--set", "'cpu.thread=1'"],
        ["--set", "cpu.threads"],
        ["TRILANE_POLICY_FORCE", "policy.force"],
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("policy.lanes", "stream,cpu", ("stream", "cpu")),
        ("policy.lanes", " cpu ", ("cpu",)),
        ("policy.lanes", "[cpu, stream]", ("cpu", "stream")),
        ("policy.fills", "false", False),
        ("cache.nbytes", "4.5GiB", 4831838208),
        ("cpu.spin_us", "5", 5.0),
        ("cpu.spin_us", "auto", "auto"),
        ("record.path", "a: [b] # no", Path("a: [b] # no")),
        ("record.path", "null", None),
        ("record.path", "\udcff", Path("\udcff")),
    ],
)
def test_texts_are_read_as_values(name: str, text: str, expected: Any) -> None:
    variable = f"TRILANE_{name.replace('.', '_').upper()}"
    for found in (load_config(environment={variable: text}), load_config(environment={}, arguments=[f"{name}={text}"])):
        assert found.value(name) == expected and str(found).isascii()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("cache.slots=", "is set to nothing"),
        ("cache.slots", "write SECTION.OPTION=VALUE"),
        ("cache.slotz=3", "Did you mean 'cache.slots'?"),
        ("slots=3", "Did you mean 'cache.slots'?"),
        ("", "write SECTION.OPTION=VALUE"),
        ("cache.slots=[", "cannot be read as YAML"),
        ("cache.slots=\udcff", "cannot be read as YAML"),
        ("cache.slots=1e3", "write 1000.0"),
        ("cache.slots={a: 1, a: 2}", "cache.slots.a: is given twice"),
        ("cache.slots=" + "1" * 10_000, "must have 8192 at most"),
        ("policy.lanes=", "is set to nothing"),
        ("policy.lanes=cpu,", "is '', but must be 'stream'"),
        ("record.path=a\0b", "with a NUL"),
    ],
)
def test_settings_that_are_wrong_say_what_to_write(text: str, hint: str) -> None:
    problem = problems_of(environment={}, arguments=[text])[0]
    assert hint in problem and problem.isprintable() and problem.startswith("--set: ")


def test_an_option_is_set_once() -> None:
    assert "is set twice" in problems_of(environment={}, arguments=["cache.slots=3", "cache.slots=4"])[0]


def test_variables_that_name_nothing() -> None:
    assert "Did you mean 'TRILANE_CACHE_SLOTS'?" in problems_of(environment={"TRILANE_CACHE_SLOTZ": "3"})[0]
    assert "Did you mean 'TRILANE_CACHE_SLOTS'?" in problems_of(environment={"TRILANE_CAHCE_SLOTS": "3"})[0]
    assert "Did you mean 'TRILANE_CONFIG'?" in problems_of(environment={"TRILANE_CONFIGS": "3"})[0]
    for name in ("TRILANE_CACHE_", "TRILANE_CACHE"):
        assert "names no option" in problems_of(environment={name: "3"})[0]
    found = load_config(environment={"TRILANE_SERVICE_HOST": "10.0.0.1", "OTHER": "x", "TRILANE_NO_CACHE": "1"})
    assert found.config == Config() and len(found.warnings) == 1 and "TRILANE_SERVICE_HOST" in found.warnings[0]


def test_an_empty_variable_counts_as_none(file: Path) -> None:
    assert load_config(file, environment={"TRILANE_CACHE_SLOTS": " ", "TRILANE_CONFIG": ""}).config.cache.slots == 64


def test_names_of_variables_are_reserved_where_the_project_reads_them() -> None:
    folders = ("scheduler", "cpu_kernels", "gpu_kernels", "probes", "scripts", "benchmarks")
    options = {option.variable for option in all_options()}
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]:
        if path.suffix in (".py", "") and "__pycache__" not in path.parts:
            named = set(re.findall(r"\bTRILANE_[A-Z_]*[A-Z]\b", path.read_text()))
            assert named <= options | RESERVED, path


def test_the_file_may_be_named_by_a_variable(file: Path) -> None:
    assert load_config(environment={"TRILANE_CONFIG": str(file)}).config.cache.slots == 64
    assert load_config(file, environment={"TRILANE_CONFIG": "/none"}).config.cache.slots == 64
    assert problems_of(environment={"TRILANE_CONFIG": "/none"})[0].startswith("TRILANE_CONFIG: /none: does not exist")


def test_arguments_of_programs_are_checked_too() -> None:
    found = problems_of(environment={}, arguments={"cache": {"slots": "3", 4: 5}, "cpu": 3, "polcy": None})
    assert {line.partition(": is")[0] for line in found} == {
        "argument: cache.slots",
        "argument: cache.4",
        "argument: cpu",
        "argument: polcy",
    }


def test_the_effective_config_is_frozen(file: Path) -> None:
    found = load_config(file, environment={})
    with pytest.raises(AttributeError):
        found.config = Config()  # type: ignore[misc]
    with pytest.raises(TypeError):
        found.origins["cache.slots"] = found.origins["cpu.isa"]  # type: ignore[index]


def test_programs_pass_files_which_the_environment_goes_over_and_options_which_it_does_not(
    file: Path, monkeypatch: Any, caplog: Any
) -> None:
    for name in [name for name in os.environ if name.startswith("TRILANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRILANE_CPU_THREADS", "1")
    monkeypatch.setenv("TRILANE_ODD", "1")
    file.write_text("cache: {slots: 1}\n")
    with caplog.at_level(logging.WARNING, "trilane"):
        for given in (file, str(file)):
            assert resolve_config(given) == Config(cache={"slots": 1}, cpu={"threads": 1})
    assert "TRILANE_ODD" in caplog.text
    assert resolve_config(None) == Config(cpu={"threads": 1})
    as_they_are: list[Any] = [Config(), {}, load_config(environment={})]
    assert [resolve_config(given) for given in as_they_are] == [Config()] * 3
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_config("none.yaml")
    with pytest.raises(ConfigError, match="must be a mapping of sections"):
        resolve_config(3)  # type: ignore[arg-type]
