"""The examples of docs/transformers.md run, one after the other, with a small model in place of a large one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import ARCHITECTURES, build_model  # noqa: E402

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "transformers.md").read_text()


def test_examples_run(tmp_path, monkeypatch, capsys):
    build_model("qwen3_moe").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRILANE_CPU_THREADS", "1")
    examples, names = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE), {}
    for example in examples:
        exec(compile(example, "docs/transformers.md", "exec"), names)
    assert len(examples) == 5
    assert torch.equal(names["text"], names["forced"]) and names["again"].shape == (1, 11)
    assert names["logits"].shape == (1, 3, 128)
    printed = capsys.readouterr().out
    assert "hit rate" in printed and "the model is not on a GPU" in printed or names["decoder"].captured


def test_the_list_of_models_is_what_tests_run():
    (listed,) = re.findall(r"^> (Cohere2.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE)
    models = re.split(r",\s+|\s+and\s+", re.sub(r"\n> ", " ", listed))
    assert len(models) == len(ARCHITECTURES)
