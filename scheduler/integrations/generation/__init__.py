"""Text from models whose experts are in a store, and the proof that where the experts lie does not change it.

Importing this imports torch and transformers.
"""

from trilane.integrations.generation.decode import Step, decode
from trilane.integrations.generation.identity import Difference, all_resident, compare_decoding, decode_all
from trilane.integrations.generation.text_model import (
    TextModel,
    open_text_model,
    quiet_transformers,
    set_torch_threads,
)

__all__ = [
    "Difference",
    "Step",
    "TextModel",
    "all_resident",
    "compare_decoding",
    "decode",
    "decode_all",
    "open_text_model",
    "quiet_transformers",
    "set_torch_threads",
]
