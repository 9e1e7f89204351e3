"""trilane: a bandwidth-adaptive scheduler for offloaded mixture-of-experts models.

The weights of the experts live in host memory; a device holds slots for some of them. Each expert that a
step needs and the device lacks takes one of three lanes: it is streamed into a slot, read in place over the
link, or computed on the CPU. The lane never changes a bit of the result.

Public names load when they are first used: ``import trilane`` imports neither numba nor a GPU library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trilane.settings.effective_config import EffectiveConfig, load_config

    from .config import Config
    from .engine import ExpertScheduler
    from .errors import (
        ArrayError,
        ArrayTypeError,
        ClosedError,
        ConfigError,
        DeviceError,
        ForkError,
        ModelFileError,
        ProbeError,
        ProfileError,
        RoutingError,
        StoreError,
        TraceError,
        TrilaneError,
        WorkerError,
    )
    from .expert import Outcome, Plan
    from .profile import MachineProfile
    from .stats import Stats
    from .store import ExpertStore

__version__ = "0.1.0"

__all__ = [
    "ArrayError",
    "ArrayTypeError",
    "ClosedError",
    "Config",
    "ConfigError",
    "DeviceError",
    "EffectiveConfig",
    "ExpertScheduler",
    "ExpertStore",
    "ForkError",
    "MachineProfile",
    "ModelFileError",
    "Outcome",
    "Plan",
    "ProbeError",
    "ProfileError",
    "RoutingError",
    "Stats",
    "StoreError",
    "TraceError",
    "TrilaneError",
    "WorkerError",
    "load_config",
]

_ELSEWHERE = {
    "Config": "config",
    "EffectiveConfig": "settings.effective_config",
    "ExpertScheduler": "engine",
    "ExpertStore": "store",
    "MachineProfile": "profile",
    "Outcome": "expert",
    "Plan": "expert",
    "Stats": "stats",
    "load_config": "settings.effective_config",
}  # every other public name is an error


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'errors')}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
