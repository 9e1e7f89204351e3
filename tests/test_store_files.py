"""Stores from files hold the bytes that stores from arrays hold, whatever the file's names and orders."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from expert_cases import assert_same_bits, open_scheduler, random_routing
from model_files import (
    gguf_bytes,
    gguf_experts,
    quantized,
    random_experts,
    safetensors_bytes,
    to_bf16,
    trunk,
)

from trilane import ExpertStore, ModelFileError, StoreError
from trilane.cpu_kernels.formats import FORMATS, format_of
from trilane.cpu_kernels.layout import unpack_expert
from trilane.readers.finder import describe_experts
from trilane.readers.gguf import open_gguf
from trilane.readers.model_file import ModelFile
from trilane.store import Gate

HIDDEN, INTERMEDIATE, EXPERTS = 256, 512, 4
ALL_Q4_K = dict.fromkeys(("gate", "up", "down"), "q4_k")
MIXED = {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}


def arrays_of(seed=0, bias=False, **options):
    return random_experts(np.random.default_rng(seed), EXPERTS, HIDDEN, INTERMEDIATE, bias, **options)


def packed(arrays, formats):
    """The arrays as source blocks of ``formats``, biases as they are."""
    return {name: quantized(a, formats[name]) if name in formats else a for name, a in arrays.items()}


def assert_same_store(actual, wanted):
    assert [(a.layout, a.num_experts, a.gate) for a in actual.layers] == [
        (w.layout, w.num_experts, w.gate) for w in wanted.layers
    ]
    np.testing.assert_array_equal(actual.arena.bytes, wanted.arena.bytes)


def write(folder, data, name="model.gguf"):
    path = folder / name
    path.write_bytes(data)
    return path


def write_checkpoint(folder, tensors, **config):
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN} | config
    (folder / "config.json").write_text(json.dumps(config))
    return write(folder, safetensors_bytes(tensors), "model.safetensors")


def bf16(values):
    return ("BF16", values.shape, to_bf16(values).tobytes())


# ----------------------------------------------------------------------------------------------------- GGUF
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_of_a_gguf_file(name, tmp_path):
    formats, arrays = dict.fromkeys(("gate", "up", "down"), name), arrays_of()
    path = write(tmp_path, gguf_bytes(trunk(0) | gguf_experts(0, arrays, formats)))
    wanted = ExpertStore.from_arrays([packed(arrays, formats)], formats=formats)
    assert_same_store(ExpertStore.from_gguf(path), wanted)


def test_layers_with_formats_of_their_own(tmp_path):
    layers = [arrays_of(seed) for seed in range(3)]
    formats = [ALL_Q4_K, MIXED, ALL_Q4_K]
    tensors = trunk(0)  # layer 0 is dense
    for block, (arrays, names) in enumerate(zip(layers, formats, strict=True), start=1):
        tensors |= trunk(block) | gguf_experts(block, arrays, names)
    store = ExpertStore.from_gguf(write(tmp_path, gguf_bytes(tensors)), threads=3)
    assert [layer.layout.down.name for layer in store.layers] == ["q4_k", "q6_k", "q4_k"]
    for index, (arrays, names) in enumerate(zip(layers, formats, strict=True)):
        alone = ExpertStore.from_arrays([packed(arrays, names)], formats=names)
        for e in range(EXPERTS):
            np.testing.assert_array_equal(store.expert_bytes(index, e), alone.expert_bytes(0, e))
    assert [layer.block for layer in store.model.layers] == [1, 2, 3]
    assert "layer 2: 4 experts of 256 x 512, q4_k/q4_k/q6_k" in str(store.model)
    assert "left alone: shared experts, 4 tensors" in str(store.model)
    chosen = ExpertStore.from_gguf(tmp_path / "model.gguf", layers=[3, 1])
    np.testing.assert_array_equal(chosen.expert_bytes(1, 2), store.expert_bytes(2, 2))


def test_gate_and_up_merged(tmp_path):
    arrays = arrays_of()
    merged = {
        "gate_up": np.concatenate([arrays["gate"], arrays["up"]], axis=1), "down": arrays["down"]
    }  # fmt: skip
    path = write(tmp_path, gguf_bytes(gguf_experts(0, merged, {"gate_up": "q4_k", "down": "q6_k"})))
    wanted = ExpertStore.from_arrays([packed(arrays, MIXED)], formats=MIXED)
    assert_same_store(ExpertStore.from_gguf(path), wanted)


def test_a_tensor_for_each_expert(tmp_path):
    arrays = arrays_of()
    tensors = trunk(0)
    for name, values in arrays.items():
        for e in reversed(range(EXPERTS)):  # the order in the file says nothing
            raw = quantized(values[e : e + 1], "q8_0").tobytes()
            tensors[f"blk.0.ffn_{name}.{e}.weight"] = ("q8_0", values.shape[1:], raw)
    path = write(tmp_path, gguf_bytes(tensors, {"general.architecture": "llama"}))
    wanted = ExpertStore.from_arrays([packed(arrays, dict.fromkeys(arrays, "q8_0"))], formats="q8_0")
    assert_same_store(ExpertStore.from_gguf(path), wanted)


def test_gpt_oss_as_gguf(tmp_path):
    arrays, formats = arrays_of(bias=True), dict.fromkeys(("gate", "up", "down"), "mxfp4")
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, formats), {"general.architecture": "gpt-oss"}))
    wanted = ExpertStore.from_arrays([packed(arrays, formats)], formats="mxfp4", gate="swiglu_oai")
    store = ExpertStore.from_gguf(path)
    assert_same_store(store, wanted)
    assert store.layers[0].layout.has_bias and "mxfp4/mxfp4/mxfp4, biases" in str(store.model)


def test_experts_without_a_gate(tmp_path):
    arrays = arrays_of(gate=False)
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, ALL_Q4_K), {"general.architecture": "nemotron_h_moe"}))
    assert_same_store(ExpertStore.from_gguf(path), ExpertStore.from_arrays([arrays], gate="relu2"))
    with pytest.raises(StoreError, match="gate kind 'silu_glu' needs a gate matrix, but the layer has down, up"):
        ExpertStore.from_gguf(path, gate="silu_glu")


def test_converting_on_the_way(tmp_path):
    arrays = arrays_of()
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "bf16"))))
    assert_same_store(ExpertStore.from_gguf(path, formats="q4_k"), ExpertStore.from_arrays([arrays]))
    partly = ExpertStore.from_gguf(path, formats={"down": "q8_0"})
    assert_same_store(partly, ExpertStore.from_arrays([arrays], formats={"gate": "bf16", "up": "bf16", "down": "q8_0"}))


def test_quantised_weights_are_converted_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("trilane.file_source.PIECE_WEIGHTS", 100 * HIDDEN)  # pieces that end inside of a matrix
    arrays = arrays_of()
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "q8_0"))))
    with pytest.raises(StoreError, match=r"ffn_gate_exps.*is quantised already, and q4_k is wanted; pass requantize"):
        ExpertStore.from_gguf(path, formats="q4_k")
    q8_0 = format_of("q8_0")
    twice = {
        name: np.stack([q8_0.dequantize_rows(expert) for expert in quantized(values, "q8_0")])
        for name, values in arrays.items()
    }
    wanted = ExpertStore.from_arrays([twice], formats="q4_k")
    assert_same_store(ExpertStore.from_gguf(path, formats="q4_k", requantize=True), wanted)
    same = ExpertStore.from_arrays([packed(arrays, dict.fromkeys(arrays, "q8_0"))], formats="q8_0")
    assert_same_store(ExpertStore.from_gguf(path, formats="q8_0"), same)


# ---------------------------------------------------------------------------------------------- safetensors
def per_expert(arrays, names=("gate_proj", "up_proj", "down_proj"), block="mlp", layer=0):
    tensors = {f"model.layers.{layer}.{block}.gate.weight": bf16(np.ones((EXPERTS, HIDDEN), np.float32))}
    for name, values in zip(names, (arrays["gate"], arrays["up"], arrays["down"]), strict=True):
        for e, expert in enumerate(values):
            tensors[f"model.layers.{layer}.{block}.experts.{e}.{name}.weight"] = bf16(expert)
    return tensors


@pytest.mark.parametrize("formats", ["bf16", "f32", "q8_0", "q4_k", "mxfp4"])
@pytest.mark.parametrize(
    ("block", "names", "model_type"),
    [
        ("mlp", ("gate_proj", "up_proj", "down_proj"), "qwen3_moe"),
        ("block_sparse_moe", ("w1", "w3", "w2"), "mixtral"),
    ],
)
def test_a_checkpoint_with_a_tensor_for_each_expert(formats, block, names, model_type, tmp_path):
    arrays = arrays_of()
    path = write_checkpoint(tmp_path, per_expert(arrays, names, block), model_type=model_type)
    wanted = ExpertStore.from_arrays([arrays], formats=formats)
    assert_same_store(ExpertStore.from_safetensors(path, formats=formats), wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("formats", [None, "q4_k"])
def test_stacked_checkpoints_in_both_orders(transposed, formats, tmp_path):
    arrays = arrays_of()
    merged, down = np.concatenate([arrays["gate"], arrays["up"]], axis=1), arrays["down"]
    if transposed:
        merged, down = (np.ascontiguousarray(values.transpose(0, 2, 1)) for values in (merged, down))
    tensors = {
        "model.language_model.layers.0.mlp.experts.gate_up_proj": bf16(merged),
        "model.language_model.layers.0.mlp.experts.down_proj": bf16(down),
        "model.language_model.layers.0.mlp.shared_expert.up_proj.weight": bf16(down[0]),
        "mtp.layers.0.mlp.experts.down_proj": bf16(down),
    }
    config = {"text_config": {"model_type": "qwen3_5_moe_text", "hidden_act": "silu"}}
    path = write_checkpoint(tmp_path, tensors, model_type="qwen3_5_moe", **config)
    wanted = ExpertStore.from_arrays([arrays], formats=formats or "bf16")
    store = ExpertStore.from_safetensors(path, formats=formats)
    assert_same_store(store, wanted)
    assert [a.what for a in store.model.left_alone] == ["shared experts", "other experts"]


def test_separate_stacks_that_are_transposed(tmp_path):
    arrays = arrays_of()
    tensors = {
        f"model.layers.0.mlp.experts.{name}_proj.weight": bf16(np.ascontiguousarray(values.transpose(0, 2, 1)))
        for name, values in arrays.items()
    }
    path = write_checkpoint(tmp_path, tensors)
    assert_same_store(ExpertStore.from_safetensors(path), ExpertStore.from_arrays([arrays], formats="bf16"))


def interleave(gate, up):
    """Rows of gate and up in turns, along axis 1."""
    return np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])


def gpt_oss_biases(arrays):
    return {
        "model.layers.0.mlp.experts.gate_up_proj_bias": bf16(interleave(arrays["gate_bias"], arrays["up_bias"])),
        "model.layers.0.mlp.experts.down_proj_bias": bf16(arrays["down_bias"]),
    }


@pytest.mark.parametrize("formats", [None, "q8_0"])
def test_gpt_oss_in_bfloat16(formats, tmp_path):
    arrays = arrays_of(bias=True)
    merged = interleave(arrays["gate"], arrays["up"]).transpose(0, 2, 1)
    tensors = gpt_oss_biases(arrays) | {
        "model.layers.0.mlp.experts.gate_up_proj": bf16(np.ascontiguousarray(merged)),
        "model.layers.0.mlp.experts.down_proj": bf16(np.ascontiguousarray(arrays["down"].transpose(0, 2, 1))),
    }
    path = write_checkpoint(tmp_path, tensors, model_type="gpt_oss", swiglu_limit=7.0)
    wanted = ExpertStore.from_arrays([arrays], formats=formats or "bf16", gate="swiglu_oai")
    assert_same_store(ExpertStore.from_safetensors(path, formats=formats), wanted)


def split_mxfp4(blocks):
    """GGUF blocks (..., K / 32 * 17) -> the blocks and scales of a gpt-oss checkpoint, weight by weight."""
    blocks = blocks.reshape(*blocks.shape[:-1], -1, 17)
    weights = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    return weights[..., 0::2] | weights[..., 1::2] << 4, np.ascontiguousarray(blocks[..., 0])


def u8(values):
    return ("U8", values.shape, np.ascontiguousarray(values).tobytes())


@pytest.mark.parametrize("formats", [None, "bf16"])
def test_gpt_oss_in_mxfp4(formats, tmp_path):
    arrays = arrays_of(bias=True)
    source = packed(arrays, dict.fromkeys(("gate", "up", "down"), "mxfp4"))
    tensors = gpt_oss_biases(arrays)
    for name, blocks in (("gate_up", interleave(source["gate"], source["up"])), ("down", source["down"])):
        nibbles, scales = split_mxfp4(blocks)
        tensors[f"model.layers.0.mlp.experts.{name}_proj_blocks"] = u8(nibbles)
        tensors[f"model.layers.0.mlp.experts.{name}_proj_scales"] = u8(scales)
    path = write_checkpoint(tmp_path, tensors, model_type="gpt_oss")
    if formats is None:
        wanted = ExpertStore.from_arrays([source], formats="mxfp4", gate="swiglu_oai")
        assert_same_store(ExpertStore.from_safetensors(path), wanted)
        return
    mxfp4 = format_of("mxfp4")
    plain = {n: np.stack([mxfp4.dequantize_rows(e) for e in v]) if "bias" not in n else v for n, v in source.items()}
    wanted = ExpertStore.from_arrays([plain], formats=formats, gate="swiglu_oai")
    assert_same_store(ExpertStore.from_safetensors(path, formats=formats, requantize=True), wanted)


def test_tensors_that_lie_at_odd_addresses(tmp_path):
    arrays = arrays_of()
    tensors = {"odd": ("U8", (3,), b"abc")} | per_expert(arrays)
    raw = safetensors_bytes(tensors, pad=False)
    path = write_checkpoint(tmp_path, {})
    path.write_bytes(raw)
    for formats in (None, "q4_k", "f32"):
        wanted = ExpertStore.from_arrays([arrays], formats=formats or "bf16")
        assert_same_store(ExpertStore.from_safetensors(path, formats=formats), wanted)


def test_a_sharded_checkpoint_from_its_folder_its_index_or_a_file(tmp_path):
    layers = [arrays_of(seed) for seed in range(2)]
    names = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    weight_map = {}
    for layer, (arrays, name) in enumerate(zip(layers, names, strict=True)):
        tensors = per_expert(arrays, layer=layer)
        write_checkpoint(tmp_path, {})
        write(tmp_path, safetensors_bytes(tensors, metadata={"format": "pt"}), name)
        weight_map |= dict.fromkeys(tensors, name)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    wanted = ExpertStore.from_arrays(layers, formats="bf16")
    for path in (tmp_path, index, tmp_path / names[1]):
        assert_same_store(ExpertStore.from_safetensors(path), wanted)
    (tmp_path / names[0]).unlink()
    with pytest.raises(ModelFileError, match=rf"1 of 2 files are missing from .*: {names[0]}; put all into one folder"):
        ExpertStore.from_safetensors(tmp_path)


# ------------------------------------------------------------------------------------------- what they compute
def test_a_gguf_file_and_its_twin_compute_what_arrays_compute(tmp_path):
    """Two layers, sixteen experts, top-8: three ways to the same bits."""
    rng = np.random.default_rng(5)
    layers = [random_experts(rng, 16, 256, 256) for _ in range(2)]
    tensors, twin = {}, {}
    for block, arrays in enumerate(layers):
        tensors |= trunk(block) | gguf_experts(block, arrays, dict.fromkeys(arrays, "bf16"))
        for name, values in arrays.items():
            for e, expert in enumerate(values):
                twin[f"model.layers.{block}.mlp.experts.{e}.{name}_proj.weight"] = bf16(expert)
    gguf_path = write(tmp_path, gguf_bytes(tensors))
    stores = [
        ExpertStore.from_arrays(layers, formats="q4_k"),
        ExpertStore.from_gguf(gguf_path, formats="q4_k"),
        ExpertStore.from_safetensors(write_checkpoint(tmp_path, twin), formats="q4_k"),
    ]
    hidden = rng.standard_normal((3, 256), np.float32)
    ids, weights = random_routing(rng, 3, 8, 16)
    for layer in range(2):
        outs = []
        for store in stores:
            with open_scheduler(store, cache={"fraction": 0.25}) as scheduler:
                outs.append(scheduler.forward(layer, hidden, ids, weights))
        assert np.isfinite(outs[0]).all() and outs[0].any()
        for other in outs[1:]:
            assert_same_bits(other, outs[0], f"layer {layer}")


@pytest.mark.parametrize("down", ["Q4_K", "Q6_K"])
def test_a_file_of_the_gguf_package(down, tmp_path):
    """A writer that is not ours, quantised blocks that are not ours."""
    import gguf
    import libgguf

    rng, path = np.random.default_rng(2), tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    blocks = {}
    for name, kind in (("gate", "Q4_K"), ("up", "Q4_K"), ("down", down)):
        rows, columns = (HIDDEN, INTERMEDIATE) if name == "down" else (INTERMEDIATE, HIDDEN)
        values = rng.standard_normal((EXPERTS * rows, columns), np.float32)
        qtype = gguf.GGMLQuantizationType[kind]
        blocks[name] = np.asarray(libgguf.quantize_rows(values, qtype), np.uint8).reshape(EXPERTS, rows, -1)
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", blocks[name], raw_dtype=qtype)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = ExpertStore.from_arrays([blocks], formats={"gate": "q4_k", "up": "q4_k", "down": down.lower()})
    store = ExpertStore.from_gguf(path)
    assert_same_store(store, wanted)
    source = unpack_expert(store.layers[0].layout, store.expert_bytes(0, 3))
    np.testing.assert_array_equal(source.down, blocks["down"][3])
    assert store.model.architecture == "olmoe"


# --------------------------------------------------------------------------------------------- what is refused
def test_a_format_that_is_not_supported_is_named(tmp_path):
    arrays = arrays_of()
    tensors = gguf_experts(0, arrays, ALL_Q4_K) | gguf_experts(1, arrays, ALL_Q4_K)
    raw = bytes(EXPERTS * HIDDEN * INTERMEDIATE // 256 * 176)
    tensors["blk.1.ffn_down_exps.weight"] = ("q5_k", arrays["down"].shape, raw)
    path = write(tmp_path, gguf_bytes(tensors))
    with pytest.raises(
        StoreError, match=r"blk.1.ffn_down_exps.weight.*q5_k cannot be used; supported are f32, .*mxfp4"
    ):
        ExpertStore.from_gguf(path)
    assert ExpertStore.from_gguf(path, layers=[0]).num_layers == 1
    with pytest.raises(StoreError, match=r"layers: \[7\], but layers with experts are 0 to 1; choose among them"):
        ExpertStore.from_gguf(path, layers=[0, 7])


def test_an_unknown_architecture_asks_for_the_gate(tmp_path):
    arrays = arrays_of()
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, ALL_Q4_K), {"general.architecture": "brand-new"}))
    assert describe_experts(path).gate is None
    with pytest.raises(StoreError, match="architecture 'brand-new' is not known here; pass the model's own"):
        ExpertStore.from_gguf(path)
    store = ExpertStore.from_gguf(path, gate=Gate("silu_glu_clamped", limit=3.0))
    assert store.layers[0].gate == Gate("silu_glu_clamped", limit=3.0)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "new_moe"}, "model_type 'new_moe' with hidden_act 'silu' is not known here"),
        ({"hidden_act": "relu"}, "model_type 'qwen3_moe' with hidden_act 'relu' is not known here"),
        ({"model_type": "gpt_oss", "swiglu_limit": -1}, "swiglu_limit is -1, but must be a number above 0"),
        ({"model_type": "deepseek_v4"}, "model_type 'deepseek_v4'"),
    ],
)
def test_a_config_that_does_not_name_a_known_gate(config, text, tmp_path):
    path = write_checkpoint(tmp_path, per_expert(arrays_of()), **config)
    with pytest.raises(StoreError, match=text):
        ExpertStore.from_safetensors(path)


def test_gates_from_configs(tmp_path):
    path = write_checkpoint(tmp_path, per_expert(arrays_of()), model_type="deepseek_v4", swiglu_limit=5.0)
    assert ExpertStore.from_safetensors(path).layers[0].gate == Gate("silu_glu_clamped", limit=5.0)
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh"}')
    assert ExpertStore.from_safetensors(path).layers[0].gate.kind == "gelu_tanh_glu"
    (tmp_path / "config.json").unlink()
    with pytest.raises(StoreError, match=r"no config.json with a model_type lies beside the file"):
        ExpertStore.from_safetensors(path)
    assert ExpertStore.from_safetensors(path, gate="silu_glu").layers[0].gate.kind == "silu_glu"


def test_weights_that_no_format_can_hold(tmp_path):
    arrays = arrays_of()
    arrays["up"][2, 5, 7] = np.inf
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "bf16"))))
    with pytest.raises(StoreError, match=r"blk.0.ffn_up_exps.weight.*weight \[5, 7\] is inf"):
        ExpertStore.from_gguf(path, formats="q4_k")


def test_rows_that_no_layout_takes(tmp_path):
    arrays = random_experts(np.random.default_rng(0), 2, 256, 288)
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "bf16"))))
    with pytest.raises(StoreError, match="layer 0: down of an expert .*q4_k"):
        ExpertStore.from_gguf(path, formats="q4_k")


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays_of(), ALL_Q4_K)))

    def cut(done, total):
        with path.open("r+b") as file:
            file.truncate(1000)

    with pytest.raises(ModelFileError, match=r"was changed while it was read \(\d+ bytes before, 1000 now\)"):
        ExpertStore.from_gguf(path, threads=1, progress=cut)


@pytest.mark.parametrize("last", ["up_exps.weight", "down_exps.weight", "down_exps.bias"])
@pytest.mark.parametrize("formats", [None, {"up": "q8_0"}], ids=["as they are", "converted"])
def test_a_file_cut_short_while_an_expert_is_read(last, formats, tmp_path, monkeypatch):
    """Between the look at the file and the read of its bytes: a read of a mapping would end the process here."""
    tensors = gguf_experts(0, arrays_of(bias=True), dict.fromkeys(("gate", "up", "down"), "bf16"))
    tensors[f"blk.0.ffn_{last}"] = tensors.pop(f"blk.0.ffn_{last}")  # to the end of the file
    path = write(tmp_path, gguf_bytes(tensors, {"general.architecture": "gpt-oss"}, pad_end=False))
    end = path.stat().st_size - 1

    def cut(file, offset, nbytes):
        os.truncate(path, end)
        return False

    monkeypatch.setattr("trilane.readers.model_file.ModelFile.prefetch", cut)
    monkeypatch.setattr("trilane.readers.model_file.ModelFile.check_unchanged", only_when_read)
    with pytest.raises(ModelFileError, match=rf"tensor 'blk.0.ffn_{last}' .*: the file was changed while it was read"):
        ExpertStore.from_gguf(path, formats=formats, threads=3)


def only_when_read(file, what=None, check=ModelFile.check_unchanged):
    """Looks at the file for the sake of a read that failed, and not before one."""
    if what is not None:
        check(file, what)


def test_progress(tmp_path, capsys):
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays_of(), ALL_Q4_K)))
    calls = []
    ExpertStore.from_gguf(path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n, EXPERTS) for n in range(1, EXPERTS + 1)]
    ExpertStore.from_gguf(path, progress="auto")
    assert capsys.readouterr() == ("", "")  # no terminal, no bar
    with pytest.raises(StoreError, match="threads: 0, but at least 1 is needed"):
        ExpertStore.from_gguf(path, threads=0)
    with pytest.raises(StoreError, match="progress: 'yes' is no choice"):
        ExpertStore.from_gguf(path, progress="yes")


def test_a_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays_of(), ALL_Q4_K)))
    ExpertStore.from_gguf(path, progress="auto")
    assert "loading experts" in capsys.readouterr().err


def test_memory_stays_at_the_store(tmp_path):
    """Resident memory grows by the store, and not by the file beside it."""
    arrays = random_experts(np.random.default_rng(0), 16, 256, 2048)
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "f32"))))
    nbytes = ExpertStore.from_gguf(path).nbytes  # and compiled code is loaded
    before, seen = resident_nbytes(), []
    store = ExpertStore.from_gguf(path, progress=lambda done, total: seen.append(resident_nbytes()))
    assert nbytes > 64 << 20 and store.nbytes == nbytes
    assert nbytes / 2 < seen[-1] - before and max(seen) - before < 1.25 * nbytes


def test_a_view_of_a_tensor(tmp_path):
    arrays = arrays_of()
    files = open_gguf(write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "f32")))))
    view = files.bytes_of(files.tensors["blk.0.ffn_up_exps.weight"])
    np.testing.assert_array_equal(view.view(np.float32), arrays["up"].ravel())
    assert not view.flags.writeable


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("was_cached", [False, True])
def test_the_system_cache_of_the_file(was_cached, is_tight, tmp_path, monkeypatch):
    """Where memory is short, the cache gives up what loading brought in, and nothing that was there before."""
    monkeypatch.setattr("trilane.store.available_nbytes", lambda: 0 if is_tight else 1 << 60)
    arrays = random_experts(np.random.default_rng(0), 2, 256, 2048)
    path = write(tmp_path, gguf_bytes(gguf_experts(0, arrays, dict.fromkeys(arrays, "f32"))))
    files = open_gguf(path)
    (file,), tensor = files.files.values(), files.tensors["blk.0.ffn_up_exps.weight"]
    middle = tensor.offset + tensor.nbytes // 4  # of the first expert
    if not was_cached:
        os.fsync(file.fd)  # pages that are still to be written cannot be given up
        file.release(0, file.nbytes)
    before = file._is_cached(middle)  # also True where the system keeps files in memory, or does not say
    assert before or not was_cached
    ExpertStore.from_gguf(path, threads=2)
    assert file._is_cached(middle) == (before or not is_tight)


def resident_nbytes():
    """Memory of this process that is in RAM, mapped files included."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
