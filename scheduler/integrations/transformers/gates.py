"""Which activation an experts module has, found by trying it out: no model's name and no attribute is looked up.

Limits and slopes are measured first, with values far beyond any limit; the kind whose formula then gives the module's
own results, on random values of all sizes, is the one. It knows modules and formulas, not stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trilane.cpu_kernels import reference
from trilane.cpu_kernels.gate import GATES
from trilane.errors import StoreError
from trilane.store_layers import GATELESS, Gate

NEAR, FAR = 1 / 16, 1e4  # within the limit of any model, and beyond it
NUM_TRIALS = 4096
SPREAD = 12.0  # standard deviation of the trials: some lie where the activation is flat, some beyond limits
TOLERANCE = 1e-4

Apply = Callable[[np.ndarray, np.ndarray], np.ndarray]  # gate and up values, float64 (n,), to hidden values


def probe_gate(module: Any, name: str = "experts") -> Gate:
    """The gate of an experts module.

    Parameters
    ----------
    module : torch.nn.Module
        It may be on the meta device: its activation holds no weights.
    name : str
        What to call it in an error.

    Raises
    ------
    StoreError
        Its activation is none that the kernels have.
    """
    apply = _apply_of(module)
    for gate in _candidates(apply, bool(module.has_gate)):
        if _agrees(gate, apply):
            return gate
    act = type(getattr(module, "act_fn", None)).__name__
    raise StoreError(
        f"{name} ({type(module).__name__}): its activation ({act}) gives the results of none of {', '.join(GATES)}, "
        "but must be one of these; this model cannot be offloaded"
    )


def _apply_of(module: Any) -> Apply:
    """The module's activation as a function of gate and up values, whichever way it wants them beside each other."""

    def apply(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        if not module.has_gate:
            return _numpy(module.act_fn(_tensor(u)))
        axis = 0 if module.is_concatenated else 1  # gate rows first, or gate and up in turns
        both = np.stack([g, u], axis=axis).reshape(1, -1)
        return _numpy(module._apply_gate(_tensor(both))).reshape(-1)

    return apply


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _numpy(values: torch.Tensor) -> np.ndarray:
    return values.detach().to("cpu", torch.float64).numpy()


def _candidates(apply: Apply, has_gate: bool) -> list[Gate]:
    """Kinds with the numbers that they would have, if they were the one."""
    if not has_gate:
        return [Gate(GATELESS)]
    at = np.full(2, NEAR), np.array([NEAR, FAR])
    near, far = apply(*at).tolist()
    ratio = far / near if near else np.inf
    if not 0 < ratio < FAR / NEAR / 2:  # no limit on up values
        return [Gate("silu_glu"), Gate("gelu_tanh_glu")]
    found = [Gate("silu_glu_clamped", limit=_rounded(NEAR * ratio))]  # h is in proportion to u
    slope = near / NEAR / (NEAR + 1)  # (u + 1) * g * sigmoid(alpha * g)
    if 0 < slope < 1 and (limit := (NEAR + 1) * ratio - 1) > 0:
        found.append(Gate("swiglu_oai", _rounded(np.log(slope / (1 - slope)) / NEAR), _rounded(limit)))
    return found


def _rounded(value: float) -> float:
    """To six digits, which drops what the arithmetic added: models have numbers such as 7.0 and 1.702."""
    return float(f"{value:.6g}")


def _agrees(gate: Gate, apply: Apply) -> bool:
    """Whether a gate's formula gives the module's results, also where values are beyond all limits."""
    trials = SPREAD * np.random.default_rng(0).standard_normal((2, NUM_TRIALS))
    g, u = np.append(trials, [[FAR, -FAR, FAR, -FAR], [FAR, FAR, -FAR, -FAR]], axis=1).astype(np.float32)
    with np.errstate(all="ignore"):
        ours = reference.gate(GATES[gate.kind], g, u, gate.alpha, gate.limit)
        theirs = apply(g.astype(np.float64), u.astype(np.float64))
    return theirs.shape == ours.shape and bool(np.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE))
