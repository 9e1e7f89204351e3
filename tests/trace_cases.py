"""Traces for tests: random ones of several models, and one that was recorded live."""

from __future__ import annotations

import numpy as np
from expert_cases import random_routing

from trilane.traces.trace import HINT, REQUEST, STEP, Trace, TraceMeta, trace_of_tokens

MIXED = TraceMeta("mixed", (4, 300, 9), ((100, 50), (7, 7, 7), (64,)), "made up", "CC0-1.0")


def random_tokens(tokens=50, layers=3, experts=8, top_k=2, seed=0, weights=False, starts=(0,)):
    """A trace of single tokens, with some locality."""
    rng = np.random.default_rng(seed)
    odds = rng.dirichlet(np.full(experts, 0.5), layers)
    ids = np.array([[rng.choice(experts, top_k, False, odds[layer]) for layer in range(layers)] for _ in range(tokens)])
    w255 = rng.integers(0, 256, ids.shape, np.uint8) if weights else None
    meta = TraceMeta("random", (experts,) * layers, ((1000, 1000, 500),) * layers)
    return trace_of_tokens(meta, ids, w255, starts)


def mixed_trace(events=200, seed=0):
    """Layers of different sizes, batches, skipped ranks, hints and requests."""
    rng, meta = np.random.default_rng(seed), MIXED
    kinds = rng.choice([STEP, STEP, STEP, HINT, REQUEST], events).astype(np.uint8)
    layer = rng.integers(0, 3, events).astype(np.uint16)
    rows = np.where(kinds == STEP, rng.integers(1, 5, events), kinds == HINT).astype(np.int32)
    top_k = np.where(kinds == REQUEST, 0, rng.integers(1, 4, events)).astype(np.int32)
    ids = [rng.integers(0, meta.num_experts[at], r * k) for at, r, k in zip(layer, rows, top_k, strict=True)]
    ids = np.concatenate(ids).astype(np.uint16)
    skipped = np.repeat(kinds == STEP, rows * top_k) & (rng.random(len(ids)) < 0.1)
    ids[skipped] = meta.no_expert
    weights = rng.random(len(ids)).astype(np.float16)
    digest = rng.integers(0, 1 << 32, events, np.uint32)
    return Trace(meta, kinds, layer, rows, top_k, digest, ids, weights)


def assert_same_trace(a: Trace, b: Trace) -> None:
    assert a.meta == b.meta
    for name in ("kind", "layer", "rows", "top_k", "digest", "ids", "weights"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)


def drive(scheduler, steps, seed=0, hints=0.4, rows=(1, 1, 2, 5, 9)):
    """Random layer-steps of different batch sizes with hints between them."""
    rng, store = np.random.default_rng(seed), scheduler.store
    for step in range(steps):
        layer = step % store.num_layers
        experts = store.layers[layer].num_experts
        num = int(rng.choice(rows))
        ids, weights = random_routing(rng, num, 2, experts)
        hidden = rng.standard_normal((num, store.hidden)).astype(np.float32)
        scheduler.forward(layer, hidden, ids, weights)
        if rng.random() < hints:
            target = int(rng.integers(store.num_layers))
            scheduler.hint(target, rng.permutation(store.layers[target].num_experts)[:3])
            if rng.random() < 0.5:  # else the next step gives most of them up
                scheduler._runner.settle_fills(let_end=True)


def drive_until_full(scheduler, steps):
    """Layer-steps until every slot is taken: a fill that was given up leaves its slot free for a later one."""
    drive(scheduler, steps)
    for seed in range(1, 50):
        scheduler._runner.settle_fills(let_end=True)
        if not scheduler._runner.state.num_free.any():
            return
        drive(scheduler, 3, seed, hints=0)
    raise AssertionError("slots stay free")
