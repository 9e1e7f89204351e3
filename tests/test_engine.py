"""The scheduler at its public edge: what it takes and gives, what it refuses, what it tells."""

from __future__ import annotations

import numpy as np
import pytest
from expert_cases import assert_same_bits, expected, narrow, open_scheduler, random_routing, random_store
from numba import config
from test_arrays import BFLOAT, CUDA, Interface, Tensor

import trilane
from trilane import (
    ArrayError,
    ArrayTypeError,
    ConfigError,
    DeviceError,
    ExpertScheduler,
    RoutingError,
    StoreError,
    TrilaneError,
)

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")

HIDDEN, EXPERTS = 256, 6
LANES = (None, "stream", "zero_copy", "cpu")


@pytest.fixture(scope="module")
def store():
    return random_store("q8_0", layers=2, experts=EXPERTS, hidden=HIDDEN, intermediate=544)


@pytest.fixture
def scheduler(store, scheduler_of):
    return scheduler_of(store, cache={"fraction": 0.5})


def step_inputs(rows=3, top_k=2, seed=0, dtype=np.float32, skips=False):
    rng = np.random.default_rng(seed)
    x = narrow(rng.standard_normal((rows, HIDDEN)).astype(np.float32), dtype)
    return x, *random_routing(rng, rows, top_k, EXPERTS, skips)


def snapshot(scheduler):
    """All that a refused call must leave as it was."""
    runner = scheduler._runner
    state = [np.copy(part) for part in runner.state]
    return [*state, runner.totals.copy(), runner.journal.log.copy(), runner.journal.clock.copy()]


