"""Routing traces: which experts a model chose, token by token and layer by layer.

Reads the trace that ships with the package. A trace is data; who replays or runs it is elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

BUNDLED = "gptoss20b_conversation.npz"


@dataclass(frozen=True)
class Trace:
    """Routing of consecutive tokens.

    Attributes
    ----------
    ids : uint8 (tokens, layers, top_k)
        Expert ids.
    weights : float32 (tokens, layers, top_k)
        Router weights; they sum to about 1 over a token's experts.
    num_experts : int
    model, source, licence : str
        What it is a trace of, where it came from, and its terms.
    """

    ids: np.ndarray
    weights: np.ndarray
    num_experts: int
    model: str
    source: str
    licence: str

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])


def bundled_trace() -> Trace:
    """One real conversation of gpt-oss-20b: 240 tokens, 24 layers, 4 of 32 experts."""
    with (files("trilane") / "data" / BUNDLED).open("rb") as file, np.load(file) as arrays:
        meta = json.loads(str(arrays["meta"]))
        weights = arrays["w255"].astype(np.float32) / np.float32(255)
        return Trace(
            ids=arrays["ids"],
            weights=weights,
            num_experts=meta["num_experts"],
            model=meta["model"],
            source=meta["source"],
            licence=meta["licence"],
        )
