"""The routing that the peers' benchmark is run on: skewed popularity, and some experts kept from the token before."""

from __future__ import annotations

import numpy as np


def synth_trace(tokens, layers, experts, top_k, zipf=0.8, reuse=0.3, seed=1):
    """Ids (tokens, layers, top_k), int32: Zipf popularity with each layer's own order of experts; each expert of the
    token before is kept with the probability ``reuse``."""
    rng = np.random.default_rng(seed)
    part = 1.0 / np.arange(1, experts + 1) ** zipf
    logits = np.log(part / part.sum())
    order = np.stack([rng.permutation(experts) for _ in range(layers)])
    trace = np.empty((tokens, layers, top_k), np.int32)
    for layer in range(layers):
        before = np.empty(0, np.int32)
        for token in range(tokens):
            kept = before[rng.random(before.size) < reuse]
            drawn = order[layer][np.argsort(-(logits + rng.gumbel(size=experts)))]  # a draw without replacement
            fresh = drawn[~np.isin(drawn, kept)][: top_k - kept.size]
            trace[token, layer] = before = np.concatenate([kept, fresh]).astype(np.int32)
    return trace


def sweep_trace(layers, experts, top_k):
    """Ids (tokens, layers, top_k) that name every expert of every layer once, or twice at the end."""
    tokens = -(-experts // top_k)
    ids = np.arange(tokens * top_k, dtype=np.int32) % experts
    return np.ascontiguousarray(np.repeat(ids.reshape(tokens, 1, top_k), layers, axis=1))


def load_trace(path, layers, experts, top_k):
    """A trace from a file of NumPy: (tokens, layers, top_k), or (tokens, top_k) for all layers."""
    found = np.load(path)
    if found.ndim == 2:
        found = np.repeat(found[:, None, :], layers, 1)
    fits = found.ndim == 3 and found.shape[1] >= layers and found.shape[2] == top_k
    if not fits or found.min() < 0 or found.max() >= experts:
        raise ValueError(f"{path}: shape {found.shape} does not fit {layers} layers, top-{top_k} of {experts} experts")
    return np.ascontiguousarray(found[:, :layers], dtype=np.int32)
