"""Which profile a scheduler starts with: the one it is given, the saved one, or one that is measured now.

A profile that cannot be used is never used quietly: the log ("trilane") or the error says why.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from trilane.calibrate import calibrate, this_machine
from trilane.config import Config
from trilane.errors import ProfileError
from trilane.profile import MachineProfile
from trilane.profile_cache import check_machine, find_profile, read_profile, save_profile

log = logging.getLogger("trilane")


def start_profile(given: MachineProfile | str | os.PathLike[str] | None, config: Config) -> MachineProfile:
    """The profile for this machine.

    Parameters
    ----------
    given : MachineProfile, path or None
        None: what ``profile.path`` names, else the saved profile, else, unless ``profile.missing`` is "refuse",
        one that is measured quickly and saved.
    config : Config

    Raises
    ------
    ProfileError
        The profile is unreadable or another machine's, or there is none and measuring is refused.
    """
    here = this_machine()
    if isinstance(given, MachineProfile):
        check_machine(given, here)
        return given
    path = given if given is not None else config.profile.path
    if path is not None:
        return read_profile(Path(path), here)
    found, reason = find_profile(here)
    if found is not None:
        log.info("machine profile: %s", reason)
        return found
    if config.profile.missing == "refuse":
        raise ProfileError(f"{reason}; profile.missing is 'refuse': run 'trilane probe' once on this machine")
    return _measure(reason)


def _measure(reason: str) -> MachineProfile:
    log.info("%s: measuring this machine (about five seconds, and the compiler's time at first)", reason)
    profile = calibrate(quick=True).profile
    try:
        log.info("machine profile saved to %s; 'trilane probe' measures better", save_profile(profile))
    except OSError as error:
        log.warning("the machine profile cannot be saved (%s): it will be measured again at the next start", error)
    return profile
