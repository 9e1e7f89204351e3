"""Taking the experts of a loaded model over: into a store of their own, or by a store that exists."""

from __future__ import annotations

from typing import Any

from trilane.errors import StoreError
from trilane.integrations.transformers.experts import ModuleExperts, find_module_experts
from trilane.integrations.transformers.handle import (
    ConfigLike,
    OffloadedModel,
    ProfileLike,
    choose_device,
    put_together,
    strip,
)
from trilane.integrations.transformers.tensor_layer import Formats, StoreBuilder
from trilane.settings.effective_config import resolve_config
from trilane.store import ExpertStore
from trilane.store_fill import Progress


def offload(
    model: Any,
    *,
    formats: Formats = None,
    device: str = "auto",
    config: ConfigLike = None,
    profile: ProfileLike = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> OffloadedModel:
    """Move the routed experts of a model that is loaded into a store, and let a scheduler run them.

    Layer by layer: a layer's parameters are packed into the store and freed. Everything else of the model stays as it
    is, and moves to the GPU where ``device`` is one.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On the CPU, in float32, float16 or bfloat16.
    formats : str or mapping, optional
        What experts are kept as: "q4_k", "q8_0", "mxfp4" and so on, one name or names for some of "gate", "up" and
        "down". None: as they are, without loss.
    device : str
        "host", "cuda", or "auto": the GPU if torch sees one.
    config, profile
        As for :class:`~trilane.ExpertScheduler`.
    threads : int, optional
        Threads that pack and quantise; the CPUs allowed if None.
    progress : callable, optional
        Called with (experts done, experts in all).

    Returns
    -------
    OffloadedModel

    Raises
    ------
    StoreError
        The model has no experts that can be taken, or a format does not suit them; the model is as it was. Weights that
        a format cannot hold are found when some layers are gone already: load such a model again.
    DeviceError, ConfigError, ProfileError, MemoryError

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained("model")  # doctest: +SKIP
    >>> with offload(model, formats="q8_0") as handle:  # doctest: +SKIP
    ...     text = model.generate(ids.to(model.device), max_new_tokens=20)
    """
    device, config = choose_device(device), resolve_config(config)
    found = find_module_experts(model)
    builder = StoreBuilder(found, formats, threads, progress)
    _check_loaded(found)
    for index, one in enumerate(found):
        for name in one.tensors:
            builder.put(index, name, one.parameter(name))
        strip(one)
    return put_together(model, found, builder.finish(), device, config, profile)


def attach(
    model: Any, store: ExpertStore, *, device: str = "auto", config: ConfigLike = None, profile: ProfileLike = None
) -> OffloadedModel:
    """Let a store that exists stand for the routed experts of a model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its experts' parameters are dropped; they may be on the meta device, so that nothing need be loaded for them.
    store : ExpertStore
        One layer for each layer of the model with experts, in their order.
    device, config, profile
        As for :func:`offload`.

    Returns
    -------
    OffloadedModel

    Raises
    ------
    StoreError
        The model has no experts that can be taken, or the store is not of this model: another number of layers,
        another size, activation or number of experts. The model is as it was.
    DeviceError, ConfigError, ProfileError, MemoryError
    """
    device, config = choose_device(device), resolve_config(config)
    found = find_module_experts(model)
    check_store(model, found, store)
    return put_together(model, found, store, device, config, profile)


def check_store(model: Any, found: list[ModuleExperts], store: ExpertStore) -> None:
    """Refuse a store that is not of a model.

    Raises
    ------
    StoreError
    """
    if len(found) != store.num_layers:
        raise StoreError(
            f"store: has {store.num_layers} layers, but {type(model).__name__} has {len(found)} layers with experts "
            f"({found[0].name} to {found[-1].name}); attach a store of this model, with all of its layers"
        )
    for index, (one, layer) in enumerate(zip(found, store.layers, strict=True)):
        one.check_layer(layer, index)


def _check_loaded(found: list[ModuleExperts]) -> None:
    for one in found:
        for name in one.tensors:
            if one.parameter(name).is_meta:
                raise StoreError(
                    f"{one}, {name}: on the meta device, so there are no weights to take; load the model, or attach a "
                    "store"
                )
