"""A made-up profile of this machine, saved where schedulers look, so that no test waits for a measurement."""

from __future__ import annotations

from pathlib import Path

from trilane.calibrate import this_machine
from trilane.cpu_kernels.formats import FORMATS
from trilane.profile import Curve, MachineProfile
from trilane.profile_cache import save_profile


def make_profile(**changes) -> MachineProfile:
    """Rates of about one core of a small machine, for every format."""
    values = dict(
        machine=this_machine(),
        pinned_to_device=Curve((65536.0, 4194304.0), (8.0, 10.0)),
        zero_copy=Curve((1.0,), (10.0,)),
        host_read=Curve((1.0, 2.0), (20.0, 36.0)),
        cpu_experts={name: Curve((1.0, 2.0), (12.0, 22.0)) for name in FORMATS},
        cpu_rows={name: Curve((1.0, 2.0), (24.0, 44.0)) for name in FORMATS},
        device_experts=dict.fromkeys(FORMATS, 12.0),
        device_rows=dict.fromkeys(FORMATS, 24.0),
        step_fix_us=50.0,
        hit_fix_us=10.0,
        stream_fix_us=10.0,
        zero_copy_fix_us=10.0,
        cpu_fix_us=20.0,
        copy_fix_us=0.0,
        num_cores=2.0,
        hit_cores=1.0,
        link_cores=1.0,
        cpu_cores=None,
    )
    return MachineProfile(**{**values, **changes})


def save_made_profile(**changes) -> Path:
    """Save it for this machine."""
    return save_profile(make_profile(**changes))
