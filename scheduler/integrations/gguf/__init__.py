"""Models of transformers from GGUF files: the experts as they are in the file, the rest dequantised, and the tokenizer.

``load_gguf(path)`` gives the model with its experts in a store, ``gguf_tokenizer(path)`` what turns text into ids.
Importing this imports torch and transformers.
"""

from trilane.integrations.gguf.load import load_gguf
from trilane.integrations.gguf.tokenizer import gguf_tokenizer

__all__ = ["gguf_tokenizer", "load_gguf"]
