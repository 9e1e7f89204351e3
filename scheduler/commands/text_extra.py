"""What commands that generate or serve text need beside the package, and a clear word without it."""

from __future__ import annotations

import importlib.util

from trilane.errors import TrilaneError

NEEDED = ("torch", "transformers", "tokenizers")
NEEDED_TO_SERVE = ("fastapi", "uvicorn", "openai", "prometheus_client")


def missing_for_text() -> list[str]:
    """What is not installed of that."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def need_text_extra(command: str) -> None:
    """Refuse before anything is loaded.

    Raises
    ------
    TrilaneError
        It names what is missing and the extra that brings it.
    """
    missing = missing_for_text()
    if missing:
        raise TrilaneError(
            f"{command}: {', '.join(missing)} not installed, but models run on them; install the extra: "
            "pip install 'trilane[hf]' (on a machine without a GPU, a CPU build of torch first saves gigabytes)"
        )


def need_serve_extra(command: str) -> None:
    """The same for commands that answer requests.

    Raises
    ------
    TrilaneError
        It names what is missing and the extra that brings it.
    """
    missing = [*missing_for_text(), *(name for name in NEEDED_TO_SERVE if importlib.util.find_spec(name) is None)]
    if missing:
        raise TrilaneError(
            f"{command}: {', '.join(missing)} not installed, but the server is made of them; install the extra: "
            "pip install 'trilane[serve]' (on a machine without a GPU, a CPU build of torch first saves gigabytes)"
        )
