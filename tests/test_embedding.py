"""The examples of docs/embedding.md run, one after the other; the one that needs a GPU runs on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "embedding.md").read_text()


def run_examples(marks: tuple[str, ...]) -> dict[str, object]:
    """Run the code blocks whose fence is ``python`` with one of these marks behind it; what they have defined."""
    names: dict[str, object] = {}
    for mark, example in re.findall(r"^```python(.*)\n((?:.*\n)*?)^```$", TEXT, re.MULTILINE):
        assert mark in ("", " gpu")
        if mark in marks:
            exec(compile(example, "docs/embedding.md", "exec"), names)
    return names


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_examples(("",))
    assert {"store", "ticket", "started", "request", "second"} <= names.keys()
    printed = capsys.readouterr().out
    assert "hit rate" in printed and "99" in printed and "layer 0, clock" in printed


@pytest.mark.gpu
def test_a_step_in_a_graph_of_the_callers() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert "graph" in run_examples(("", " gpu"))
