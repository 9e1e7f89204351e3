"""Steps of a single row as a chain of kernels that overlap, while a host answers misses and changes slots.

The kernels are the product's own, on the processor: blocks of several kernels take turns at random. The host here keeps
the rules of cuda_fills.py: a shard that leaves its slot is told, acknowledged, and a further list acknowledged, before
other bytes are written there. So a kernel that relied on what is not sure would give other bits, or not end.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from cuda_backends import Shim
from cuda_cases import HIT, LayerOnDevice, make_store
from expert_cases import assert_same_bits, expected

from trilane.cpu_kernels import reference
from trilane.gpu_kernels import launch as launches
from trilane.gpu_kernels.build import variant_of
from trilane.gpu_kernels.words import TYPES

HIDDEN, TOP_K, STEPS = 256, 2, 4


class Host:
    """What the control thread, the CPU lane and the link do, a bit whenever it is called."""

    def __init__(self, device, tokens, seed, resident, fills):
        self.device, self.tokens, self.rng = device, tokens, random.Random(seed)
        self.answered = self.sequence = 0
        self.flags = []  # what is told later: (name of the word, its value)
        self.table = np.full((device.num_experts, device.shards), -1)
        lanes = np.where(np.random.default_rng(seed).random(self.table.shape) < resident, HIT, 4)
        device.set_resident(lanes, np.random.default_rng(seed))
        self.table[:] = device.table.get()[: self.table.nbytes // 2].view(np.int32).reshape(self.table.shape)
        self.free, self.fills, self.stage, self.changes = list(device.free), fills, 0, []

    def __call__(self):
        for act in self.rng.sample([self.answer, self.flag, self.change], 3):
            act()

    # ------------------------------------------------------------------------------------------ misses
    def answer(self):
        """Plan a step whose mailbox is closed: each missing shard in place, in place with a fill, or on the CPU."""
        device, mail = self.device, self.device.mail()
        if mail["end"] != self.answered + 1 or mail["begin"] != mail["end"]:
            return
        self.answered += 1
        x = self.tokens[self.answered_step(int(mail["clock"]))].hidden
        items, updates = [], []
        for group, (expert, first, _) in enumerate(device.groups().tolist()):
            mask = int(device.view("mail_missing", np.uint64, (group + 1,))[group])
            for shard in range(device.shards):
                if mask >> shard & 1:
                    self._serve(x, expert, shard, first, items, updates)
        rows = np.array([(*pair, self.answered, 0) for pair in updates], TYPES["Update"])
        device.at["plan_list"].array[8:12].view(np.int32)[0] = len(updates)
        device._write_list("updates", self.answered, rows)
        device._write_list("plan_list", self.answered, np.array(items, TYPES["Item"]))
        self.flags.append(("cpu_flag", self.answered))

    @staticmethod
    def answered_step(clock):
        return clock - 1

    def _serve(self, x, expert, shard, first, items, updates):
        device = self.device
        how = self.rng.choice(["in place", "fill", "cpu"] if self.free and self.stage == 0 else ["in place", "cpu"])
        data = device.shard_bytes(expert, shard)
        if how == "cpu":
            weights = reference_parts(device.store, expert, x)
            device.view("cpu_parts", np.float32, (TOP_K, device.shards, device.hidden))[first, shard] = weights[shard]
            return
        item = np.zeros((), TYPES["Item"])
        item["shard"], item["first_position"], item["num_rows"] = shard, first, 1
        item["sequence"] = item["sequence_2"] = item["sequence_3"] = self.answered
        item["weights"] = data.ctypes.data
        if how == "fill" and self.table[expert, shard] < 0:
            slot = self.free.pop()
            item["fill"] = device.slots.address + slot * device.slot_nbytes
            updates.append((expert * device.shards + shard, slot))
            self.table[expert, shard] = slot
        items.append(item)

    def flag(self):
        if self.flags:
            name, value = self.flags.pop()
            self.device.at[name].array[:4].view(np.uint32)[0] = value

    # ------------------------------------------------------------------------------------------- fills
    def change(self):
        """Move the change of slots that is under way on, or begin one: some shards leave, others take their slots."""
        device = self.device
        if device.at["acknowledged"].array[:4].view(np.uint32)[0] != self.sequence or not self.fills:
            return
        if self.stage == 0:
            there, gone = np.argwhere(self.table >= 0).tolist(), np.argwhere(self.table < 0).tolist()
            count = min(len(there), len(gone), self.rng.randrange(1, 4))
            leaving = self.rng.sample(there, count)
            self.changes = [
                (tuple(a), tuple(b), int(self.table[tuple(a)])) for a, b in zip(leaving, gone, strict=False)
            ]
            for old, _, _ in self.changes:
                self.table[old] = -1
            self.post([(old, -1) for old, _, _ in self.changes])
            self.stage = 1
        elif self.stage == 1:
            self.post([])
            self.stage = 2
        elif self.stage == 2:
            for _, (expert, shard), slot in self.changes:
                data = device.shard_bytes(expert, shard)
                device.slots.array[slot * device.slot_nbytes :][: len(data)] = data
            self.post([(new, slot) for _, new, slot in self.changes])
            self.stage = 3
        else:
            for _, new, slot in self.changes:
                self.table[new] = slot
            self.stage = 0

    def post(self, changes):
        self.sequence += 1
        rows = [(e * self.device.shards + s, slot, self.sequence, 0) for (e, s), slot in changes]
        self.device._write_list("pending", self.sequence, np.array(rows, TYPES["Update"]))


def reference_parts(store, expert, x):
    from expert_cases import weights_of

    return reference.reference_expert(x, *weights_of(store, 0, expert)).v[0]


class Token:
    """A step's inputs and output, in memory of their own, and its launches."""

    def __init__(self, device, rng):
        self.hidden = rng.standard_normal((1, HIDDEN)).astype(np.float32)
        self.ids = rng.permutation(device.num_experts)[:TOP_K].astype(np.int64)[None]
        self.weights = rng.random((1, TOP_K)).astype(np.float32)
        self.out = np.full((1, HIDDEN), np.nan, np.float32)
        step = device.step.copy()
        for name in ("hidden", "ids", "weights", "out"):
            step["x" if name == "hidden" else name] = getattr(self, name).ctypes.data
        step["x_stride"] = step["out_stride"] = 4 * HIDDEN
        step["x_element"] = step["out_element"] = step["weight_element"] = 0
        step["id_nbytes"] = 8
        parts = device.layout, device.layer, step
        lists = device.at["plan_list"].address, device.at["updates"].address
        hits, plan = device._progress(0), device._progress(1)
        self.launches = [
            launches.publish_launch(device.layer, step),
            launches.hit_launch(*parts, hits, device.max_items),
            launches.plan_launch(*parts, plan, device.max_items, *lists, wait=True),
            launches.combine_launch(device.layer, step, hits, plan),
        ]


