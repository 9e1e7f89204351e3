"""One private anonymous region of host memory, page aligned, in huge pages where the system gives them.

Knows memory only: not what lies in it. ``mmap``'s default, a shared mapping, gets no huge pages, hence
``MAP_PRIVATE``. Untouched pages cost nothing, so that whoever touches a page first decides its NUMA node.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np

SLACK_NBYTES = 4096  # readable bytes behind the last one: vector loads may look past the end of a row


@dataclass(frozen=True)
class Arena:
    """``nbytes`` zeroed bytes at ``address``; freed when the object and all views of it are gone."""

    nbytes: int
    bytes: np.ndarray = field(repr=False)
    huge_pages: bool

    @property
    def address(self) -> int:
        """Address of byte 0, a multiple of the page size."""
        return int(self.bytes.ctypes.data)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes ``offset`` to ``offset + nbytes`` as a writable uint8 array, without a copy."""
        return self.bytes[offset : offset + nbytes]


def allocate_arena(nbytes: int, *, huge_pages: bool = True) -> Arena:
    """Map ``nbytes`` of private anonymous memory.

    Parameters
    ----------
    nbytes : int
        Size in bytes; 0 is allowed.
    huge_pages : bool
        Ask for transparent huge pages; a system without them gives ordinary ones.

    Raises
    ------
    MemoryError
        The system refuses a mapping of that size.
    """
    region = _map_private(nbytes + SLACK_NBYTES)
    asked = huge_pages and _advise_huge_pages(region)
    return Arena(nbytes, np.frombuffer(region, np.uint8), asked)


def available_nbytes() -> int | None:
    """Memory that programs can still get without swapping, the system's caches of files included; None: not told."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return None


def _map_private(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows: anonymous maps are private to the process there
        return mmap.mmap(-1, nbytes)
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"host arena of {nbytes} bytes: the system refused the mapping ({error}); "
            "free memory, raise the container's limit, or use a smaller weight format"
        ) from error


def _advise_huge_pages(region: mmap.mmap) -> bool:
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError, ValueError):
        return False
    return True
