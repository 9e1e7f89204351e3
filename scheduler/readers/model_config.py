"""A model's parameters by layer, counted from its config.json alone: no weights are needed.

It reads the keys that transformers' mixture-of-experts models share, and some that a family has for itself. Counted are
matrices and the norms of a layer; biases of attention, sinks and norms of heads (below 0.1 %) are not, nor
are layers for multi-token prediction. Layers of kinds that are not counted here (Mamba, say) are refused. It knows no
formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.errors import ModelFileError, StoreError
from trilane.readers.architectures import text_config
from trilane.readers.attention import LINEAR, KvCache, kv_of_config, layer_kinds
from trilane.readers.config_keys import ConfigKeys, whole_numbers
from trilane.readers.json_text import ALWAYS_NBYTES, read_object

MAX_LAYERS, MAX_EXPERTS, MAX_MODEL_EXPERTS = 1 << 14, 0xFFFF, 1 << 22  # of a model, of a layer, of all layers
MAX_SIZE = 1 << 20  # of a matrix's side
MATRICES = 3  # gate, up and down
DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: ``model_type`` for which the count was held against published numbers, or which differ from those in names alone.
COUNTED_TYPES = frozenset(
    """deepseek_v2 deepseek_v3 ernie4_5_moe glm4_moe gpt_oss granitemoe llama4 llama4_text mixtral minimax_m2 olmoe
    phimoe qwen2_moe qwen3_moe qwen3_next qwen3_vl_moe qwen3_vl_moe_text""".split()
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")
_EXPERT_SIZE = ("moe_intermediate_size", "intermediate_size")
_DENSE_SIZE = ("intermediate_size_mlp", "intermediate_size")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size")
_FIRST_MOE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_MOE_LISTS = ("mlp_layer_types", "is_moe_layer", "moe_layer_freq")
_ATTENTIONS = frozenset(("attention", "full_attention", "sliding_attention", "chunked_attention", LINEAR, ""))
#: Keys of families with layers that are not counted here.
_OTHER_LAYERS = (
    "linear_attn_config",
    "hybrid_override_pattern",
    "attn_layer_period",
    "conv_L_cache",
    "enable_moe_block",
)


@dataclass(frozen=True)
class ConfigLayer:
    """Parameters of a layer: ``num_experts`` is 0 in a dense one; ``other`` is attention, router, norms, dense MLP."""

    num_experts: int
    shared: int
    other: int


@dataclass(frozen=True)
class ModelConfig:
    """What a config.json says about a model's size. Sizes are parameters, not bytes.

    Attributes
    ----------
    path : Path
    model_type : str
    hidden, intermediate : int
        Of a routed expert.
    layers : tuple of ConfigLayer
    experts_per_token : int
    has_bias : bool
        Whether the experts' matrices have biases (gpt-oss).
    embeddings, head : int
        The table of which a token reads a row, and the last matrix; head is 0 where they are one.
    element_nbytes : int
        Of a parameter that is no routed expert's.
    stored_format : str or None
        "mxfp4" where the checkpoint's experts are so.
    kv : KvCache or None
    notes : tuple of str
        What was taken for granted.
    """

    path: Path
    model_type: str
    hidden: int
    intermediate: int
    layers: tuple[ConfigLayer, ...]
    experts_per_token: int
    has_bias: bool
    embeddings: int
    head: int
    element_nbytes: int
    stored_format: str | None
    kv: KvCache | None
    notes: tuple[str, ...]

    @property
    def expert_params(self) -> int:
        """Of one routed expert."""
        biases = 2 * self.intermediate + self.hidden if self.has_bias else 0
        return MATRICES * self.hidden * self.intermediate + biases

    def num_params(self, *, active: bool = False) -> int:
        """All parameters, or those that one token reads whole (not a table of embeddings that is nothing else)."""
        found = (self.embeddings if self.head == 0 or not active else 0) + self.head + self.hidden  # the last norm
        for layer in self.layers:
            experts = min(self.experts_per_token, layer.num_experts) if active else layer.num_experts
            found += experts * self.expert_params + layer.shared + layer.other
        return found


def read_model_config(path: Path) -> ModelConfig:
    """Read a config.json.

    Raises
    ------
    ModelFileError
        It cannot be read, lacks a key, or a key has no possible value.
    StoreError
        No mixture of experts, or layers of a kind that is not counted here.
    """
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{path}: is no regular file; pass a model's config.json, folder or GGUF file")
    return _Reader(path, read_object(path, ALWAYS_NBYTES)).model()


class _Reader(ConfigKeys):
    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path, text_config(config))
        self._config = config
        self._notes: list[str] = []

    def model(self) -> ModelConfig:
        self._check_kind()
        hidden, layers = self.need(("hidden_size",), MAX_SIZE), self.need(("num_hidden_layers",), MAX_LAYERS)
        embeddings = self.need(("vocab_size",)) * hidden
        is_tied = self.part.get("tie_word_embeddings", self._config.get("tie_word_embeddings", False)) is True
        experts = self.need(_EXPERTS, min(MAX_EXPERTS, MAX_MODEL_EXPERTS // layers))
        intermediate, top_k = self.need(_EXPERT_SIZE, MAX_SIZE), self.need(TOP_K_KEYS, experts)
        element_nbytes, stored_format = self._element_nbytes(), self._stored_format()
        if self._type not in COUNTED_TYPES:
            self._note(f"model_type {self._type!r} is none whose count was checked: the trunk may be off")
        return ModelConfig(
            path=self.path,
            model_type=self._type,
            hidden=hidden,
            intermediate=intermediate,
            layers=self._layers(layers, experts, hidden, intermediate),
            experts_per_token=top_k,
            has_bias=self._type == "gpt_oss",
            embeddings=embeddings,
            head=0 if is_tied else embeddings,
            element_nbytes=element_nbytes,
            stored_format=stored_format,
            kv=kv_of_config(self._config),
            notes=tuple(self._notes),
        )

    @property
    def _type(self) -> str:
        found = self.part.get("model_type", self._config.get("model_type"))
        return found if isinstance(found, str) else ""

    def _note(self, text: str) -> None:
        self._notes.append(f"{self.path.name}: {text}")

    def _check_kind(self) -> None:
        if not any(self.part.get(key) for key in _EXPERTS):
            raise StoreError(
                f"{self.path}: model_type {self._type!r} has none of {', '.join(_EXPERTS)}, which a mixture-of-experts "
                "model has; a dense model has no experts to schedule: pass another model"
            )
        layers = self.need(("num_hidden_layers",), MAX_LAYERS)
        others = [kind for kind in layer_kinds(self.part, layers) if kind not in _ATTENTIONS]
        softmax = self.part.get("attn_type_list")  # of MiniMax: 1 is usual attention
        is_linear = isinstance(softmax, list) and any(kind != 1 for kind in softmax)
        sign = "attn_type_list" if is_linear else next((key for key in _OTHER_LAYERS if self.part.get(key)), None)
        if others or sign:
            what = (
                f"layers of type {others[0][:40]!r}"
                if others
                else f"{sign}, so layers that are not only attention and MLP"
            )
            raise StoreError(
                f"{self.path}: model_type {self._type!r} has {what}, whose parameters are not counted here; pass the "
                "model's GGUF file or safetensors folder, which say where every byte is"
            )

    def _element_nbytes(self) -> int:
        names = [part.get(key) for part in (self.part, self._config) for key in ("dtype", "torch_dtype")]
        name = next((name for name in names if name is not None), None)
        if isinstance(name, str) and name in DTYPE_NBYTES:
            return DTYPE_NBYTES[name]
        self._note(f"dtype is {'not given' if name is None else repr(name)[:40]}: the trunk counts as bfloat16")
        return DTYPE_NBYTES["bfloat16"]

    def _stored_format(self) -> str | None:
        scheme = self._config.get("quantization_config")
        method = scheme.get("quant_method") if isinstance(scheme, dict) else None
        if method is not None and method != "mxfp4":
            self._note(f"the checkpoint is quantised ({str(method)[:40]}), but the trunk counts at its dtype")
        return "mxfp4" if method == "mxfp4" else None

    # ---------------------------------------------------------------------------------------------- layers
    def _layers(self, count: int, experts: int, hidden: int, intermediate: int) -> tuple[ConfigLayer, ...]:
        is_moe = self._moe_layers(count)
        if not any(is_moe):
            raise StoreError(f"{self.path}: none of its {count} layers has experts by its own keys; check the file")
        shared, gate = self._shared(hidden, intermediate)
        sparse = experts * hidden + gate
        dense = 0 if all(is_moe) else MATRICES * hidden * self.need(_DENSE_SIZE)
        kinds = layer_kinds(self.part, count)
        attention = {
            k: (self._linear(hidden) if k == LINEAR else self._attention(hidden)) for k in dict.fromkeys(kinds)
        }
        return tuple(
            ConfigLayer(experts, shared, attention[kind] + 2 * hidden + sparse)
            if one
            else ConfigLayer(0, 0, attention[kind] + 2 * hidden + dense)
            for one, kind in zip(is_moe, kinds, strict=True)
        )

    def _shared(self, hidden: int, intermediate: int) -> tuple[int, int]:
        """Parameters of the shared experts, and of their gate."""
        size = self.optional(_SHARED_SIZE, 0)
        count = self.optional(_SHARED_COUNT, 1 if size or self._type.startswith("llama4") else 0)
        has_gate = self._type.startswith("qwen") and size > 0
        return MATRICES * hidden * (size or intermediate) * count, hidden if has_gate else 0

    def _moe_layers(self, count: int) -> list[bool]:
        """Which layers have experts, by whichever of the families' keys are there."""
        for key in _MOE_LISTS:
            flags = self.part.get(key)
            if isinstance(flags, list):
                if len(flags) != count:
                    raise ModelFileError(
                        f"{self.path}: {key} has {len(flags)} entries, but num_hidden_layers is {count}; correct it"
                    )
                return [bool(flag) and flag != "dense" for flag in flags]
        named = self.part.get("moe_layers")
        if isinstance(named, list) and named:
            chosen = whole_numbers(named)
            return [layer in chosen for layer in range(count)]
        first, last = self.optional(_FIRST_MOE, 0), self.part.get("moe_layer_end_index")
        stop = last + 1 if type(last) is int and last >= 0 else count
        every, frequency = max(1, self.optional(_EVERY, 1)), max(1, self.optional(("moe_layer_freq",), 1))
        dense = whole_numbers(self.part.get("mlp_only_layers"))
        return [
            first <= layer < stop and (layer + 1) % every == 0 and layer % frequency == 0 and layer not in dense
            for layer in range(count)
        ]

    def _attention(self, hidden: int) -> int:
        """Parameters of a layer's attention: grouped queries, or latent (MLA)."""
        heads = self.need(("num_attention_heads",))
        rank = self.optional(("kv_lora_rank",), 0)
        if not rank:
            head = self.optional(("head_dim",), 0) or hidden // heads
            kv_heads = self.optional(("num_key_value_heads",), 0) or heads
            is_gated = self._type == "qwen3_next" or self.part.get("attn_output_gate") is True
            return hidden * head * ((3 if is_gated else 2) * heads + 2 * kv_heads)
        plain, rope, value = (self.need((k,)) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries, width = self.optional(("q_lora_rank",), 0), heads * (plain + rope)
        query = queries * (hidden + width) if queries else hidden * width
        return query + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden

    def _linear(self, hidden: int) -> int:
        """Parameters of a layer's linear attention (gated delta rule): queries, keys, values, gates, convolution."""
        keys, values = (
            self.need((f"linear_{n}_head_dim",)) * self.need((f"linear_num_{n}_heads",)) for n in ("key", "value")
        )
        gates = 2 * self.need(("linear_num_value_heads",))
        kernel = self.need(("linear_conv_kernel_dim",))
        return hidden * (2 * keys + 2 * values + gates) + (2 * keys + values) * kernel + values * hidden
