"""The effective configuration: defaults, then a file, then the environment, then arguments; and who set what.

Each source is checked on its own, so that one error tells what is wrong in all of them, and then all together.
The file knows names of sources and how they are combined; what an option may be is the model's business.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from trilane.config import ONE_OF, Config, sound_options
from trilane.config_file import file_name, read_file
from trilane.config_problems import shown
from trilane.config_reference import Option, all_options, value_text
from trilane.errors import ConfigError, Problem, did_you_mean
from trilane.yaml_document import read_document

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


_DEFAULT = Origin("default", "default")


@dataclass(frozen=True)
class EffectiveConfig:
    """A configuration, and where each of its values comes from.

    Attributes
    ----------
    config : Config
    origins : mapping of str to Origin
        By path, such as ``cache.slots``; every option has one.
    warnings : tuple of str
        What is odd but not wrong, such as a variable with our prefix that names nothing.
    """

    config: Config
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()

    def value(self, path: str) -> Any:
        """The value of an option such as ``cache.slots``."""
        section, _, name = path.partition(".")
        return getattr(getattr(self.config, section), name)

    def __str__(self) -> str:
        return "\n".join(f"{path} = {value_text(self.value(path))}  # {self.origins[path]}" for path in self.origins)


@dataclass
class _Layer:
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
        self.problems += [replace(problem, where=_place(problem.path, self.origins)) for problem in problems]
        self.problems.sort(key=lambda problem: [int(digits) for digits in re.findall(r"\d+", problem.where or "")])


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
) -> EffectiveConfig:
    """Read the configuration: defaults < file < environment < arguments.

    Parameters
    ----------
    path : path, optional
        A YAML file. None: the file that ``TRILANE_CONFIG`` names, if it is set; no other place is searched.
    environment : mapping, optional
        Variables such as ``TRILANE_CACHE_SLOTS=64``. None: those of the process; ``{}``: none.
    arguments : mapping or sequence of str, optional
        Options as nested mappings (``{"cache": {"slots": 64}}``), or as texts (``["cache.slots=64"]``).

    Raises
    ------
    ConfigError
        With everything that is wrong in the file, the environment and the arguments.

    >>> found = load_config(environment={"TRILANE_CACHE_SLOTS": "64"}, arguments=["policy.lanes=stream,cpu"])
    >>> found.config.cache.slots, found.config.policy.lanes, str(found.origins["cache.slots"])
    (64, ('stream', 'cpu'), 'TRILANE_CACHE_SLOTS')
    """
    variables = os.environ if environment is None else environment
    named = path if path is not None else variables.get(FILE_VARIABLE) or None
    layers = [] if named is None else [_file_layer(named)]
    layers += [_environment_layer(variables), _argument_layer(arguments)]
    for layer in layers:
        layer.check()
    options, origins = _merge(layers)
    problems = [problem for layer in layers for problem in layer.problems]
    problems += _joint_problems(options, origins)
    if problems:
        raise ConfigError(problems)
    every = {option.path: origins.get(option.path, _DEFAULT) for option in all_options()}
    warnings = tuple(warning for layer in layers for warning in layer.warnings)
    return EffectiveConfig(Config.from_mapping(options), MappingProxyType(every), warnings)


def _place(path: str, origins: Mapping[str, Origin]) -> str | None:
    """Where a path was written: its own place, or that of the nearest part around it."""
    while path not in origins:
        if "." not in path:
            return None
        path = path.rpartition(".")[0]
    return str(origins[path])


def resolve_config(given: Config | EffectiveConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """The configuration that a program passed: objects and mappings as they are, else as :func:`load_config` reads it.

    The environment has a say where a file has one, or nothing was given; who spells options out in a program gets
    these and nothing else.
    """
    if isinstance(given, EffectiveConfig):
        return given.config
    if isinstance(given, Config):
        return given
    if given is not None and not isinstance(given, str | os.PathLike):
        return Config.from_mapping(given)
    found = load_config(given)
    for warning in found.warnings:
        logging.getLogger("trilane").warning("%s", warning)
    return found.config


# ------------------------------------------------------------------------------------------------ the sources
def _file_layer(path: str | os.PathLike[str]) -> _Layer:
    name, text = file_name(path), read_file(path)
    if isinstance(text, Problem):
        return _Layer(problems=[text])
    document = read_document(text, name)
    origins = {path: Origin("file", name, line) for path, line in document.lines.items()}
    layer = _Layer(origins=origins, problems=list(document.problems))
    if isinstance(document.value, dict):
        layer.options = document.value
    elif document.value is not None:
        what = "a list" if isinstance(document.value, list) else f"the value {shown(document.value)}"
        sentence = f"holds {what}, but must hold sections of options, such as 'cache:' with 'slots: 64' below it."
        layer.problems.append(Problem("", sentence, f"{name}:{document.lines['configuration']}"))
    return layer


def _environment_layer(variables: Mapping[str, str]) -> _Layer:
    layer, known = _Layer(), {option.variable: option for option in all_options()}
    for name in sorted(name for name in variables if name.startswith(PREFIX) and name not in RESERVED):
        if name not in known:
            _note_unknown_variable(layer, name, known)
        elif variables[name].strip():  # an empty variable counts as none, as shells have it
            _put_text(layer, known[name], variables[name], Origin("environment", name))
    return layer


def _note_unknown_variable(layer: _Layer, name: str, known: Mapping[str, Option]) -> None:
    """A slip is an error; a name that resembles nothing may be another program's, and is a warning."""
    near = difflib.get_close_matches(name, [*known, *RESERVED], n=1, cutoff=_MISSPELT)
    section = next((s for s in Config.model_fields if name.startswith(f"{PREFIX}{s}_".upper())), None)
    if not near and section is None:
        layer.warnings.append(f"the environment variable {shown(name)} names no option of trilane; it is ignored")
        return
    mine = [option.variable for option in known.values() if option.section == section]
    hint = f" Did you mean {near[0]!r}?" if near else did_you_mean(name, mine)
    layer.problems.append(Problem("", f"names no option: rename or unset it.{hint}", file_name(name)))


