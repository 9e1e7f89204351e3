"""Sizes of models, whether they fit, and the speed to expect: by hand, and against what a store really takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_cases import DEEPSEEK_V2_LITE, GPT_OSS_20B, QWEN3_30B, write_config
from made_profile import make_profile
from model_files import gguf_bytes, gguf_experts, random_experts, safetensors_bytes, to_bf16, trunk
from numba import config

from trilane.capacity import Capacity, HostMemory, Vram, memory_here, vram_here, vram_of
from trilane.errors import ModelFileError, StoreError, TraceError
from trilane.expected_speed import Expectation, look_ahead, machine_for, routings_for, slots_to_compare
from trilane.find_sizes import read_sizes
from trilane.gpu_kernels.driver import DriverError, DriverMissing
from trilane.machines import load_machine, profile_machine
from trilane.readers.finder import open_model
from trilane.store import ExpertStore
from trilane.traces.trace import TraceMeta, trace_of_tokens
from trilane.traces.trace_import import bundled_trace
from trilane.traces.trace_summary import summarise

needs_compiled = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="needs compiled code")
GIB = 1 << 30
Q4 = {"gate": "q4_k", "up": "q4_k", "down": "q4_k"}
KEYS = {
    "qwen3moe.block_count": 3, "qwen3moe.expert_used_count": 2, "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.head_count_kv": 2, "qwen3moe.embedding_length": 256,
}  # fmt: skip


def f32(*shape):
    return ("f32", shape, bytes(4 * int(np.prod(shape))))


def gguf_model():
    """Tensors: a dense layer, two with experts, one for prediction behind them, embeddings and head."""
    rng = np.random.default_rng(0)
    tensors = {"blk.0.ffn_up.weight": f32(16, 256), "token_embd.weight": f32(20, 256), "output.weight": f32(20, 256)}
    for block, down in ((1, "q4_k"), (2, "q6_k"), (3, "q4_k")):
        tensors |= gguf_experts(block, random_experts(rng, 8, 256, 512), Q4 | {"down": down}) | trunk(block)
    return tensors


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes(gguf_model(), KEYS))
    return path


# ------------------------------------------------------------------------------------------------------ sizes
def test_sizes_of_a_gguf_file_are_those_of_its_store(gguf):
    sizes = read_sizes(gguf)
    assert sizes.store_nbytes == ExpertStore.from_gguf(gguf).nbytes
    assert [(one.number, one.num_experts) for one in sizes.layers] == [(0, 0), (1, 8), (2, 8)]
    shared, others = 8 * 256 * 4, 4 * (256 + 8 * 256 + 8 * 256)
    assert [(one.shared_nbytes, one.other_nbytes) for one in sizes.layers] == [
        (0, 16 * 256 * 4),
        *[(shared, others)] * 2,
    ]
    assert sizes.outside_nbytes == 2 * 20 * 256 * 4 and sizes.lookup_nbytes == 20 * 256 * 4
    assert sizes.experts_per_token == 2 and sizes.kv.token_nbytes == (2 * 2 * 2 * 64,) * 3
    experts = {name: t for name, t in open_model(gguf).tensors.items() if "_exps" in name and "blk.3" not in name}
    whole = sum(t.nbytes for t in open_model(gguf).tensors.values())
    assert sizes.trunk_nbytes + sizes.unused_nbytes + sum(t.nbytes for t in experts.values()) == whole


def test_a_sharded_file_and_its_folder_are_the_same_model(gguf, tmp_path):
    items, folder = list(gguf_model().items()), tmp_path / "sharded"
    folder.mkdir()
    for k, part in enumerate((items[:7], items[7:])):
        keys = KEYS | {"split.no": k, "split.count": 2, "split.tensors.count": len(items)}
        (folder / f"small-{k + 1:05}-of-00002.gguf").write_bytes(gguf_bytes(dict(part), keys))
    whole = read_sizes(gguf)
    for path in (folder, folder / "small-00002-of-00002.gguf"):
        found = read_sizes(path)
        assert (found.layers, found.trunk_nbytes, found.kv) == (whole.layers, whole.trunk_nbytes, whole.kv)


def checkpoint(folder):
    """A safetensors folder: one layer of 4 experts in bfloat16, a shared one, embeddings."""
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": ("F32", (5, 256), bytes(5 * 256 * 4))}
    tensors["model.layers.0.mlp.shared_expert.up_proj.weight"] = ("BF16", (2, 256), bytes(1024))
    tensors["vision.encoder.layers.0.mlp.weight"] = ("BF16", (3, 256), bytes(1536))
    for name, values in random_experts(rng, 4, 256, 256).items():
        for expert, matrix in enumerate(values):
            key = f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"
            tensors[key] = ("BF16", matrix.shape, to_bf16(matrix).tobytes())
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    write_config(folder, QWEN3_30B, hidden_size=256, num_hidden_layers=1, num_experts_per_tok=2, hidden_act="silu")
    return folder


def test_sizes_of_a_checkpoint_follow_the_format(tmp_path):
    folder = checkpoint(tmp_path)
    as_is, smaller = read_sizes(folder), read_sizes(folder, "q4_k")
    assert as_is.store_nbytes == ExpertStore.from_safetensors(folder).nbytes
    assert smaller.store_nbytes == ExpertStore.from_safetensors(folder, formats="q4_k").nbytes
    assert as_is.layers[0].shared_nbytes == 1024 and as_is.layers[0].other_nbytes == 0
    assert as_is.outside_nbytes == 5 * 256 * 4 + 1536 and as_is.lookup_nbytes == 0  # the table is the head, too
    assert as_is.experts_per_token == 2 and as_is.kv is not None
    (folder / "config.json").unlink()
    alone = read_sizes(folder)
    assert alone.experts_per_token is None and alone.kv is None and routings_for(alone) == []
    assert any("activation" in note for note in alone.notes)


def test_quantised_experts_in_another_format_are_planned_with_a_word(gguf):
    sizes = read_sizes(gguf, "q8_0")
    assert sizes.store_nbytes == ExpertStore.from_gguf(gguf, formats="q8_0", requantize=True).nbytes
    assert any("requantize=True" in note for note in sizes.notes)


def test_sizes_of_a_config_by_hand(tmp_path):
    sizes = read_sizes(write_config(tmp_path, QWEN3_30B))
    expert = 3 * 2048 * 768 // 256 * 144
    assert sizes.store_nbytes == 48 * 128 * expert and sizes.name == tmp_path.name
    rest = 48 * (2048 * 128 * (2 * 32 + 2 * 4) + 2 * 2048 + 128 * 2048) + 2 * 151936 * 2048 + 2048
    assert sizes.trunk_nbytes == 2 * rest and sizes.lookup_nbytes == 2 * 151936 * 2048
    assert sizes.store_nbytes_in(sizes.moe_layers[0].layout.up) == sizes.store_nbytes
    assert read_sizes(tmp_path).store_nbytes == sizes.store_nbytes  # the folder, without weights
    assert read_sizes(tmp_path, "bf16").store_nbytes == 48 * 128 * 3 * 2048 * 768 * 2


def test_formats_of_a_config_have_a_reason(tmp_path):
    oss = read_sizes(write_config(tmp_path, GPT_OSS_20B))
    assert oss.shard_nbytes == bundled_trace().meta.shard_nbytes  # mxfp4 with biases, as the bundled trace says
    assert "mxfp4: as the checkpoint has them" in oss.notes[0]
    lite = read_sizes(write_config(tmp_path, DEEPSEEK_V2_LITE))
    assert "q4_k/q8_0" in lite.notes[0] and "rows of 1408 weights are no multiple of 256" in lite.notes[0]
    with pytest.raises(StoreError, match="K must be a positive multiple of 256; use one of"):
        read_sizes(tmp_path, "q4_k")


def test_what_is_no_model_is_refused(tmp_path, gguf):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelFileError, match=r"holds no .gguf file, no .safetensors file and no config.json"):
        read_sizes(empty)
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match="was not copied to its end"):
        read_sizes(gguf)
    with pytest.raises(ModelFileError, match="cannot be opened|cannot be read"):
        read_sizes(tmp_path / "none.json")


# ------------------------------------------------------------------------------------------------------- fits
def capacity_of(path, *, ram=64 * GIB, vram=24 * GIB, context=4096, **more):
    memory = HostMemory(ram, None, ram, "a test's")
    return Capacity(read_sizes(path), memory, Vram(vram, "a test's"), context, **more)


def test_slots_are_what_is_left(tmp_path):
    path = write_config(tmp_path, QWEN3_30B)
    found = capacity_of(path, vram=10 * GIB)
    kv = 4096 * 48 * 2 * 4 * 128 * 2
    prefill = min(512 << 20, (10 * GIB - found.sizes.trunk_nbytes - kv) // 16)
    room = 10 * GIB - found.sizes.trunk_nbytes - kv - prefill - (512 << 20)
    shard = 3 * 2048 * 256 // 256 * 144
    assert (found.kv_nbytes, found.prefill_nbytes, found.room_nbytes) == (kv, prefill, room)
    assert found.num_slots == room // shard and not found.shortages
    assert found.experts_a_layer == pytest.approx(found.num_slots / (48 * 3))
    assert found.vram_nbytes(found.num_slots) <= 10 * GIB < found.vram_nbytes(found.num_slots + 1)
    assert replace(found, reserve_nbytes=0).num_slots > found.num_slots
    assert replace(found, vram=Vram(80 * GIB, "")).num_slots == 48 * 128 * 3  # no more than there are experts
    assert replace(found, wanted=4).num_slots == 4 * 48 * 3
    unknown = replace(found, vram=Vram(None, "no GPU here"))
    assert unknown.num_slots is None and unknown.room_nbytes is None and not unknown.shortages
    assert any("device memory is not known" in note for note in unknown.notes)


def test_what_is_short_in_host_memory_is_told_to_the_byte(tmp_path):
    path = write_config(tmp_path, QWEN3_30B)
    need = read_sizes(path, "bf16").store_nbytes
    found = replace(capacity_of(path, ram=32 * GIB), sizes=read_sizes(path, "bf16"))
    (shortage,) = found.shortages
    assert shortage.nbytes == need - 32 * GIB and "the model in q8_0, whose experts take 30.80 GB" in shortage.remedies
    assert not replace(found, memory=HostMemory(need, None, need, "")).shortages
    (none,) = capacity_of(path, ram=1 * GIB).shortages
    assert "fewer than any supported one" in none.remedies[0] and "0.3 bits a weight" in none.remedies[0]
    limited = HostMemory(64 * GIB, 8 * GIB, 7 * GIB, "")
    assert any("control group" in text for text in replace(found, memory=limited).shortages[0].remedies)


def test_what_is_short_in_device_memory_is_told_with_what_fits(tmp_path):
    path = write_config(tmp_path, QWEN3_30B)
    (shortage,) = capacity_of(path, vram=5 * GIB, context=32768).shortages
    tokens = int(next(text for text in shortage.remedies if "--context" in text).split()[1].rstrip(","))
    assert not capacity_of(path, vram=5 * GIB, context=tokens).shortages
    assert capacity_of(path, vram=5 * GIB, context=tokens + 1).shortages
    (trunk_alone,) = capacity_of(path, vram=2 * GIB, context=1).shortages
    assert "a smaller quantisation of the trunk" in trunk_alone.remedies
    found = capacity_of(path, vram=10 * GIB, wanted=100)
    most = int(found.shortages[0].remedies[0].split()[1].rstrip(","))
    assert not replace(found, wanted=most).shortages and replace(found, wanted=most + 1).shortages


def test_notes_say_what_to_know(tmp_path):
    path = write_config(tmp_path, QWEN3_30B)
    assert "more than the 40,960 that the model is made for" in " ".join(capacity_of(path, context=50_000).notes)
    assert "no slots" in " ".join(capacity_of(path, wanted=0).notes)
    assert "slots for all routed experts" in " ".join(capacity_of(path, vram=80 * GIB).notes)


def test_memory_is_that_of_the_control_group(tmp_path):
    here = memory_here()
    assert 0 < here.available_nbytes <= here.total_nbytes
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/")
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(1 << 20))
    limited = memory_here(tmp_path)
    assert limited.limit_nbytes == 1 << 20 and limited.available_nbytes <= 1 << 20


class OneGpu:
    closed = 0

    def name(self):
        return "a GPU"

    def free_nbytes(self):
        return 123

    def close(self):
        OneGpu.closed += 1


def test_the_gpu_here_is_asked_for_what_is_free(monkeypatch):
    monkeypatch.setattr("trilane.gpu_kernels.driver.CudaDriver", OneGpu)
    assert vram_here() == Vram(123, "free on a GPU") and OneGpu.closed == 1
    for error, text in (
        (DriverMissing("no library"), "no GPU here"),
        (DriverError("cuInit: broken"), "cuInit: broken"),
    ):

        def fail(error=error):
            raise error

        monkeypatch.setattr("trilane.gpu_kernels.driver.CudaDriver", fail)
        found = vram_here()
        assert found.free_nbytes is None and text in found.source
    assert vram_of("rtx5090-ddr5").free_nbytes == 32 * GIB


# ------------------------------------------------------------------------------------------------------ speed
def test_assumed_routing_is_as_it_is_described(tmp_path):
    sizes = read_sizes(write_config(tmp_path, GPT_OSS_20B))
    recorded, uniform, skewed = routings_for(sizes)
    assert (recorded.is_assumed, uniform.is_assumed, skewed.is_assumed) == (False, True, True)
    assert uniform.trace.tokens()[0].shape == (256, 24, 4)
    if not config.DISABLE_JIT:
        rates = summarise(skewed.trace).lru_hit_rates
        assert rates[8] == pytest.approx(0.66, abs=0.02) and rates[16] == pytest.approx(0.90, abs=0.02)
        assert summarise(skewed.trace).repeat_rate == pytest.approx(0.45, abs=0.02)
    for changes in ({"model_type": "mixtral"}, {"num_experts_per_tok": 2}, {"num_local_experts": 16}):
        other = read_sizes(write_config(tmp_path, GPT_OSS_20B, **changes))
        assert [routing.name for routing in routings_for(other)] == ["uniform", "skewed"]


@needs_compiled
def test_hit_rates_and_times_follow_the_slots(gguf):
    capacity = capacity_of(gguf)
    sizes, machine = capacity.sizes, load_machine("rtx3090-ddr4")
    slots = slots_to_compare(capacity.num_shards, 13)
    assert slots == [0, 4, 8, 12, 13, 16, 24, 32]
    outlook = look_ahead(routings_for(sizes), machine, slots, 936_000)
    assert outlook.trunk_us == pytest.approx(1.0)  # 936 kB at 936 GB/s
    for name in ("uniform", "skewed"):
        rows = [speed for speed in outlook.speeds if speed.routing == name]
        assert [row.num_slots for row in rows] == slots
        hits, times = [row.hit_rate for row in rows], [row.moe_us for row in rows]
        assert hits == sorted(hits) and hits[0] == 0 and hits[-1] == 1 and times[-1] < times[0]
        routed = 2 * sum(sum(layer) for layer in sizes.shard_nbytes)  # two experts of each layer
        assert all(sum(row.lane_nbytes.values()) == pytest.approx(routed) for row in rows)
        if name == "uniform":
            # with 16 experts in all, slots that chance fills for one layer are missed by the other
            assert hits == pytest.approx([count / 32 for count in slots], abs=0.08)
    found = outlook.to_dict()["by_slots"][0]
    assert found["tokens_a_second_at_most"] == pytest.approx(1e6 / found["moe_us"])
    assert found["tokens_a_second_with_trunk"] == pytest.approx(1e6 / (found["moe_us"] + 1.0))
    assert found["is_assumed"] is True


@needs_compiled
def test_a_recorded_trace_counts_its_second_half_without_prompts(gguf):
    sizes = read_sizes(gguf)
    rng = np.random.default_rng(0)
    ids = np.array([[rng.choice(8, 2, False) for _ in range(2)] for _ in range(40)], np.uint8)
    plain = trace_of_tokens(TraceMeta("small", (8, 8)), ids)
    (routing,) = routings_for(sizes, plain)
    assert not routing.is_assumed and routing.about == "40 tokens of small"
    prompt = {"kind": [1, 1], "layer": [0, 1], "rows": [3, 3], "top_k": [2, 2], "digest": [0, 0], "ids": [1, 2] * 6}
    columns = {name: np.concatenate([values, getattr(plain, name)]) for name, values in prompt.items()}
    (after_prompt,) = routings_for(sizes, replace(plain, **columns))
    assert after_prompt.about == "40 tokens of small, 2 steps of several rows left out"
    assert (after_prompt.trace.tokens()[0] == ids).all()
    speed = Expectation(routing, load_machine("h200-host")).speed(32)
    assert speed.hit_rate == 1 and not speed.is_assumed


def test_a_trace_of_another_model_is_refused(gguf, tmp_path):
    sizes = read_sizes(gguf)
    with pytest.raises(TraceError, match="24 layers of 32 experts, but small has 2 layers of 8 experts"):
        routings_for(sizes, bundled_trace())
    ids = np.zeros((5, 2, 3), np.uint8) + np.arange(3, dtype=np.uint8)
    with pytest.raises(TraceError, match=r"\[3\] experts a token, but small uses 2"):
        routings_for(sizes, trace_of_tokens(TraceMeta("x", (8, 8)), ids))
    with pytest.raises(TraceError, match="1 tokens of one row each, but 2 are needed"):
        routings_for(sizes, trace_of_tokens(TraceMeta("x", (8, 8)), ids[:1, :, :2]))


def test_rates_of_the_models_format_are_used_where_there_are_some():
    table = load_machine("rtx3090-ddr4")
    assert machine_for(table, "q8_0") is table
    profile = make_profile()
    here = profile_machine(profile, Path("here.json"))
    known = [name for name in profile.cpu_experts if name in profile.device_experts]
    assert machine_for(here, known[-1]).format == known[-1] and machine_for(here, "no such") is here
