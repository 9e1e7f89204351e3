"""Whether torch and transformers are there, in versions that have what this package uses."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable

LEAST = {"torch": (2, 6), "transformers": (5, 17)}
BELOW = {"transformers": (5, 18)}  # calls quantisers with other arguments


def check_versions(version_of: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raise where one is missing, too old or too new.

    Raises
    ------
    ImportError
        With what is missing, and the remedy.
    """
    for name, least in LEAST.items():
        needed = f"trilane.integrations.transformers needs {name} {'.'.join(map(str, least))} or newer"
        try:
            found = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"{needed}, which is not installed; pip install 'trilane[hf]'", name=name) from None
        numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
        if numbers < least:
            raise ImportError(f"{needed}, but {found} is installed; pip install -U 'trilane[hf]'", name=name)
        if numbers >= BELOW.get(name, (numbers[0] + 1,)):
            below = ".".join(map(str, BELOW[name]))
            raise ImportError(
                f"trilane.integrations.transformers needs {name} below {below}, but {found} is installed; pip install "
                f"'{name}<{below}'",
                name=name,
            )
