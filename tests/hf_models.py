"""Tiny random models of transformers, one for each architecture on its experts interface that tests run."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)  # threads that wait for each other take longer over models of this size than they save
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
SHARED = ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LINEAR = EXPERTS | {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES = {
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_next": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "mixtral": LOCAL,
    "olmoe": EXPERTS,
    "deepseek_v2": SHARED | LATENT | {"topk_method": "greedy", "num_key_value_heads": 4},
    "deepseek_v3": SHARED | LATENT | {"n_group": 2, "num_key_value_heads": 4},
    "deepseek_v4": LOCAL | {"intermediate_size": 32},
    "gpt_oss": LOCAL,
    "glm4_moe": SHARED,
    "glm4_moe_lite": SHARED | LATENT | {"num_key_value_heads": 4},
    "granitemoe": LOCAL,
    "phimoe": LOCAL,
    "minimax_m2": LOCAL | {"rotary_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1,
    },
    "dots1": SHARED,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "lfm2_moe": EXPERTS
    | {"moe_intermediate_size": 32, "layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "nemotron_h": ROUTED
    | {
        "moe_shared_expert_intermediate_size": 48, "layers_block_type": ["attention", "moe"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "mlp_hidden_act": "relu2",
    },
    "exaone_moe": EXPERTS
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "flex_olmo": EXPERTS,
    "solar_open": ROUTED | {"n_shared_experts": 1},
    "cohere2_moe": EXPERTS | SLIDING,
    "jamba": EXPERTS
    | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
        "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 8,
    },
    "gemma4_text": SLIDING
    | {
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32, "enable_moe_block": True,
        "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 128,
    },
}  # fmt: skip
ONE_THREAD = {"cpu": {"threads": 1}}


def build_model(kind, dtype=torch.float32, **changes):
    """A model of the architecture with weights of a size that makes its logits depend on its experts."""
    config = AutoConfig.for_model(kind, **(SIZES | ARCHITECTURES[kind] | changes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # all texts have the length that is asked for
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def token_ids(rows=2, length=11):
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(model, ids, **more):
    device = next(p.device for p in model.parameters() if p.numel())
    return model(ids.to(device), use_cache=False, **more).logits.float().cpu()


def greedy(model, ids, new, **more):
    """What transformers' own generate gives, all of the new tokens."""
    more.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **more)
