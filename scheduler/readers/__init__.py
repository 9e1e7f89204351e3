"""Readers of model files: GGUF and safetensors headers, and where the experts of a model lie in them.

They read headers and say where bytes are; nothing here copies weights, quantises, or loads compiled code.
"""
