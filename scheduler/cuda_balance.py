"""How misses are best split between a GPU's link and the CPU lane: rates make the split, and whole steps judge it.

The rates are those of lanes alone, and of both at once for long. In a step the lanes begin and end apart, and errors of
several figures meet, so a split can leave one of them waiting. So steps are split as if the CPU lane were faster or
slower beside the link than was measured, and the profile keeps the belief with which they were shortest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trilane.cuda_runner import CudaRunner
from trilane.cuda_step_probe import StepProbe, planned_with
from trilane.expert import CPU, STREAM, ZERO_COPY
from trilane.layer_rates import rates_of_layers
from trilane.plan import allows
from trilane.profile import MachineProfile

LEANS = (0.76, 0.87, 1.0, 1.15, 1.32)  # factors of the CPU lane's rate beside the link
PASSES = 2  # of which the better counts
WORTH = 0.985  # of the time with the rates as measured: what is not shorter than this is noise
MOST_SLOWDOWN = 0.9


def measure_balance(
    runner: CudaRunner, profile: MachineProfile, layers: Sequence[int], counts: Sequence[int]
) -> dict[str, Any]:
    """What link and CPU lane lose beside each other, as fields of the profile, so that splits are best.

    Parameters
    ----------
    profile : MachineProfile
        With rates for all layers of the runner's store.
    layers : sequence of int
        Of one kind.
    counts : sequence of int
        Missing experts of the steps that are tried; where there are a few, the larger ones.
    """
    links = allows(runner.options, STREAM) or allows(runner.options, ZERO_COPY)
    if profile.link_slowdown is None or profile.cpu_slowdown is None or not (links and allows(runner.options, CPU)):
        return {}
    us = _split_us(runner, profile, layers, counts[-2:])
    longer = {lean: float(np.mean(us[lean] / us[1.0])) for lean in LEANS}
    best = min(LEANS, key=lambda lean: longer[lean])
    leant = lean_to(profile, best if longer[best] < WORTH else 1.0)
    return {"link_slowdown": leant.link_slowdown, "cpu_slowdown": leant.cpu_slowdown}


def lean_to(profile: MachineProfile, lean: float) -> MachineProfile:
    """The profile as if the CPU lane had so many times its rate beside the link; what would be above its rate alone
    makes the link slower instead."""
    assert profile.link_slowdown is not None and profile.cpu_slowdown is not None
    cpu = (1 - profile.cpu_slowdown) * lean
    link = (1 - profile.link_slowdown) / max(1.0, cpu)
    lost = (min(MOST_SLOWDOWN, max(0.0, 1 - part)) for part in (link, cpu))
    return replace(profile, **dict(zip(("link_slowdown", "cpu_slowdown"), lost, strict=True)))


def _split_us(
    runner: CudaRunner, profile: MachineProfile, layers: Sequence[int], counts: Sequence[int]
) -> dict[float, np.ndarray]:
    """us of split steps by number of missing experts, for each lean."""
    experts, found = runner.store.layers[layers[0]].num_experts, {lean: np.full(len(counts), np.inf) for lean in LEANS}
    runner.reset()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, runner, "rates", runner.rates)
        stack.enter_context(planned_with(runner, runner.options._replace(fills=False, background=False)))
        probes = [stack.enter_context(contextlib.closing(StepProbe(runner, layers, n))) for n in counts]
        for _ in range(PASSES):
            for lean in LEANS:
                runner.rates = rates_of_layers(lean_to(profile, lean), runner)
                found[lean] = np.minimum(found[lean], [probe.us(experts) for probe in probes])
    return found
