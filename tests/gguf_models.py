"""GGUF files of random models of transformers, named by the gguf package's own tables, as converters write them."""

from __future__ import annotations

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "qwen3_moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "qwen2_moe": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "olmoe": ("olmoe", gguf.MODEL_ARCH.OLMOE),
    "mixtral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "gpt_oss": ("gpt-oss", gguf.MODEL_ARCH.GPT_OSS),
    "deepseek_v2": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "deepseek_v3": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "glm4_moe": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
}


def _pairwise(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as llama's converter puts them: first and second half by turns."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _experts(name: str, value: np.ndarray, interleaved: bool):
    """Stacked experts of transformers as the tensors of GGUF: gate, up and down, rows by output."""
    block = name.split(".")[2]
    kind = "bias" if name.endswith("bias") else "weight"
    if interleaved and kind == "weight":
        value = value.swapaxes(1, 2)
    if "down_proj" in name:
        yield f"blk.{block}.ffn_down_exps.{kind}", value
        return
    half = value.shape[1] // 2
    parts = (value[:, ::2], value[:, 1::2]) if interleaved else (value[:, :half], value[:, half:])
    yield f"blk.{block}.ffn_gate_exps.{kind}", parts[0]
    yield f"blk.{block}.ffn_up_exps.{kind}", parts[1]


def gguf_tensors(model, kind: str, split_latent: bool = False):
    """(name, float32 array) of every tensor of the file."""
    c = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind][1], c.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        value = parameter.detach().float().numpy()
        if ".mlp.experts." in name:
            yield from _experts(name, value, kind == "gpt_oss")
            continue
        if kind == "mixtral" and "q_proj" in name:
            value = _pairwise(value, c.num_attention_heads)
        if kind == "mixtral" and "k_proj" in name:
            value = _pairwise(value, c.num_key_value_heads)
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        if name.endswith("e_score_correction_bias"):
            yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", value
        elif split_latent and name.endswith("kv_b_proj.weight"):
            block, both = name.split(".")[2], value.reshape(c.num_attention_heads, -1, value.shape[-1])
            yield f"blk.{block}.attn_k_b.weight", both[:, : c.qk_nope_head_dim].swapaxes(1, 2)
            yield f"blk.{block}.attn_v_b.weight", both[:, c.qk_nope_head_dim :]
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            yield (f"{found}.weight" if found.endswith("attn_sinks") else found), value


def write_model(path, model, kind: str, *, split_latent: bool = False, leave_out: str = "") -> None:
    """The whole model in float32, without a tokenizer."""
    c, architecture = model.config, ARCHITECTURES[kind][0]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(1 if split_latent else c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_expert_used_count(c.num_experts_per_tok)
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(getattr(c, name) for name in counts if hasattr(c, name)))
    if getattr(c, "moe_intermediate_size", None) and kind != "qwen2_moe":
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if getattr(c, "head_dim", None) and "deepseek" not in kind:
        writer.add_key_length(c.head_dim)
    _add_more(writer, c, kind, split_latent)
    for name, value in gguf_tensors(model, kind, split_latent):
        if name != leave_out:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_more(writer: gguf.GGUFWriter, c, kind: str, split_latent: bool) -> None:
    if kind == "gpt_oss":
        writer.add_sliding_window(c.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(c.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(c.rope_parameters["original_max_position_embeddings"])
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        writer.add_leading_dense_block_count(c.first_k_dense_replace)
        writer.add_expert_shared_count(c.n_shared_experts)
        writer.add_expert_weights_scale(c.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(c.norm_topk_prob))
        writer.add_expert_group_count(c.n_group)
        writer.add_expert_group_used_count(c.topk_group)
    if kind in ("deepseek_v3", "glm4_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "glm4_moe":
        writer.add_rope_dimension_count(int(c.head_dim * c.rope_parameters["partial_rotary_factor"]))
    if "deepseek" in kind:
        writer.add_q_lora_rank(c.q_lora_rank)
        writer.add_kv_lora_rank(c.kv_lora_rank)
        writer.add_rope_dimension_count(c.qk_rope_head_dim)
        key = c.qk_nope_head_dim + c.qk_rope_head_dim
        writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim if split_latent else key)
        writer.add_value_length(c.kv_lora_rank if split_latent else c.v_head_dim)
        if split_latent:
            writer.add_key_length_mla(key)
            writer.add_value_length_mla(c.v_head_dim)


@torch.no_grad()
def shake_vectors(model) -> None:
    """Norms, biases and sinks that differ from ones and zeros, so that a missing one shows."""
    generator = torch.Generator().manual_seed(9)
    for value in model.state_dict().values():
        if value.ndim == 1 and value.is_floating_point():
            value.add_(0.1 * torch.randn(value.shape, generator=generator).to(value.dtype))
