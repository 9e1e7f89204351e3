"""Loading a checkpoint with its experts sent straight to a store, by the hooks that transformers has for quantisers.

All naming of checkpoints stays in transformers: an operation of ours comes last in each conversion that ends in an
experts tensor, gives the tensor to the store, and leaves an empty one. So one layer's experts are in memory beside the
store, and none on a GPU.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trilane.errors import StoreError
from trilane.integrations.transformers.experts import ModuleExperts, find_module_experts
from trilane.integrations.transformers.forward import NAME
from trilane.integrations.transformers.handle import (
    ConfigLike,
    OffloadedModel,
    ProfileLike,
    choose_device,
    handle_of,
    put_together,
)
from trilane.integrations.transformers.offload import check_store
from trilane.integrations.transformers.tensor_layer import Formats, StoreBuilder
from trilane.settings.effective_config import resolve_config
from trilane.store import ExpertStore
from trilane.store_fill import Progress

TENSORS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
EXPERTS_ONLY = ("mxfp4",)  # quantisations that leave all but the experts as floats


def load(
    path: str | os.PathLike[str] | None,
    *,
    formats: Formats = None,
    store: ExpertStore | None = None,
    device: str = "auto",
    config: ConfigLike = None,
    profile: ProfileLike = None,
    threads: int | None = None,
    progress: Progress | None = None,
    model_config: Any = None,
    model_class: Any = AutoModelForCausalLM,
    **from_pretrained: Any,
) -> OffloadedModel:
    """Load a model with its routed experts in a store.

    Parameters
    ----------
    path : str or Path or None
        A checkpoint's folder or name, as for ``from_pretrained``. None: weights come as ``state_dict=``.
    formats, threads, progress
        As for :func:`~trilane.integrations.transformers.offload`; experts are quantised as they are read.
    store : ExpertStore, optional
        The experts, where they come from elsewhere: the checkpoint's own are not read.
    device, config, profile
        As for :func:`~trilane.integrations.transformers.offload`.
    model_config : PreTrainedConfig, optional
        The model's configuration; None: the checkpoint's.
    model_class : class
        What ``from_pretrained`` is called on.
    **from_pretrained
        Its other arguments, such as ``dtype``, ``state_dict`` or ``attn_implementation``.

    Returns
    -------
    OffloadedModel

    Raises
    ------
    StoreError
        The model has no experts that can be taken, the checkpoint lacks some or is quantised already, a format does not
        suit them, or ``store`` is not of this model.
    DeviceError, ConfigError, ProfileError, MemoryError

    Examples
    --------
    >>> with load("model", formats="q4_k", config={"cache": {"fraction": 0.25}}) as handle:  # doctest: +SKIP
    ...     text = handle.model.generate(ids, max_new_tokens=20)
    """
    if path is None and (model_config is None or from_pretrained.get("state_dict") is None):
        raise StoreError(
            "path: None, but weights must come from somewhere; give a folder, or model_config= and state_dict="
        )
    options = TrilaneConfig(
        formats, store=store, device=device, config=config, profile=profile, threads=threads, progress=progress
    )
    if model_config is None and path is not None:
        names = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")
        known = {name: from_pretrained[name] for name in names if name in from_pretrained}
        model_config = AutoConfig.from_pretrained(path, **known)
    if model_config is not None:
        model_config = _without_quantization(model_config, path, store)
    if path is None and model_class is AutoModelForCausalLM:  # which finds a class by its name alone
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    model = model_class.from_pretrained(path, config=model_config, quantization_config=options, **from_pretrained)
    return handle_of(model)


def _without_quantization(config: Any, path: Any, store: ExpertStore | None) -> Any:
    """The model's configuration as one whose weights are floats, if all that are loaded are."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return config
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in EXPERTS_ONLY:
        raise StoreError(
            f"{path}: the checkpoint is quantised ({method}), but float weights are needed; load it with "
            "from_pretrained and its own quantiser's dequantize=True if memory allows, then call offload(model)"
        )
    if store is None:
        raise StoreError(
            f"{path}: the checkpoint's experts are in {method}, which transformers would dequantise; read them as they "
            "are, by store=ExpertStore.from_safetensors(path)"
        )
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


