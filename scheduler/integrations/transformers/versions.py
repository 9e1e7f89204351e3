"""Whether torch and transformers are there, in versions that have what this package uses."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable

LEAST = {"torch": (2, 6), "transformers": (5, 17)}


def check_versions(version_of: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raise where one is missing or too old.

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
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < least:
            raise ImportError(f"{needed}, but {found} is installed; pip install -U 'trilane[hf]'", name=name)
