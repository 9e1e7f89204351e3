"""The mask of eager attention without a copy from the host: the values of transformers' own, which no graph can hold.

Transformers makes the mask's zero on the host and copies it at each step. Models without another attention (gpt-oss and
its sinks) could not be captured for that alone.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

EAGER = "eager"


def device_mask(*args: Any, dtype: torch.dtype = torch.float32, **named: Any) -> torch.Tensor | None:
    """The mask that is added to attention's scores.

    Parameters
    ----------
    dtype : torch.dtype
        A float type.
    others
        As transformers calls mask functions.

    Returns
    -------
    (rows, 1, queries, keys) tensor of ``dtype``, optional
        0 where a key is attended to, else the type's smallest number; None where no mask is needed.
    """
    attended = sdpa_mask(*args, **{**named, "allow_is_causal_skip": False})
    if attended is None:
        return None
    hidden = torch.full(attended.shape, torch.finfo(dtype).min, dtype=dtype, device=attended.device)
    return hidden.masked_fill_(attended, 0.0)


def register_device_mask() -> None:
    """Have eager attention of all models use it; may be called again."""
    AttentionMaskInterface.register(EAGER, device_mask)
