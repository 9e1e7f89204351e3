"""The CUDA kernels against the NumPy reference, bit for bit: one source, run on the processor and on a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_backends import Gpu, Shim, gpu_missing
from cuda_cases import (
    ALL,
    CPU,
    FILL,
    HIT,
    STREAM,
    ZERO_COPY,
    LayerOnDevice,
    Routing,
    any_bytes,
    make_store,
    random_lanes,
    spoil,
)
from expert_cases import FORMATS, KINDS, STEP_COLUMNS, assert_same_bits, narrow, random_routing, widen

from trilane.gpu_kernels import launch as launches
from trilane.gpu_kernels.build import variant_of

ROWS = (1, 2, 3, 7)
SHAPES = ((96, 288), (320, 32), (544, 320), (256, 544))  # ragged where the formats allow it
K_SHAPES = ((256, 512), (512, 256), (768, 512), (256, 768))
HIDDEN_TYPES = (np.float32, np.float16, np.uint16)


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend_of(request):
    """Makes the backend for a layout's formats."""
    if request.param == "gpu" and gpu_missing():
        pytest.skip(gpu_missing())
    backend = Shim if request.param == "processor" else Gpu
    return lambda layout: backend(variant_of(layout))


def on_device(backend_of, store, rows, top_k=3, **options):
    return LayerOnDevice(backend_of(store.layers[0].layout), store, rows, top_k, **options)


def hidden_states(rng, rows, hidden, dtype=np.float32):
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    return narrow(x, np.dtype(dtype))


def random_step(rng, rows, top_k, num_experts, hidden, dtype=np.float32, skips=True):
    ids, weights = random_routing(rng, rows, top_k, num_experts, skips)
    return Routing(hidden_states(rng, rows, hidden, dtype), ids, weights)


def shape_of(formats, index):
    return (K_SHAPES if STEP_COLUMNS.get(formats, 256) == 256 else SHAPES)[index % 4]


CASES = [
    (fmt, kind, ROWS[(i + j) % 4], HIDDEN_TYPES[(i + j) % 3], shape_of(fmt, i + 3 * j))
    for i, fmt in enumerate(FORMATS)
    for j, kind in enumerate(kind for kind in KINDS if kind != "relu2")
]
CASES += [("q8_0", "relu2", rows, np.float32, (288, 544)) for rows in (1, 3)]
CASES += [(mixed, "silu_glu", 2, np.float32, (512, 768)) for mixed in ("q4_k+q6_k", "q6_k+mxfp4+f32", "bf16+q8_0+q4_k")]


@pytest.mark.parametrize(("formats", "kind", "rows", "dtype", "shape"), CASES)
def test_a_step_through_all_lanes(backend_of, formats, kind, rows, dtype, shape):
    seed = [formats.encode()[0], len(kind), rows]
    rng = np.random.default_rng(seed)
    store = make_store(formats, kind, *shape, seed=rows)
    device = on_device(backend_of, store, rows, out_dtype=dtype)
    device.run(random_step(rng, rows, 3, 4, shape[0], dtype), random_lanes(rng, 4, device.shards), rng)
    assert not any(device.errors().values())


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_router_weights_of_half_precision(backend_of, rows, dtype):
    rng = np.random.default_rng(rows)
    store = make_store("q8_0", "silu_glu", 256, 256)
    device = on_device(backend_of, store, rows)
    routing = random_step(rng, rows, 3, 4, 256)
    routing.weights = narrow(routing.weights, np.dtype(dtype))
    for lanes in (np.full((4, device.shards), HIT), random_lanes(rng, 4, device.shards)):
        device.run(routing, lanes, rng)


@pytest.mark.parametrize("lane", [HIT, STREAM, ZERO_COPY, FILL, CPU])
@pytest.mark.parametrize("fmt", ["q4_k", "mxfp4"])
def test_every_lane_gives_the_same_bits_and_fills_become_hits(backend_of, fmt, lane):
    rng = np.random.default_rng(lane)
    store = make_store(fmt, "silu_glu", 256, 512)
    device = on_device(backend_of, store, 1)
    routing = random_step(rng, 1, 3, 4, 256, skips=False)
    items = device.run(routing, np.full((4, device.shards), lane), rng)
    assert len(items) == (0 if lane in (HIT, CPU) else len(np.unique(routing.ids)) * device.shards)
    device.begin(routing)  # what was filled or streamed is resident now
    if lane in (HIT, STREAM, FILL):
        assert device.state()["missing"] == 0
        device.finish()
        device.check_output(routing)


