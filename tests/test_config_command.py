"""``trilane config``, the example that it prints, and the table in the documents: all from one model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trilane import Config, load_config
from trilane.settings.config_reference import all_options, example_text, reference_table

ROOT = Path(__file__).resolve().parent.parent


def run(*args: str, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TRILANE_")}
    command = [sys.executable, "-c", "from trilane.cli import main; main()", "config", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=plain | variables)
    assert result.returncode == expect, result.stderr
    assert "Traceback" not in result.stderr
    return result


def test_values_and_origins_are_printed_plainly_where_there_is_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("cache:\n  slots: 64\n")
    result = run(str(file), "--set", "policy.lanes=cpu", TRILANE_CPU_ISA="portable", TRILANE_ODD="1")
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["option", "value", "from", "meaning"] and "\x1b" not in result.stdout
    assert len(rows) == len(all_options())
    cells = {row.split()[0]: row.split()[1:3] for row in rows}
    assert cells["cache.slots"] == ["64", f"{file}:2"]
    assert cells["policy.lanes"] == ["[cpu]", "--set"]
    assert cells["cpu.isa"] == ["portable", "TRILANE_CPU_ISA"]
    assert cells["cpu.threads"] == ["auto", "default"]
    assert "'TRILANE_ODD' names no option" in result.stderr


def test_json_has_exactly_the_documented_form(tmp_path: Path) -> None:
    found = json.loads(run("--json", "--set", "record.path=r").stdout)
    assert (found["schema"], list(found)) == (1, ["schema", "options", "warnings"])
    assert all(list(row) == ["path", "value", "origin", "default", "limits", "description"] for row in found["options"])
    rows = {row["path"]: row for row in found["options"]}
    assert rows["record.path"]["value"] == "r"
    assert rows["record.path"]["origin"] == {"kind": "argument", "name": "--set", "line": None}
    assert rows["policy.lanes"]["value"] == ["stream", "zero_copy", "cpu"]


def test_all_problems_are_printed_and_the_exit_code_is_1(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("cache:\n  slotz: 64\ncpu: {threads: 0}\n")
    result = run(str(file), expect=1, TRILANE_CPU_ISA="sse")
    assert result.stdout == "" and result.stderr.startswith("trilane: 3 problems:\n")
    for place in (
        f"  {file}:2: cache.slotz: is no",
        f"  {file}:3: cpu.threads: is 0",
        "  TRILANE_CPU_ISA: cpu.isa: is",
    ):
        assert place in result.stderr
    (first, *_) = json.loads(run(str(file), "--json", expect=1).stdout)["problems"]
    assert (first["where"], first["path"]) == (f"{file}:2", "cache.slotz")
    assert "prints every option's default" in run("--example", "--set", "a=b", expect=2).stderr


def test_a_terminal_gets_a_table(monkeypatch: Any, capsys: Any) -> None:
    from trilane.commands.config import show_config

    for name in [name for name in os.environ if name.startswith("TRILANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "150")
    show_config(settings=["policy.lanes=cpu,stream"])
    out = capsys.readouterr().out
    assert "[cpu, stream]" in out and "\x1b[1m" in out


def test_the_example_sets_every_option_to_its_default_and_explains_it(tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(run("--example").stdout)
    assert file.read_text() == example_text()
    found = load_config(file, environment={})
    assert found.config == Config() and {origin.kind for origin in found.origins.values()} == {"file"}
    lines = [line.strip() for line in example_text().splitlines()]
    for option in all_options():
        assert f"# {option.description}" in lines and f"# ({option.limits})" in lines
    assert max(map(len, lines)) <= 100


def test_every_option_has_a_default_within_its_limits_and_a_meaning() -> None:
    assert {option.path for option in all_options()} == {
        f"{section}.{name}" for section, options in Config().model_dump().items() for name in options
    }
    for option in all_options():
        assert option.description and option.limits and "|" not in option.description
        Config.from_mapping({option.section: {option.name: option.default}})
        suffix = option.name.rsplit("_", 1)[-1]
        unit = {"us": "us", "s": "s ", "nbytes": "bytes", "steps": "steps"}.get(suffix, "")
        assert (unit or "GB/s" * option.name.endswith("gb_s")) in option.description


def test_the_table_in_the_documents_is_that_of_the_model() -> None:
    assert reference_table() in (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("block", range(2))
def test_files_that_the_documents_show_are_right(block: int, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    shown = text.split("```yaml\n")[block + 1].partition("```")[0]
    assert isinstance(yaml.safe_load(shown), dict)
    (tmp_path / "a.yaml").write_text(shown)
    assert load_config(tmp_path / "a.yaml", environment={}).config != Config()