def _argument_layer(arguments: Mapping[str, Any] | Sequence[str] | None) -> _Layer:
    if arguments is None:
        return _Layer()
    if isinstance(arguments, Mapping):
        return _mapping_layer(arguments)
    layer = _Layer()
    for text in [arguments] if isinstance(arguments, str) else arguments:
        _put_setting(layer, text)
    return layer


def _mapping_layer(arguments: Mapping[str, Any]) -> _Layer:
    plain = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in arguments.items()
    }
    origin = Origin("argument", "argument")
    inner = {f"{name}.{option}" for name, value in plain.items() if isinstance(value, Mapping) for option in value}
    return _Layer(plain, dict.fromkeys([*map(str, plain), *inner], origin))


def _put_setting(layer: _Layer, text: str) -> None:
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


def _put_text(layer: _Layer, option: Option, text: str, origin: Origin) -> None:
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


# ------------------------------------------------------------------------------------------------ combining them
def _merge(layers: Iterable[_Layer]) -> tuple[dict[str, dict[str, Any]], dict[str, Origin]]:
    """Weakest source first; of options that exclude each other, the strongest source's choice is what stays."""
    merged: dict[str, dict[str, Any]] = {}
    origins: dict[str, Origin] = {}
    for layer in layers:
        for section, options in layer.options.items():
            into, rivals = merged.setdefault(section, {}), ONE_OF.get(section, ())
            given = options if isinstance(options, Mapping) else {}
            if any(given.get(name) is not None for name in rivals):
                for name in rivals:
                    into.pop(name, None)
                    origins.pop(f"{section}.{name}", None)
            for name, value in given.items():
                into[name] = value
                origins[f"{section}.{name}"] = layer.origins[f"{section}.{name}"]
    return merged, origins


def _joint_problems(options: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[Problem]:
    """What is wrong only since several sources meet; names the others that are involved."""
    found = []
    for problem in sound_options(options)[1]:
        others = [
            f" {path} comes from {origin}."
            for path, origin in origins.items()
            if path != problem.path and re.search(rf"\b{re.escape(path)}\b", problem.message)
        ]
        found.append(Problem(problem.path, problem.message + "".join(others), _place(problem.path, origins)))
    return found
