"""Stores of random weights, for measuring: the bytes do not matter, their number and format do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trilane.cpu_kernels.formats import format_of
from trilane.store import ExpertStore

SEED = 11
NUM_DISTINCT = 13  # rows of a matrix; no divisor of its rows, so that experts differ


@dataclass(frozen=True)
class StepShape:
    """The layer that is measured: sizes, experts, ranks and the weights' format."""

    hidden: int = 2048
    intermediate: int = 768
    num_experts: int = 32
    top_k: int = 8
    format: str = "q4_k"


def random_store(shape: StepShape, num_layers: int = 1) -> ExpertStore:
    """Experts of random weights of the shape; a few distinct rows, repeated."""
    fmt, rng = format_of(shape.format), np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values = rng.standard_normal((NUM_DISTINCT, columns), np.float32) / np.sqrt(columns, dtype=np.float32)
        packed = fmt.quantize(values.reshape(-1, fmt.block_size)).reshape(NUM_DISTINCT, -1)
        return packed[np.arange(shape.num_experts * rows) % NUM_DISTINCT].reshape(shape.num_experts, rows, -1)

    layer = {
        "gate": matrix(shape.intermediate, shape.hidden),
        "up": matrix(shape.intermediate, shape.hidden),
        "down": matrix(shape.hidden, shape.intermediate),
    }
    return ExpertStore.from_arrays([layer] * num_layers, formats=shape.format)
