"""A GGUF file's metadata as a configuration of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from trilane.errors import ModelFileError
from trilane.integrations.gguf.architectures import SIZES, Architecture, Facts

TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of(facts: Facts, row: Architecture) -> Any:
    """The configuration of the model in a file.

    Raises
    ------
    ModelFileError
        A size is missing, or positions are scaled in a way that is not known.
    """
    values: dict[str, Any] = {name: facts.need(key) for key, name in SIZES.items() if key != "attention.head_count_kv"}
    values["num_key_value_heads"] = facts.get("attention.head_count_kv", values["num_attention_heads"])
    values |= {name: facts.get(key) for key, name in row.sizes.items() if facts.get(key) is not None}
    more = row.more(facts)
    values |= more
    embeddings = facts.shape("token_embd.weight")
    if embeddings is None:
        raise ModelFileError(f"{facts.files.path}: has no tensor 'token_embd.weight'; the file is incomplete")
    values["vocab_size"] = embeddings[0]
    values["tie_word_embeddings"] = facts.shape("output.weight") is None
    values["rope_parameters"] = _rope(facts)
    if "partial_rotary_factor" in more:
        values["rope_parameters"]["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    for name, key in TOKEN_IDS.items():
        values[name] = facts.files.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return AutoConfig.for_model(row.model_type, **values)


def _rope(facts: Facts) -> dict[str, Any]:
    theta = facts.get("rope.freq_base", 10000.0)
    kind = facts.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    found = {"rope_type": kind, "rope_theta": theta, "factor": facts.need("rope.scaling.factor")}
    if kind == "linear":
        return found
    if kind != "yarn":
        raise ModelFileError(
            f"{facts.files.path}: {facts.architecture}.rope.scaling.type is {kind!r}, but only none, linear "
            "and yarn are known; take another file of the model"
        )
    found["original_max_position_embeddings"] = facts.need("rope.scaling.original_context_length")
    found |= {"beta_fast": 32.0, "beta_slow": 1.0}
    if facts.architecture == "gpt-oss":
        found["truncate"] = False
    log_multiplier = facts.get("rope.scaling.yarn_log_multiplier")
    if log_multiplier:
        found |= {"mscale": 10 * log_multiplier, "mscale_all_dim": 10 * log_multiplier}
    return found
