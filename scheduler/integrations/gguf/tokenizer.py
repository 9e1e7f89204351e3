"""The tokenizer of a GGUF file, from its metadata, as transformers has them.

Byte-level BPE is built here, with the splitting rule that the file names; SentencePiece vocabularies go through
transformers' own converter. A rule that is not in the table is refused, since another one gives other tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trilane.errors import ModelFileError
from trilane.readers.gguf import open_gguf

CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_MARK = r"[^\r\n\p{L}\p{N}]?"
_QWEN2 = rf"{_SHORT_FORMS}|{_MARK}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_SHORT_FORMS}|{_MARK}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = (
    rf"{_MARK}[{_UPPER}]*[{_LOWER}]+{_SHORT_FORMS}?|{_MARK}[{_UPPER}]+[{_LOWER}]*{_SHORT_FORMS}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
#: How text is split before merges, by ``tokenizer.ggml.pre``; an empty tuple is GPT-2's own rule.
RULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "default"), ()),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    "gpt-4o": (_GPT4O,),
    "deepseek-v3": _DEEPSEEK_V3,
}


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a GGUF file, with its chat template if there is one.

    Parameters
    ----------
    path : str or Path
        As for :func:`~trilane.integrations.gguf.load_gguf`.

    Raises
    ------
    ModelFileError
        There is none, or it is of a kind that is not known here.
    """
    metadata = open_gguf(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None or kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"{path}: its tokenizer is {kind!r}, but gpt2 (byte-level BPE) and llama (SentencePiece) are known; give a "
            "folder with the model's tokenizer.json (trilane run: --tokenizer)"
        )
    backend = _byte_level(path, metadata, tokens) if kind == "gpt2" else _sentence_piece(metadata, tokens)
    special = {
        f"{name}_token": tokens[metadata[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"), ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.add_bos_token = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    return tokenizer


def _byte_level(path: str | Path, metadata: Any, tokens: list[str]) -> Tokenizer:
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if rule not in RULES:
        raise ModelFileError(
            f"{path}: its tokenizer splits text by the rule {rule!r}, but {', '.join(RULES)} are known; give a folder "
            "with the model's tokenizer.json (trilane run: --tokenizer)"
        )
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in ("llama-bpe", "llama3")))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in RULES[rule]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens([_added(tokens[i]) for i, kind in enumerate(kinds) if kind == CONTROL])
    tokenizer.add_tokens([_added(tokens[i]) for i, kind in enumerate(kinds) if kind == USER_DEFINED])
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _sentence_piece(metadata: Any, tokens: list[str]) -> Tokenizer:
    from transformers.integrations.ggml import convert_gguf_tokenizer

    names = {"tokens": tokens, "tokenizer_type": "llama", "scores": list(metadata["tokenizer.ggml.scores"])}
    names["token_type"] = list(metadata.get("tokenizer.ggml.token_type", []))
    for name in ("bos", "eos", "unknown"):
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            names[f"{name.replace('unknown', 'unk')}_token_id"] = metadata[f"tokenizer.ggml.{name}_token_id"]
    backend, _ = convert_gguf_tokenizer("llama", names)
    return backend
