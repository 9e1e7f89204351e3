"""Numbers of a config.json by their keys, of which a family may use one or another; what cannot be is an error.

It knows what numbers may be, and not what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilane.errors import ModelFileError

MAX_COUNT = 1 << 30


class ConfigKeys:
    """A config.json's part for the language model.

    Attributes
    ----------
    path : Path
        For errors.
    part : mapping
    """

    def __init__(self, path: Path, part: Mapping[str, Any]) -> None:
        self.path, self.part = path, part

    def value(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first of the keys that is set, and its value; of a list of equal numbers the number."""
        key = next((key for key in keys if self.part.get(key) is not None), keys[0])
        value = self.part.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return key, value[0]
        return key, value

    def need(self, keys: tuple[str, ...], most: int = MAX_COUNT) -> int:
        """A whole number from 1 to ``most``.

        Raises
        ------
        ModelFileError
            None of the keys is there, or it has another value.
        """
        key, value = self.value(keys)
        if value is None:
            names = " or ".join(keys)
            raise ModelFileError(
                f"{self.path}: {names} is missing, but is needed to count parameters; take the model's own"
            )
        return self._checked(key, value, 1, most)

    def optional(self, keys: tuple[str, ...], default: int) -> int:
        """A whole number from 0 up, or the default where none of the keys is there."""
        key, value = self.value(keys)
        return default if value is None else self._checked(key, value, 0, MAX_COUNT)

    def _checked(self, key: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ModelFileError(
                f"{self.path}: {key} is {str(value)[:80]!r}, but must be a whole number from {least} to {most}; "
                "correct it"
            )
        return value


def whole_numbers(value: Any) -> set[int]:
    """The whole numbers of a list; none of anything else."""
    return {item for item in value if type(item) is int} if isinstance(value, list) else set()
