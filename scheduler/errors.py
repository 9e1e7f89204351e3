"""The errors that reach a caller, and how their texts are made.

The tree::

    TrilaneError
    +-- ConfigError   (ValueError)    options that are unknown, of a wrong type or impossible; all of them
    +-- StoreError    (ValueError)    expert weights that cannot be taken in: format, shape, memory
    |   +-- ModelFileError (ValueError)   a model file that is damaged, incomplete, changed, or of an unknown kind
    +-- RoutingError  (ValueError)    expert ids or layer numbers that do not exist
    +-- ArrayError    (ValueError)    an array of a wrong shape, type, layout or device
    |   +-- ArrayTypeError (TypeError)    an array of a wrong dtype, or no array at all
    +-- DeviceError   (RuntimeError)  a device that is missing or failed
    +-- WorkerError   (RuntimeError)  a worker thread that died or does not answer
    +-- ProfileError  (ValueError)    a machine profile that is unreadable or of another machine
    +-- TraceError    (ValueError)    a routing trace that cannot be read, written to or replayed
    +-- ProbeError    (RuntimeError)  a measurement whose result is wrong, so that its figures are worthless
    +-- ClosedError   (RuntimeError)  use after close()
    +-- ForkError     (RuntimeError)  use in a forked child, which has none of the threads

Each text says the thing, its value, the rule and the remedy. The file knows nothing of what raises them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "ArrayError",
    "ArrayTypeError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "ForkError",
    "ModelFileError",
    "ProbeError",
    "Problem",
    "ProfileError",
    "RoutingError",
    "StoreError",
    "TraceError",
    "TrilaneError",
    "WorkerError",
    "did_you_mean",
    "fault_text",
]


class TrilaneError(Exception):
    """Base of every error that this package raises on purpose."""


class StoreError(TrilaneError, ValueError):
    """Expert weights that cannot be taken in: an unknown format, a wrong shape, no memory for them."""


class ModelFileError(StoreError):
    """A model file that is damaged, incomplete, of an unknown kind, or changed while it was read."""


class RoutingError(TrilaneError, ValueError):
    """An expert id or a layer number that does not exist."""


class ArrayError(TrilaneError, ValueError):
    """An array of a wrong shape, memory layout or device."""


class ArrayTypeError(ArrayError, TypeError):
    """An array of a wrong dtype, or something that is no array."""


class DeviceError(TrilaneError, RuntimeError):
    """A device that is missing, or that failed while it worked."""


class WorkerError(TrilaneError, RuntimeError):
    """A worker thread that died or does not answer."""


class ProfileError(TrilaneError, ValueError):
    """A machine profile that cannot be read, or that was measured on another machine."""


class TraceError(TrilaneError, ValueError):
    """A routing trace that cannot be read, written to or replayed."""


class ProbeError(TrilaneError, RuntimeError):
    """A measurement that did not do what it should have done: its figures are worthless."""


class ClosedError(TrilaneError, RuntimeError):
    """A scheduler or store that was used after ``close()``."""


class ForkError(TrilaneError, RuntimeError):
    """A scheduler that was used in a forked child: its threads live in the parent alone."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes
    ----------
    path : str
        Where, as in ``cache.slots``.
    message : str
        The value, the rule and the remedy.
    where : str, optional
        Where it was written: ``trilane.yaml:12``, ``TRILANE_CACHE_SLOTS``, ``--set``.
    """

    path: str
    message: str
    where: str | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.path, self.message)))


class ConfigError(TrilaneError, ValueError):
    """A configuration with one or more problems, all of them reported at once.

    Parameters
    ----------
    problems : sequence of Problem
        What is wrong, in the order of the configuration.
    source : str, optional
        Where the configuration came from (a file name, or "arguments").
    """

    def __init__(self, problems: Sequence[Problem], source: str | None = None) -> None:
        self.problems = tuple(problems)
        self.source = source
        where = f" in {source}" if source else ""
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count}{where}:", *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str | None]]:
        return type(self), (self.problems, self.source)  # the text alone would not rebuild it from a pickle


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint to append to a message, with a leading space, or "" where nothing comes close.

    >>> did_you_mean("polcy", ["policy", "cache"])
    " Did you mean 'policy'?"
    >>> did_you_mean("zzz", ["policy", "cache"])
    ''
    """
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def fault_text(thing: str, value: object, rule: str, remedy: str) -> str:
    """The text of an error: the thing, its value, the rule, the remedy.

    >>> fault_text("layer", 9, "must be below 4", "pass a layer of the store")
    'layer is 9, but must be below 4: pass a layer of the store.'
    """
    return f"{thing} is {value!r}, but {rule}: {remedy}."
