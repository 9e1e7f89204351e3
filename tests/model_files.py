"""Writers of small model files, independent of the readers: GGUF and safetensors from plain bytes."""

from __future__ import annotations

import json
import struct

import numpy as np

from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.quantize import quantize_matrix

# ggml's type numbers and blocks, written down once more
TYPES = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176), "q6_k": (14, 256, 210), "bf16": (30, 1, 2), "mxfp4": (39, 32, 17), "i32": (26, 1, 4),
}  # fmt: skip


def gguf_text(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value):
    """Type number and bytes of a metadata value."""
    if isinstance(value, tuple):  # (item type, bytes of the items, count)
        return struct.pack("<IIQ", 9, value[0], value[2]) + value[1]
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_text, value))
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def gguf_bytes(tensors, metadata=None, *, version=3, alignment=32, pad_end=True):
    """A GGUF file. ``tensors``: name -> (type, shape, bytes), or (type, shape, bytes, offset) to lie about it."""
    pairs = {"general.architecture": "qwen3moe"} | (metadata or {})
    infos, data = b"", b""
    for name, (kind, shape, raw, *offset) in tensors.items():
        number = TYPES[kind][0] if isinstance(kind, str) else kind
        place = offset[0] if offset else len(data)
        infos += gguf_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", number, place)
        data += raw + bytes(-len(raw) % alignment)
    keys = b"".join(gguf_text(key) + gguf_value(value) for key, value in pairs.items())
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + keys + infos
    return header + bytes(-len(header) % alignment) + (data if pad_end else data.rstrip(b"\0"))


def safetensors_bytes(tensors, *, metadata=None, pad=True):
    """A safetensors file. ``tensors``: name -> (dtype, shape, bytes)."""
    header = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    return struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values())


def to_bf16(values):
    """float32 -> the upper halves of their bits, as uint16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def quantized(values, name):
    """(experts, rows, columns) float32 -> (experts, rows, row bytes) uint8."""
    fmt = format_of(name)
    return np.stack([quantize_matrix(expert, fmt).reshape(len(expert), -1) for expert in values])


def random_experts(rng, num_experts, hidden, intermediate, bias=False, gate=True):
    """float32 arrays by the names of `ExpertStore.from_arrays`; weights are exact in bfloat16."""
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    made = {}
    for name, shape in shapes.items():
        if name == "gate" and not gate:
            continue
        values = rng.standard_normal((num_experts, *shape), np.float32) * np.float32(0.08)
        made[name] = (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
        if bias:
            values = rng.standard_normal((num_experts, shape[0]), np.float32)
            made[f"{name}_bias"] = (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return made


def trunk(block, hidden=256, ending=".weight"):
    """Tensors of a layer that are no routed experts, in GGUF's names."""
    raw = np.ones(hidden * 8, np.float32).tobytes()
    return {
        f"blk.{block}.attn_norm{ending}": ("f32", (hidden,), raw[: 4 * hidden]),
        f"blk.{block}.ffn_gate_inp{ending}": ("f32", (8, hidden), raw),
        f"blk.{block}.ffn_gate_shexp{ending}": ("f32", (8, hidden), raw),
        f"blk.{block}.ffn_up{ending}": ("f32", (8, hidden), raw),
    }


def gguf_experts(block, arrays, formats):
    """Stacked tensors of one layer in GGUF's names, quantised; biases as f32."""
    found = {}
    for name, fmt in formats.items():
        if name not in arrays:
            continue
        values = arrays[name]
        found[f"blk.{block}.ffn_{name}_exps.weight"] = (fmt, values.shape, quantized(values, fmt).tobytes())
        if f"{name}_bias" in arrays:
            bias = arrays[f"{name}_bias"]
            found[f"blk.{block}.ffn_{name}_exps.bias"] = ("f32", bias.shape, bias.tobytes())
    return found
