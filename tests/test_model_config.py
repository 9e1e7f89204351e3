"""Parameters and KV cache from config.json: published totals, counts by hand, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from config_cases import DEEPSEEK_V3, GPT_OSS_20B, PUBLISHED, QWEN3_30B, QWEN3_NEXT, write_config

from trilane.errors import ModelFileError, StoreError
from trilane.readers.attention import kv_of_config, kv_of_gguf
from trilane.readers.model_config import read_model_config

SMALL = {
    "model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3,
    "mlp_only_layers": [0], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
    "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name, tmp_path):
    config, total, active = PUBLISHED[name]
    found = read_model_config(write_config(tmp_path, config))
    assert found.num_params() / 1e9 == pytest.approx(total, rel=0.012)
    # makers count embeddings in or out of what a token uses
    with_table = (found.num_params(active=True) + (found.embeddings if found.head else 0)) / 1e9
    assert min(abs(with_table / active - 1), abs(found.num_params(active=True) / 1e9 / active - 1)) < 0.07
    assert not [note for note in found.notes if "may be off" in note]


def test_a_small_model_counted_by_hand(tmp_path):
    found = read_model_config(write_config(tmp_path, SMALL))
    attention_and_norms = 64 * 16 * (2 * 4 + 2 * 2) + 2 * 64
    dense, sparse, shared, expert = 3 * 64 * 128, 4 * 64 + 64, 3 * 64 * 48, 3 * 64 * 32
    assert [(one.num_experts, one.shared, one.other) for one in found.layers] == [
        (0, 0, attention_and_norms + dense),
        *[(4, shared, attention_and_norms + sparse)] * 2,
    ]
    assert found.expert_params == expert and found.element_nbytes == 4
    assert found.num_params() == 142_912 and found.num_params(active=True) == 111_936
    tied = read_model_config(write_config(tmp_path, SMALL, tie_word_embeddings=True))
    assert tied.num_params() == 142_912 - 6400 and tied.num_params(active=True) == 111_936


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"mlp_only_layers": []}, "EEE"),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, "-E-"),
        ({"first_k_dense_replace": 2}, "--E"),
        ({"mlp_only_layers": [], "moe_layer_freq": 2}, "E-E"),
        ({"moe_layer_freq": [0, 1, 1]}, "-EE"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, "-EE"),
        ({"is_moe_layer": [True, False, True]}, "E-E"),
        ({"moe_layers": [1]}, "-E-"),
        ({"mlp_only_layers": [], "interleave_moe_layer_step": 2}, "-E-"),
        ({"mlp_only_layers": [], "moe_layer_start_index": 0, "moe_layer_end_index": 1}, "EE-"),
    ],
)
def test_which_layers_have_experts(changes, layers, tmp_path):
    found = read_model_config(write_config(tmp_path, SMALL, **changes))
    assert "".join("E" if one.num_experts else "-" for one in found.layers) == layers


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_experts": None}, StoreError, "a dense model has no experts to schedule"),
        ({"num_experts": 0}, StoreError, "a dense model has no experts"),
        ({"num_experts": 1 << 40}, ModelFileError, "num_experts is '1099511627776', but must be a whole number from 1"),
        ({"hidden_size": None}, ModelFileError, "hidden_size is missing, but is needed to count parameters"),
        ({"hidden_size": "64"}, ModelFileError, "hidden_size is '64', but must be a whole number from 1 to 1048576"),
        ({"num_hidden_layers": -3}, ModelFileError, "num_hidden_layers is '-3', but must be a whole number"),
        ({"num_experts_per_tok": 5}, ModelFileError, "num_experts_per_tok is '5', but must be .* from 1 to 4"),
        ({"num_experts_per_tok": None}, ModelFileError, "num_experts_per_tok or .* is missing"),
        ({"mlp_only_layers": [0, 1, 2]}, StoreError, "none of its 3 layers has experts"),
        ({"is_moe_layer": [True]}, ModelFileError, "is_moe_layer has 1 entries, but num_hidden_layers is 3"),
        ({"layer_types": ["mamba"] * 3}, StoreError, "layers of type 'mamba', whose parameters are not counted here"),
        ({"hybrid_override_pattern": "M-E"}, StoreError, "pass the model's GGUF file or safetensors folder"),
        ({"attn_type_list": [0, 1, 1]}, StoreError, "attn_type_list"),
        ({"kv_lora_rank": 8}, ModelFileError, "qk_nope_head_dim is missing"),
    ],
)
def test_what_cannot_be_counted_is_refused(changes, error, text, tmp_path):
    with pytest.raises(error, match=text) as caught:
        read_model_config(write_config(tmp_path, SMALL, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("value", [None, -1, 0, 1 << 62, 1.5, True, "x", [], {}, [[]], [None], float("inf")])
def test_no_value_of_any_key_ends_in_another_error(value, tmp_path):
    keys = {
        *SMALL,
        *QWEN3_NEXT,
        *DEEPSEEK_V3,
        *GPT_OSS_20B,
        "moe_layers",
        "moe_layer_freq",
        "text_config",
        "is_moe_layer",
    }
    for key in sorted(keys):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SMALL | {key: value}))
        try:
            read_model_config(path).num_params()
        except StoreError as error:
            assert str(path) in str(error)


def test_what_is_taken_for_granted_is_said(tmp_path):
    odd = {"model_type": "new_moe", "dtype": None, "quantization_config": {"quant_method": "fp8"}}
    notes = " ".join(read_model_config(write_config(tmp_path, SMALL, **odd)).notes)
    for text in ("'new_moe' is none whose count was checked", "dtype is not given", "quantised (fp8)"):
        assert text in notes


# -------------------------------------------------------------------------------------------------- KV cache
def test_the_kv_cache_of_a_config():
    grouped = kv_of_config(QWEN3_30B)
    assert grouped.nbytes(1000) == 48 * 2 * 4 * 128 * 2 * 1000 and grouped.max_context == 40960
    latent = kv_of_config(DEEPSEEK_V3)
    assert latent.nbytes(1000) == 61 * (512 + 64) * 2 * 1000
    windowed = kv_of_config(GPT_OSS_20B)
    assert windowed.nbytes(1000) == 12 * 2 * 8 * 64 * 2 * (1000 + 128)
    linear = kv_of_config(QWEN3_NEXT)
    assert linear.nbytes(1000) == 12 * 2 * 2 * 256 * 2 * 1000
    assert kv_of_config({}) is None


def test_the_kv_cache_of_gguf():
    keys = {"block_count": 3, "attention.head_count": 8, "embedding_length": 512, "context_length": 4096}

    def kv(**more):
        named = {f"x.{key.replace('__', '.')}": value for key, value in (keys | more).items()}
        return kv_of_gguf({"general.architecture": "x"} | named)

    assert kv(attention__head_count_kv=2).nbytes(10) == 3 * 2 * 2 * 64 * 2 * 10
    some = kv(attention__head_count_kv=np.array([0, 2, 2], np.uint32), attention__key_length=32)
    assert some.token_nbytes == (0, 2 * 2 * (32 + 64), 2 * 2 * (32 + 64))
    assert kv(attention__kv_lora_rank=512, rope__dimension_count=64).token_nbytes == (2 * 576,) * 3
    assert kv(attention__head_count_kv=2, nextn_predict_layers=1).token_nbytes == (2 * 2 * 128,) * 2
    assert kv() is None and kv_of_gguf({}) is None
