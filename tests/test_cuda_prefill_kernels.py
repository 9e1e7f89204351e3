"""Prefill's CUDA kernels against the NumPy reference, bit for bit: one source, on the processor and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_backends import Gpu, Shim, gpu_missing
from cuda_cases import ELEMENTS, POISON, Routing, any_bytes, make_store, spoil
from expert_cases import FORMATS, KINDS, STEP_COLUMNS, assert_same_bits, expected, narrow, random_routing

from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.layout import NBYTES, OFFSET
from trilane.gpu_kernels import prefill_launch as launches
from trilane.gpu_kernels import words
from trilane.gpu_kernels.build import variant_of
from trilane.gpu_kernels.words import TYPES

SLOT, STAGED, IN_PLACE = range(3)
ROWS = (1, 5, 17, 20)
SHAPES = ((96, 288), (320, 32), (544, 320), (256, 544))  # ragged where the formats allow it
K_SHAPES = ((256, 512), (512, 256), (768, 512), (256, 768))


@pytest.fixture(params=["processor", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend_of(request):
    """Makes the backend for a layout's formats."""
    if request.param == "gpu" and gpu_missing():
        pytest.skip(gpu_missing())
    backend = Shim if request.param == "processor" else Gpu
    return lambda layout: backend(variant_of(layout))


class Pass:
    """A layer and the buffers of a pass of up to ``max_rows`` rows; what kernels write starts as poison."""

    def __init__(self, backend_of, store, max_rows, top_k=3, id_dtype=np.int64, out_dtype=np.float32):
        where = store.layers[0]
        self.store, self.layout, self.num_experts, self.top_k = store, where.layout, where.num_experts, top_k
        self.backend = backend = backend_of(where.layout)
        self.shards, self.hidden = self.layout.num_shards, self.layout.hidden
        self.id_dtype, self.out_dtype = np.dtype(id_dtype), np.dtype(out_dtype)
        self.host = backend.mapped(self.num_experts * self.layout.expert_nbytes)
        for expert in range(self.num_experts):
            start = expert * self.layout.expert_nbytes
            self.host.array[start : start + self.layout.expert_nbytes] = store.expert_bytes(0, expert)
        positions, row_nbytes = max_rows * top_k, 4 * max_rows * self.hidden
        sizes = launches.step_sizes(self.hidden, max_rows, positions)
        inner = launches.prefill_sizes(self.hidden, self.num_experts, self.shards, positions)
        inputs = {"x": row_nbytes, "ids": 8 * positions, "weights": 4 * positions, "out": row_nbytes, "error": 64}
        self.at = {name: backend.device(nbytes) for name, nbytes in (sizes | inner | inputs).items()}
        self.at["state"] = backend.device(64, 0)
        self.at["error"] = backend.mapped(64, 0)
        self.batches = backend.mapped(launches.batches_nbytes(self.num_experts, self.shards), 0)
        self.slot_nbytes = int(self.layout.shard_nbytes.max())
        self.slots = backend.device(self.num_experts * self.shards * self.slot_nbytes)
        self.stage = backend.device(self.num_experts * self.layout.expert_nbytes)
        self.table = backend.device(4 * self.num_experts * self.shards)
        self.bias = backend.device(4 * self.num_experts * self.hidden)
        if self.layout.has_bias:
            start = self.layout.down_bias_offset
            self.bias.set(self.host.array.reshape(self.num_experts, -1)[:, start : start + 4 * self.hidden])
        self._make_words(where.gate, sizes, inner)

    def _make_words(self, gate, sizes, inner):
        self.layer = words.layer_words(
            self.layout, layer=5, num_experts=self.num_experts, gate_kind=GATES[gate.kind], alpha=gate.alpha,
            limit=gate.limit, slot_of=self.table.address, slots=self.slots.address, slot_nbytes=self.slot_nbytes,
            down_bias=self.bias.address if self.layout.has_bias else 0,
        )  # fmt: skip
        self.step, self.prefill = np.zeros((), TYPES["Step"]), np.zeros((), TYPES["Prefill"])
        for name in (*sizes, "x", "ids", "weights", "out", "state", "error"):
            self.step[name] = self.at[name].address
        for name in inner:
            self.prefill[name] = self.at[name].address
        self.prefill["host"], self.prefill["host_stride"] = self.host.address, self.layout.expert_nbytes
        kinds = {fmt.activation for fmt in (self.layout.gate, self.layout.up) if fmt is not None}
        for name, kind in (("records", "int8"), ("floats", "f32")):
            if kind not in kinds:
                self.step[name] = 0

    def place(self, where, rng):
        """Shards into slots and to where they are copied, as ``where`` (experts, shards) says; the rest is garbage."""
        slots = np.full((self.num_experts * self.shards, self.slot_nbytes), POISON, np.uint8)
        stage = np.full((self.num_experts, self.layout.expert_nbytes), POISON, np.uint8)
        table, staged = np.full(where.shape, -1, np.int32), np.zeros(where.shape, np.uint64)
        order = iter(rng.permutation(len(slots)).tolist())
        for (expert, shard), place in np.ndenumerate(where):
            start, nbytes = int(self.layout.descriptor[shard, OFFSET]), int(self.layout.descriptor[shard, NBYTES])
            data = self.host.array[expert * self.layout.expert_nbytes + start :][:nbytes]
            if place == SLOT:
                table[expert, shard] = slot = next(order)
                slots[slot, :nbytes] = data
            elif place == STAGED:
                stage[expert, start : start + nbytes] = data
                staged[expert, shard] = self.stage.address + expert * self.layout.expert_nbytes + start
        for memory, array in ((self.slots, slots), (self.stage, stage), (self.table, table)):
            memory.set(array)
        return staged

    def run(self, routing, where, rng, batches=None, parts=None):
        """A whole pass, compared with the reference."""
        staged = self.place(where, rng)
        batches = [rng.permutation(self.num_experts)] if batches is None else batches
        launches.write_batches(self.batches.array, staged, batches)
        hidden = np.ascontiguousarray(routing.hidden)
        for name, array in (("x", hidden), ("ids", routing.ids.astype(self.id_dtype)), ("weights", routing.weights)):
            self.at[name].set(array)
        for name in ("out", "outs", "hidden", "records", "floats", "source"):
            self.at[name].set(np.full_like(self.at[name].get(), POISON))
        step = self.step
        step["x_stride"], step["x_element"] = hidden.strides[0], ELEMENTS[hidden.dtype]
        step["id_nbytes"], step["num_rows"], step["top_k"] = self.id_dtype.itemsize, routing.rows, self.top_k
        step["out_stride"], step["out_element"] = self.hidden * self.out_dtype.itemsize, ELEMENTS[self.out_dtype]
        parts = parts or launches.parts_of(routing.rows, self.top_k, self.num_experts)
        made = launches.begin_launches(self.layer, step, self.prefill, self.batches.address)
        for k, experts in enumerate(batches):
            made += launches.batch_launches(
                self.layout, self.layer, step, self.prefill, k, len(experts), parts
            )  # fmt: skip
        for launch in [*made, launches.sum_launch(self.layer, step, self.prefill)]:
            self.backend.launch(launch)
        wanted = expected(self.store, 0, routing.hidden, routing.ids, routing.weights)
        assert_same_bits(self.output(routing.rows), narrow(wanted, self.out_dtype))

    def output(self, rows):
        nbytes = rows * self.hidden * self.out_dtype.itemsize
        return self.at["out"].get()[:nbytes].view(self.out_dtype).reshape(rows, self.hidden)

    def state(self):
        return self.at["state"].get()[:64].view(TYPES["State"])[0]


