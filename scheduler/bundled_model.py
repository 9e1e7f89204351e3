"""The model that comes with the package: a small mixture of experts, trained for this, complete in one GGUF file.

It knows where its files are. What they are made from is told in benchmarks/tiny_moe/README.md.
"""

from __future__ import annotations

from pathlib import Path

from trilane.errors import ModelFileError

TINY = "tiny"
FOLDER = Path(__file__).parent / "data" / "tiny_moe"


def tiny_path() -> Path:
    """The GGUF file of the tiny model.

    Raises
    ------
    ModelFileError
        It was not installed.
    """
    path = FOLDER / "tiny-q4_k.gguf"
    if not path.is_file():
        raise ModelFileError(f"{path}: the bundled model is missing; install the package again, or name a model's file")
    return path


def tiny_prompts() -> list[str]:
    """The twenty prompts, two for each domain that the model was trained on."""
    return (FOLDER / "prompts.txt").read_text().splitlines()
