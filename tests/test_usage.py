"""What ``--help`` of every command says: one style, one voice, units, and every default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from trilane.cli import app
from trilane.commands.options import GB_S, METAVARS, PART, SIZE, US

FORMS = {"ROWSxCOLUMNS", "SECTION.OPTION=VALUE", "ADDRESS"}  # of values that only one option has
ARGUMENTS = {"MODEL", "TRACE", "FILE", "PROGRAM..."}
VERBS = {"Check", "Generate", "Measure", "Record", "Replay", "Say", "Serve"}
FLAG_VERBS = {"Also", "Check", "Compare", "Keep", "Measure", "Only", "Play", "Print", "Take", "Try"}
OF_TYPER = {"--help", "--version", "--install-completion", "--show-completion"}


def commands(command: Any = None, name: str = "trilane") -> Iterator[tuple[str, Any]]:
    """Every command and group below one, with what users type."""
    command = get_command(app) if command is None else command
    yield name, command
    for below, found in getattr(command, "commands", {}).items():
        yield from commands(found, f"{name} {below}")


COMMANDS = dict(commands())
PARAMS = [
    pytest.param(param, id=f"{name} {param.opts[-1]}")
    for name, command in COMMANDS.items()
    for param in command.params
    if param.opts[0] not in OF_TYPER
]


def is_option(param: Any) -> bool:
    return param.opts[0].startswith("-")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "trilane"])
def test_a_command_begins_with_what_it_does(name: str) -> None:
    first, *_ = COMMANDS[name].help.split("\n\n")
    assert first.split()[0] in VERBS and first.endswith(".") and "  " not in first and len(first) < 130, first


@pytest.mark.parametrize("param", PARAMS)
def test_an_option_says_what_it_takes(param: Any) -> None:
    text = param.help
    assert text.endswith(".") and (text[0].isupper() or text[0].isdigit() or text.split()[0].strip(",") in KNOWN), text
    if not is_option(param):
        assert param.metavar in ARGUMENTS, param.metavar
    elif getattr(param, "is_flag", False) or getattr(param, "is_bool_flag", False):
        assert text.split()[0] in {*FLAG_VERBS, "On"} and "Default" not in text, text
    else:
        assert param.metavar in METAVARS | FORMS, param.metavar


KNOWN = {"auto", "host", "ggml's"}  # words that are written small


@pytest.mark.parametrize("param", PARAMS)
def test_units_and_defaults_are_shown(param: Any) -> None:
    text, is_flag = param.help, getattr(param, "is_flag", False) or getattr(param, "is_bool_flag", False)
    unit = {SIZE: ", such as ", PART: ", 0 to 1", GB_S: ", GB/s", US: ", us"}.get(param.metavar)
    assert unit is None or unit in text, text
    if is_option(param) and not is_flag:
        is_shown = param.default not in (None, (), []) and bool(param.show_default)
        assert is_shown != (" Default: " in text), (text, param.default)


@pytest.mark.parametrize("option", ["--json", "--slots", "--vram", "--device", "--machine", "--max-tokens", "--format"])
def test_options_that_commands_share_read_alike(option: str) -> None:
    found = {param.values[0].metavar for param in PARAMS if option in param.values[0].opts}
    assert len(found - {PART}) == 1, found