def run_steps(seed, resident, fills, window=24, fmt="q4_k", intermediate=512):
    rng = np.random.default_rng(seed)
    store = make_store(fmt, "silu_glu", HIDDEN, intermediate, experts=6, seed=seed)
    device = LayerOnDevice(Shim(variant_of(store.layers[0].layout)), store, 1, TOP_K)
    device.step["num_rows"], device.step["top_k"] = 1, TOP_K
    tokens = [Token(device, rng) for _ in range(STEPS)]
    host = Host(device, tokens, seed, resident, fills)
    device.backend.launch_chain([one for token in tokens for one in token.launches], seed + 1, host, window)
    for number, token in enumerate(tokens):
        wanted = expected(store, 0, token.hidden, token.ids, token.weights)
        assert_same_bits(token.out, wanted, f"seed {seed}, step {number}")
    assert not any(device.errors().values()) and device.state()["clock"] == STEPS
    return host


@pytest.mark.parametrize("seed", range(8))
def test_steps_without_misses(seed):
    host = run_steps(seed, resident=1.0, fills=False, window=20 + 5 * (seed % 5))
    assert host.answered == 0


@pytest.mark.parametrize("seed", range(12))
def test_steps_with_misses(seed):
    host = run_steps(100 + seed, resident=0.5, fills=False, window=20 + 5 * (seed % 5))
    assert host.answered > 0


@pytest.mark.parametrize("seed", range(16))
def test_slots_that_change_hands_meanwhile(seed):
    host = run_steps(200 + seed, resident=[0.6, 0.95][seed % 2], fills=True, window=20 + 5 * (seed % 5))
    assert host.sequence > 1


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_of_more_items_than_are_worked_on_at_a_time(seed, monkeypatch):
    monkeypatch.setattr(launches, "PLAN_ITEMS", 2)
    host = run_steps(300 + seed, resident=0.2, fills=seed % 2 == 1, intermediate=768)
    assert host.answered > 0
