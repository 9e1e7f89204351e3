"""Placement never changes a bit: every format, gate, lane, cache and split gives the bits of the NumPy reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from expert_cases import (
    FORMATS,
    KINDS,
    MIXED,
    STEP_COLUMNS,
    assert_same_bits,
    covering,
    expected,
    force,
    narrow,
    random_routing,
    random_store,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import config

from trilane.cpu_kernels.float_env import EXACT, FLUSH, set_float_mode
from trilane.cpu_kernels.isa import available_isas

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")

LANES = (None, "stream", "zero_copy", "cpu")
ROWS = (1, 2, 3, 7, 64)
POOLS, EVICTIONS = ("shared", "layer"), ("lru", "decayed_frequency")
RATES = (  # made-up machines, so that free plans split in different places
    {"cpu": 8.0, "link": 5.0},
    {"cpu": 30.0, "link": 3.0, "cores": 0.0},
    {"cpu": 2.0, "link": 20.0, "zero_copy": 25.0, "cores": 0.0},
    {"cpu": 6.0, "link": 6.0, "zero_copy": 6.0, "cores": 0.0, "fix": 0.0},
)


def hidden_rows(rng, rows, width, dtype=np.float32):
    x = (2 * rng.standard_normal((rows, width))).astype(np.float32)
    return narrow(x, dtype)


def shape_for(formats, shapes=((256, 544), (96, 288))):
    """(hidden, intermediate): small, with a short last shard where the formats allow it."""
    names = [formats] if isinstance(formats, str) else list(formats.values())
    gate_up, down = names[:2], names[-1:]
    wide = shapes[0] if max(STEP_COLUMNS[name] for name in names) == 256 else shapes[1]
    columns = max(STEP_COLUMNS[name] for name in down)
    return 256 if any(STEP_COLUMNS[name] == 256 for name in gate_up) else wide[0], -(-wide[1] // columns) * columns


def run_everywhere(scheduler_of, store, hidden, ids, weights, placements):
    """The same step under each placement, cold, half warm and warm; all give the reference's bits."""
    wanted = expected(store, 0, hidden, ids, weights)
    for lane, fraction, sections in placements:
        scheduler = scheduler_of(store, sections.pop("rates", None), policy=force(lane), **sections)
        for step in range(3):
            if step == 1:  # only some of the experts become resident
                half = np.where(ids % 2 == 0, ids, -1)
                scheduler.forward(0, hidden, half, weights)
            out = scheduler.forward(0, hidden, ids, weights)
            assert_same_bits(out, narrow(wanted, hidden.dtype), f"{lane} {fraction} {sections} step {step}")


# Every format with every gate; all else in turn.
CASES = list(
    covering([*FORMATS, *MIXED], KINDS, ROWS, available_isas(), (1, 2), POOLS, EVICTIONS, (0.3, 0.7, 0.1), RATES)
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}rows-{case[3]}")
def test_every_format_and_gate_on_every_lane(scheduler_of, case):
    formats, kind, rows, isa, threads, pool, eviction, fraction, rates = case
    if formats in ("f32", "f16", "bf16"):
        rows = min(rows, 6)  # their reference takes seconds otherwise; more rows run with the others
    hidden, intermediate = shape_for(MIXED.get(formats, formats))
    store = random_store(formats, kind, hidden=hidden, intermediate=intermediate, experts=5)
    rng = np.random.default_rng(len(formats) * 7 + rows)
    x = hidden_rows(rng, rows, hidden)
    ids, weights = random_routing(rng, rows, 2, 5)
    sections = {"cpu": {"isa": isa, "threads": threads}}
    cache = {"pool": pool, "eviction": eviction}
    placements = [
        (lane, size, {**sections, "cache": {**cache, "fraction": size}, "rates": rates})
        for lane, size in ((None, fraction), ("stream", 0.8), ("zero_copy", fraction), ("cpu", fraction))
    ]
    run_everywhere(scheduler_of, store, x, ids, weights, placements)


@pytest.mark.parametrize(
    ("formats", "kind"),
    [("q4_k+q6_k", "silu_glu"), ("mxfp4", "swiglu_oai"), ("bf16", "gelu_tanh_glu"), ("q8_0", "relu2")],
)
def test_every_placement(scheduler_of, formats, kind):
    """Lane x cache size x instruction set x threads x pool x eviction, in full."""
    hidden, intermediate = shape_for(MIXED.get(formats, formats))
    store = random_store(formats, kind, hidden=hidden, intermediate=intermediate, experts=5, layers=2)
    rng = np.random.default_rng(5)
    x = hidden_rows(rng, 3, hidden)
    ids, weights = random_routing(rng, 3, 2, 5)
    placements = [
        (lane, size, {"cpu": {"isa": isa, "threads": threads}, "cache": {"fraction": size, "pool": pool,
                      "eviction": eviction}, "rates": RATES[number % len(RATES)]})
        for number, (lane, size, isa, threads, pool, eviction) in enumerate(
            itertools.product(LANES, (0.0, 0.1, 0.5, 1.0), available_isas(), (1, 2), POOLS, EVICTIONS))
        if lane != "stream" or size > 0
    ]  # fmt: skip
    run_everywhere(scheduler_of, store, x, ids, weights, placements)


