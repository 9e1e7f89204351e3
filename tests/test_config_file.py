"""YAML files: every mistake with its line, what YAML readers disagree about, and files that are none."""

from __future__ import annotations

import doctest
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from trilane import Config, ConfigError, load_config
from trilane.settings import config_reference, effective_config
from trilane.settings.config_file import MAX_NBYTES
from trilane.settings.yaml_document import MAX_DEPTH


@pytest.fixture
def problems_in(tmp_path: Path) -> Any:
    """Loads a text as a file a.yaml and gives (line, path, message) of each problem."""

    def load(text: str | bytes) -> list[tuple[str, str, str]]:
        file = tmp_path / "a.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as caught:
            load_config(file, environment={})
        found = caught.value.problems
        assert all(problem.where and problem.where.startswith(str(file)) for problem in found)
        return [(f"{problem.where}".removeprefix(f"{file}")[1:], problem.path, problem.message) for problem in found]

    return load


TEN_MISTAKES = """\
cache:
  slots: -1                      # 2: below its limit
  half-life-steps: 3             # 3: misspelt
  eviction: lur                  # 4: no such choice
  eviction: lru                  # 5: given twice
polcy: {}                        # 6: no such section
policy:
  lanes: [stream, zerocopy]      # 8: no such lane
  fills: yes                     # 9: a word that YAML readers disagree about
  isa: avx2                      # 10: another section's option
cpu:
  threads: 010                   # 12: eight or ten?
host_device:
  link_gb_s: fast                # 14: no number
"""


def test_ten_mistakes_are_reported_as_ten_with_paths_and_lines(problems_in: Any) -> None:
    found = problems_in(TEN_MISTAKES)
    assert [(line, path) for line, path, _ in found] == [
        ("2", "cache.slots"),
        ("3", "cache.half-life-steps"),
        ("4", "cache.eviction"),
        ("5", "cache.eviction"),
        ("6", "polcy"),
        ("8", "policy.lanes.1"),
        ("9", "policy.fills"),
        ("10", "policy.isa"),
        ("12", "cpu.threads"),
        ("14", "host_device.link_gb_s"),
    ]
    hints = {
        "cache.half-life-steps": "Did you mean 'half_life_steps'?",
        "policy.fills": "write true",
        "policy.isa": "'isa' is an option of section 'cpu': move it to 'cpu:'.",
        "policy.lanes.1": "Did you mean 'zero_copy'?",
        "cpu.threads": "write 8 or 10",
    }
    messages = {path: message for _, path, message in found}
    for path, hint in hints.items():
        assert hint in messages[path]


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "\ufeffcache: {nbytes: 4.5GiB}\npolicy:\n  lanes: [cpu, stream]\ncpu:\nrecord: {path: 2020-01-01}\n"
    )
    found = load_config(file, environment={})
    assert found.config == Config(
        cache={"nbytes": "4.5GiB"}, policy={"lanes": ["cpu", "stream"]}, record={"path": "2020-01-01"}
    )
    assert str(found.origins["policy.lanes"]) == f"{file}:3" and str(found.origins["cpu.isa"]) == "default"


def test_a_file_of_comments_alone_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# cache:\n#   slots: 3\n")
    assert load_config(file, environment={}).config == Config()


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("yes", "write true, or"),
        ("Off", "write false, or"),
        ("010", "write 8 or 10, or"),
        ("0o17", "write 15, or"),
        ("08", "write 8, or"),
        ("1_000", "write 1000, or"),
        ("1:30", "write 90, or"),
        ("1e3", "write 1000.0, or"),
        ("-.5", "write -0.5, or"),
        ("1e999", "put it in quotes"),
        ("0b_", "put it in quotes"),
        ("9" * 5000, "a number of 5000 digits"),
        ("*other", "aliases are not taken"),
        ("!!python/object/apply:os.system [ls]", "tags are not taken"),
        ("!!int 3", "tags are not taken"),
        ("{a: 1}", "must be a whole number"),
        ("'64'", "is '64', but must be a whole number"),
        ("2020-01-01", "is '2020-01-01', but"),
        (".inf", "is inf, but"),
    ],
)
def test_values_that_are_unclear_or_wrong_say_what_to_write(problems_in: Any, value: str, hint: str) -> None:
    ((line, path, message),) = problems_in(f"cache:\n  slots: {value}\n")
    assert (line, path) == ("2", "cache.slots") and hint in message


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("cache:\n\tslots: 1", "2:1", "indent with spaces"),
        ("cache: slots: 1", "1:13", "without its colon"),
        ("cache:\n  slots: 1\n pool: layer\n", "3:2", "indent the options"),
        ("policy: {lanes: [cpu}", "1:21", "close the bracket"),
        ("cache: 'x", "1:8", "close the quote"),
        ("cache: [", "1:9", "close the quote or bracket"),
        ("a: 1\n---\nb: 2", "2:1", "second '---'"),
        ('a: "\\UFFFFFFFF"', "1:7", "out of range"),
        ("%YAML 1." + "9" * 5000, "1:9", "out of range"),
        ("a: 1\nb: \x07", "2:4", "0x7 is not allowed"),
        ("[" * 100_000, "", "more than 65536 bytes"),
        ("[" * 1000, f"1:{MAX_DEPTH + 1}", "nested more than 16 deep"),
        ("- cache", "1", "holds a list, but must hold sections"),
        ("64", "1", "holds the value 64"),
        ("", "", "is empty"),
        (" \n\n", "", "is empty"),
        (b"cache: \0", "", "is binary"),
        (b"cache:\n  pool: \xff\n", "2", "0xff, which is not UTF-8"),
        ("cache: {}\n".encode("utf-16"), "", "is binary"),
    ],
)
def test_what_is_no_configuration_at_all_is_told_with_its_place(
    problems_in: Any, text: Any, place: str, hint: str
) -> None:
    ((where, path, message),) = problems_in(text)
    assert where == place and path == "" and hint in message


