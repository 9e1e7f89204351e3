"""The text of a configuration file, or the problem with it: missing, huge, binary, no file at all.

The file knows neither YAML nor options.
"""

from __future__ import annotations

import os
import stat

from trilane.errors import Problem
from trilane.settings.config_problems import shown

MAX_NBYTES = 64 << 10  # every option with a page of comments each needs less
_MARK = "\ufeff"  # a byte order mark, which some editors put at the start


def read_file(path: str | os.PathLike[str]) -> str | Problem:
    """The text of a file of at most 64 KiB of UTF-8; a :class:`Problem` says why it cannot be had.

    What is no regular file is never opened: reading a pipe could wait forever, a device could have side effects.
    """
    name = file_name(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Problem("", f"is {_kind(path)}, but must be a YAML file: name a regular file.", name)
        with open(path, "rb") as file:
            content = file.read(MAX_NBYTES + 1)
    except FileNotFoundError:
        remedy = "check its name, or print one to start from with: trilane config --example"
        return Problem("", f"does not exist: {remedy}.", name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return Problem("", f"cannot be read ({reason}): name a file that this user may read.", name)
    if len(content) > MAX_NBYTES:
        return Problem("", f"has more than {MAX_NBYTES} bytes, but a configuration is short: is it another file?", name)
    return _decode(content, name)


def file_name(path: str | os.PathLike[str]) -> str:
    """A file's name as messages show it: as given, quoted if it holds what a terminal should not see."""
    name = os.fspath(path)
    return name if isinstance(name, str) and name.isprintable() and name.strip() else shown(name)


def _decode(content: bytes, name: str) -> str | Problem:
    if b"\0" in content:
        return Problem("", "is binary (it has a NUL byte), but must be a YAML file: is it another file?", name)
    try:
        text = content.decode("utf-8").removeprefix(_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        return Problem("", f"has the byte {byte:#04x}, which is not UTF-8: save it as UTF-8 text.", f"{name}:{line}")
    if not text.strip():
        return Problem("", "is empty: write options, or remove it; see trilane config --example.", name)
    return text


def _kind(path: str | os.PathLike[str]) -> str:
    return "a folder" if os.path.isdir(path) else "a pipe, a device or a socket"
