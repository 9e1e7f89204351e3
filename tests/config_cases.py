"""config.json of published models, cut down to the keys that say how large they are, and their published totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _config(**keys: Any) -> dict[str, Any]:
    return {"torch_dtype": "bfloat16", "tie_word_embeddings": False} | keys


_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

QWEN3_30B = _config(
    model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    vocab_size=151936, decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=40960,
)  # fmt: skip
MIXTRAL = _config(
    model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000,
)  # fmt: skip
GPT_OSS_20B = _config(
    model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
    num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088,
    sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12,
    quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
OLMOE = _config(
    model_type="olmoe", hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
    num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, vocab_size=50304,
)  # fmt: skip
DEEPSEEK_V2_LITE = _config(
    model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
    n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, num_hidden_layers=27, first_k_dense_replace=1,
    moe_layer_freq=1, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, vocab_size=102400, **_MLA,
)  # fmt: skip
DEEPSEEK_V3 = _config(
    model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, num_hidden_layers=61, first_k_dense_replace=3,
    moe_layer_freq=1, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, vocab_size=129280, **_MLA,
)  # fmt: skip
QWEN15_MOE = _config(
    model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
    num_attention_heads=16, num_key_value_heads=16, vocab_size=151936, decoder_sparse_step=1,
)  # fmt: skip
PHI_35_MOE = _config(
    model_type="phimoe", hidden_size=4096, intermediate_size=6400, num_local_experts=16, num_experts_per_tok=2,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=32064,
)  # fmt: skip
GLM_45_AIR = _config(
    model_type="glm4_moe", hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408,
    n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, num_hidden_layers=46, first_k_dense_replace=1,
    num_attention_heads=96, num_key_value_heads=8, head_dim=128, vocab_size=151552,
)  # fmt: skip
GRANITE_3B = _config(
    model_type="granitemoe", hidden_size=1536, intermediate_size=512, num_local_experts=40, num_experts_per_tok=8,
    num_hidden_layers=32, num_attention_heads=24, num_key_value_heads=8, vocab_size=49155, tie_word_embeddings=True,
)  # fmt: skip
ERNIE_21B = _config(
    model_type="ernie4_5_moe", hidden_size=2560, intermediate_size=12288, moe_intermediate_size=1536,
    moe_num_experts=64, moe_num_shared_experts=2, moe_k=6, moe_layer_start_index=1, moe_layer_end_index=29,
    moe_layer_interval=1, num_hidden_layers=28, num_attention_heads=20, num_key_value_heads=4, head_dim=128,
    vocab_size=103424, tie_word_embeddings=True,
)  # fmt: skip
LLAMA4_SCOUT = {
    "model_type": "llama4",
    "text_config": _config(
        model_type="llama4_text", hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
        num_local_experts=16, num_experts_per_tok=1, num_hidden_layers=48, interleave_moe_layer_step=1,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, vocab_size=202048,
    ),
}  # fmt: skip
QWEN3_NEXT = _config(
    model_type="qwen3_next", hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, num_experts=512, num_experts_per_tok=10, num_hidden_layers=48,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, vocab_size=151936, full_attention_interval=4,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_value_head_dim=128, decoder_sparse_step=1,
)  # fmt: skip

#: Billions of parameters as the models' makers publish them: in all, and what a token uses (embeddings in or out).
PUBLISHED = {
    "qwen3-30b-a3b": (QWEN3_30B, 30.5, 3.3),
    "mixtral-8x7b": (MIXTRAL, 46.7, 12.9),
    "gpt-oss-20b": (GPT_OSS_20B, 20.9, 3.6),
    "olmoe-1b-7b": (OLMOE, 6.92, 1.3),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15.7, 2.4),
    "deepseek-v3": (DEEPSEEK_V3, 671, 37),
    "qwen1.5-moe-a2.7b": (QWEN15_MOE, 14.3, 2.7),
    "phi-3.5-moe": (PHI_35_MOE, 41.9, 6.6),
    "glm-4.5-air": (GLM_45_AIR, 106, 12),
    "granite-3.1-3b-a800m": (GRANITE_3B, 3.3, 0.88),
    "ernie-4.5-21b-a3b": (ERNIE_21B, 21.8, 3.3),
    "llama-4-scout": (LLAMA4_SCOUT, 109, 17),  # with 0.9 of a tower for images
    "qwen3-next-80b-a3b": (QWEN3_NEXT, 80, 3.9),
}


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A config.json in ``folder`` with some keys changed; None leaves a key out."""
    kept = {key: value for key, value in (config | changes).items() if key not in changes or value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(kept))
    return path
