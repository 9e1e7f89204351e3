"""Tens of thousands of mutated files: our error or success, and memory in proportion to the file."""

from __future__ import annotations

import json
import random
import resource
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from model_files import gguf_bytes, gguf_experts, random_experts, safetensors_bytes, to_bf16, trunk

from trilane import ExpertStore
from trilane.errors import StoreError
from trilane.readers.finder import find_experts
from trilane.readers.gguf import parse_gguf
from trilane.readers.model_file import ModelFiles
from trilane.readers.safetensors import parse_safetensors

HERE = Path("fuzzed")
NUMBERS = (0, 1, 2, 3, 4, 9, 31, 32, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1)
TRACED = 20


def small_experts(bias=False):
    return random_experts(np.random.default_rng(0), 2, 32, 32, bias)


def gguf_bases():
    arrays, kinds = small_experts(), dict.fromkeys(("gate", "up", "down"), "f32")
    stacked = trunk(0, 32) | gguf_experts(0, arrays, kinds)
    merged = {"gate_up": np.concatenate([arrays["gate"], arrays["up"]], axis=1), "down": arrays["down"]}
    single = {
        f"blk.0.ffn_{name}.{e}.weight": ("f32", values.shape[1:], values[e].tobytes())
        for name, values in arrays.items()
        for e in range(2)
    }
    keys = {
        "general.alignment": 32, "qwen3moe.block_count": 1, "words": ["a", "bc", ""], "ids": (5, bytes(12), 3),
        "split.count": 1, "x": 1.5,
    }  # fmt: skip
    biased = gguf_experts(0, small_experts(bias=True), dict.fromkeys(kinds, "mxfp4"))
    return [
        gguf_bytes(stacked, keys), gguf_bytes(gguf_experts(0, merged, {"gate_up": "q8_0", "down": "f32"}), keys),
        gguf_bytes(single, {}), gguf_bytes(biased, {"general.architecture": "gpt-oss"}),
    ]  # fmt: skip


def checkpoint_tensors():
    arrays = small_experts()
    tensors = {"model.norm.weight": ("F32", (4,), bytes(16))}
    for name, values in arrays.items():
        for e in range(2):
            raw = to_bf16(values[e]).tobytes()
            tensors[f"model.layers.0.mlp.experts.{e}.{name}_proj.weight"] = ("BF16", values.shape[1:], raw)
    return tensors


def header_end(base):
    """Bytes that a mutation should aim at: all but the weights."""
    return min(len(base), 1600)


def mutate(rng, base):
    """One to four changes: bytes, whole numbers, cuts, repeats, removals."""
    data = bytearray(base)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, min(len(data), header_end(base))))
        kind = rng.randrange(8)
        if kind <= 1:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2 and len(data) > at:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 4:
            data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 5:
            del data[at if rng.random() < 0.3 else at + rng.randrange(len(data)) :]
        elif kind == 6:
            data[at:at] = data[at : at + rng.randrange(64)]
        else:
            del data[at : at + rng.randrange(64)]
    return bytes(data)


def numbers_of(base):
    """Offsets in a GGUF header at which a known number stands; mutations there go deeper than those anywhere."""
    wanted = {struct.pack("<Q", n) for n in (1, 2, 3, 32, 64)} | {struct.pack("<I", n) for n in (0, 3, 4, 8, 9)}
    return [at for at in range(header_end(base)) for size in (4, 8) if base[at : at + size] in wanted]


def look_at_gguf(data):
    tensors, metadata = parse_gguf(data, HERE)
    for key in metadata:
        metadata[key]
    return find_experts(ModelFiles("gguf", HERE, tensors, metadata, {}))


def look_at_safetensors(data):
    tensors = parse_safetensors(data, HERE)
    return find_experts(ModelFiles("safetensors", HERE, tensors, {"model_type": "qwen3_moe"}, {}))


def tried(look, data):
    """Whether a file is taken; anything but our error gets out."""
    try:
        look(data)
    except StoreError as error:
        assert str(error)
        return False
    return True


