"""Every option as text: its default, its limits, its unit and its meaning; a table and a commented example.

All of it is read off the model, so it cannot differ from what is checked. The file knows nothing of files,
variables or arguments that set options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from trilane.config import Config
from trilane.settings.config_problems import section_of

_NAMED = {"null": "null", "boolean": "true or false", "size": "bytes, or a size such as 4.5GiB", "path": "a file name"}
_BOUNDS = (("minimum", "{:g} or more"), ("exclusiveMinimum", "above {:g}"), ("maximum", "up to {:g}"))


@dataclass(frozen=True)
class Option:
    """One option of the configuration.

    Attributes
    ----------
    section, name : str
    default : object
        Its value where nothing sets it.
    limits : str
        What may be set, for people.
    description : str
        One line with the unit.
    is_list, is_file : bool
        Whether it holds a list, or the name of a file.
    """

    section: str
    name: str
    default: Any
    limits: str
    description: str
    is_list: bool
    is_file: bool

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it.

        >>> all_options()[0].variable
        'TRILANE_CACHE_SLOTS'
        """
        return f"TRILANE_{self.section}_{self.name}".upper()


@cache
def all_options() -> tuple[Option, ...]:
    """Every option, in the order of the model."""
    return tuple(option for section in Config.model_fields for option in _options_of(section))


def _options_of(section: str) -> Iterator[Option]:
    model = section_of(Config, section)
    assert model is not None
    defaults, schemas = model(), model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        limits, default = limits_text(schemas[name]), getattr(defaults, name)
        is_list, is_file = "list of" in limits, "file name" in limits
        yield Option(section, name, default, limits, field.description or "", is_list, is_file)


def limits_text(schema: Mapping[str, Any]) -> str:
    """What may be set, from a JSON schema.

    >>> limits_text({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]})
    'a whole number, 0 to 9, or null'
    """
    if "anyOf" in schema:
        *parts, last = (limits_text(part) for part in schema["anyOf"])
        return f"{', '.join(parts)}, or {last}"
    if names := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(names[:-1]) + (" or " if names[1:] else "") + names[-1]
    if schema["type"] == "array":
        return f"a list of {limits_text(schema['items']).replace(' or ', ', ')}"
    if schema["type"] in ("integer", "number"):
        return ", ".join(
            filter(None, ("a whole number" if schema["type"] == "integer" else "a number", _range(schema)))
        )
    return _NAMED[schema.get("format", schema["type"])]


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high:.0f}"
    return " and ".join(text.format(schema[bound]) for bound, text in _BOUNDS if bound in schema)


def value_text(value: Any) -> str:
    """A value as YAML, on one line, in ASCII.

    >>> value_text(None), value_text(("stream", "cpu")), value_text(1e16)
    ('null', '[stream, cpu]', '1.0e+16')
    """
    if isinstance(value, tuple):
        value = list(value)
    elif not isinstance(value, int | float | str | None):
        value = str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def reference_table() -> str:
    """All options as Markdown, a table a section."""
    lines = []
    for section, field in Config.model_fields.items():
        lines += [
            f"### `{section}`: {field.description}",
            "",
            "| option | default | may be | meaning |",
            "|---|---|---|---|",
        ]
        for option in _options_of(section):
            cells = (f"`{option.name}`", f"`{value_text(option.default)}`", option.limits, option.description)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def example_text() -> str:
    """A configuration with every option at its default, commented."""
    lines = ["# Every option of trilane with its default. Keep what you change; leave out the rest."]
    lines += ["# Check a file, and see what applies: trilane config FILE", ""]
    for section, field in Config.model_fields.items():
        lines.append(f"{section}:  # {field.description}")
        for option in _options_of(section):
            lines += [f"  # {option.description}", f"  # ({option.limits})"]
            lines.append(f"  {option.name}: {value_text(option.default)}")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"