class TrilaneConfig(QuantizationConfigMixin):
    """For ``from_pretrained(..., quantization_config=TrilaneConfig(...))``: what :func:`load` uses.

    The model's handle is then found by :func:`~trilane.integrations.transformers.handle_of`.

    Parameters
    ----------
    formats, store, device, config, profile, threads, progress
        As for :func:`load`. With ``device="cuda"`` all but the experts moves to the GPU once it is loaded.
    """

    def __init__(
        self,
        formats: Formats = None,
        *,
        store: ExpertStore | None = None,
        device: str = "auto",
        config: ConfigLike = None,
        profile: ProfileLike = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if store is not None and formats is not None:
            raise StoreError(
                f"formats: {formats!r} given beside a store, whose experts have their formats; leave one out"
            )
        self.quant_method = NAME
        self.formats, self.store, self.device = formats, store, choose_device(device)
        self.config, self.profile = resolve_config(config), profile
        self.threads, self.progress = threads, progress
        _register_loader()

    def __deepcopy__(self, memo: Any) -> TrilaneConfig:
        return self  # a store is not copied with a model's configuration

    def to_dict(self) -> dict[str, Any]:
        """What of it is text, for a model's configuration as JSON."""
        return {"quant_method": NAME, "formats": self.formats, "device": self.device}


class ToStore(ConversionOps):
    """The last operation of a conversion: an experts tensor goes to the store, an empty one stays in the model."""

    def __init__(self, loader: ExpertsLoader) -> None:
        self._loader = loader

    def __deepcopy__(self, memo: Any) -> ToStore:
        return self  # transformers copies conversions for each tensor

    def convert(
        self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **context: Any
    ) -> dict[str, torch.Tensor]:
        """Called by transformers with the tensor under the name of its pattern."""
        (value,) = input_dict.values()
        self._loader.put(context["full_layer_name"], value[0] if isinstance(value, list) else value)
        return {context["full_layer_name"]: torch.empty(0)}

    @property
    def reverse_op(self) -> ConversionOps:
        raise StoreError("model: its experts are in a store, so it cannot be saved; save it before they are offloaded")


class ExpertsLoader:
    """The experts of a model that is being loaded, on their way to a store."""

    def __init__(self, found: Sequence[ModuleExperts], builder: StoreBuilder) -> None:
        self.found, self.builder = found, builder
        self.index_of = {one.name: index for index, one in enumerate(found)}
        self.failure: Exception | None = None

    def put(self, full_name: str, tensor: torch.Tensor) -> None:
        """Give a tensor to the store; an error is kept, since transformers turns it into a line of a report."""
        module, _, name = full_name.rpartition(".")
        try:
            if self.failure is None:
                self.builder.put(self.index_of[module], name, tensor)
        except Exception as error:
            self.failure = error

    def finish(self) -> ExpertStore:
        """The store, or the first error."""
        if self.failure is not None:
            raise self.failure
        return self.builder.finish()


class ExpertsQuantizer(HfQuantizer):
    """What transformers calls while it loads a model; nothing is quantised but the experts, and these by the store."""

    def __init__(self, quantization_config: TrilaneConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._found: list[ModuleExperts] = []
        self._loader: ExpertsLoader | None = None

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element on the device: none for the experts, so that no room is kept for them."""
        module, _, _ = param_name.rpartition(".")
        return 0 if any(one.name == module for one in self._found) else param.element_size()

    def _process_model_before_weight_loading(self, model: Any, **context: Any) -> Any:
        options = self.quantization_config
        self._found = find_module_experts(model)  # on the meta device
        if options.store is None:
            builder = StoreBuilder(self._found, options.formats, options.threads, options.progress)
            self._loader = ExpertsLoader(self._found, builder)
            return model
        check_store(model, self._found, options.store)
        names = [re.escape(one.name) for one in self._found]
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {rf"^{name}\." for name in names}
        for one in self._found:
            one.module._parameters.update(dict.fromkeys(one.tensors))  # nothing is read for None
            one.module._is_hf_initialized = True
        return model

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """End conversions to experts tensors in the store, and add some for tensors that need none otherwise."""
        if self._loader is None:
            return weight_conversions
        last = ToStore(self._loader)
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and any(map(_is_experts_target, conversion.target_patterns)):
                conversion.operations, conversion.force_cpu = [*conversion.operations, last], True
        names = {f"{one.name}.{name}" for one in self._found for name in one.tensors}
        stacked = [WeightConverter(rf"{re.escape(name)}$", name, [last], force_cpu=True) for name in sorted(names)]
        return [*weight_conversions, *stacked]

    def _process_model_after_weight_loading(self, model: Any, **context: Any) -> Any:
        options = self.quantization_config
        store = options.store if self._loader is None else self._loader.finish()
        put_together(model, self._found, store, options.device, options.config, options.profile)
        return model


def _is_experts_target(pattern: str) -> bool:
    return pattern.endswith(TENSORS)


def _register_loader() -> None:
    """Make the hooks known to transformers; may be called again."""
    if NAME not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(NAME)(TrilaneConfig)
        register_quantizer(NAME)(ExpertsQuantizer)
