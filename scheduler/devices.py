"""What devices are called, in calls and on the command line."""

from __future__ import annotations

from trilane.errors import DeviceError

DEVICES = ("auto", "host", "cuda")


def check_device(device: str) -> str:
    """Return the name, or raise DeviceError if there is no such device."""
    if device not in DEVICES:
        raise DeviceError(f"device {device!r}: there are {', '.join(map(repr, DEVICES))}; use one of them")
    return device