@pytest.mark.parametrize("shape", [(32, 32), (32, 2336), (2336, 32)])
@pytest.mark.parametrize("fmt", ["q8_0", "mxfp4", "f16"])
def test_tiny_and_long_rows(backend_of, fmt, shape):
    """One sub-block; more than eight shards; rows of more than eight blocks, which wrap the accumulators."""
    rng = np.random.default_rng(shape[0])
    store = make_store(fmt, "silu_glu", *shape, experts=2)
    device = on_device(backend_of, store, 2, top_k=2)
    device.run(random_step(rng, 2, 2, 2, shape[0], skips=False), random_lanes(rng, 2, device.shards), rng)


def test_rows_too_long_for_shared_memory_go_through_in_tiles(backend_of):
    store = make_store("f32", "silu_glu", 2400, 32, experts=2)
    tiles = launches.tiles_of(store.layers[0].layout)
    assert tiles.up == 2 and not tiles.whole
    rng = np.random.default_rng(0)
    device = on_device(backend_of, store, 1, top_k=2)
    device.run(random_step(rng, 1, 2, 2, 2400, skips=False), np.full((2, 1), FILL), rng)


@pytest.mark.parametrize(("fmt", "rows"), [("q4_k", 1), ("mxfp4", 1), ("q4_k", 3)])
def test_rows_of_more_than_eight_blocks_are_in_shared_memory_whole_where_there_is_enough(backend_of, fmt, rows):
    store = make_store(fmt, "silu_glu", *((2560, 512) if fmt == "q4_k" else (2336, 288)), experts=2)
    layout = store.layers[0].layout
    assert launches.tiles_of(layout, launches.whole_nbytes(228 << 10)).whole and not launches.tiles_of(layout).whole
    rng = np.random.default_rng(rows)
    device = on_device(backend_of, store, rows, top_k=2)
    for lanes in (np.full((2, device.shards), HIT), random_lanes(rng, 2, device.shards)):
        device.run(random_step(rng, rows, 2, 2, layout.hidden, skips=False), lanes, rng)


def test_biases_are_read_on_every_lane(backend_of):
    rng = np.random.default_rng(8)
    store = make_store("mxfp4", "swiglu_oai", 96, 288)
    assert store.layers[0].layout.has_bias
    device = on_device(backend_of, store, 2)
    for lane in ALL:
        device.run(random_step(rng, 2, 3, 4, 96), np.full((4, 2), lane), rng)


# ------------------------------------------------------------------------------------------ odd numbers
@pytest.mark.parametrize("kind", ["zeros", "zero block", "denormals", "huge", "nan", "inf", "-inf"])
@pytest.mark.parametrize("fmt", ["q4_k", "q8_0", "f32"])
def test_degenerate_hidden_rows(backend_of, fmt, kind):
    rng = np.random.default_rng(3)
    store = make_store(fmt, "silu_glu", 512, 256)
    device = on_device(backend_of, store, 2)
    routing = random_step(rng, 2, 3, 4, 512, skips=False)
    routing.hidden = spoil(routing.hidden, kind)
    with np.errstate(all="ignore"):
        device.run(routing, random_lanes(rng, 4, 1), rng)


@pytest.mark.parametrize("fmt", ["q4_k", "q6_k", "q8_0", "mxfp4", "f16"])
def test_any_bytes_are_weights(backend_of, fmt):
    rng = np.random.default_rng(11)
    store = any_bytes(make_store(fmt, "silu_glu", 512, 256), rng)
    device = on_device(backend_of, store, 2)
    with np.errstate(all="ignore"):
        device.run(random_step(rng, 2, 3, 4, 512), random_lanes(rng, 4, 1), rng)


