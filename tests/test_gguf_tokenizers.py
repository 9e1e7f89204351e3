"""Tokenizers from GGUF metadata: how each rule splits, special tokens, SentencePiece, and what is refused."""

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import gguf  # noqa: E402
import numpy as np  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402

from trilane.errors import ModelFileError  # noqa: E402
from trilane.integrations.gguf import gguf_tokenizer  # noqa: E402
from trilane.integrations.gguf.tokenizer import RULES  # noqa: E402

TEXT = "Don't HTTPServer 12345\n\n  don't"
# The words of TEXT by rule, as the patterns that the models' tokenizers publish take it apart by hand.
SPLITS = {
    "gpt-2": ["Don", "'t", " HTTPServer", " 12345", "\n\n ", " don", "'t"],
    "qwen2": ["Don", "'t", " HTTPServer", " ", "1", "2", "3", "4", "5", "\n\n", " ", " don", "'t"],
    "llama-bpe": ["Don", "'t", " HTTPServer", " ", "123", "45", "\n\n", " ", " don", "'t"],
    "gpt-4o": ["Don't", " HTTPServer", " ", "123", "45", "\n\n", " ", " don't"],
    "deepseek-v3": ["Don", "'t", " HTTPServer", " ", "123", "45", "\n\n", " ", " don", "'t"],
}


def write_tokenizer(path, tokens, kinds, rule=None, kind="gpt2", merges=(), scores=None, **ids):
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    if merges:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in ids.items():
        getattr(writer, f"add_{name}_token_id")(value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level(path, rule):
    """All bytes, one merge, an end token and a token of its own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<end>", *letters, "do", "<mark>"]
    kinds = [3, *[1] * len(letters), 1, 4]
    write_tokenizer(path, tokens, kinds, rule, merges=["d o"], eos=0)
    return gguf_tokenizer(path)


@pytest.mark.parametrize("rule", SPLITS)
def test_each_rule_splits_as_its_model_does(tmp_path, rule):
    tokenizer = byte_level(tmp_path / "model.gguf", rule)
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in pieces] == SPLITS[rule]


@pytest.mark.parametrize("rule", RULES)
def test_text_comes_back_and_special_tokens_stay_whole(tmp_path, rule):
    tokenizer = byte_level(tmp_path / "model.gguf", rule)
    odd = f"{TEXT}\tnaïve 日本 \U0001f600"
    assert tokenizer.decode(tokenizer(odd).input_ids) == odd
    ids = tokenizer("do<mark>do<end>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["do", "<mark>", "do", "<end>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "do<mark>do"
    assert tokenizer.eos_token_id == 0


def test_sentence_piece(tmp_path):
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -14.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    path = tmp_path / "model.gguf"
    write_tokenizer(path, tokens, kinds, kind="llama", scores=scores, bos=1, eos=2, unk=0)
    tokenizer = gguf_tokenizer(path)
    ids = [one for one in tokenizer("hello hello").input_ids if one != 1]
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁hello", "▁hello"]
    assert tokenizer.decode(ids) == "hello hello"
    assert tokenizer.add_bos_token and tokenizer.bos_token_id == 1


def test_an_unknown_rule_or_kind_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"by the rule 'unheard-of'.*--tokenizer"):
        byte_level(tmp_path / "rule.gguf", "unheard-of")
    write_tokenizer(tmp_path / "kind.gguf", ["a"], [1], kind="t5")
    with pytest.raises(ModelFileError, match=r"tokenizer is 't5'"):
        gguf_tokenizer(tmp_path / "kind.gguf")
