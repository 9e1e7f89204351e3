"""Numbers on the command line: a wrong one is answered with its value, the rule, and a number that would do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import typer

MOST_WHOLE = 2**31 - 1
MOST = 1e9
_WHOLE = re.compile(r"[-+]?[0-9]{1,30}")


def whole(least: int, such_as: int, *, most: int = MOST_WHOLE) -> Callable[[str | int], int]:
    """What an option of whole numbers from ``least`` to ``most`` parses its text with; ``such_as`` is an example."""

    def parse(text: str | int) -> int:
        shown = str(text).strip()
        value = int(shown) if _WHOLE.fullmatch(shown) else least - 1
        if not least <= value <= most:
            rule = f"{least} or more" if value < least else f"at most {most}"
            raise typer.BadParameter(f"{shown[:60]!r} must be a whole number, {rule}: give one such as {such_as}")
        return value

    return parse


def number(least: float, such_as: float, *, most: float = MOST, above: bool = False) -> Callable[[str | float], float]:
    """The same for numbers from ``least`` to ``most``; ``above``: ``least`` itself is too small."""

    def parse(text: str | float) -> float:
        shown = str(text).strip()
        try:
            value = float(shown)
        except ValueError:
            value = math.nan
        if not (least < value <= most if above else least <= value <= most):
            rule = f"{'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}"
            raise typer.BadParameter(f"{shown[:60]!r} must be a number {rule}: give one such as {such_as:g}")
        return value

    return parse
