"""What the host device's steps look up: a store and its slots as plain arrays for compiled code."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trilane.cpu_kernels.activation import F32_BLOCK_NBYTES, RECORD_NBYTES
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.host_device import PlayedRates
from trilane.cpu_kernels.isa import best_isa
from trilane.cpu_kernels.layout import NUM_COLUMNS
from trilane.cpu_kernels.shard_words import layer_words
from trilane.cpu_kernels.words import Layer
from trilane.expert import Geometry, make_geometry
from trilane.host_step import CPU_NS, HIT_NS, LINK_FIX_NS, LINK_NS, NUM_PLAYED, ZERO_COPY_NS, Tables
from trilane.store import ExpertStore, StoreLayer


def store_geometry(store: ExpertStore) -> Geometry:
    """Number the experts and shards of a store."""
    return make_geometry(
        [layer.num_experts for layer in store.layers],
        [layer.layout.shard_nbytes.tolist() for layer in store.layers],
    )


class LanesDevice(Protocol):
    """What tables hold of a device: addresses of its slots, workers of the CPU lane, rates that are played."""

    slot_address: np.ndarray
    num_threads: int
    played: PlayedRates


def make_tables(store: ExpertStore, device: LanesDevice, isa: str) -> Tables:
    """Tables of a store on a device, with row kernels of an instruction set ("auto": the best)."""
    layers = store.layers
    isa = best_isa() if isa == "auto" else isa
    words = np.stack([_layer_words(layer, isa) for layer in layers])
    shards = max(layer.layout.num_shards for layer in layers)
    descriptor = np.zeros((len(layers), shards, NUM_COLUMNS), np.int64)
    for index, layer in enumerate(layers):
        descriptor[index, : layer.layout.num_shards] = layer.layout.descriptor
    int8_down = words[:, Layer.DOWN_INT8]
    return Tables(
        layer_words=words,
        layer_address=words.ctypes.data + words.strides[0] * np.arange(len(layers), dtype=np.int64),
        descriptor=descriptor,
        num_shards=np.array([layer.layout.num_shards for layer in layers], np.int64),
        expert_base=np.array([store.arena.address + layer.offset for layer in layers], np.int64),
        expert_stride=np.array([layer.stride for layer in layers], np.int64),
        down_bias=np.array([layer.layout.down_bias_offset for layer in layers], np.int64),
        gate_int8=np.array([_takes_int8(layer, "gate") for layer in layers], np.int64),
        up_int8=np.array([_takes_int8(layer, "up") for layer in layers], np.int64),
        record_nbytes=np.where(int8_down == 1, RECORD_NBYTES, F32_BLOCK_NBYTES).astype(np.int64),
        slot_address=device.slot_address,
        hidden=store.hidden,
        num_threads=device.num_threads,
        played=_played_ns(device),
    )


def _takes_int8(layer: StoreLayer, matrix: str) -> bool:
    fmt = getattr(layer.layout, matrix)
    return fmt is not None and fmt.activation == "int8"


def _layer_words(layer: StoreLayer, isa: str) -> np.ndarray:
    gate = layer.gate
    return layer_words(layer.layout, GATES[gate.kind], gate.alpha, gate.limit, isa)


def _played_ns(device: LanesDevice) -> np.ndarray:
    played = np.zeros(NUM_PLAYED)
    for place, name in (
        (LINK_NS, "link_gb_s"),
        (ZERO_COPY_NS, "zero_copy_gb_s"),
        (HIT_NS, "hit_gb_s"),
        (CPU_NS, "cpu_gb_s"),
    ):
        played[place] = device.played.ns_per_byte(name)
    played[LINK_FIX_NS] = 1000.0 * (device.played.link_fix_us or 0.0)
    return played