def test_names_are_found_twice_at_any_depth(problems_in: Any) -> None:
    found = problems_in("cpu: {isa: avx2}\ncache: {slots: {a: 1, b: {c: 1, c: 2}}}\ncpu:\n  threads: 0\n")
    assert [(line, path) for line, path, _ in found] == [
        ("2", "cache.slots.b.c"),
        ("2", "cache.slots"),
        ("3", "cpu"),
        ("4", "cpu.threads"),
    ]


@pytest.mark.parametrize("key", ["? [a]\n: 1", "{a: b}: 1", "<<: {slots: 1}", "!!int 1: 1", "*a : 1"])
def test_keys_that_are_no_names_are_refused(problems_in: Any, key: str) -> None:
    ((line, path, message),) = problems_in(key + "\n")
    assert (line, path) == ("1", "configuration") and "the name of an option must stand" in message


@pytest.mark.parametrize("key", ["on", "1", "null", "~", "self", "'a.b'", "'\\e[0m'", "é"])
def test_odd_names_are_names_that_do_not_exist(problems_in: Any, key: str) -> None:
    ((line, path, message),) = problems_in(f"{key}: 1\n")
    assert line == "1" and "is no section" in message and path.isascii() and path.isprintable()


def test_a_bomb_of_aliases_is_not_expanded(problems_in: Any) -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 20)]
    start = time.perf_counter()
    found = problems_in("\n".join(["l0: &l0 [x]", *levels]))
    assert len(found) >= 190 and time.perf_counter() - start < 5


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    cases = {
        tmp_path / "none.yaml": "does not exist",
        tmp_path: "is a folder",
        tmp_path / "pipe": "is a pipe",
        "/dev/zero": "a device",
        tmp_path / "loop": "cannot be read",
        tmp_path / ("x" * 300): "cannot be read",
        "a\0b": "cannot be read",
        "": "does not exist",
    }
    for path, hint in cases.items():
        with pytest.raises(ConfigError, match=hint):
            load_config(path, environment={})


def test_a_file_that_must_not_be_read_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.yaml").write_text("cache: {}")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)"):
        load_config(tmp_path / "a.yaml", environment={})


def mutated(text: bytes, rng: random.Random) -> bytes:
    """A file with a few bytes, words or lines changed, dropped, doubled or swapped."""
    words = "*a|&a |!!|<<: |\t|yes|1e3|---\n|? |{|[|'|  |\n|: |#|>|%YAML 9.9\n|-|null|0x|é|!<%zz> |!x!y |%TAG ! x:\n"
    words += '|\'\\UFFFFFFFF\'|"\\UFFFFFFFF"|"\\ud800"'
    pieces = [
        *(word.encode() for word in words.split("|")),
        b"|",
        b"\xff",
        b"\0",
        b"9" * 400,
        b"%YAML 1." + b"9" * 5000 + b"\n---\n",
    ]
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(1, 6)):
        where, kind = rng.randrange(len(lines)), rng.randrange(6)
        if kind == 0:
            lines.insert(where, lines[rng.randrange(len(lines))])
        elif kind == 1:
            lines[where] = lines[where][rng.randrange(len(lines[where]) + 1) :]
        elif kind == 2 and len(lines) > 1:
            del lines[where]
        else:
            at = rng.randrange(len(lines[where]) + 1)
            cut = at + (rng.randrange(3) if kind == 3 else 0)
            lines[where] = lines[where][:at] + rng.choice(pieces) + lines[where][cut:]
    return b"".join(lines)


def test_mutated_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    plain = "\n".join(line for line in config_reference.example_text().splitlines() if "#" not in line.split(":")[0])
    seeds = [plain.encode(), TEN_MISTAKES.encode(), b"cache: {slots: 3, pool: layer}\npolicy: {lanes: [cpu]}\n"]
    rng, file, outcomes = random.Random(3), tmp_path / "a.yaml", {True: 0, False: 0}
    for _ in range(2000):
        file.write_bytes(mutated(rng.choice(seeds), rng))
        try:
            assert isinstance(load_config(file, environment={}).config, Config)
            outcomes[True] += 1
        except ConfigError as error:
            assert error.problems and all(line.isprintable() for line in str(error).split("\n"))
            outcomes[False] += 1
    assert min(outcomes.values()) > 20, outcomes


@pytest.mark.parametrize("line", ["  x{i}: 1\n", "a{i}: [no, no, no]\n", "k: &a{i} *a{i}\n"])
def test_the_largest_file_is_answered_within_seconds(problems_in: Any, line: str) -> None:
    text = "cache:\n"
    for i in range(100_000):
        if len(text) + len(line) + 5 > MAX_NBYTES:
            break
        text += line.format(i=i)
    start = time.perf_counter()
    problems_in(text)
    assert time.perf_counter() - start < 20


def test_examples_in_docstrings_run() -> None:
    for module in (config_reference, effective_config):
        result = doctest.testmod(module)
        assert result.attempted >= 2 and result.failed == 0