SHAPES = {32: (32, 64, 96, 160, 256, 288, 320), 256: (256, 512)}


@st.composite
def steps(draw):
    """A store with a random shape and format, and a step on it."""
    formats = draw(st.sampled_from([*FORMATS, *MIXED]))
    names = MIXED.get(formats, {"gate": formats, "up": formats, "down": formats})
    columns = max(STEP_COLUMNS[names[name]] for name in ("gate", "up"))
    hidden = draw(st.sampled_from(SHAPES[columns]))
    intermediate = draw(st.sampled_from((*SHAPES[STEP_COLUMNS[names["down"]]], 768)))
    floats = "f32" if STEP_COLUMNS[names["down"]] == 32 and columns == 32 else ""
    rows = draw(st.integers(1, 3 if floats else 9))
    experts = draw(st.integers(1, 9))
    return {
        "store": (formats, draw(st.sampled_from(KINDS)), hidden, intermediate, experts, draw(st.booleans())),
        "rows": rows,
        "top_k": draw(st.integers(1, 6)),
        "dtype": draw(st.sampled_from([np.float32, np.float16, np.uint16])),
        "lane": draw(st.sampled_from(LANES)),
        "admit": draw(st.sampled_from(["always", "score"])),
        "slots": draw(st.integers(0, 3 * experts)),
        "rates": draw(st.sampled_from(RATES)),
        "seed": draw(st.integers(0, 999)),
    }


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(step=steps())
def test_random_shapes(scheduler_of, step):
    formats, kind, hidden, intermediate, experts, bias = step["store"]
    store = random_store(
        formats, kind, hidden=hidden, intermediate=intermediate, experts=experts, bias=bias, seed=step["seed"]
    )
    slots = max(1, step["slots"]) if step["lane"] == "stream" else step["slots"]
    policy = {"force": step["lane"], "admit": step["admit"]}
    scheduler = scheduler_of(store, step["rates"], cache={"slots": slots}, policy=policy)
    rng = np.random.default_rng(step["seed"])
    for _ in range(3):
        x = hidden_rows(rng, step["rows"], hidden, step["dtype"])
        ids, weights = random_routing(rng, step["rows"], step["top_k"], experts)
        wanted = narrow(expected(store, 0, x, ids, weights), step["dtype"])
        assert_same_bits(scheduler.forward(0, x, ids, weights), wanted, str(step))


@pytest.mark.parametrize(
    ("formats", "hidden", "intermediate", "experts", "kind"),
    [
        ("mxfp4", 2880, 2880, 3, "swiglu_oai"),
        ("q8_0", 640, 704, 60, "silu_glu"),
        ("q4_k+q8_0", 512, 1408, 61, "silu_glu_clamped"),
        ("mxfp4", 704, 640, 61, "gelu_tanh_glu"),
    ],
)
def test_shapes_of_real_models(scheduler_of, formats, hidden, intermediate, experts, kind):
    """Rows that are no multiple of 256, short last shards, numbers of experts that divide by nothing."""
    store = random_store(formats, kind, hidden=hidden, intermediate=intermediate, experts=experts)
    rng = np.random.default_rng(1)
    x = hidden_rows(rng, 2, hidden)
    ids, weights = random_routing(rng, 2, 3, experts, skips=False)
    placements = [(lane, 0.5, {"cache": {"fraction": 0.5}, "cpu": {"threads": 2}}) for lane in LANES]
    run_everywhere(scheduler_of, store, x, ids, weights, placements)


