"""A model whose experts are in a store: the two put together, and what a caller holds of them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trilane.config import Config
from trilane.devices import check_device
from trilane.engine import ExpertScheduler
from trilane.errors import DeviceError, StoreError, TrilaneError
from trilane.integrations.transformers.experts import ModuleExperts
from trilane.integrations.transformers.forward import NAME, bind, register
from trilane.profile import MachineProfile
from trilane.settings.effective_config import EffectiveConfig
from trilane.stats import Stats
from trilane.store import ExpertStore

ConfigLike = Config | EffectiveConfig | Mapping[str, Any] | str | os.PathLike[str] | None
ProfileLike = MachineProfile | str | os.PathLike[str] | None
HANDLE = "_trilane_handle"
log = logging.getLogger("trilane")


class OffloadedModel:
    """A model whose routed experts run in a scheduler.

    Made by :func:`~trilane.integrations.transformers.offload`, ``attach`` and ``load``; a context manager.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        Used as before: ``model(...)``, ``model.generate(...)``.
    scheduler : ExpertScheduler
        Its layer ``i`` is the model's ``i``-th layer with experts.
    store : ExpertStore
    """

    def __init__(self, model: Any, scheduler: ExpertScheduler) -> None:
        self.model, self.scheduler, self.store = model, scheduler, scheduler.store

    def stats(self) -> Stats:
        """What the scheduler has done since its start."""
        return self.scheduler.stats()

    def close(self) -> None:
        """Stop the scheduler and free its slots; the model's experts cannot run afterwards. May be called again."""
        self.scheduler.close()

    def __enter__(self) -> OffloadedModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> OffloadedModel:
        return self

    def __repr__(self) -> str:
        return f"OffloadedModel({type(self.model).__name__}, {self.store})"


def handle_of(model: Any) -> OffloadedModel:
    """The handle of a model whose experts are in a store.

    Raises
    ------
    TrilaneError
        They are not.
    """
    found = model.__dict__.get(HANDLE)
    if found is None:
        raise TrilaneError(
            f"model: {type(model).__name__} has its own experts; call offload(model) or attach(model, store) first"
        )
    return found


def choose_device(device: str) -> str:
    """ "host" or "cuda", for a device that a caller named.

    Raises
    ------
    DeviceError
        An unknown name, or torch sees no GPU where one was asked for.
    """
    check_device(device)
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise DeviceError(
            "device 'cuda': torch sees no GPU; install a torch with CUDA and look at nvidia-smi, or use device='host'"
        )
    return "cuda" if has_gpu and device != "host" else "host"


def put_together(
    model: Any,
    found: Sequence[ModuleExperts],
    store: ExpertStore,
    device: str,
    config: ConfigLike,
    profile: ProfileLike,
) -> OffloadedModel:
    """Let a store stand for the experts of a model: their parameters go, what is left moves to the device.

    The device's memory is divided after the rest of the model is there, so that slots get what it leaves.
    """
    register()
    for one in found:
        strip(one)
    if device == "cuda":
        model.to("cuda")
        torch.cuda.empty_cache()  # slots come from what the driver calls free
    scheduler = ExpertScheduler(store, profile=profile, config=config, device=device)
    lock = threading.RLock()
    for index, one in enumerate(found):
        bind(one.module, scheduler, index, lock)
        one.module.register_state_dict_pre_hook(_refuse_to_save)
    _choose_implementation(model, found)
    handle = model.__dict__[HANDLE] = OffloadedModel(model, scheduler)
    return handle


def strip(one: ModuleExperts) -> None:
    """Replace an experts module's parameters by empty ones."""
    for name in one.tensors:
        one.module._parameters[name] = torch.nn.Parameter(torch.empty(0, dtype=one.dtype), requires_grad=False)


def _refuse_to_save(module: Any, prefix: str, keep_vars: bool) -> None:
    raise TrilaneError(
        f"{prefix.rstrip('.')} ({type(module).__name__}): its weights are in a store, so a state dict would be without "
        "them; save the model before its experts are offloaded"
    )


def _choose_implementation(model: Any, found: Sequence[ModuleExperts]) -> None:
    model.set_experts_implementation(NAME)
    for one in found:
        if one.module.config._experts_implementation != NAME:
            raise StoreError(
                f"{one}: transformers did not take experts_implementation {NAME!r} for it; the file of the model's "
                "class must name use_experts_implementation where it defines its experts"
            )