def assert_unchanged(before, scheduler):
    for a, b in zip(before, snapshot(scheduler), strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------ what it takes
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("out_dtype", [np.float32, np.float16, np.uint16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows", [3, 9])
def test_hidden_and_out_types(store, scheduler, dtype, out_dtype, rows):
    x, ids, weights = step_inputs(rows, dtype=dtype)
    wanted = expected(store, 1, x, ids, weights)
    out = np.full(x.shape, 77, out_dtype)
    assert scheduler.forward(1, x, ids, weights, out=out) is out
    assert_same_bits(out, narrow(wanted, out_dtype))
    assert_same_bits(scheduler.forward(1, x, ids, weights), narrow(wanted, dtype))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_strided_rows_unaligned_rows_and_out_in_place(store, scheduler, rows):
    x, ids, weights = step_inputs(rows)
    wanted = expected(store, 0, x, ids, weights)
    wide = np.full((2 * rows, HIDDEN + 24), np.nan, np.float32)
    strided = wide[::2, 8 : 8 + HIDDEN]
    strided[:] = x
    out = np.full((3 * rows, HIDDEN + 8), 9, np.float32)[::3, :HIDDEN]
    scheduler.forward(0, strided, ids, weights, out=out)
    assert_same_bits(out, wanted)
    assert (out.base[1::3] == 9).all() and (out.base[:, HIDDEN:] == 9).all()
    odd = np.zeros(4 * rows * HIDDEN + 1, np.uint8)[1:].view(np.float32).reshape(rows, HIDDEN)
    odd[:] = x
    scheduler.forward(0, odd, ids, weights, out=odd)
    assert_same_bits(odd, wanted, "in place, at an odd address")


def test_out_that_overlaps_other_rows_of_hidden(store, scheduler_of, monkeypatch):
    """In one step and in parts: rows are not read after they were written."""
    monkeypatch.setattr("trilane.host_runner.SCRATCH_NBYTES", 1 << 20)
    scheduler = scheduler_of(store)
    assert scheduler._runner.max_rows(2) < 60
    for rows in (3, 60):
        x, ids, weights = step_inputs(rows)
        wanted = expected(store, 0, x, ids, weights)
        for shift in (1, -1):
            both = np.zeros((rows + 1, HIDDEN), np.float32)
            hidden, out = (both[:-1], both[1:]) if shift > 0 else (both[1:], both[:-1])
            hidden[:] = x
            scheduler.forward(0, hidden, ids, weights, out=out)
            assert_same_bits(out, wanted, f"{rows} rows, shift {shift}")


@pytest.mark.parametrize("ids_dtype", [np.uint8, np.int8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("weights_dtype", [np.float32, np.float16, np.uint16, np.float64])
def test_types_of_ids_and_weights(store, scheduler, ids_dtype, weights_dtype):
    x, ids, weights = step_inputs()
    ids[0, 1] = EXPERTS
    given = weights.astype(weights_dtype) if weights_dtype != np.uint16 else narrow(weights, np.uint16)
    exact = given.astype(np.float32)
    if weights_dtype == np.uint16:
        exact = (given.astype(np.uint32) << 16).view(np.float32)
    wanted = expected(store, 0, x, ids, exact)
    assert_same_bits(scheduler.forward(0, x, ids.astype(ids_dtype), given), wanted)


def test_lists_and_strided_routing(store, scheduler):
    x, ids, weights = step_inputs()
    wanted = expected(store, 0, x, ids, weights)
    assert_same_bits(scheduler.forward(0, x, ids.tolist(), weights.tolist()), wanted)
    assert_same_bits(scheduler.forward(0, x, tuple(map(tuple, ids.tolist())), weights), wanted)
    wide = np.zeros((6, 4), np.int32)
    wide[::2, ::2] = ids
    assert_same_bits(scheduler.forward(0, x, wide[::2, ::2], np.asfortranarray(weights)), wanted)
    assert_same_bits(scheduler.forward(0, x, ids, [[1, 0]] * 3), expected(store, 0, x, ids, [[1, 0]] * 3))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_of_other_libraries(store, scheduler, version, dtype):
    """Everything by DLPack, results in the caller's own kind, nothing copied."""
    kept = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    x, ids, weights = step_inputs(dtype=kept)
    code = BFLOAT if dtype == "bfloat16" else None
    tensors = Tensor(x, code, version=version), Tensor(ids, version=version), Tensor(weights, version=version)
    wanted = narrow(expected(store, 0, x, ids, weights), kept)
    made = scheduler.forward(0, *tensors)
    assert isinstance(made, Tensor) and made.code == tensors[0].code
    assert_same_bits(made.array, wanted)
    out = Tensor(np.zeros_like(x), code, version=version)
    assert scheduler.forward(0, *tensors, out=out) is out
    assert_same_bits(out.array, wanted)
    assert_same_bits(scheduler.forward(0, Interface(x), Interface(ids), Interface(weights)), wanted)


def test_nothing_to_do(store, scheduler):
    """Zero rows, top_k of 0, all skipped: the right shape, zeros, and no expert touched."""
    assert scheduler.forward(0, np.zeros((0, HIDDEN), np.float16), np.zeros((0, 2), int), np.zeros((0, 2))).shape == (
        0,
        HIDDEN,
    )
    x, ids, weights = step_inputs()
    out = np.full_like(x, np.nan)
    scheduler.forward(0, x, ids[:, :0], weights[:, :0], out=out)
    assert not out.any() and scheduler.stats().steps == 0
    for rows in (3, 9):
        x, ids, weights = step_inputs(rows)
        x[0] = np.nan
        out = np.full_like(x, np.nan)
        scheduler.forward(0, x, np.where(ids % 2, -1, EXPERTS), weights, out=out)
        assert not out.view(np.uint32).any()
    stats = scheduler.stats()
    assert stats.steps == 2 and stats.hit_rate is None and stats.fills == 0
    assert not any(lane.shards for lane in stats.lanes.values())
    assert str(stats).startswith("2 steps") and "hit rate -" in str(stats)


def test_duplicates_count_twice(store, scheduler):
    x, ids, weights = step_inputs(4, 4)
    ids[:] = 2  # as a router gives that only knows NaN
    assert_same_bits(scheduler.forward(0, x, ids, weights), expected(store, 0, x, ids, weights))
    assert (
        scheduler.stats().lanes["hit"].experts
        + sum(scheduler.stats().lanes[name].experts for name in ("stream", "zero_copy", "cpu"))
        >= 1
    )


def test_more_ranks_than_experts(store, scheduler):
    x, ids, weights = step_inputs(5, 20)
    assert_same_bits(scheduler.forward(0, x, ids, weights), expected(store, 0, x, ids, weights))


def test_scratch_grows_by_rows_times_ranks():
    """Many rows of one rank, then one row of many: no scratch for many rows of many ranks."""
    small = random_store("q8_0", experts=4, hidden=32, intermediate=32)
    with open_scheduler(small) as scheduler:
        for rows, top_k in ((2000, 1), (1, 500)):
            ids = np.zeros((rows, top_k), int)
            scheduler.forward(0, np.ones((rows, 32), np.float32), ids, np.ones(ids.shape, np.float32))
        assert scheduler._runner.ws.weights.size == 2000


# --------------------------------------------------------------------------------------- what it refuses
@pytest.mark.parametrize("bad", [-2, EXPERTS + 1, 2**40, -(2**63)])
@pytest.mark.parametrize("rows", [3, 9, 200])
def test_ids_that_do_not_exist(store, scheduler_of, monkeypatch, bad, rows):
    monkeypatch.setattr("trilane.host_runner.SCRATCH_NBYTES", 1 << 20)
    scheduler = scheduler_of(store)
    x, ids, weights = step_inputs(rows)
    scheduler.forward(0, x, ids, weights)
    before = snapshot(scheduler)
    ids[rows - 1, 1] = bad
    out = np.full_like(x, 7)
    text = rf"topk_ids\[{rows - 1}, 1\]: expert id {bad}, but layer 1 has experts 0 to 5 \(-1 and 6 mean none\)"
    with pytest.raises(RoutingError, match=text):
        scheduler.forward(1, x, ids, weights, out=out)
    assert (out == 7).all()
    assert_unchanged(before, scheduler)
    ids[rows - 1, 1] = 0
    assert_same_bits(scheduler.forward(1, x, ids, weights), expected(store, 1, x, ids, weights))


def test_unsigned_ids_do_not_wrap_round(store, scheduler):
    x, ids, weights = step_inputs()
    ids = ids.astype(np.uint64)
    for bad in (2**64 - 1, 2**63, 2**64 - 2):
        ids[1, 1] = bad
        with pytest.raises(RoutingError, match=f"expert id {bad}"):
            scheduler.forward(0, x, ids, weights)


X, IDS, WEIGHTS = np.ones((3, HIDDEN), np.float32), np.zeros((3, 2), int), np.ones((3, 2), np.float32)
READ_ONLY = np.ones((3, HIDDEN), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"hidden": X.astype(float)},
            ArrayTypeError,
            "hidden: dtype float64, but float32, float16 or bf.*convert",
        ),
        ({"hidden": X.astype(int)}, ArrayTypeError, "hidden: dtype int64"),
        ({"hidden": X.tolist()}, ArrayTypeError, "hidden: a list is no array"),
        ({"hidden": X.astype(">f4")}, ArrayTypeError, "hidden: byte order"),
        ({"hidden": X[:, :128]}, ArrayError, r"hidden: shape \(3, 128\), but \(rows, 256\) is needed: the store's"),
        ({"hidden": X[0]}, ArrayError, r"hidden: shape \(256,\)"),
        ({"hidden": np.ones((3, 2 * HIDDEN), np.float32)[:, ::2]}, ArrayError, "hidden: elements of a row"),
        ({"hidden": X[::-1]}, ArrayError, "hidden: rows overlap or run backwards"),
        ({"hidden": Tensor(X, device=CUDA)}, ArrayError, "hidden: the array is on DLPack device type 2"),
        ({"out": X.astype(float)}, ArrayTypeError, "out: dtype float64"),
        ({"out": READ_ONLY}, ArrayError, "out: the array is read-only.*writable"),
        ({"out": Tensor(X, version=1, flags=1)}, ArrayError, "out: the array is read-only"),
        ({"out": np.ones((2, HIDDEN), np.float32)}, ArrayError, "out: 2 rows, but hidden has 3"),
        ({"out": X[:, :32]}, ArrayError, r"out: shape \(3, 32\)"),
        ({"out": np.broadcast_to(X[0], X.shape)}, ArrayError, "out: "),
        ({"topk_ids": IDS.astype(float)}, ArrayTypeError, "topk_ids: dtype float64, but integers"),
        ({"topk_ids": IDS.astype(bool)}, ArrayTypeError, "topk_ids: dtype bool, but integers"),
        ({"topk_ids": Tensor(IDS.astype(np.uint16), BFLOAT)}, ArrayTypeError, "topk_ids: dtype bfloat16"),
        ({"topk_ids": [[0.5, 1.5]] * 3}, ArrayTypeError, "topk_ids: dtype float64"),
        ({"topk_ids": [[0, 1], [2], [3, 4]]}, ArrayError, "topk_ids: a list whose rows differ in length"),
        (
            {"topk_weights": WEIGHTS[:, :1]},
            ArrayError,
            r"topk_weights: shape \(3, 1\), but .*; pass one weight for each id",
        ),
        ({"topk_ids": IDS[:2]}, ArrayError, r"topk_ids: shape \(2, 2\), but \(3, top_k\) is needed"),
        ({"topk_ids": IDS[:, 0]}, ArrayError, r"topk_ids: shape \(3,\)"),
        ({"topk_ids": None}, ArrayTypeError, "topk_ids: a NoneType is no array"),
        ({"topk_weights": WEIGHTS.astype(int)}, ArrayTypeError, "topk_weights: dtype int64, but floats"),
        ({"topk_weights": [["a", "b"]] * 3}, ArrayTypeError, "topk_weights: dtype"),
        ({"topk_weights": WEIGHTS[:, :1]}, ArrayError, r"topk_weights: shape \(3, 1\), but topk_ids has \(3, 2\)"),
        ({"layer": 2}, RoutingError, "layer: 2, but the store has layers 0 to 1; pass the index"),
        ({"layer": -1}, RoutingError, "layer: -1, but"),
        ({"layer": 0.0}, RoutingError, "layer: 0.0, but"),
        ({"layer": True}, RoutingError, "layer: True, but"),
        ({"stream": 5}, ArrayError, "stream: 5, but the host device has no streams"),
    ],
)
def test_refused_arguments(scheduler, changes, error, text):
    before = snapshot(scheduler)
    arguments = {"layer": 0, "hidden": X, "topk_ids": IDS, "topk_weights": WEIGHTS} | changes
    with pytest.raises(error, match=text) as caught:
        scheduler.forward(**arguments)
    assert isinstance(caught.value, TrilaneError | ValueError)
    assert_unchanged(before, scheduler)
    scheduler.forward(0, X, IDS, WEIGHTS)


def test_options_may_come_from_a_file(store, tmp_path):
    file = tmp_path / "trilane.yaml"
    file.write_text("cache: {slots: 3}\n")
    with trilane.ExpertScheduler(store, config=file) as scheduler:
        assert scheduler.config == trilane.load_config(file).config and scheduler.config.cache.slots == 3


def test_refused_at_the_start(store):
    with pytest.raises(DeviceError, match="device 'rocm': there are 'auto'"):
        trilane.ExpertScheduler(store, device="rocm")
    with pytest.raises(ConfigError, match="cache.slotz"):
        open_scheduler(store, cache={"slotz": 1})
    with pytest.raises(ConfigError, match="none.yaml: does not exist"):
        trilane.ExpertScheduler(store, config="none.yaml")
    from trilane.cpu_kernels.isa import ISAS, available_isas

    for isa in set(ISAS) - set(available_isas()):
        with pytest.raises(ConfigError, match=f"cpu.isa: is '{isa}', but this CPU has"):
            open_scheduler(store, cpu={"isa": isa})


def test_what_is_no_store_is_told_how_to_become_one():
    with pytest.raises(StoreError, match="'model.gguf' is a str, but an ExpertStore is needed; .*from_gguf"):
        ExpertScheduler("model.gguf")
