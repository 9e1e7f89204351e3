"""A file that is replaced in one go: whoever reads it finds what was there before, or all of what is there now."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in an existing folder; whatever happens meanwhile, it holds the old bytes or the new ones.

    Raises
    ------
    OSError
        The folder cannot be written to, or the disk is full.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}."[:64], dir=path.parent)
    except OSError as error:  # of the file that was asked for: nobody knows the other
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