# ---------------------------------------------------------------------------------------------- routing
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_skipped_repeated_and_impossible_ids(backend_of, id_dtype):
    rng = np.random.default_rng(4)
    store = make_store("q8_0", "silu_glu", 96, 288)
    device = on_device(backend_of, store, 3, top_k=4, id_dtype=id_dtype)
    routing = random_step(rng, 3, 4, 4, 96, skips=False)
    routing.ids = np.array([[2, 2, -1, 0], [4, -1, 4, -1], [1, 0, 2, 2]])
    device.run(routing, random_lanes(rng, 4, 2), rng)
    assert device.errors()["bad_id"] == 0
    routing.ids[0, 0], routing.ids[2, 1] = 5, -7
    device.run(routing, random_lanes(rng, 4, 2), rng)
    assert device.errors()["bad_id"] == device.state()["clock"] == 2


@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_without_experts_gives_zeros(backend_of, rows):
    rng = np.random.default_rng(5)
    store = make_store("q8_0", "silu_glu", 96, 288)
    device = on_device(backend_of, store, rows)
    routing = random_step(rng, rows, 3, 4, 96)
    routing.ids[:] = -1
    device.run(routing, np.full((4, 2), CPU), rng)
    assert not device.output(rows).any() and device.state()["sequence"] == 0


def test_many_experts_and_many_rows(backend_of):
    rng = np.random.default_rng(6)
    store = make_store("q8_0", "silu_glu", 64, 32, experts=70)
    device = on_device(backend_of, store, 20, top_k=5)
    device.run(random_step(rng, 20, 5, 70, 64), random_lanes(rng, 70, 1), rng)


def test_hidden_rows_at_odd_addresses(backend_of):
    """Rows of a wider array, so that they are not aligned to 16 bytes."""
    rng = np.random.default_rng(7)
    store = make_store("q8_0", "silu_glu", 96, 32)
    device = on_device(backend_of, store, 2)
    routing = random_step(rng, 2, 3, 4, 96)
    wide = np.zeros((2, 101), np.float32)
    wide[:, 3:99] = routing.hidden
    device.set_resident(np.full((4, 1), HIT), rng)
    device.begin(routing)
    device.at["x"].set(wide)
    device.step["x"] += 12
    device.step["x_stride"] = 404
    device.backend.launch(launches.publish_launch(device.layer, device.step))
    device.backend.launch(device._experts(0))
    device.finish()
    device.check_output(routing)


# ------------------------------------------------------------------------------- what the host relies on
def started(backend_of, lane=FILL, rows=1):
    rng = np.random.default_rng(9)
    store = make_store("q8_0", "silu_glu", 96, 288)
    device = on_device(backend_of, store, rows)
    routing = random_step(rng, rows, 3, 4, 96, skips=False)
    lanes = np.full((4, 2), lane)
    device.set_resident(lanes, rng)
    device.begin(routing)
    return device, routing, lanes


def test_a_plan_of_another_step_is_not_used(backend_of):
    device, routing, lanes = started(backend_of)
    device.write_plan(routing, lanes)
    for name in ("plan_list", "updates"):
        device.at[name].array[:4].view(np.uint32)[0] += 1
    table = device.table.get().copy()
    device.finish()
    assert np.isnan(device.output(1)).all()
    assert device.errors()["stale_plan"] == device.state()["clock"] == 1
    assert np.array_equal(device.table.get(), table)
    device.check_fills(lanes)
    device.set_resident(lanes, np.random.default_rng(0))
    device.begin(routing)  # the next step is not harmed
    device.write_plan(routing, lanes)
    device.finish()
    device.check_output(routing)


@pytest.mark.parametrize("word", ["cpu_flag", "stream flag"])
def test_the_abort_word_ends_waits(backend_of, word):
    device, routing, lanes = started(backend_of, CPU if word == "cpu_flag" else STREAM)
    device.write_plan(routing, lanes)
    device.at["cpu_flag"].array[:4] = 0
    device.at["abort"].array[:4].view(np.uint32)[0] = 1
    device.finish()
    assert np.isnan(device.output(1)).all()
    assert device.errors()["aborted"] == 1
    device.at["abort"].array[:4] = 0
    device.begin(routing)
    device.write_plan(routing, np.where(lanes == STREAM, CPU, lanes))
    device.finish()
    device.check_output(routing)


