"""Stores with random experts, the reference for what a layer-step must give, and schedulers to compare with it."""

from __future__ import annotations

import itertools

import numpy as np

from trilane import ExpertScheduler, ExpertStore, MachineProfile
from trilane.cpu_kernels import reference
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.layout import unpack_expert
from trilane.layer_rates import layer_formats
from trilane.profile import Curve
from trilane.store import Gate

FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_k", "q6_k", "mxfp4")
MIXED = {
    "q4_k+q6_k": {"gate": "q4_k", "up": "q4_k", "down": "q6_k"},
    "q4_k+q8_0": {"gate": "q4_k", "up": "q4_k", "down": "q8_0"},
    "q6_k+mxfp4+f32": {"gate": "q6_k", "up": "mxfp4", "down": "f32"},
    "bf16+q8_0+q4_k": {"gate": "bf16", "up": "q8_0", "down": "q4_k"},
}
KINDS = tuple(GATES)
STEP_COLUMNS = {"f32": 32, "f16": 32, "bf16": 32, "q8_0": 32, "mxfp4": 32, "q4_k": 256, "q6_k": 256}
SMALL = 0.08  # weights of this size keep the gates away from where they are flat


def random_layer(rng, num_experts, hidden, intermediate, kind="silu_glu", bias=False):
    """The arrays of one layer, as `ExpertStore.from_arrays` takes them."""
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    if kind == "relu2":
        del shapes["gate"]
    layer = {name: SMALL * rng.standard_normal((num_experts, *shape), np.float32) for name, shape in shapes.items()}
    if bias:
        layer |= {
            f"{name}_bias": rng.standard_normal((num_experts, shape[0]), np.float32) for name, shape in shapes.items()
        }
    return layer


def random_store(
    formats="q8_0", kind="silu_glu", *, layers=1, experts=6, hidden=256, intermediate=512, bias=None, seed=0
):
    """A store of random experts; biases where the gate kind is the one that has them."""
    rng = np.random.default_rng(seed)
    bias = kind == "swiglu_oai" if bias is None else bias
    arrays = [random_layer(rng, experts, hidden, intermediate, kind, bias) for _ in range(layers)]
    return ExpertStore.from_arrays(arrays, formats=MIXED.get(formats, formats), gate=Gate(kind), threads=1)


def random_routing(rng, rows, top_k, num_experts, skips=True):
    """Ids and weights; with ``skips`` some ids are -1 or num_experts, and some repeat in their row."""
    ids = np.stack([rng.choice(num_experts, top_k, replace=top_k > num_experts) for _ in range(rows)])
    if skips and rows * top_k > 2:
        spoilt = rng.random(ids.shape) < 0.15
        ids = np.where(spoilt, rng.choice([-1, num_experts, 0], ids.shape), ids)
    return ids, rng.standard_normal((rows, top_k)).astype(np.float32)


def widen(hidden):
    """Hidden states as the contract sees them: float32; uint16 is bfloat16."""
    if hidden.dtype == np.uint16:
        return (hidden.astype(np.uint32) << 16).view(np.float32)
    return hidden.astype(np.float32)


def narrow(y, dtype):
    """float32 results rounded to nearest even; NaN is canonical."""
    if dtype == np.uint16:
        bits = y.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(y), np.uint16(0x7FC0), rounded)
    with np.errstate(all="ignore"):
        return y.astype(dtype)


def expected(store, layer, hidden, ids, weights):
    """What the reference gives for a layer-step, float32 (rows, hidden)."""
    x, ids, where = widen(np.asarray(hidden)), np.asarray(ids), store.layers[layer]
    outs = np.zeros((*ids.shape, store.hidden), np.float32)
    skip = (ids < 0) | (ids >= where.num_experts)
    for expert in np.unique(ids[~skip]):
        tokens, ranks = np.nonzero(ids == expert)
        outs[tokens, ranks] = reference.reference_expert(x[tokens], *weights_of(store, layer, expert)).out
    y = reference.reference_combine(np.asarray(weights, np.float32), outs, skip)
    bad = ~np.isfinite(x).all(1) & ~skip.all(1)
    y[bad] = reference.NAN
    return y


def weights_of(store, layer, expert):
    """The arguments of `reference_expert` behind the rows, from the bytes that the store holds."""
    where = store.layers[layer]
    layout, gate = where.layout, where.gate
    source = unpack_expert(layout, store.expert_bytes(layer, int(expert)))
    gate_weights = None if layout.gate is None else (layout.gate.name, source.gate)
    biases = source.gate_bias, source.up_bias, source.down_bias
    return (
        gate_weights, (layout.up.name, source.up), (layout.down.name, source.down),
        GATES[gate.kind], gate.alpha, gate.limit, *biases,
    )  # fmt: skip


def profile_for(store, *, link=5.0, zero_copy=6.0, cpu=8.0, device=20.0, cores=2.0, fix=1.0):
    """Made-up rates in GB/s, so that no test depends on what this machine measures."""
    labels = sorted({name for layer in store.layers for name in layer_formats(layer)})
    return MachineProfile(
        pinned_to_device=Curve((1.0,), (link,)), zero_copy=Curve((1.0,), (zero_copy,)),
        cpu_experts=dict.fromkeys(labels, Curve((1.0,), (cpu,))),
        cpu_rows=dict.fromkeys(labels, Curve((1.0,), (4 * cpu,))),
        device_experts=dict.fromkeys(labels, device), device_rows=dict.fromkeys(labels, 4 * device),
        step_fix_us=fix, miss_fix_us=fix, cpu_fix_us=fix, stream_fix_us=fix, copy_fix_us=fix, num_cores=cores,
        hit_cores=1.0, link_cores=1.0,
    )  # fmt: skip


def open_scheduler(store, rates=None, **sections):
    """A scheduler with made-up rates; sections are those of Config."""
    sections.setdefault("cpu", {}).setdefault("threads", 1)
    return ExpertScheduler(store, profile=profile_for(store, **(rates or {})), config=sections)


def force(lane):
    """The policy section that sends every miss to one lane; None: the fastest split."""
    return {"admit": "always"} if lane is None else {"force": lane, "admit": "always"}


def assert_same_bits(actual, wanted, what=""):
    """Bits of two arrays of one type; NaN must be the canonical one on both sides."""
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    kind = {2: np.uint16, 4: np.uint32}[wanted.itemsize]
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype
    a, b = (np.ascontiguousarray(array).view(kind) for array in (actual, wanted))
    if not (a == b).all():
        row, column = np.argwhere(a != b)[0]
        raise AssertionError(
            f"{what}: {(a != b).sum()} of {a.size} differ, first at [{row}, {column}]: "
            f"{actual[row, column]!r} (0x{a[row, column]:x}) against {wanted[row, column]!r} (0x{b[row, column]:x})"
        )


def covering(*axes, strength_axes=2):
    """A small set of tuples in which every pair of values of the first axes occurs; the others rotate."""
    rotating = [itertools.cycle(axis) for axis in axes[strength_axes:]]
    for fixed in itertools.product(*axes[:strength_axes]):
        yield (*fixed, *(next(values) for values in rotating))
