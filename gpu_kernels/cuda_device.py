"""The CUDA device: slots in VRAM, the slot table, the buffers of a step, streams, pinned host memory, launches.

It makes addresses and launches kernels. What is in a slot and what a plan says is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.cpu_kernels.formats import BLOCK, align_up
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.gpu_kernels import launch, words
from trilane.gpu_kernels.build import variant_of
from trilane.gpu_kernels.driver import Driver, DriverError, Encoded
from trilane.gpu_kernels.launch import Launch
from trilane.gpu_kernels.pinning import Pinned, pin_region
from trilane.gpu_kernels.prefill_memory import FREE_PART, MOST_NBYTES, PrefillMemory, shape_within

RESERVE_NBYTES = 512 << 20  # of free device memory that is left to others
ALIGNMENT = 256
FEWER_SLOTS = 0.9  # of what a failed allocation asked for
HIGH_PRIORITY, LOW_PRIORITY = -1, 0


@dataclass(frozen=True)
class DeviceShape:
    """Sizes of the buffers: rows and rows x ranks of a step, and the largest layer's."""

    max_rows: int
    max_positions: int
    hidden: int
    max_experts: int
    max_shards: int
    num_shards: int  # of all experts of all layers

    @property
    def max_items(self) -> int:
        """Expert-shards that a step can touch."""
        return min(self.max_positions, self.max_experts) * self.max_shards


@dataclass(frozen=True)
class DeviceLayer:
    """A layer as the kernels need it; ``expert_base`` and ``expert_stride`` are in host memory."""

    layout: ExpertLayout
    index: int
    num_experts: int
    first_expert: int
    first_shard: int
    gate_kind: int
    alpha: float
    limit: float
    expert_base: int
    expert_stride: int


