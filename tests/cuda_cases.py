"""One layer-step through the CUDA kernels, played by a test in the place of the host, and what must come out.

The host's part (which lane serves what is missing, the plan, the CPU lane's parts) is done here in the open; the
expected bits are those of the NumPy reference. Everything that kernels write starts as poison.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from cuda_backends import POISON
from expert_cases import assert_same_bits, expected, narrow, random_store, weights_of, widen

from trilane.cpu_kernels import reference
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.layout import OFFSET
from trilane.gpu_kernels import launch as launches
from trilane.gpu_kernels import words
from trilane.gpu_kernels.buffers import buffer_sizes, max_items
from trilane.gpu_kernels.words import TYPES

HIT, STREAM, ZERO_COPY, FILL, CPU = range(5)
ALL = (HIT, STREAM, ZERO_COPY, FILL, CPU)
SLOT_GAP = 64  # bytes behind each slot that nobody may write
ELEMENTS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}


@dataclasses.dataclass
class Routing:
    hidden: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @property
    def rows(self):
        return len(self.ids)


class LayerOnDevice:
    """A store's layer, its host bytes, slots and the table, and all buffers of a step of up to ``max_rows`` rows."""

    def __init__(self, backend, store, max_rows, top_k, id_dtype=np.int64, out_dtype=np.float32):
        self.backend, self.store, self.top_k = backend, store, top_k
        self.id_dtype, self.out_dtype = np.dtype(id_dtype), np.dtype(out_dtype)
        where = store.layers[0]
        self.layout, self.num_experts, gate = where.layout, where.num_experts, where.gate
        self.shards, self.hidden = self.layout.num_shards, self.layout.hidden
        self.host = backend.mapped(self.num_experts * self.layout.expert_nbytes)
        for expert in range(self.num_experts):
            start = expert * self.layout.expert_nbytes
            self.host.array[start : start + self.layout.expert_nbytes] = store.expert_bytes(0, expert)
        self.slot_nbytes = int(self.layout.shard_nbytes.max()) + SLOT_GAP
        self.num_slots = self.num_experts * self.shards
        self.slots = backend.device(self.num_slots * self.slot_nbytes, 0xAB)
        self.table = backend.device(4 * self.num_slots)
        self.stamps = backend.mapped(4 * self.num_experts, 0)
        self.bias = backend.device(4 * self.num_experts * self.hidden)
        self._put_biases()
        self.layer = words.layer_words(
            self.layout, layer=5, num_experts=self.num_experts, gate_kind=GATES[gate.kind], alpha=gate.alpha,
            limit=gate.limit, slot_of=self.table.address, slots=self.slots.address, slot_nbytes=self.slot_nbytes,
            down_bias=self.bias.address if self.layout.has_bias else 0, stamps=self.stamps.address,
        )  # fmt: skip
        self._make_buffers(max_rows)

    def _put_biases(self):
        if not self.layout.has_bias:
            return
        host, start = self.host.array.reshape(self.num_experts, -1), self.layout.down_bias_offset
        self.bias.set(host[:, start : start + 4 * self.hidden])

    def _make_buffers(self, max_rows):
        sizes = buffer_sizes(self.hidden, self.shards, self.num_experts, max_rows, self.top_k, self.num_slots)
        self.max_items = max_items(self.num_experts, self.shards, max_rows, self.top_k)
        positions = max_rows * self.top_k
        row_nbytes = 4 * max_rows * (self.hidden + 8)
        device = {"x": row_nbytes, "ids": 8 * positions, "weights": 4 * positions, "out": row_nbytes, **sizes.device}
        lists = {"plan_list": words.list_nbytes(self.max_items), "updates": 64 + 32 * self.max_items}
        mapped = {**sizes.mapped, **lists}
        fills = dict.fromkeys((*sizes.zeroed, *lists), 0)
        self.at = {name: self.backend.device(nbytes, fills.get(name, POISON)) for name, nbytes in device.items()}
        self.at |= {name: self.backend.mapped(nbytes, fills.get(name, POISON)) for name, nbytes in mapped.items()}
        nbytes = words.progress_nbytes(self.max_items)
        self.progress = [self.backend.device(nbytes, 0) for _ in range(2)]
        self.step = np.zeros((), TYPES["Step"])
        for name, memory in self.at.items():
            if name in TYPES["Step"].names:
                self.step[name] = memory.address
        self.step["table"] = self.table.address
        formats = (self.layout.gate, self.layout.up)
        kinds = {fmt.activation for fmt in formats if fmt is not None}
        for name, kind in (("records", "int8"), ("floats", "f32")):
            if kind not in kinds:
                self.step[name] = self.step[f"mail_{name}"] = 0

    # ------------------------------------------------------------------------------------------- views
    def view(self, name, dtype, shape):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.at[name].get()[:count].view(dtype).reshape(shape)

    def state(self):
        return self.at["state"].get()[:64].view(TYPES["State"])[0]

    def mail(self):
        return self.at["mail"].array[:64].view(TYPES["Mailbox"])[0]

    def errors(self):
        return dict(zip(words.ERRORS, self.at["error"].array[:12].view(np.uint32).tolist(), strict=True))

    def shard_bytes(self, expert, shard):
        where = self.layout.descriptor[shard]
        start = expert * self.layout.expert_nbytes + int(where[OFFSET])
        return self.host.array[start : start + int(self.layout.shard_nbytes[shard])]

    def slot(self, index):
        return self.slots.get()[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]

    # -------------------------------------------------------------------------------------- residency
    def set_resident(self, lanes, rng):
        """Hits get a slot with their bytes in it; the other slots hold garbage. ``lanes`` (experts, shards)."""
        order = rng.permutation(self.num_slots)
        table, slots = np.full(lanes.shape, -1, np.int32), np.full((self.num_slots, self.slot_nbytes), 0xAB, np.uint8)
        free = iter(order.tolist())
        for expert, shard in np.argwhere(lanes == HIT):
            table[expert, shard] = slot = next(free)
            data = self.shard_bytes(expert, shard)
            slots[slot, : len(data)] = data
        self.free = list(free)
        self.table.set(table)
        self.slots.set(slots)

    # ------------------------------------------------------------------------------------------- steps
    def begin(self, routing):
        """Inputs in place, outputs poisoned, publish and the hits."""
        hidden = np.ascontiguousarray(routing.hidden)
        for name, array in (("x", hidden), ("ids", routing.ids.astype(self.id_dtype)), ("weights", routing.weights)):
            self.at[name].set(array)
        for name in ("out", "parts", "h", "lane", "records", "floats", "hits", "cpu_parts"):
            self.at[name].set(np.full_like(self.at[name].get(), POISON))
        step = self.step
        step["x_stride"], step["x_element"] = hidden.strides[0], ELEMENTS[hidden.dtype]
        step["weight_element"] = ELEMENTS[routing.weights.dtype]
        step["id_nbytes"], step["num_rows"], step["top_k"] = self.id_dtype.itemsize, routing.rows, self.top_k
        step["out_stride"], step["out_element"] = self.hidden * self.out_dtype.itemsize, ELEMENTS[self.out_dtype]
        self.backend.launch(launches.publish_launch(self.layer, step))
        self.backend.launch(self._experts(0))

    def _progress(self, plan):
        return words.progress_words(self.progress[plan].address, self.max_items)

    def _experts(self, plan):
        what = (self.layout, self.layer, self.step, self._progress(plan), self.max_items)
        if plan:
            return launches.plan_launch(*what, self.at["plan_list"].address, self.at["updates"].address)
        return launches.hit_launch(*what, most_shared=self.most_shared)

    @property
    def most_shared(self):
        return launches.whole_nbytes(self.backend.multiprocessor_shared_nbytes)

    def finish(self):
        """The plan's part of a step, after `write_plan`."""
        self.backend.launch(self._experts(1))
        self.backend.launch(launches.combine_launch(self.layer, self.step, self._progress(0), self._progress(1)))

    def groups(self):
        """(expert, first position, rows) of each group, from the mailbox."""
        n = int(self.step["num_rows"]) * self.top_k
        table = self.view("mail_groups", np.int32, (3, n))
        return table[:, : int(self.mail()["num_groups"])].T

    def write_plan(self, routing, lanes):
        """Items, updates and CPU parts for what the mailbox names as missing; ``lanes`` (experts, shards)."""
        items, updates = [], []
        sequence = int(self.mail()["end"])
        tokens = self.view("mail_tokens", np.int32, (int(self.step["num_rows"]) * self.top_k,))
        for group, (expert, first, rows) in enumerate(self.groups()):
            mask = int(self.view("mail_missing", np.uint64, (group + 1,))[group])
            for shard in range(self.shards):
                if not mask >> shard & 1:
                    continue
                if lanes[expert, shard] == CPU:
                    self._compute(routing, expert, shard, first, tokens[first : first + rows])
                    continue
                items.append(self._item(expert, shard, first, rows, lanes[expert, shard], sequence, updates))
        items.sort(key=lambda item: item["flag"] != 0)
        self.at["plan_list"].array[8:12].view(np.int32)[0] = len(updates)
        rows = np.array([(*pair, sequence, 0) for pair in updates], TYPES["Update"])
        self._write_list("updates", sequence, rows)
        self._write_list("plan_list", sequence, np.array(items, TYPES["Item"]))
        self.at["cpu_flag"].array[:4].view(np.uint32)[0] = sequence
        return items

    def _item(self, expert, shard, first, rows, lane, sequence, updates):
        item = np.zeros((), TYPES["Item"])
        data = self.shard_bytes(expert, shard)
        item["shard"], item["first_position"], item["num_rows"] = shard, first, rows
        item["sequence"] = item["sequence_2"] = item["sequence_3"] = sequence
        item["weights"] = data.ctypes.data
        if lane in (STREAM, FILL):
            slot = self.free.pop()
            updates.append((expert * self.shards + shard, slot))
            address = self.slots.address + slot * self.slot_nbytes
        if lane == FILL:
            item["fill"] = address
        if lane == STREAM:
            self._copy_to_slot(slot, data)
            item["weights"], item["flag"] = address, self.at["cpu_flag"].address
        return item

    def _copy_to_slot(self, slot, data):
        whole = self.slots.get().copy()
        whole[slot * self.slot_nbytes : slot * self.slot_nbytes + len(data)] = data
        self.slots.set(whole)

    def _compute(self, routing, expert, shard, first, tokens):
        x = widen(routing.hidden)[tokens]
        v = reference.reference_expert(x, *weights_of(self.store, 0, expert)).v[:, shard]
        parts = self.view("cpu_parts", np.float32, (routing.ids.size, self.shards, self.hidden))
        parts[first : first + len(tokens), shard] = v

    def _write_list(self, name, sequence, rows):
        memory = self.at[name]
        memory.array[64 : 64 + rows.nbytes] = rows.view(np.uint8).reshape(-1)
        header = memory.array[:64].view(np.int32)
        header[1] = len(rows)
        header[0] = sequence

    def output(self, rows):
        raw = self.view("out", self.out_dtype, (rows, self.hidden))
        return raw.copy()

    # ------------------------------------------------------------------------------------------ checks
    def run(self, routing, lanes, rng):
        """A whole step with these lanes (experts, shards), compared with the reference; the plan's items."""
        self.set_resident(lanes, rng)
        self.begin(routing)
        self.check_published(routing, lanes)
        items = []
        if int(self.state()["missing"]):
            items = self.write_plan(routing, lanes)
        self.finish()
        self.check_output(routing)
        self.check_fills(lanes)
        return items

    def check_output(self, routing, what=""):
        wanted = expected(self.store, 0, routing.hidden, routing.ids, widen(routing.weights))
        assert_same_bits(self.output(routing.rows), narrow(wanted, self.out_dtype), what)

    def check_published(self, routing, lanes):
        ids, rows = routing.ids, routing.rows
        real = (ids >= 0) & (ids < self.num_experts)
        experts = np.unique(ids[real])
        missing = int((lanes[experts] != HIT).sum())
        state = self.state()
        assert state["missing"] == missing and state["num_groups"] == len(experts)
        x = widen(routing.hidden)
        if self.step["records"]:
            nb = -(-self.hidden // 256)
            records = self.view("records", np.uint8, (rows, nb * 320))
            assert np.array_equal(records, reference.records(x).view(np.uint8).reshape(rows, -1))
        stamps = self.stamps.array[: 4 * self.num_experts].view(np.uint32)
        assert (stamps[experts] == state["clock"]).all()
        if missing:
            self.check_mail(routing, lanes, experts)

    def check_mail(self, routing, lanes, experts):
        mail, state, n = self.mail(), self.state(), routing.ids.size
        assert mail["begin"] == mail["end"] == state["sequence"] and mail["layer"] == 5
        assert mail["clock"] == state["clock"] and mail["num_missing"] == state["missing"]
        assert (mail["num_rows"], mail["top_k"]) == (routing.rows, self.top_k)
        counts = [(routing.ids == expert).sum() for expert in experts]
        groups = self.groups()
        assert groups[:, 0].tolist() == experts.tolist() and groups[:, 2].tolist() == counts
        assert groups[:, 1].tolist() == (np.cumsum(counts) - counts).tolist()
        masks = self.view("mail_missing", np.uint64, (len(experts),))
        wanted = [sum(1 << j for j in range(self.shards) if lanes[e, j] != HIT) for e in experts]
        assert masks.tolist() == wanted
        tokens = np.concatenate([np.nonzero(routing.ids == e)[0] for e in experts])
        assert self.view("mail_tokens", np.int32, (len(tokens),)).tolist() == tokens.tolist()
        assert np.array_equal(self.view("mail_weights", np.float32, (n,)), widen(routing.weights).reshape(-1))
        x = widen(routing.hidden)
        assert self.view("mail_bad", np.int32, (routing.rows,)).tolist() == (~np.isfinite(x).all(1)).tolist()
        for name in ("records", "floats"):
            if self.step[name]:
                size = routing.rows * -(-self.hidden // 256) * {"records": 320, "floats": 1024}[name]
                assert np.array_equal(self.view(f"mail_{name}", np.uint8, (size,)), self.view(name, np.uint8, (size,)))

    def check_fills(self, lanes):
        """Slots that the table names hold their shard, byte for byte; nothing was written past any slot."""
        table = self.table.get()[: 4 * self.num_slots].view(np.int32).reshape(lanes.shape)
        named = set()
        for expert, shard in np.argwhere(table >= 0):
            slot = self.slot(table[expert, shard])
            data = self.shard_bytes(expert, shard)
            assert np.array_equal(slot[: len(data)], data), (expert, shard)
            assert (slot[len(data) :] == 0xAB).all()
            named.add(int(table[expert, shard]))
        for index in set(range(self.num_slots)) - named:
            assert (self.slot(index) == 0xAB).all()


def random_lanes(rng, num_experts, shards, lanes=ALL):
    return rng.choice(lanes, (num_experts, shards))


def make_store(formats, kind, hidden, intermediate, experts=4, seed=0):
    return random_store(formats, kind, experts=experts, hidden=hidden, intermediate=intermediate, seed=seed)


def spoil(x, kind):
    """Hidden rows with something in them that quantisation must survive."""
    x = x.copy()
    if kind == "zeros":
        x[:] = 0
    elif kind == "zero block":
        x[0, :256] = -0.0
    elif kind == "denormals":
        x[:] *= np.float32(2.0**-140)
    elif kind == "huge":
        x[:] *= np.float32(2.0**100)
    else:
        x[0, 300] = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}[kind]
    return x


def any_bytes(store, rng):
    """The store with random bytes for weights: its scales are infinite, NaN, denormal or negative."""
    for expert in range(store.layers[0].num_experts):
        data = store.expert_bytes(0, expert)
        data[:] = rng.integers(0, 256, len(data), dtype=np.uint8)
    return store