# ------------------------------------------------------------------------------------- degenerate numbers
def odd_rows(rng, width):
    """Blocks that are all zero, denormal, at the 2^-100 limit, huge; and rows that are not finite."""
    x = rng.standard_normal((12, width)).astype(np.float32)
    x[0] = 0
    x[1] *= np.float32(1e-40)
    x[2] *= np.float32(2.0**-101)
    x[3] *= np.float32(2.0**-99)
    x[4] *= np.float32(1e30)
    x[5, 3] = np.nan
    x[6, -1] = np.inf
    x[7, 0] = -np.inf
    x[8] = np.where(np.arange(width) % 2, np.float32(-0.0), np.float32(0))
    x[9, : width // 2] = 0
    x[10] = np.float32(3.4e38)
    x[11] = np.uint32(0x7F800001).view(np.float32)  # a signalling NaN everywhere
    return x


@pytest.mark.parametrize("flush", [False, True], ids=["denormals", "flush-to-zero"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("formats", ["q8_0", "q4_k+q6_k", "mxfp4", "bf16", "f32", "q6_k+mxfp4+f32"])
def test_degenerate_rows(scheduler_of, formats, dtype, flush):
    """NaN rows are the rows with a non-finite element, and no others learn of it; the caller's mode is no matter."""
    hidden, intermediate = shape_for(MIXED.get(formats, formats))
    store = random_store(formats, hidden=hidden, intermediate=intermediate, experts=4)
    rng = np.random.default_rng(3)
    x = narrow(odd_rows(rng, hidden), dtype)
    ids, weights = random_routing(rng, len(x), 2, 4, skips=False)
    ids[6] = -1  # infinite, but routed to nobody: zeros
    weights[9] = 1e-39
    wanted = narrow(expected(store, 0, x, ids, weights), dtype)
    for lane in LANES:
        scheduler = scheduler_of(store, cache={"fraction": 0.5}, policy=force(lane))
        for rows in (slice(0, 12), slice(0, 3), slice(4, 8)):  # by the team, and by the caller
            before = set_float_mode(EXACT | FLUSH if flush else EXACT)
            try:
                out = scheduler.forward(0, x[rows], ids[rows], weights[rows])
            finally:
                set_float_mode(before)
            assert_same_bits(out, wanted[rows], f"{lane} rows {rows}")
    with np.errstate(invalid="ignore"):
        nan_rows = np.isnan(wanted.view(np.float16) if dtype == np.float16 else expected_floats(wanted)).all(1)
    assert nan_rows[[5, 7, 11]].all() and not nan_rows[[0, 1, 2, 3, 6, 8, 9]].any()


def expected_floats(values):
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def test_router_weights_that_are_not_finite(scheduler_of):
    """They reach their own row only, and NaN is canonical."""
    store = random_store("q8_0", experts=4)
    rng = np.random.default_rng(3)
    x = hidden_rows(rng, 4, 256)
    ids, weights = random_routing(rng, 4, 2, 4, skips=False)
    weights[:3, 1] = np.nan, np.inf, np.uint32(0xFFC12345).view(np.float32)
    wanted = expected(store, 0, x, ids, weights)
    assert np.isnan(wanted[[0, 2]]).all() and np.isfinite(wanted[3]).all()
    assert_same_bits(scheduler_of(store).forward(0, x, ids, weights), wanted)


def test_a_store_made_in_flush_to_zero_mode_has_the_same_bytes():
    before = set_float_mode(EXACT | FLUSH)
    try:
        flushed = small_stores()
    finally:
        set_float_mode(before)
    for a, b in zip(flushed, small_stores(), strict=True):
        np.testing.assert_array_equal(a.arena.bytes, b.arena.bytes)


def small_stores():
    from trilane import ExpertStore

    rng = np.random.default_rng(0)
    bits = {name: rng.integers(0, 1 << 23, (1, 256, 256), np.uint32) for name in ("gate", "up", "down")}
    layer = {name: value.view(np.float32) for name, value in bits.items()}  # denormals all of them
    return [ExpertStore.from_arrays([layer], formats=name) for name in FORMATS]


# ------------------------------------------------------------------------------------------------ batches
@pytest.mark.parametrize("lane", LANES)
def test_a_thousand_rows_have_the_bits_of_one_by_one(scheduler_of, monkeypatch, lane):
    """A batch that is run in parts, rows in any company: always the same bits."""
    monkeypatch.setattr("trilane.host_runner.SCRATCH_NBYTES", 4 << 20)
    store = random_store("q8_0", experts=7, hidden=96, intermediate=288)
    rng = np.random.default_rng(8)
    x = hidden_rows(rng, 1000, 96)
    ids, weights = random_routing(rng, 1000, 3, 7)
    scheduler = scheduler_of(store, cache={"fraction": 0.4}, policy=force(lane))
    assert scheduler._runner.max_rows(3) < 1000
    together = scheduler.forward(0, x, ids, weights)
    for row in range(0, 1000, 9):
        one = slice(row, row + 1)
        assert_same_bits(scheduler.forward(0, x[one], ids[one], weights[one]), together[one], f"row {row}")
    some = slice(100, 130)
    assert_same_bits(together[some], expected(store, 0, x[some], ids[some], weights[some]))
    in_place = x.copy()
    scheduler.forward(0, in_place, ids, weights, out=in_place)
    assert_same_bits(in_place, together, "in place")
