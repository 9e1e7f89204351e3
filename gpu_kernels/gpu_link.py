"""What NVIDIA's management library and the system say of a GPU and its link. Unknown is None, never a guess.

An idle link falls back to its lowest generation, so what it runs at is read while something is copied; the maximum
is that of GPU and slot together. Nothing here needs a CUDA context.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
#: GT/s of a lane to the generation of PCI Express.
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_VERSION = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


@dataclass(frozen=True)
class GpuLink:
    """The driver's version, and lanes and generations of a GPU's link to the host.

    Attributes
    ----------
    driver : str or None
    width, max_width : int or None
        Lanes in use, and those that GPU and slot could use.
    generation, max_generation : int or None
        Of PCI Express, now and at most.
    """

    driver: str | None = None
    width: int | None = None
    max_width: int | None = None
    generation: int | None = None
    max_generation: int | None = None


class LinkReader:
    """Reads the link of one GPU, again and again; use it as a context.

    Parameters
    ----------
    pci_address : str
        domain:bus:device.function.
    root : Path
        Replaces "/" for the files of the system (tests pass a made-up one).
    library : str
        NVML; where it is missing the system's files have to do.
    """

    def __init__(self, pci_address: str, root: Path = Path("/"), library: str = LIBRARY) -> None:
        self._address, self._root = pci_address.lower(), root
        self._device = ctypes.c_void_p()
        self._nvml = _open(library)
        if self._nvml is not None:
            handle = self._nvml.nvmlDeviceGetHandleByPciBusId_v2
            if handle(pci_address.encode(), ctypes.byref(self._device)):
                self._device = ctypes.c_void_p()

    def __enter__(self) -> LinkReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml = None

    def read(self) -> GpuLink:
        """All that is known now."""
        return GpuLink(
            self._driver(),
            self._value("CurrPcieLinkWidth", "current_link_width"),
            self._value("MaxPcieLinkWidth", "max_link_width"),
            self._value("CurrPcieLinkGeneration", "current_link_speed"),
            self._value("MaxPcieLinkGeneration", "max_link_speed"),
        )

    def _driver(self) -> str | None:
        if self._nvml is not None:
            text = ctypes.create_string_buffer(96)
            if self._nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
                return text.value.decode()
        found = _VERSION.search(_text(self._root / "proc/driver/nvidia/version") or "")
        return found.group(1) if found else None

    def _value(self, name: str, file: str) -> int | None:
        """A number from NVML, else from the system's file."""
        if self._nvml is not None and self._device:
            value = ctypes.c_uint()
            if getattr(self._nvml, f"nvmlDeviceGet{name}")(self._device, ctypes.byref(value)) == 0 and value.value:
                return value.value
        text = _text(self._root / "sys/bus/pci/devices" / self._address / file) or ""
        number = text.split()[0] if text.split() else ""
        with contextlib.suppress(ValueError):
            found = GENERATIONS.get(float(number)) if file.endswith("speed") else int(number)
            return found or None
        return None


def read_link(pci_address: str) -> GpuLink:
    """The link as it is now."""
    with LinkReader(pci_address) as reader:
        return reader.read()


def _open(name: str) -> ctypes.CDLL | None:
    """NVML, ready for use; None where it is missing or refuses."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(name)
        if library.nvmlInit_v2() == 0:
            return library
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def while_busy(reader: LinkReader, busy: Iterator[bool]) -> GpuLink:
    """The highest generation and width that are seen while ``busy`` yields True; the last reading without any."""
    best = reader.read()
    for still in busy:
        if not still:
            break
        now = reader.read()
        if (now.generation or 0, now.width or 0) > (best.generation or 0, best.width or 0):
            best = now
    return best
