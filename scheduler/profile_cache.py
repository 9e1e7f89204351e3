"""Where machine profiles are kept, and whether one that is kept holds for this machine.

One file for each CPU, GPU and number of cores in the user's cache folder. A file that cannot be read, or that was
measured on another machine, in a smaller container or by another version, is never used: the reason names every
difference. Nothing is measured here.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import platformdirs

from trilane.errors import ProfileError
from trilane.profile import Machine, MachineProfile, load_profile, machine_differences
from trilane.whole_file import replace_file

REMEDY = "measure this machine with 'trilane probe'"
_NO_WORD = re.compile(r"[^a-z0-9]+")


def profile_folder() -> Path:
    """The folder of saved profiles, in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("trilane")) / "profiles"


def file_word(text: str) -> str:
    """A text as part of a file's name: lower case letters, digits and dashes."""
    return _NO_WORD.sub("-", text.lower()).strip("-")


def machine_name(machine: Machine) -> str:
    """The CPU, GPU and number of cores that files are kept for, as a part of their names."""
    names = [machine.cpu or "unknown-cpu", machine.gpu or "host", f"{machine.cores_allowed or 0} cores"]
    return "-".join(map(file_word, names))


def profile_path(machine: Machine) -> Path:
    """The file that holds a machine's profile."""
    return profile_folder() / f"{machine_name(machine)}.json"


def check_target(path: Path) -> None:
    """Refuse to replace what is no regular file: a rename over a device or a pipe would remove it.

    Raises
    ------
    ProfileError
    """
    if path.exists() and not path.is_file():
        raise ProfileError(f"{path}: it is no regular file; give the name of a file for the profile")
    if not path.parent.is_dir():
        raise ProfileError(f"{path}: its folder does not exist; make it, or give another file")


def save_profile(profile: MachineProfile, path: Path | None = None) -> Path:
    """Write a profile, by default to where :func:`find_profile` looks; the file is whole or not there.

    Raises
    ------
    OSError
        The folder cannot be written to.
    ProfileError
        ``path`` is no regular file, or in no folder.
    """
    if path is None:
        path = profile_path(profile.machine)
        path.parent.mkdir(parents=True, exist_ok=True)
    else:
        check_target(path := Path(path))
    replace_file(path, profile.to_json().encode())
    return path


def read_profile(path: Path, here: Machine | None = None) -> MachineProfile:
    """Read a profile from a file; with ``here``, only one that was measured on that machine.

    Raises
    ------
    ProfileError
        There is no such file, it is no profile, or it is another machine's (every difference is named).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path}: it cannot be read ({error}): {REMEDY}") from None
    try:
        profile = load_profile(text)
    except ProfileError as error:
        raise ProfileError(f"profile {path}: {error}") from None
    if here is not None:
        check_machine(profile, here, f"profile {path}")
    return profile


def check_machine(profile: MachineProfile, here: Machine, name: str = "profile") -> None:
    """Raise ProfileError unless a profile holds on a machine; one that names no machine holds on all."""
    differences = () if profile.machine == Machine() else machine_differences(profile.machine, here)
    if differences:
        raise ProfileError(f"{name} is of another machine or version: {'; '.join(differences)}: {REMEDY}")


def find_profile(here: Machine) -> tuple[MachineProfile | None, str]:
    """The saved profile of this machine, and its file; or None, and the reason why there is none to use."""
    path = profile_path(here)
    if not path.exists():
        return None, _nearest(here)
    try:
        return read_profile(path, here), str(path)
    except ProfileError as error:
        return None, str(error)


def _nearest(here: Machine) -> str:
    """Why there is no profile, beside the newest of those that there are."""
    with contextlib.suppress(OSError, ProfileError):
        newest = max(profile_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            differences = machine_differences(read_profile(newest).machine, here)
            return f"no profile of this machine is saved; the one in {newest} differs: {'; '.join(differences)}"
    return "no profile of this machine is saved"