def random_step(rng, rows, top_k, num_experts, hidden, dtype=np.float32, skips=True):
    ids, weights = random_routing(rng, rows, top_k, num_experts, skips)
    return Routing(narrow(rng.standard_normal((rows, hidden)).astype(np.float32), np.dtype(dtype)), ids, weights)


def random_places(rng, device):
    return rng.integers(0, 3, (device.num_experts, device.shards))


def shape_of(formats, index):
    return (K_SHAPES if STEP_COLUMNS.get(formats, 256) == 256 else SHAPES)[index % 4]


CASES = [
    (fmt, kind, ROWS[(i + j) % 4], shape_of(fmt, i + 3 * j))
    for i, fmt in enumerate(FORMATS)
    for j, kind in enumerate(kind for kind in KINDS if kind != "relu2")
]
CASES += [("q8_0", "relu2", 19, (288, 544))]
CASES += [(mixed, "silu_glu", 18, (512, 768)) for mixed in ("q4_k+q6_k", "q6_k+mxfp4+f32", "bf16+q8_0+q4_k")]


@pytest.mark.parametrize(("formats", "kind", "rows", "shape"), CASES)
def test_a_pass_gives_the_bits_of_the_reference(backend_of, formats, kind, rows, shape):
    rng = np.random.default_rng([formats.encode()[0], len(kind), rows])
    device = Pass(backend_of, make_store(formats, kind, *shape, seed=rows), rows)
    device.run(random_step(rng, rows, 3, 4, shape[0]), random_places(rng, device), rng)


@pytest.mark.parametrize(
    ("fmt", "shape"), [("q8_0", (32, 32)), ("q8_0", (32, 2336)), ("q8_0", (2336, 32)), ("f16", (32, 2336))]
)
def test_tiny_and_long_rows(backend_of, fmt, shape):
    """One sub-block; more than eight shards; rows of more than eight blocks, which wrap the accumulators."""
    rng = np.random.default_rng(shape[0])
    device = Pass(backend_of, make_store(fmt, "silu_glu", *shape, experts=2), 9, top_k=2)
    device.run(random_step(rng, 9, 2, 2, shape[0]), random_places(rng, device), rng)


