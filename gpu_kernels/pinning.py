"""Pinned memory for the store's arena: registered in segments, as far as the system lets us, and what became of it.

One registration of hundreds of GiB fails, quotas end it half way, and users cap it. What was registered before
that is kept, always a prefix of the arena, so that one comparison tells whether bytes are pinned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SEGMENT_NBYTES = 1 << 30
MAX_SEGMENTS = 512  # drivers take some 65,000 registrations, and each costs time; larger arenas get larger segments
PAGE_NBYTES = 4096


class Registers(Protocol):
    """What pinning needs of a driver."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin host memory that is mapped already; an empty text, or why not."""

    def unregister(self, address: int) -> None:
        """Undo it."""


@dataclass(frozen=True)
class Pinned:
    """A pinned prefix of a region of host memory.

    Attributes
    ----------
    address, nbytes : int
        The region.
    pinned_nbytes : int
        Bytes of it, from its start, that are pinned.
    segments : tuple of int
        Addresses of the registrations.
    segment_nbytes : int
        Bytes of each; the last may have fewer.
    reason : str
        Why the rest is pageable; empty if there is none.
    """

    address: int
    nbytes: int
    pinned_nbytes: int
    segments: tuple[int, ...]
    segment_nbytes: int
    reason: str

    @property
    def end(self) -> int:
        """Address behind the last pinned byte."""
        return self.address + self.pinned_nbytes

    def release(self, driver: Registers) -> None:
        """Give the registrations back."""
        for segment in self.segments:
            driver.unregister(segment)


def segment_nbytes(nbytes: int) -> int:
    """Bytes of a segment: 1 GiB, or more where that would make too many."""
    share = -(-nbytes // MAX_SEGMENTS)
    return max(SEGMENT_NBYTES, -(-share // PAGE_NBYTES) * PAGE_NBYTES)


def pin_region(
    driver: Registers, address: int, nbytes: int, limit: int | None = None, segment: int | None = None
) -> Pinned:
    """Pin a region, or as much of its start as can be had.

    Parameters
    ----------
    address : int
        Start of the region, at a page boundary.
    limit : int, optional
        Bytes that may be pinned (the option ``host.pin_limit``).
    segment : int, optional
        Bytes of a registration.
    """
    wanted = nbytes if limit is None else min(nbytes, limit // PAGE_NBYTES * PAGE_NBYTES)
    size = segment or segment_nbytes(nbytes)
    done, segments, reason = 0, [], ""
    while done < wanted and not reason:
        part = min(size, wanted - done)
        problem = driver.register(address + done, part)
        if problem:
            reason = f"pinning stopped after {done} of {nbytes} bytes: {problem}"
        else:
            segments.append(address + done)
            done += part
    if not reason and done < nbytes:
        reason = f"host.pin_limit allows {limit} of {nbytes} bytes to be pinned"
    return Pinned(address, nbytes, done, tuple(segments), size, reason)
