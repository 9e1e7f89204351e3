"""Which profile a scheduler starts with: the one it is given, the saved one, or one that is measured now.

A profile that cannot be used is never used quietly: the log ("trilane") or the error says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from trilane.calibrate import calibrate, this_machine
from trilane.config import Config
from trilane.errors import ProfileError
from trilane.profile import Machine, MachineProfile
from trilane.profile_cache import check_machine, find_profile, read_profile, save_profile

log = logging.getLogger("trilane")
Given = MachineProfile | str | os.PathLike[str] | None


def start_profile(given: Given, config: Config) -> MachineProfile:
    """The profile of this machine without a GPU.

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
    return _chosen(given, config, this_machine(), _measure, lambda profile: "")


def start_gpu_profile(
    given: Given,
    config: Config,
    *,
    here: Machine,
    lacks: Callable[[MachineProfile], str],
    measure: Callable[[], MachineProfile],
) -> MachineProfile:
    """The same for a GPU, whose profiles name it.

    Parameters
    ----------
    here : Machine
        This machine with its GPU.
    lacks : callable
        What a saved profile does not know of what is to be run, as a text; empty if it knows all.
    measure : callable
        Measures through what is to be run. That knows no more than it needs, so it is not saved.
    """

    def measured(reason: str) -> MachineProfile:
        log.info("%s: measuring the GPU's lanes (about a second); 'trilane probe' does it once for all", reason)
        return measure()

    return _chosen(given, config, here, measured, lacks)


def _chosen(
    given: Given,
    config: Config,
    here: Machine,
    measure: Callable[[str], MachineProfile],
    lacks: Callable[[MachineProfile], str],
) -> MachineProfile:
    """What is given, else what ``profile.path`` names, else the saved profile, else what is measured."""
    if isinstance(given, MachineProfile):
        check_machine(given, here)
        return given
    path = given if given is not None else config.profile.path
    if path is not None:
        return read_profile(Path(path), here)
    found, reason = find_profile(here)
    if found is not None and not (missing := lacks(found)):
        log.info("machine profile: %s", reason)
        return found
    if found is not None:
        reason = f"the profile in {reason} {missing}"
    if config.profile.missing == "refuse":
        raise ProfileError(f"{reason}; profile.missing is 'refuse': run 'trilane probe' once on this machine")
    return measure(reason)


def _measure(reason: str) -> MachineProfile:
    log.info("%s: measuring this machine (about five seconds, and the compiler's time at first)", reason)
    profile = calibrate(quick=True).profile
    try:
        log.info("machine profile saved to %s; 'trilane probe' measures better", save_profile(profile))
    except OSError as error:
        log.warning("the machine profile cannot be saved (%s): it will be measured again at the next start", error)
    return profile
