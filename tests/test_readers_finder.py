"""Which tensors are experts: names, orders, what is left alone, and what is refused with its reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trilane.errors import StoreError
from trilane.readers.architectures import GGUF_GATES, SILU, GateKind, gate_of_config, gate_of_gguf
from trilane.readers.finder import find_experts
from trilane.readers.model_file import ModelFiles, TensorInfo
from trilane.readers.names import STACKED, read_checkpoint_name, read_gguf_name

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 96
BYTES = {"f32": 4, "bf16": 2, "u8": 1, "f8_e4m3": 1}


def model(kind, shapes, metadata=None, formats=None):
    """An opened model without files: shapes by name."""
    tensors = {}
    for name, shape in shapes.items():
        fmt = (formats or {}).get(name, "bf16")
        tensors[name] = TensorInfo(name, fmt, tuple(shape), Path("m"), 0, math.prod(shape) * BYTES[fmt])
    default = {"general.architecture": "olmoe"} if kind == "gguf" else {"model_type": "olmoe", "hidden_act": "silu"}
    return ModelFiles(kind, Path("m"), tensors, default if metadata is None else metadata, {})


def gguf_shapes(block=0, **changes):
    shapes = {
        "ffn_gate_exps.weight": (EXPERTS, INTERMEDIATE, HIDDEN), "ffn_up_exps.weight": (EXPERTS, INTERMEDIATE, HIDDEN),
        "ffn_down_exps.weight": (EXPERTS, HIDDEN, INTERMEDIATE),
    } | changes  # fmt: skip
    return {f"blk.{block}.{name}": shape for name, shape in shapes.items() if shape is not None}


def refuses(files, text):
    with pytest.raises(StoreError, match=text):
        find_experts(files)


# ---------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("blk.7.ffn_gate_exps.weight", ("", 7, "gate", "weight", STACKED)),
        ("blk.7.ffn_gate_up_exps.bias", ("", 7, "gate_up", "bias", STACKED)),
        ("blk.31.ffn_down.12.weight", ("", 31, "down", "weight", 12)),
        ("blk.7.ffn_gate_shexp.weight", None),
        ("blk.7.ffn_gate_chexps.weight", None),
        ("blk.7.ffn_gate_inp.weight", None),
        ("blk.7.ffn_norm_exps.weight", None),
        ("blk.7.exp_probs_b.bias", None),
        ("blk.7.ffn_up.weight", None),
        ("token_embd.weight", None),
    ],
)
def test_gguf_names(name, wanted):
    assert read_gguf_name(name) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.3.mlp.experts.17.up_proj.weight", ("model.", 3, "up", "weight", 17)),
        ("model.layers.3.block_sparse_moe.experts.0.w1.weight", ("model.", 3, "gate", "weight", 0)),
        ("model.layers.3.block_sparse_moe.experts.0.w2.weight", ("model.", 3, "down", "weight", 0)),
        ("model.layers.3.feed_forward.experts.0.w3.weight", ("model.", 3, "up", "weight", 0)),
        ("backbone.layers.9.mixer.experts.4.down_proj.weight", ("backbone.", 9, "down", "weight", 4)),
        ("model.language_model.layers.0.experts.down_proj", ("model.language_model.", 0, "down", "weight", STACKED)),
        ("model.layers.0.mlp.experts.gate_up_proj", ("model.", 0, "gate_up", "weight", STACKED)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", ("model.", 0, "gate_up", "bias", STACKED)),
        ("model.layers.0.mlp.experts.down_proj_blocks", ("model.", 0, "down", "blocks", STACKED)),
        ("model.layers.0.mlp.experts.down_proj_scales", ("model.", 0, "down", "scales", STACKED)),
        ("model.layers.0.block_sparse_moe.input_linear.weight", ("model.", 0, "gate_up", "weight", STACKED)),
        ("model.layers.0.block_sparse_moe.output_linear.weight", ("model.", 0, "down", "weight", STACKED)),
        ("layers.0.mlp.experts.0.gate_proj.weight", ("", 0, "gate", "weight", 0)),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", None),
        ("model.layers.0.mlp.gate.weight", None),
        ("model.layers.0.mlp.gate.e_score_correction_bias", None),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_checkpoint_names(name, wanted):
    assert read_checkpoint_name(name) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.0.gate_proj.qweight",
        "model.layers.0.mlp.experts.0.linear_v.weight",
        "model.layers.0.mlp.experts.mystery",
    ],
)
def test_other_schemes_of_quantisation_are_not_passed_over(name):
    refuses(model("safetensors", {name: (4, 4)}), f"tensor '{name}': lies among the experts.*in bf16, or as a GGUF")
    refuses(model("gguf", {"blk.0.ffn_down_exps.scale": (3,)}), "'blk.0.ffn_down_exps.scale': lies among the experts")


# ---------------------------------------------------------------------------------------------------------- layers
def test_a_model_with_layers_of_several_sorts():
    shapes = {"token_embd.weight": (9, HIDDEN), "blk.1.ffn_up_shexp.weight": (4, HIDDEN), "blk.0.ffn_up.weight": (4, 4)}
    for block in (1, 2, 3, 4):
        shapes |= gguf_shapes(block)
    metadata = {"general.architecture": "glm4moe", "glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    found = find_experts(model("gguf", shapes, metadata))
    assert [layer.block for layer in found.layers] == [1, 2, 3]
    assert {a.what: a.num_tensors for a in found.left_alone} == {
        "shared experts": 1, "other experts": 3, "all else": 2,
    }  # fmt: skip
    assert found.expert_nbytes == 3 * 3 * EXPERTS * HIDDEN * INTERMEDIATE * 2
    text = str(found)
    assert "layers 1 to 3: 3 experts of 64 x 96, bf16/bf16/bf16" in text and "m: glm4moe, gate silu_glu" in text
    assert found.layers[0].formats == ("bf16",) * 3


def test_layers_of_prediction_in_a_checkpoint():
    shapes = {}
    for layer in range(3):
        shapes |= {
            f"model.layers.{layer}.mlp.experts.gate_up_proj": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            f"model.layers.{layer}.mlp.experts.down_proj": (EXPERTS, HIDDEN, INTERMEDIATE),
        }
    metadata = {"model_type": "deepseek_v3", "hidden_act": "silu", "num_hidden_layers": 2}
    found = find_experts(model("safetensors", shapes, metadata))
    assert [layer.block for layer in found.layers] == [0, 1] and found.gate == SILU
    assert [a.what for a in found.left_alone] == ["other experts"]


def test_no_experts():
    files = model("gguf", {"blk.0.ffn_up.weight": (4, 4)})
    refuses(files, "m: none of its 1 tensors is a routed expert's; is it a mixture-of-experts model")


def checkpoint(**shapes):
    return {f"model.layers.0.mlp.experts.{name}": shape for name, shape in shapes.items()}


UP, DOWN = (EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
MERGED = (EXPERTS, 2 * INTERMEDIATE, HIDDEN)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (gguf_shapes(**{"ffn_down_exps.weight": None}), "layer 0: has gate, up, but needs down and up"),
        (gguf_shapes(**{"ffn_up_exps.weight": None}), "layer 0: has down, gate, but needs down and up"),
        (gguf_shapes(**{"ffn_gate_up_exps.weight": MERGED}), "gate_up is there beside gate or up; keep one"),
        (gguf_shapes(**{"ffn_up_exps.weight": (EXPERTS, 90, HIDDEN)}), r"has \(90, 64\) for an expert, but \(96, 64\)"),
        (gguf_shapes(**{"ffn_up_exps.weight": (EXPERTS + 1, *UP[1:])}), "numbers of experts differ: .*'up': 4"),
        (gguf_shapes(**{"ffn_up_exps.weight": UP[1:]}), r"must have 3 dimensions, the experts first"),
        (gguf_shapes(**{"ffn_up_exps.bias": UP[:2]}), "biases of up beside weights of down, gate, up"),
        (gguf_shapes(**{"ffn_up.0.weight": UP[1:]}), "up weight is there both stacked and expert by expert"),
        (gguf_shapes(**{"ffn_up.00.weight": UP[1:], "ffn_up.0.weight": UP[1:]}), "is the same matrix as tensor"),
    ],
)
def test_gguf_layers_that_do_not_fit(shapes, text):
    refuses(model("gguf", shapes), text)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            checkpoint(gate_up_proj=(EXPERTS, 100, HIDDEN), down_proj=DOWN),
            r"\(100, 64\) for an expert, but \(192, 64\)",
        ),
        (checkpoint(gate_up_proj_blocks=(3, 4, 2, 16), down_proj=DOWN), "gate_up has MXFP4 blocks, which need scales"),
        (checkpoint(gate_up_proj_scales=(3, 4, 2), gate_up_proj=MERGED, down_proj=DOWN), "has scales, but no MXFP4"),
        (checkpoint(down_proj_blocks=(3, 4, 2, 16), down_proj_scales=(3, 4, 3)), "must be u8 of shapes"),
        (
            {f"model.layers.0.mlp.experts.{e}.{n}_proj.weight": (4, 4) for n in ("gate", "up", "down") for e in (0, 2)},
            "gate weight of expert 1 is missing; the files are incomplete",
        ),
        (
            {f"model.layers.0.mlp.experts.{e}.{n}_proj.weight": (4, 4 + e) for n in ("up", "down") for e in (0, 1)},
            "must be like tensor .*; write all experts alike",
        ),
        (
            checkpoint(up_proj=UP, down_proj=DOWN) | {"talker.layers.0.mlp.experts.up_proj": UP},
            r"has experts of several models, with names that start with \['model.', 'talker.'\]",
        ),
    ],
)
def test_checkpoint_layers_that_do_not_fit(shapes, text):
    refuses(model("safetensors", shapes), text)


def test_one_model_of_several_is_chosen():
    shapes = checkpoint(up_proj=UP, down_proj=DOWN)
    both = shapes | {name.replace("model.", "talker.model."): shape for name, shape in shapes.items()}
    files = model("safetensors", both)
    found = find_experts(files, prefix="talker.model.").layers[0].matrices
    assert all(m.tensors[0].name.startswith("talker.") for m in found.values())


def test_only_a_config_can_say_whether_rows_take_turns():
    shapes = checkpoint(
        gate_up_proj=MERGED, down_proj=DOWN, gate_up_proj_bias=MERGED[:2], down_proj_bias=DOWN[:2]
    )  # fmt: skip
    refuses(model("safetensors", shapes, {}), "only config.json can say whether its rows take turns; put it beside")
    halves = find_experts(model("safetensors", shapes)).layers[0].matrices
    turns = find_experts(model("safetensors", shapes, {"model_type": "gpt_oss"})).layers[0].matrices
    assert [(m.first_row, m.row_step) for m in halves.values()] == [(0, 1), (INTERMEDIATE, 1), (0, 1)]
    assert [(m.first_row, m.row_step) for m in turns.values()] == [(0, 2), (1, 2), (0, 1)]


# ----------------------------------------------------------------------------------------------------------- gates
def test_architectures_of_the_table_exist():
    from gguf.constants import MODEL_ARCH_NAMES

    assert set(GGUF_GATES) <= set(MODEL_ARCH_NAMES.values())
    assert gate_of_gguf("gpt-oss") == GateKind("swiglu_oai", 1.702, 7.0)
    for unknown in ("gpt2", None, 7):
        with pytest.raises(StoreError, match=f"architecture {unknown!r} is not known here"):
            gate_of_gguf(unknown)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "mixtral", "hidden_act": "silu"}, SILU),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}, GateKind("relu2")),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, GateKind("swiglu_oai")),
        (
            {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_act": "silu"}},
            SILU,
        ),
        ({"model_type": "hy_v4", "hidden_act": "silu", "swiglu_limit": 4}, GateKind("silu_glu_clamped", limit=4.0)),
    ],
)
def test_gates_of_configs(config, wanted):
    assert gate_of_config(config) == wanted
