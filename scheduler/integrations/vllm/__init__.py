"""A plugin of vLLM: routed experts in a store, as the quantisation method "trilane".

vLLM calls :func:`register` in each of its processes, by the entry point in the group ``vllm.general_plugins``. Only
then is vLLM imported. docs/embedding.md says how it is used, and what of it was run.
"""

from __future__ import annotations

NAME = "trilane"


def register() -> None:
    """Make the quantisation method known to vLLM; may be called again."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME not in QUANTIZATION_METHODS:
        from trilane.integrations.vllm.method import TrilaneConfig

        register_quantization_config(NAME)(TrilaneConfig)
