"""What the documents say is true: examples run, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"`((?:scheduler|cpu_kernels|probes|tests|scripts|docs)/[\w./]+)`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_example_of_the_readme_runs() -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    result = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_exist(path: Path) -> None:
    commands = re.findall(r"^(trilane bench(?: \w+)?|scripts/\w+)", path.read_text(), re.MULTILINE)
    for command in sorted(set(commands)):
        if command.startswith("scripts/"):
            assert (ROOT / command).stat().st_mode & 0o100, command
        else:
            run = [
                sys.executable,
                "-c",
                "from trilane.cli import main; main()",
                *command.split()[1:],
                "--help",
            ]
            assert subprocess.run(run, capture_output=True).returncode == 0, command