def _device_sizes(s: DeviceShape) -> dict[str, int]:
    blocks, items = -(-s.hidden // BLOCK), s.max_positions * s.max_shards
    progress = words.progress_nbytes(s.max_items)
    return {
        "records": s.max_rows * blocks * words.RECORD_NBYTES, "floats": s.max_rows * blocks * words.F32_BLOCK_NBYTES,
        "row_bad": 4 * s.max_rows, "groups": 12 * s.max_positions, "token_of": 4 * s.max_positions,
        "position_of": 4 * s.max_positions, "hits": words.list_nbytes(s.max_items),
        "plan": words.list_nbytes(s.max_items), "lane": 4 * items, "h": words.F32_BLOCK_NBYTES * items,
        "parts": 4 * s.hidden * items, "state": 64, "table": 4 * s.num_shards, "copy_flags": 4 * s.max_items,
        "hits_progress": progress, "plan_progress": progress,
    }  # fmt: skip


def _mapped_sizes(s: DeviceShape) -> dict[str, int]:
    blocks, items = -(-s.hidden // BLOCK), s.max_positions * s.max_shards
    updates = words.HEADER_NBYTES + words.UPDATE_NBYTES * 2 * max(s.max_items, s.max_experts * s.max_shards)
    return {
        "mail": 64, "pending": updates, "acknowledged": 64, "cpu_flag": 64, "error": 64,
        "updates": updates, "plan_list": words.list_nbytes(s.max_items), "copied": 64, "fill_flag": 64,
        "stamps": 4 * s.num_shards, "mail_groups": 12 * s.max_positions, "mail_missing": 8 * s.max_positions,
        "mail_tokens": 4 * s.max_positions, "mail_weights": 4 * s.max_positions,
        "mail_records": s.max_rows * blocks * words.RECORD_NBYTES,
        "mail_floats": s.max_rows * blocks * words.F32_BLOCK_NBYTES, "mail_bad": 4 * s.max_rows,
        "brief": words.BRIEF_NBYTES, "told": blocks * words.TOLD_NBYTES, "uses": words.USES_NBYTES,
        "cpu_parts": 4 * s.hidden * items, "host_x": 4 * s.hidden * s.max_rows, "host_out": 4 * s.hidden * s.max_rows,
        "host_ids": 8 * s.max_positions, "host_weights": 4 * s.max_positions,
    }  # fmt: skip


def _place(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of parts in one block, each at a multiple of ALIGNMENT, and the block's bytes."""
    offsets, end = {}, 0
    for name, nbytes in sizes.items():
        offsets[name] = end
        end = align_up(end + nbytes, ALIGNMENT)
    return offsets, end


class CudaDevice:
    """Memory, streams and kernels of one scheduler on one GPU.

    Parameters
    ----------
    driver : Driver
    layers : sequence of DeviceLayer
    shape : DeviceShape
    num_slots : int
        Slots that are wanted; ``num_slots`` of the device says how many fit.
    slot_nbytes : int
        Bytes of each, a multiple of 64.
    arena_address, arena_nbytes : int
        The store's experts in host memory.
    pin_limit : int, optional
        Bytes of the arena that may be pinned.
    """

    def __init__(
        self,
        driver: Driver,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        *,
        num_slots: int,
        slot_nbytes: int,
        arena_address: int,
        arena_nbytes: int,
        pin_limit: int | None = None,
    ) -> None:
        self.driver, self.layers, self.shape, self.slot_nbytes = driver, layers, shape, slot_nbytes
        self.notes: dict[str, str] = {}  # what is less than was asked for, and why
        self._device_blocks: list[int] = []
        self._mapped_blocks: list[int] = []
        self._streams: list[int] = []
        self.pinned: Pinned | None = None
        self.prefill: PrefillMemory | None = None  # None: there is no room for it
        try:
            self._allocate(num_slots)
            self.pinned = pin_region(driver, arena_address, arena_nbytes, pin_limit)
            if self.pinned.reason:
                self.notes["pinned"] = self.pinned.reason
            if self.prefill is not None and self.pinned.pinned_nbytes < arena_nbytes:
                self.prefill.add_bounces()
            self._load()
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------------------------------------- memory
    def _allocate(self, num_slots: int) -> None:
        self.address: dict[str, int] = {}
        for sizes, allocate, blocks in (
            (_device_sizes(self.shape), self.driver.allocate, self._device_blocks),
            (_mapped_sizes(self.shape), self.driver.allocate_mapped, self._mapped_blocks),
        ):
            offsets, nbytes = _place(sizes)
            blocks.append(allocate(nbytes))
            self.address |= {name: blocks[-1] + offset for name, offset in offsets.items()}
        self.address["abort"] = self.address["cpu_flag"] + 4  # the GPU looks at both at once
        self.copy_stream = self._make_stream(HIGH_PRIORITY)
        self.fill_stream = self._make_stream(LOW_PRIORITY)
        self.work_stream = self._make_stream(HIGH_PRIORITY)  # of callers who bring none
        self.empty_table()
        self._biases = [self._copy_biases(layer) for layer in self.layers]
        self._allocate_prefill()
        self._allocate_slots(num_slots)

    def empty_table(self) -> None:
        """The slot table says that nothing is in a slot; no step may be under way."""
        self.write_table(np.full(self.shape.num_shards, -1, np.int32))

    def write_table(self, slot_of: np.ndarray) -> None:
        """The slot table as a whole, int32 (shards,): a slot or -1 each; no step may be under way."""
        self.driver.to_device(self.address["table"], slot_of.ctypes.data, slot_of.nbytes, self.work_stream)
        self.driver.synchronize()

    def _make_stream(self, priority: int) -> int:
        self._streams.append(self.driver.make_stream(priority))
        return self._streams[-1]

    def _allocate_prefill(self) -> None:
        """Buffers for large batches; without room for them these go through the step in parts."""
        nbytes = min(MOST_NBYTES, self.driver.free_nbytes() // FREE_PART)
        expert = max(layer.expert_stride for layer in self.layers)
        whole = max(layer.num_experts * layer.expert_stride for layer in self.layers)
        shape = shape_within(nbytes, self.shape.hidden, self.shape.max_experts, self.shape.max_shards, expert, whole)
        try:
            self.prefill = PrefillMemory(self.driver, shape) if shape else None
            problem = "" if shape else f"its buffers take more than {nbytes} bytes of device memory"
        except DriverError as error:
            problem = str(error)
        if problem:
            self.notes["prefill"] = f"large batches go through the step in parts: {problem}; free device memory"

    def _allocate_slots(self, wanted: int) -> None:
        """Slots from memory that is free, never from all there is; fewer where they do not fit."""
        free = self.driver.free_nbytes()
        count = min(wanted, max(0, free - RESERVE_NBYTES) // self.slot_nbytes)
        self.slots, problem = 0, ""
        while count > 0 and not self.slots:
            try:
                self.slots = self.driver.allocate(count * self.slot_nbytes)
            except DriverError as error:
                problem, count = f" ({error})", int(count * FEWER_SLOTS)
        if self.slots:
            self._device_blocks.append(self.slots)
        self.num_slots = count
        if count < wanted:
            self.notes["cache"] = (
                f"{count} of {wanted} slots of {self.slot_nbytes} bytes fit: {free} bytes of device memory were free, "
                f"of which {RESERVE_NBYTES} are left to others{problem}; free device memory or set cache.nbytes"
            )

    def _copy_biases(self, layer: DeviceLayer) -> int:
        """A device copy of a layer's down biases; 0 without."""
        offset, hidden = layer.layout.down_bias_offset, layer.layout.hidden
        if offset < 0:
            return 0
        rows = np.zeros((layer.num_experts, hidden), np.float32)
        for expert in range(layer.num_experts):
            source = layer.expert_base + expert * layer.expert_stride + offset
            rows[expert] = _floats_at(source, hidden)
        self._device_blocks.append(self.driver.allocate(rows.nbytes))
        self.driver.to_device(self._device_blocks[-1], rows.ctypes.data, rows.nbytes, self.work_stream)
        self.driver.synchronize()
        return self._device_blocks[-1]

    def mapped(self, name: str, dtype: Any, count: int) -> np.ndarray:
        """A part of the mapped memory as an array."""
        nbytes = np.dtype(dtype).itemsize * count
        return _bytes_at(self.address[name], nbytes).view(dtype)

    # ------------------------------------------------------------------------------------------- kernels
    def _load(self) -> None:
        variants = {variant_of(layer.layout) for layer in self.layers}
        loaded = {variant: self.driver.load_kernels(variant) for variant in variants}
        self._kernels = [loaded[variant_of(layer.layout)] for layer in self.layers]
        self._layer_words = [
            words.layer_words(
                layer.layout,
                layer=layer.index,
                num_experts=layer.num_experts,
                gate_kind=layer.gate_kind,
                alpha=layer.alpha,
                limit=layer.limit,
                slot_of=self.address["table"] + 4 * layer.first_shard,
                slots=self.slots,
                slot_nbytes=self.slot_nbytes,
                down_bias=bias,
                stamps=self.address["stamps"] + 4 * layer.first_expert,
            )  # fmt: skip
            for layer, bias in zip(self.layers, self._biases, strict=True)
        ]

    def step_words(self, layer: int) -> np.ndarray:
        """The Step struct with all that belongs to the device; inputs and output are the caller's."""
        step = np.zeros((), words.TYPES["Step"])
        for name in words.TYPES["Step"].names or ():
            if name in self.address:
                step[name] = self.address[name]
        layout = self.layers[layer].layout
        kinds = {fmt.activation for fmt in (layout.gate, layout.up) if fmt is not None}
        for name, kind in (("records", "int8"), ("floats", "f32")):
            if kind not in kinds:
                step[name] = step[f"mail_{name}"] = 0
        return step

    def encode_step(self, layer: int, step: np.ndarray) -> Encoded:
        """The launches of one layer-step for these inputs: constant, so that they can be captured."""
        where, layer_words = self.layers[layer], self._layer_words[layer]
        positions = int(step["num_rows"]) * int(step["top_k"])
        items = min(positions, where.num_experts) * where.layout.num_shards
        progress = [
            words.progress_words(self.address[f"{name}_progress"], self.shape.max_items) for name in ("hits", "plan")
        ]
        lists = self.address["plan_list"], self.address["updates"]
        most = launch.whole_nbytes(self.driver.multiprocessor_shared_nbytes)
        launches = [
            launch.publish_launch(layer_words, step),
            launch.hit_launch(where.layout, layer_words, step, progress[0], items, most_shared=most),
            launch.plan_launch(where.layout, layer_words, step, progress[1], items, *lists, wait=True),
            launch.combine_launch(layer_words, step, *progress),
        ]
        return self.driver.encode(self._kernels[layer], launches)

    def encode_whole(self, layer: int, launches: Sequence[Launch]) -> Encoded:
        """Launches of a layer's kernels that start when all that was before them has ended."""
        return self.driver.encode(self._kernels[layer], launches, early=False)

    def layer_words(self, layer: int) -> np.ndarray:
        """The Layer struct."""
        return self._layer_words[layer]

    def close(self) -> None:
        """Free everything; no kernel may be waiting for the host any more."""
        self.driver.make_current()
        self.driver.synchronize()
        if self.pinned is not None:
            self.pinned.release(self.driver)
        if self.prefill is not None:
            self.prefill.close()
            self.prefill = None
        for block in self._device_blocks:
            self.driver.free(block)
        for block in self._mapped_blocks:
            self.driver.free_mapped(block)
        self._device_blocks, self._mapped_blocks, self.pinned = [], [], None
        self.driver.close(self._streams)
        self._streams = []


def array_at(address: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Memory of the host as an array."""
    kind = np.dtype(dtype)
    return _bytes_at(address, kind.itemsize * math.prod(shape)).view(kind).reshape(shape)


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _floats_at(address: int, count: int) -> np.ndarray:
    return _bytes_at(address, 4 * count).view(np.float32)
