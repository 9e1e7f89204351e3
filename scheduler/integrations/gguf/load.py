"""A model of transformers from a GGUF file, its experts in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trilane.integrations.gguf.architectures import Facts, architecture_of
from trilane.integrations.gguf.config import config_of
from trilane.integrations.gguf.trunk import check_trunk, read_trunk
from trilane.integrations.transformers import OffloadedModel, load
from trilane.integrations.transformers.experts import is_experts
from trilane.integrations.transformers.handle import ConfigLike, ProfileLike, choose_device
from trilane.readers.gguf import open_gguf
from trilane.store import ExpertStore
from trilane.store_fill import Progress


def load_gguf(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    store: ExpertStore | None = None,
    device: str = "auto",
    config: ConfigLike = None,
    profile: ProfileLike = None,
    threads: int | None = None,
    progress: Progress | str | None = None,
    **from_pretrained: Any,
) -> OffloadedModel:
    """Load a GGUF model: experts packed as they are into a store, everything else dequantised.

    Parameters
    ----------
    path : str or Path
        A file, any one of its shards, or a folder that holds one model.
    dtype : torch.dtype, optional
        Of all but the experts; None: float32 on the host, bfloat16 on a GPU.
    store : ExpertStore, optional
        The file's experts, if they were loaded before; stores may be shared.
    device, config, profile
        As for :func:`~trilane.integrations.transformers.attach`.
    threads, progress
        As for :meth:`trilane.ExpertStore.from_gguf`.
    **from_pretrained
        Further arguments, such as ``attn_implementation``.

    Returns
    -------
    OffloadedModel

    Raises
    ------
    ModelFileError
        The file is damaged or incomplete, or of an architecture that cannot be built: the error names it.
    StoreError
        A type of a tensor that is not known, or experts that are not.
    DeviceError, ConfigError, ProfileError, MemoryError
    """
    device = choose_device(device)
    files = open_gguf(path)
    facts = Facts(files)
    row = architecture_of(facts)
    model_config = config_of(facts, row)
    if dtype is None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trunk = read_trunk(files, row, model_config, dtype)
    check_trunk(files, trunk, trunk_parameters(model_config))
    if store is None:
        store = ExpertStore.from_gguf(path, threads=threads, progress=progress)
    return load(
        None, model_config=model_config, state_dict=trunk, store=store, device=device, config=config, profile=profile,
        dtype=dtype, **from_pretrained,
    )  # fmt: skip


def trunk_parameters(model_config: Any) -> dict[str, torch.Tensor]:
    """What a model of that configuration keeps beside its experts, on the meta device; tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    experts = tuple(f"{name}." for name, module in model.named_modules() if is_experts(module))
    tied = {"lm_head.weight"} if model_config.tie_word_embeddings else set()
    return {
        name: value for name, value in model.state_dict().items() if not name.startswith(experts) and name not in tied
    }
