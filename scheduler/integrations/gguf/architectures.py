"""What GGUF architectures are called in transformers: the model's type, its sizes, and the names of its tensors.

One row for each architecture whose whole model can be run. It knows names and numbers, and reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trilane.errors import ModelFileError
from trilane.readers.model_file import ModelFiles

SIGMOID = 2  # expert_gating_func of GGUF
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PARTS = {  # of a layer, without .weight and .bias
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
EXACT = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
SIZES = {  # metadata behind "<architecture>." to what transformers calls it
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


class Facts:
    """A file's metadata by the architecture's keys, and the shapes of its tensors."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.architecture = str(files.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; a NumPy array as a list."""
        value = self.files.metadata.get(f"{self.architecture}.{key}", default)
        return value.tolist() if hasattr(value, "tolist") else value

    def need(self, key: str) -> Any:
        """A value that must be there.

        Raises
        ------
        ModelFileError
        """
        value = self.get(key)
        if value is None:
            raise ModelFileError(
                f"{self.files.path}: has no {self.architecture}.{key}, which the model's size follows from; the file "
                "is incomplete, convert it again"
            )
        return value

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None if there is none of that name."""
        tensor = self.files.tensors.get(name)
        return None if tensor is None else tensor.shape

    def has(self, part: str) -> bool:
        """Whether any layer has a part, such as ``attn_q.bias``."""
        return any(name.endswith(f".{part}") for name in self.files.tensors)


@dataclass(frozen=True)
class Architecture:
    """How a GGUF architecture is built by transformers.

    Attributes
    ----------
    model_type : str
        As in config.json.
    sizes : mapping of str
        Keys of the metadata beside :data:`SIZES`.
    parts : mapping of str
        Names that differ from :data:`PARTS`.
    more : callable
        Values of the configuration that need more than a look-up.
    permuted : bool
        Rows of the query and key matrices stand pairwise, as llama's converter writes them.
    """

    model_type: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Facts], dict[str, Any]] = lambda facts: {}
    permuted: bool = False


def _qwen3(facts: Facts) -> dict[str, Any]:
    return {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": _head_dim(facts)}


def _qwen2(facts: Facts) -> dict[str, Any]:
    shared = next(tensor.shape[0] for name, tensor in facts.files.tensors.items() if ".ffn_up_shexp." in name)
    found = {"shared_expert_intermediate_size": shared, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return found | {"moe_intermediate_size": _expert_rows(facts), "qkv_bias": facts.has("attn_q.bias")}


def _olmoe(facts: Facts) -> dict[str, Any]:
    return {"clip_qkv": facts.get("attention.clamp_kqv"), "intermediate_size": _expert_rows(facts)}


def _mixtral(facts: Facts) -> dict[str, Any]:
    return {"intermediate_size": _expert_rows(facts), "sliding_window": None, "head_dim": _head_dim(facts)}


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    return {"intermediate_size": _expert_rows(facts), "head_dim": _head_dim(facts)} | {
        "sliding_window": facts.need("attention.sliding_window")
    }


def _deepseek(facts: Facts) -> dict[str, Any]:
    rope = facts.need("rope.dimension_count")
    key = facts.get("attention.key_length_mla") or facts.need("attention.key_length")
    found = {
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": facts.get("attention.value_length_mla") or facts.need("attention.value_length"),
        "num_key_value_heads": facts.need("attention.head_count"),  # the file says 1, since one latent serves all
        "n_group": facts.get("expert_group_count", 1),
        "topk_group": facts.get("expert_group_used_count", 1),
    }
    if not _is_deepseek_v3(facts):
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found


def _glm4(facts: Facts) -> dict[str, Any]:
    layers = facts.need("block_count") - facts.get("nextn_predict_layers", 0)  # those predict further tokens
    return {
        "num_hidden_layers": layers,
        "head_dim": _head_dim(facts),
        "attention_bias": facts.has("attn_q.bias"),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "partial_rotary_factor": facts.get("rope.dimension_count", _head_dim(facts)) / _head_dim(facts),
        "n_group": facts.get("expert_group_count", 1),
        "topk_group": facts.get("expert_group_used_count", 1),
    }


def _head_dim(facts: Facts) -> int:
    return int(
        facts.get("attention.key_length") or facts.need("embedding_length") // facts.need("attention.head_count")
    )


def _expert_rows(facts: Facts) -> int:
    return int(next(tensor.shape[1] for name, tensor in facts.files.tensors.items() if ".ffn_up_exps.weight" in name))


def _is_deepseek_v3(facts: Facts) -> bool:
    return facts.get("expert_gating_func") == SIGMOID or facts.has("exp_probs_b.bias")


_EXPERTS = {"expert_count": "num_experts"}
_LOCAL = {"expert_count": "num_local_experts"}
_WIDE = _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")}
_SHARED["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3moe": Architecture("qwen3_moe", _WIDE, {}, _qwen3),
    "qwen2moe": Architecture("qwen2_moe", _EXPERTS, _SHARED, _qwen2),
    "olmoe": Architecture("olmoe", _EXPERTS, {}, _olmoe),
    "llama": Architecture("mixtral", _LOCAL, {}, _mixtral, permuted=True),
    "gpt-oss": Architecture("gpt_oss", _LOCAL, {"ffn_gate_inp": "mlp.router"}, _gpt_oss),
    "deepseek2": Architecture("deepseek_v2", ROUTED, {}, _deepseek),
    "deepseek2, sigmoid": Architecture("deepseek_v3", ROUTED, {}, _deepseek),
    "glm4moe": Architecture("glm4_moe", ROUTED, {}, _glm4),
}


def architecture_of(facts: Facts) -> Architecture:
    """The row of a file's architecture.

    Raises
    ------
    ModelFileError
        There is none.
    """
    key = facts.architecture
    if key == "deepseek2" and _is_deepseek_v3(facts):
        key = "deepseek2, sigmoid"
    found = ARCHITECTURES.get(key)
    if found is None or (key == "llama" and not facts.get("expert_count")):
        known = ", ".join(sorted(name for name in ARCHITECTURES if " " not in name))
        raise ModelFileError(
            f"{facts.files.path}: its architecture {facts.architecture!r} cannot be built as a whole model, but only "
            f"{known} (llama: Mixtral); its experts alone load by ExpertStore.from_gguf, for attach(model, store)"
        )
    return found


def name_in_transformers(row: Architecture, name: str, num_layers: int) -> str | None:
    """What a tensor of the trunk is called there; None for one that this model does not use.

    Raises
    ------
    KeyError
        It is not known.
    """
    if name in WHOLE:
        return WHOLE[name]
    if name.startswith(("rope_freqs.", "rope_factors_")):
        return None  # follow from the configuration
    match = _BLOCK.fullmatch(name)
    if match is None:
        raise KeyError(name)
    block, rest = int(match[1]), match[2]
    if block >= num_layers:
        return None  # a layer that predicts further tokens
    if rest in EXACT:
        return f"model.layers.{block}.{EXACT[rest]}"
    part, _, kind = rest.rpartition(".")
    target = row.parts.get(part) or PARTS[part]
    return f"model.layers.{block}.{target}.{kind}"
