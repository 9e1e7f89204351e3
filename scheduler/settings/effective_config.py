"""The effective configuration: defaults, then a file, then the environment, then arguments; and who set what.

All that is wrong in any of them is one error. The file knows the order of the layers and how they are combined, not
how each is written.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trilane.config import ONE_OF, Config, sound_options
from trilane.errors import ConfigError, Problem
from trilane.settings.config_reference import all_options, value_text
from trilane.settings.config_sources import (
    FILE_VARIABLE,
    Layer,
    Origin,
    argument_layer,
    environment_layer,
    file_layer,
    place_of,
)

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
    layers = [environment_layer(variables), argument_layer(arguments)]
    if path is not None:
        layers.insert(0, file_layer(path))
    elif named := variables.get(FILE_VARIABLE):
        layers.insert(0, file_layer(named, FILE_VARIABLE))
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


def _merge(layers: Iterable[Layer]) -> tuple[dict[str, dict[str, Any]], dict[str, Origin]]:
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
        found.append(Problem(problem.path, problem.message + "".join(others), place_of(problem.path, origins)))
    return found
