"""What a token of context costs: the KV cache of a model by layer, from config.json or from GGUF's metadata.

Keys and values are counted in 16 bits; models with latent attention (MLA) keep one compressed row a token. A layer
whose window config.json names keeps no more than its window. Where the files do not say enough, the answer is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trilane.readers.architectures import text_config

ELEMENT_NBYTES = 2
LINEAR = "linear_attention"  # a state of a fixed size instead of a cache
_WINDOW_KEYS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one sequence.

    Attributes
    ----------
    token_nbytes : tuple of int
        Bytes of a token in each layer.
    windows : tuple of int or None
        Tokens that each layer keeps at most; None: all.
    max_context : int or None
        Tokens that the model is made for; None: not told.
    """

    token_nbytes: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_context: int | None

    def nbytes(self, context: int) -> int:
        """Bytes for a context of so many tokens.

        >>> KvCache((100, 100), (None, 4), None).nbytes(10)
        1400
        """
        kept = (context if window is None else min(window, context) for window in self.windows)
        return sum(nbytes * tokens for nbytes, tokens in zip(self.token_nbytes, kept, strict=True))


def kv_of_config(config: Mapping[str, Any]) -> KvCache | None:
    """The KV cache that a config.json stands for; None if it does not say."""
    part = text_config(config)
    layers, heads, hidden = (_number(part.get(k)) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    rank, rope = _number(part.get("kv_lora_rank")), _number(part.get("qk_rope_head_dim"))
    if not layers or not heads or not hidden:
        return None
    if rank and rope:
        elements = rank + rope
    else:
        head = _number(part.get("head_dim")) or hidden // heads
        elements = 2 * head * (_number(part.get("num_key_value_heads")) or heads)
    kinds = layer_kinds(part, layers)
    token_nbytes = tuple(0 if kind == LINEAR else ELEMENT_NBYTES * elements for kind in kinds)
    windows = tuple(_number(part.get(_WINDOW_KEYS.get(kind, ""))) for kind in kinds)
    return KvCache(token_nbytes, windows, _number(part.get("max_position_embeddings")))


def layer_kinds(part: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer's attention as transformers call it; "" where the config does not say."""
    kinds, every = part.get("layer_types"), _number(part.get("full_attention_interval"))
    if isinstance(kinds, list) and len(kinds) == layers:
        return [str(kind) for kind in kinds]
    if every is not None:
        return ["full_attention" if (layer + 1) % every == 0 else LINEAR for layer in range(layers)]
    return [""] * layers


def kv_of_gguf(metadata: Mapping[str, Any]) -> KvCache | None:
    """The KV cache that GGUF's metadata stand for, windows not counted; None if they do not say."""

    def value(key: str) -> Any:
        return metadata.get(f"{metadata.get('general.architecture')}.{key}")

    layers, heads, hidden = (_number(value(k)) for k in ("block_count", "attention.head_count", "embedding_length"))
    if not layers:
        return None
    layers -= _number(value("nextn_predict_layers")) or 0
    kv_heads = _by_layer(value("attention.head_count_kv"), layers)
    head = hidden // heads if heads and hidden else None
    key, to = (_number(value(f"attention.{name}_length")) or head for name in ("key", "value"))
    rank, rope = _number(value("attention.kv_lora_rank")), _number(value("rope.dimension_count"))
    if rank and rope:
        token_nbytes = (ELEMENT_NBYTES * (rank + rope),) * layers
    elif kv_heads and key and to:
        token_nbytes = tuple(ELEMENT_NBYTES * count * (key + to) for count in kv_heads)
    else:
        return None
    return KvCache(token_nbytes, (None,) * layers, _number(value("context_length")))


def _number(value: Any) -> int | None:
    """A number above 0, or None."""
    return value if type(value) is int and 0 < value < 1 << 40 else None


def _by_layer(value: Any, layers: int) -> list[int] | None:
    """A number for each layer, from one number or an array of them (layers without attention have 0)."""
    if type(value) is int and value > 0:
        return [value] * layers
    if getattr(value, "ndim", None) == 1 and len(value) >= layers and (value >= 0).all():
        return [int(count) for count in value[:layers]]
    return None
