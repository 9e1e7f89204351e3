"""The places where options are set: a file, the environment, arguments. Each becomes a layer that is checked alone.

The file knows how each place spells options; what an option may be is the model's business, and which place goes
over which is said elsewhere.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel

from trilane.config import Config, sound_options
from trilane.errors import Problem, did_you_mean
from trilane.settings.config_file import file_name, read_file
from trilane.settings.config_problems import shown
from trilane.settings.config_reference import Option, all_options
from trilane.settings.yaml_document import read_document

PREFIX = "TRILANE_"
FILE_VARIABLE = "TRILANE_CONFIG"
# Names with our prefix that set no option: the file above, and what other parts read for themselves.
RESERVED = frozenset({FILE_VARIABLE, "TRILANE_GGML", "TRILANE_NO_CACHE", "TRILANE_PYTHON"})
_MAX_TEXT = 8192  # characters of one variable or --set
_MISSPELT = 0.85  # how much alike two variables are of which one is likely a slip of the other


@dataclass(frozen=True)
class Origin:
    """Where an option's value comes from.

    Attributes
    ----------
    kind : {"default", "file", "environment", "argument"}
    name : str
        The file, the variable, or "--set"; "argument" for one that a program passed.
    line : int, optional
        The line in the file, from 1.
    """

    kind: Literal["default", "file", "environment", "argument"]
    name: str
    line: int | None = None

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass
class Layer:
    """What one source sets: nested options, the origin of each, and what is wrong."""

    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def put(self, option: Option, value: Any, origin: Origin) -> None:
        self.options.setdefault(option.section, {})[option.name] = value
        self.origins[option.path] = origin

    def check(self) -> None:
        """Keep what is sound, and note the rest with its place, line by line."""
        self.options, problems = sound_options(self.options)
        self.problems += [replace(problem, where=place_of(problem.path, self.origins)) for problem in problems]
        self.problems.sort(key=lambda problem: [int(digits) for digits in re.findall(r"\d+", problem.where or "")])


def place_of(path: str, origins: Mapping[str, Origin]) -> str | None:
    """Where a path was written: its own place, or that of the nearest part around it."""
    while path not in origins:
        if "." not in path:
            return None
        path = path.rpartition(".")[0]
    return str(origins[path])


def file_layer(path: str | os.PathLike[str], named_by: str | None = None) -> Layer:
    """What a YAML file sets; ``named_by``: the variable that names the file, for the message if it is not there."""
    name, text = file_name(path), read_file(path)
    if isinstance(text, Problem):
        return Layer(problems=[replace(text, where=": ".join(filter(None, (named_by, text.where))))])
    document = read_document(text, name)
    origins = {path: Origin("file", name, line) for path, line in document.lines.items()}
    layer = Layer(origins=origins, problems=list(document.problems))
    if isinstance(document.value, dict):
        layer.options = document.value
    elif document.value is not None:
        what = "a list" if isinstance(document.value, list) else f"the value {shown(document.value)}"
        sentence = f"holds {what}, but must hold sections of options, such as 'cache:' with 'slots: 64' below it."
        layer.problems.append(Problem("", sentence, f"{name}:{document.lines['configuration']}"))
    return layer


def environment_layer(variables: Mapping[str, str]) -> Layer:
    """What variables such as ``TRILANE_CACHE_SLOTS`` set."""
    layer, known = Layer(), {option.variable: option for option in all_options()}
    for name in sorted(name for name in variables if name.startswith(PREFIX) and name not in RESERVED):
        if name not in known:
            _note_unknown_variable(layer, name, known)
        elif variables[name].strip():  # an empty variable counts as none, as shells have it
            _put_text(layer, known[name], variables[name], Origin("environment", name))
    return layer


def _note_unknown_variable(layer: Layer, name: str, known: Mapping[str, Option]) -> None:
    """A slip is an error; a name that resembles nothing may be another program's, and is a warning."""
    near = difflib.get_close_matches(name, [*known, FILE_VARIABLE], n=1, cutoff=_MISSPELT)
    section = next((s for s in Config.model_fields if f"{name}_".startswith(f"{PREFIX}{s}_".upper())), None)
    if not near and section is None:
        layer.warnings.append(f"the environment variable {shown(name)} names no option of trilane; it is ignored")
        return
    mine = [option.variable for option in known.values() if option.section == section]
    hint = f" Did you mean {near[0]!r}?" if near else did_you_mean(name, mine)
    layer.problems.append(Problem("", f"names no option: rename or unset it.{hint}", file_name(name)))


def argument_layer(arguments: Mapping[str, Any] | Sequence[str] | None) -> Layer:
    """What a program's mapping or a command line's ``section.option=value`` texts set."""
    if arguments is None:
        return Layer()
    if isinstance(arguments, Mapping):
        return _mapping_layer(arguments)
    layer = Layer()
    for text in [arguments] if isinstance(arguments, str) else arguments:
        _put_setting(layer, text)
    return layer


def _mapping_layer(arguments: Mapping[str, Any]) -> Layer:
    plain = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in arguments.items()
    }
    origin = Origin("argument", "argument")
    inner = {f"{name}.{option}" for name, value in plain.items() if isinstance(value, Mapping) for option in value}
    return Layer(plain, dict.fromkeys([*map(str, plain), *inner], origin))


def _put_setting(layer: Layer, text: str) -> None:
    """One ``section.option=value``."""
    path, given, value = text.partition("=")
    known, origin = {option.path: option for option in all_options()}, Origin("argument", "--set")
    path = path.strip()
    if path not in known or not given:
        hint = "" if path in known else did_you_mean(path, known)
        sentence = f"sets no option: write SECTION.OPTION=VALUE, such as cache.slots=64.{hint}"
        layer.problems.append(Problem(shown(text), sentence, origin.name))
    elif path in layer.origins:
        layer.problems.append(Problem(path, "is set twice: keep one of them.", origin.name))
    elif not value.strip():
        layer.problems.append(Problem(path, "is set to nothing: write a value, or null for none.", origin.name))
    else:
        _put_text(layer, known[path], value, origin)


def _put_text(layer: Layer, option: Option, text: str, origin: Origin) -> None:
    """A value given as text: a file's name is taken as it is, a list may go without brackets, the rest is YAML."""
    value: Any = text
    if len(text) > _MAX_TEXT:
        sentence = f"has {len(text)} characters, but a value must have {_MAX_TEXT} at most: shorten it."
        layer.problems.append(Problem(option.path, sentence, origin.name))
        return
    if option.is_file:
        value = None if text.strip() == "null" else text
    else:
        document = read_document(text, origin.name, (option.section, option.name), numbered=False)
        layer.problems += document.problems
        if document.problems:
            return
        value = document.value
        if option.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
    layer.put(option, value, origin)
