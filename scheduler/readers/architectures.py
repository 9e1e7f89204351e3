"""Which activation a model's experts have, from what its files say about its architecture.

The tables hold architectures whose activation is known; nothing is guessed for others. GGUF names them in
``general.architecture``, transformers in ``model_type`` of config.json. It knows no kernels: a gate here is a name and
its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trilane.errors import ModelFileError, StoreError

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


@dataclass(frozen=True)
class GateKind:
    """An activation by its name and numbers, as :class:`trilane.store.Gate` takes them."""

    kind: str
    alpha: float = ALPHA
    limit: float = LIMIT


SILU, GELU, RELU2, OAI = (GateKind(kind) for kind in ("silu_glu", "gelu_tanh_glu", "relu2", "swiglu_oai"))

_GGUF_SILU = (
    "afmoe", "bailingmoe", "bailingmoe2", "dbrx", "deepseek", "deepseek2", "deepseek2-ocr", "dots1", "ernie4_5-moe",
    "exaone-moe", "glm-dsa", "glm4moe", "granitehybrid", "granitemoe", "hunyuan-moe", "jamba", "kimi-linear", "lfm2moe",
    "llada-moe", "llama", "llama4", "mimo2", "minimax-m2", "mistral4", "olmoe", "phimoe", "qwen2moe", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen3vlmoe",
)  # fmt: skip
GGUF_GATES: Mapping[str, GateKind] = {
    **dict.fromkeys(_GGUF_SILU, SILU),
    "gemma4": GELU,
    "gpt-oss": OAI,
    "nemotron_h_moe": RELU2,
}

#: ``model_type`` whose experts multiply act(gate) by up, with the act that config.json names.
_PLAIN_TYPES = frozenset(
    """afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 diffusion_gemma dots1 ernie4_5_moe ernie4_5_vl_moe
    exaone_moe flex_olmo gemma4 gemma4_text glm4_moe glm4_moe_lite glm4v_moe glm4v_moe_text glm_moe_dsa granitemoe
    granitemoehybrid granitemoeshared hunyuan_v1_moe jamba kimi_linear lfm2_moe llama4 llama4_text mimo_v2_flash
    minimax minimax_m2 mistral4 mixtral olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next
    qwen3_omni_moe qwen3_omni_moe_text qwen3_vl_moe qwen3_vl_moe_text solar_open""".split()
)
_CLAMPED_TYPES = frozenset(("deepseek_v4", "glm5_next", "hy_v4"))
_ACTS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU, "gelu_tanh": GELU}
_ACT_KEYS = ("hidden_activation", "hidden_act")

_ASK = "pass the model's own, such as gate='silu_glu' or Gate('swiglu_oai', alpha=..., limit=...)"


def gate_of_gguf(architecture: Any) -> GateKind:
    """The activation of a GGUF architecture.

    Raises
    ------
    StoreError
        It is not in the table, and asks for ``gate=``.
    """
    found = GGUF_GATES.get(architecture) if isinstance(architecture, str) else None
    if found is None:
        raise StoreError(f"gate: the activation of architecture {architecture!r} is not known here; {_ASK}")
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model (a part of its own in multimodal models)."""
    part = config
    for key in ("thinker_config", "text_config"):
        inner = part.get(key)
        part = inner if isinstance(inner, dict) else part
    return part


def gate_of_config(config: Mapping[str, Any]) -> GateKind:
    """The activation that a transformers config.json stands for.

    Raises
    ------
    StoreError
        There is none, its model_type is not in the table, or it names another activation; asks for ``gate=``.
    """
    part = text_config(config)
    model_type = part.get("model_type", config.get("model_type"))
    if model_type is None:
        raise StoreError(f"gate: no config.json with a model_type lies beside the file; put it there, or {_ASK}")
    if model_type == "gpt_oss":
        return GateKind("swiglu_oai", ALPHA, _number(part, "swiglu_limit", LIMIT))
    if model_type == "nemotron_h" and part.get("mlp_hidden_act") == "relu2":
        return RELU2
    act = next((part[key] for key in _ACT_KEYS if part.get(key) is not None), None)
    plain = _ACTS.get(act) if isinstance(act, str) else None
    if model_type in _PLAIN_TYPES and plain is not None:
        return plain
    if model_type in _CLAMPED_TYPES and plain is SILU and "swiglu_limit" in part:
        return GateKind("silu_glu_clamped", ALPHA, _number(part, "swiglu_limit", LIMIT))
    raise StoreError(
        f"gate: the activation of model_type {model_type!r} with hidden_act {act!r} is not known here; {_ASK}"
    )


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ModelFileError(f"config.json: {key} is {value!r}, but must be a number above 0; correct it or pass gate=")
    return float(value)


def has_interleaved_rows(config: Mapping[str, Any]) -> bool:
    """Whether rows of gate and up take turns in the merged tensor (gpt-oss); else all of gate come first."""
    return text_config(config).get("model_type") == "gpt_oss"