def test_pending_updates_are_applied_after_the_look_up_and_acknowledged(backend_of):
    device, routing, lanes = started(backend_of, CPU)
    expert = int(routing.ids[0, 0])
    slot = device.free.pop()
    device._copy_to_slot(slot, device.shard_bytes(expert, 1))
    pending = device.at["pending"].array
    pending[64:76].view(np.int32)[:] = expert * 2 + 1, slot, 7  # of sixteen bytes
    pending[:8].view(np.int32)[:] = 7, 1
    device.begin(routing)
    assert device.at["acknowledged"].array[:4].view(np.uint32)[0] == 7
    assert device.state()["missing"] == 2 * len(np.unique(routing.ids))
    device.begin(routing)
    assert device.state()["missing"] == 2 * len(np.unique(routing.ids)) - 1
    device.write_plan(routing, lanes)
    device.finish()
    device.check_output(routing)


@pytest.mark.parametrize("change", ["found", "lost"])
def test_a_slot_table_that_changes_under_the_hits_changes_no_output(backend_of, change):
    """Between publish's look-up and that of the hits, which then expect another list than publish's."""
    rng = np.random.default_rng(11)
    device = on_device(backend_of, make_store("q4_k", "silu_glu", 256, 512), 1)
    routing = random_step(rng, 1, 3, 4, 256, skips=False)
    expert = int(np.sort(routing.ids[0])[0])  # the first of the list, so all others move
    lanes = np.full((4, 2), HIT)
    if change == "found":
        lanes[expert, 1] = CPU
    device.set_resident(lanes, rng)
    slot = -1
    if change == "found":
        slot = device.free.pop()
        device._copy_to_slot(slot, device.shard_bytes(expert, 1))
    pending = device.at["pending"].array
    pending[64:76].view(np.int32)[:] = expert * 2 + 1, slot, 7
    pending[:8].view(np.int32)[:] = 7, 1
    device.begin(routing)
    if change == "found":
        device.write_plan(routing, lanes)
    device.finish()
    device.check_output(routing)
    assert not any(device.errors().values())


def test_a_step_without_misses_touches_neither_mailbox_nor_plan(backend_of):
    device, routing, _ = started(backend_of, HIT, rows=5)
    mail = device.at["mail"].array.copy()
    device.at["plan_list"].array[:4].view(np.uint32)[0] = 77
    device.finish()
    device.check_output(routing)
    assert np.array_equal(device.at["mail"].array, mail) and device.state()["sequence"] == 0
    assert not any(device.errors().values())


def test_the_host_device_gives_the_same_bits(backend_of, scheduler_of):
    rng = np.random.default_rng(10)
    store = make_store("q4_k+q6_k", "silu_glu", 512, 768)
    device = on_device(backend_of, store, 3)
    routing = random_step(rng, 3, 3, 4, 512, np.float16)
    device.run(routing, random_lanes(rng, 4, 3), rng)
    y = scheduler_of(store).forward(0, widen(routing.hidden), routing.ids, routing.weights)
    assert_same_bits(device.output(3), np.asarray(y))


def test_the_shim_says_where_a_kernel_is_stuck():
    """Its own check: a flag that never comes and no abort must be an error, not a hang."""
    device, routing, lanes = started(lambda layout: Shim(variant_of(layout)), STREAM)
    device.write_plan(routing, lanes)
    device.at["cpu_flag"].array[:4] = 0
    with pytest.raises(AssertionError, match="experts_plan: no thread of block 0 can move"):
        device.finish()


def test_the_shim_computes_halves_like_numpy():
    library = Shim(variant_of(make_store("q8_0", "silu_glu", 32, 32).layers[0].layout)).library
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = halves.view(np.float16).astype(np.float32)
    library.widen_half.restype = ctypes.c_float
    widened = np.array([library.widen_half(int(h)) for h in halves[::7]], np.float32)
    assert np.array_equal(widened, floats[::7], equal_nan=True)
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(4000) * 10.0 ** rng.integers(-9, 6, 4000)).astype(np.float32)
    library.narrow_half.argtypes = [ctypes.c_float]
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16).view(np.uint16)
    assert [library.narrow_half(float(v)) for v in values] == wanted.tolist()