@pytest.mark.parametrize(("id_dtype", "dtype"), [(np.int32, np.float16), (np.int64, np.uint16)])
def test_element_types_batches_and_parts(backend_of, dtype, id_dtype):
    """Experts in several batches, one of them empty of rows; all rows on one expert, split over blocks."""
    rng = np.random.default_rng(5)
    device = Pass(backend_of, make_store("q8_0", "silu_glu", 96, 288, experts=7), 36, 2, id_dtype, dtype)
    routing = random_step(rng, 36, 2, 7, 96, dtype)
    routing.ids[:, 1] = 3
    routing.ids[routing.ids == 6] = 5
    for parts in (None, launches.Parts(3, 16), launches.Parts(1, 48)):
        device.run(
            routing, random_places(rng, device), rng, [np.array([6, 1]), np.array([3]), np.array([0, 2, 4, 5])], parts
        )


def test_experts_that_nobody_asked_for_may_be_left_out(backend_of):
    rng = np.random.default_rng(6)
    device = Pass(backend_of, make_store("mxfp4", "swiglu_oai", 96, 288, experts=6), 20, 2)
    routing = random_step(rng, 20, 2, 6, 96, skips=False)
    routing.ids = np.array([1, 4])[routing.ids % 2]
    device.run(routing, np.full((6, 2), IN_PLACE), rng, [np.array([4, 1])])


def test_parts_hold_all_rows_and_fit_in_a_grid():
    for rows in (1, 17, 512, 4096):
        for top_k, experts in ((1, 1), (8, 128), (2, 4096), (8, 60000)):
            splits, span = launches.parts_of(rows, top_k, experts)
            assert splits * span >= rows and span % 16 == 0 and splits * experts <= 65535 and splits <= 16


def test_what_is_counted(backend_of):
    """Hits are shards in slots that somebody was routed to; what was copied counts too, and the clock goes on."""
    rng = np.random.default_rng(7)
    device = Pass(backend_of, make_store("q8_0", "silu_glu", 96, 288, experts=4), 6, 2)
    routing = random_step(rng, 6, 2, 4, 96, skips=False)
    routing.ids = np.array([0, 1])[routing.ids % 2]
    where = np.array([[SLOT, SLOT], [SLOT, STAGED], [SLOT, SLOT], [STAGED, STAGED]])
    device.run(routing, where, rng)
    assert device.state()["clock"] == 1 and device.state()["routed"] == 3 + 3
    device.run(routing, where, rng)
    assert device.state()["clock"] == 2 and device.state()["routed"] == 12


def test_skipped_repeated_and_impossible_ids(backend_of):
    rng = np.random.default_rng(4)
    device = Pass(backend_of, make_store("q8_0", "silu_glu", 96, 288), 3, 4)
    routing = random_step(rng, 3, 4, 4, 96, skips=False)
    routing.ids = np.array([[2, 2, -1, 0], [4, -1, 4, -1], [1, 0, 2, 2]])
    device.run(routing, random_places(rng, device), rng)
    errors = device.at["error"].array[:12].view(np.uint32)
    assert not errors.any()
    routing.ids[0, 0], routing.ids[2, 1] = 5, -7
    device.run(routing, random_places(rng, device), rng)
    assert errors[words.ERRORS.index("bad_id")] == 2
    routing.ids[:] = -1
    device.run(routing, random_places(rng, device), rng)
    assert not device.output(3).any()


def test_an_expert_that_every_row_names_more_than_once(backend_of):
    """It has more positions than there are rows: a table of routes that was never filled sends all rows to expert 0."""
    rng = np.random.default_rng(8)
    device = Pass(backend_of, make_store("q8_0", "silu_glu", 96, 288, experts=8), 40, 3)
    routing = random_step(rng, 40, 3, 8, 96, skips=False)
    routing.ids[:] = 0
    for parts in (None, launches.Parts(2, 16)):
        device.run(routing, random_places(rng, device), rng, parts=parts)


@pytest.mark.parametrize("kind", ["zeros", "denormals", "huge", "nan", "inf"])
@pytest.mark.parametrize("fmt", ["q4_k", "f32"])
def test_degenerate_hidden_rows(backend_of, fmt, kind):
    rng = np.random.default_rng(3)
    device = Pass(backend_of, make_store(fmt, "silu_glu", 512, 256), 4)
    routing = random_step(rng, 4, 3, 4, 512, skips=False)
    routing.hidden = spoil(routing.hidden, kind)
    with np.errstate(all="ignore"):
        device.run(routing, random_places(rng, device), rng)


@pytest.mark.parametrize("fmt", FORMATS[1:])
def test_any_bytes_are_weights(backend_of, fmt):
    rng = np.random.default_rng(11)
    store = any_bytes(make_store(fmt, "silu_glu", 512, 512), rng)
    device = Pass(backend_of, store, 5)
    with np.errstate(all="ignore"):
        device.run(random_step(rng, 5, 3, 4, 512), random_places(rng, device), rng)