def traced(look, data):
    """The same, with a bound on what Python allocates meanwhile (which is slow to watch)."""
    tracemalloc.start()
    try:
        found = tried(look, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes for a file of {len(data)}"
    return found


def resident_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(look, files):
    """How many of the files were taken and how many refused. One in TRACED is watched closely; no one may grow the
    process."""
    before, outcomes = resident_nbytes(), [0, 0]
    for number, data in enumerate(files):
        outcomes[(tried if number % TRACED else traced)(look, data)] += 1
    assert resident_nbytes() - before < 64 << 20
    refused, taken = outcomes
    return taken, refused


@pytest.mark.parametrize("number", range(4))
def test_gguf_files(number):
    base, rng = gguf_bases()[number], random.Random(number)
    assert look_at_gguf(base).layers
    taken, refused = run(look_at_gguf, (mutate(rng, base) for _ in range(3000)))
    assert taken > 50 and refused > 500


def test_gguf_numbers():
    """Every number of the header in turn, by every value of the list."""
    base = gguf_bases()[0]
    places = numbers_of(base)

    def files():
        for at in places:
            for value in NUMBERS:
                size = 8 if value > 0xFFFFFFFF or at % 2 else 4
                yield base[:at] + struct.pack("<Q", value)[:size] + base[at + size :]

    taken, refused = run(look_at_gguf, files())
    assert taken + refused > 3000 and refused > 1000


def test_safetensors_bytes():
    base, rng = safetensors_bytes(checkpoint_tensors(), metadata={"format": "pt"}), random.Random(1)
    assert look_at_safetensors(base).layers
    taken, refused = run(look_at_safetensors, (mutate(rng, base) for _ in range(5000)))
    assert refused > 2000 and taken + refused == 5000


VALUES = (
    None, True, -1, 0, 1, 2.5, 1 << 62, 1 << 63, 1 << 200, 1e300, "", "F32", "BF16", "Q4", [], [0], [0, 8], [8, 0],
    [1 << 62, 1 << 62], [[0], 8], {}, {"dtype": "F32"}, [0, -8], [True, False], "9" * 500, [1] * 100,
)  # fmt: skip


def mutate_header(rng, header):
    """A header with entries, fields and names changed, dropped or repeated."""
    names = list(header)
    name, field = rng.choice(names), rng.choice(["dtype", "shape", "data_offsets", "more"])
    kind = rng.randrange(6)
    if kind == 0:
        header[name] = rng.choice(VALUES)
    elif kind == 1:
        del header[name]
    elif kind == 2:
        header[rng.choice(names).replace("0", rng.choice(["1", "00", "9" * 6, "9" * 30, "x"]), 1)] = header[name]
    elif kind == 3 and isinstance(header[name], dict) and isinstance(header[name].get("shape"), list):
        header[name]["shape"] = header[name]["shape"][::-1] + rng.choice([[], [1], [0]])
    elif isinstance(header[name], dict):
        header[name][field] = rng.choice(VALUES)


def test_safetensors_headers():
    base, rng = safetensors_bytes(checkpoint_tensors()), random.Random(2)
    (nbytes,) = struct.unpack_from("<Q", base)
    text, data = base[8 : 8 + nbytes], base[8 + nbytes :]

    def files():
        for _ in range(5000):
            header = json.loads(text)
            for _ in range(rng.randint(1, 3)):
                mutate_header(rng, header)
            changed = json.dumps(header).encode()
            yield struct.pack("<Q", len(changed)) + changed + data

    taken, refused = run(look_at_safetensors, files())
    assert refused > 2000 and taken + refused == 5000


def test_whole_stores_from_mutated_files(tmp_path):
    """Files on disk, to the last byte of the store: what a header lets through must be safe to read."""
    base, rng, path = gguf_bases()[0], random.Random(3), tmp_path / "model.gguf"
    loaded = 0
    for _ in range(300):
        path.write_bytes(mutate(rng, base))
        try:
            store = ExpertStore.from_gguf(path, threads=1)
            loaded += 1
            assert store.nbytes <= 4 * len(base) + (1 << 16)
        except StoreError as error:
            assert str(error)
    assert 5 < loaded < 300
