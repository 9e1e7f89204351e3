"""One YAML scalar: its value, where all YAML readers agree about it, and otherwise what to write instead.

YAML 1.1 and 1.2 read some plain texts differently: ``no`` is false or text, ``010`` is eight or ten, ``1:30`` is
ninety or text, ``1e3`` is text or a number. None of them is guessed at. The file knows no option.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

_CORE = {  # what YAML 1.2 (its core schema) takes a plain text for; anything else is text
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
_OCTAL_OR_NOT = re.compile(r"[-+]?0[0-9]+")
_MAX_DIGITS = 400  # of a number; a float64 has 309 before its point


@dataclass(frozen=True)
class Unclear:
    """A plain text that is not taken, and the sentence that says why and what to write."""

    sentence: str


def read_scalar(text: str, old_type: str, plain: bool) -> Any:
    """The value of a scalar, or an :class:`Unclear`.

    Parameters
    ----------
    text : str
        As written, without its quotes.
    old_type : str
        What YAML 1.1 takes it for: "int", "bool", "timestamp" ...
    plain : bool
        Whether it stood without quotes; with them it is text.
    """
    if not plain:
        return text
    new_type = next((name for name, pattern in _CORE.items() if pattern.fullmatch(text)), "str")
    if old_type not in (*_CORE, "str"):
        old_type = "str"  # dates and the like are text to us
    if new_type in ("int", "float") and len(text) > _MAX_DIGITS:
        return Unclear(f"is a number of {len(text)} digits, but must have {_MAX_DIGITS} at most: write a smaller one.")
    if old_type != new_type or _OCTAL_OR_NOT.fullmatch(text):
        return _unclear(text, old_type, new_type)
    return _value(text, new_type)


def _value(text: str, kind: str) -> Any:
    """The value of a text of a kind by YAML 1.2."""
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan")) if kind == "float" else text


def _unclear(text: str, old_type: str, new_type: str) -> Unclear:
    readings = []
    for read, kind in ((_old_value, old_type), (_value, new_type)):
        try:
            value = read(text, kind)
        except (ValueError, OverflowError):  # "0b_" and the like: numbers without digits to YAML 1.1
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            readings.append(str(value).lower())
    meant = f"write {' or '.join(dict.fromkeys(readings))}, or " if readings else "put it "
    quotes = "the same in quotes if it is text" if readings else "in quotes"
    return Unclear(f"is {text[:60]} without quotes, which YAML readers take differently: {meant}{quotes}.")


def _old_value(text: str, kind: str) -> Any:
    """The value of a text of a kind by YAML 1.1."""
    return yaml.constructor.SafeConstructor().construct_object(yaml.ScalarNode(f"tag:yaml.org,2002:{kind}", text))
