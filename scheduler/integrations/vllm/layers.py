"""The layers with experts of a model that vLLM builds, and the store and the scheduler that serve them.

Layers are announced while the model is built; when its weights have been loaded, the store and the scheduler are
opened once for all of them. It knows sizes and tensors, and imports nothing of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trilane.engine import ExpertScheduler
from trilane.errors import ConfigError, Problem, StoreError, TrilaneError, did_you_mean
from trilane.readers.finder import open_model
from trilane.settings.effective_config import resolve_config
from trilane.store import ExpertStore

OPTIONS = ("store", "formats", "config", "device")
GATES = {  # vLLM's names of activations
    "silu": ("silu_glu", "silu_glu_clamped"),
    "gelu_tanh": ("gelu_tanh_glu",),
    "swigluoai": ("swiglu_oai",),
    "swigluoai_uninterleave": ("swiglu_oai",),
    "relu2_no_mul": ("relu2",),
}
_NUMBER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerSizes:
    """A layer as vLLM announces it."""

    name: str
    num_experts: int
    hidden: int
    intermediate: int
    activation: str


class OffloadedLayers:
    """All layers with experts of one model.

    Parameters
    ----------
    options : mapping
        ``store``: a GGUF file or a checkpoint's folder, by default the model that vLLM loads; ``formats``: what a
        checkpoint's experts are quantised to; ``config``: a YAML file or a mapping; ``device``: "host", "cuda" or
        "auto", the GPU if torch sees one.

    Raises
    ------
    ConfigError
        An option that is not known.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in (*OPTIONS, "quant_method"):
                known = f"there are {', '.join(OPTIONS)}.{did_you_mean(name, OPTIONS)}"
                raise ConfigError([Problem(name, f"is unknown, but {known}")], "quantization_config")
        self.options = dict(options)
        self.scheduler: ExpertScheduler | None = None
        self._sizes: dict[int, LayerSizes] = {}
        self._indices: dict[int, int] = {}

    def add(self, sizes: LayerSizes) -> int:
        """Announce a layer; its number in the model.

        Raises
        ------
        StoreError
            Its name has no number, or one that another layer has.
        """
        match = _NUMBER.search(sizes.name)
        number = int(match[1]) if match else -1
        if number < 0 or number in self._sizes:
            known = f"{self._sizes[number].name!r} is there already" if match else "it names no layer"
            raise StoreError(
                f"{sizes.name!r}: {known}, but each layer must be 'layers.N.' of one model; run that model"
            )
        self._sizes[number] = sizes
        return number

    def open(self) -> None:
        """Load the store and start the scheduler, if that has not been done.

        Raises
        ------
        StoreError
            The store is not that of the model.
        ConfigError
            On a GPU no size of the slots is given: they would take the memory of the KV cache.
        """
        if self.scheduler is not None:
            return
        config = self.options.get("config")
        found = resolve_config(config)
        device = self.options.get("device", "auto")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "host"
        cache = found.cache
        if device == "cuda" and cache.nbytes is None and cache.slots is None and cache.fraction is None:
            text = (
                "no size is given, but vLLM takes the memory that is left for its KV cache, and slots would take it "
                "first; set cache.nbytes (say '8GiB') in the configuration that quantization_config names"
            )
            raise ConfigError([Problem("cache", text)])
        store = self._load_store()
        self._indices = {number: index for index, number in enumerate(sorted(self._sizes))}
        self._check(store)
        self.scheduler = ExpertScheduler(store, config=found, device=device)

    def forward(self, number: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts of a layer: (rows, hidden) in the type of ``x``.

        Raises
        ------
        TrilaneError
            The weights have not been loaded, or the step failed.
        """
        if self.scheduler is None:
            raise TrilaneError(f"layer {number}: its weights have not been loaded yet; load the model first")
        if x.shape[0] == 0:
            return torch.empty_like(x)
        ids, weights = ids.contiguous(), weights.float().contiguous()
        return self.scheduler.forward(self._indices[number], x.contiguous(), ids, weights)

    def _load_store(self) -> ExpertStore:
        path = self.options.get("store")
        if path is None:
            raise ConfigError(
                [Problem("store", "no model is named; set 'store' in quantization_config to a GGUF file or a folder")],
                "quantization_config",
            )
        formats = self.options.get("formats")
        if open_model(path).kind == "gguf":
            return ExpertStore.from_gguf(path, formats=formats)
        return ExpertStore.from_safetensors(path, formats=formats)

    def _check(self, store: ExpertStore) -> None:
        if store.num_layers != len(self._sizes):
            raise StoreError(
                f"store {self.options['store']}: {store.num_layers} layers with experts, but the model has "
                f"{len(self._sizes)}; name the same model's file"
            )
        for number, sizes in sorted(self._sizes.items()):
            layer = store.layers[self._indices[number]]
            found = (layer.num_experts, layer.layout.hidden, layer.layout.intermediate)
            wanted = (sizes.num_experts, sizes.hidden, sizes.intermediate)
            if found != wanted:
                raise StoreError(
                    f"{sizes.name}: {wanted} experts, hidden and intermediate size in the model, but {found} in the "
                    "store; name the same model's file"
                )
            if layer.gate.kind not in GATES.get(sizes.activation, ()):
                raise StoreError(
                    f"{sizes.name}: activation {sizes.activation!r} in vLLM, but {layer.gate.kind!r} in the store; "
                    f"known are {', '.join(GATES)}: take a model with one of these"
                )
