"""What transformers calls in place of an experts module's own code: the layer-step of a scheduler.

Tensors are handed over as they are, where they are; on a GPU the step goes to torch's current stream, and may be
recorded into a graph. To ``torch.compile`` a layer-step is one operation that it does not look into, so that a model is
compiled in one piece. The file knows a module's scheduler and layer, not how they came together.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trilane.engine import ExpertScheduler
from trilane.errors import DeviceError, TrilaneError
from trilane.integrations.transformers.experts import FLOATS

NAME = "trilane"  # the experts implementation, and the quantisation method of the load hook
ATTRIBUTE = "_trilane_layer"
_NUMBERS = itertools.count()
_NUMBERED: weakref.WeakValueDictionary[int, BoundLayer] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class BoundLayer:
    """Which scheduler and which of its layers stand for an experts module; ``lock`` lets threads share a model.

    ``number`` is the layer's in compiled code, which can hold no objects; no two of a process have the same.
    """

    scheduler: ExpertScheduler
    index: int
    lock: threading.RLock
    number: int = field(default_factory=_NUMBERS.__next__)

    def __deepcopy__(self, memo: Any) -> BoundLayer:
        return self  # a copied model has the same experts

    def __reduce__(self) -> Any:
        raise TrilaneError(
            "model: its experts are in a scheduler of this process, so it cannot be pickled; pickle or save the model "
            "before they are offloaded"
        )


def bind(module: Any, scheduler: ExpertScheduler, index: int, lock: threading.RLock) -> None:
    """Let a scheduler's layer run a module's experts."""
    layer = module.__dict__[ATTRIBUTE] = BoundLayer(scheduler, index, lock)
    _NUMBERED[layer.number] = layer


def bound_layer(module: Any) -> BoundLayer:
    """The layer of a module.

    Raises
    ------
    TrilaneError
        It has none.
    """
    found = module.__dict__.get(ATTRIBUTE)
    if found is None:
        raise TrilaneError(
            f"{type(module).__name__}: experts_implementation is {NAME!r}, but no store is attached to this model; "
            "call offload(model) or attach(model, store), or choose another: set_experts_implementation('eager')"
        )
    return found


def register() -> None:
    """Make the name known to transformers; may be called again."""
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: Any = None, top_k_weights: Any = None, **named: Any
) -> torch.Tensor:
    """The routed experts of a layer.

    Parameters
    ----------
    module : torch.nn.Module
        The model's own experts module.
    hidden_states : (rows, hidden) float tensor
    top_k_index : (rows, top_k) integer tensor
        Ids of ``num_experts`` mean "none"; gpt-oss names it ``router_indices``.
    top_k_weights : (rows, top_k) float tensor
        Router weights; gpt-oss names them ``routing_weights``.

    Returns
    -------
    (rows, hidden) tensor of the type of ``hidden_states``

    Raises
    ------
    TrilaneError
        No store is attached, or the step failed.
    """
    ids = named["router_indices"] if top_k_index is None else top_k_index
    weights = named["routing_weights"] if top_k_weights is None else top_k_weights
    layer = bound_layer(module)
    if torch.compiler.is_compiling():
        return experts_operation(hidden_states, ids, weights, layer.number)
    _check_place(hidden_states, layer.scheduler)
    if torch.is_grad_enabled() and hidden_states.requires_grad:
        return _NoGradient.apply(hidden_states, layer, ids, weights)
    return _step(layer, hidden_states, ids, weights)


@torch.library.custom_op("trilane::experts", mutates_args=())
def experts_operation(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    """A layer-step as compiled code calls it; ``number`` is that of a bound layer."""
    layer = _NUMBERED.get(number)
    if layer is None:
        raise TrilaneError("compiled model: the scheduler that it was compiled with is gone; compile the model again")
    _check_place(x, layer.scheduler)
    return _step(layer, x, ids, weights)


@experts_operation.register_fake
def _shape_of_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(x)


def _step(layer: BoundLayer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x, ids, weights = x.detach().contiguous(), ids.contiguous(), weights.detach()
    weights = (weights if x.is_cuda and weights.dtype in FLOATS else weights.float()).contiguous()
    with layer.lock:
        return layer.scheduler.forward(layer.index, x, ids, weights)


def _check_place(x: torch.Tensor, scheduler: ExpertScheduler) -> None:
    """Tensors on a GPU need a scheduler there."""
    if not x.is_cuda:
        return
    if not scheduler.on_gpu:
        raise DeviceError(
            f"hidden_states: on {x.device}, but the scheduler's device is the host; offload with device='cuda', or "
            "move the model back by model.to('cpu')"
        )
    if x.device.index:
        raise DeviceError(
            f"hidden_states: on {x.device}, but the scheduler works on the first visible GPU; move the model to "
            "cuda:0, or choose the GPU by CUDA_VISIBLE_DEVICES"
        )


class _NoGradient(torch.autograd.Function):
    """A step inside a graph of gradients: it runs, but nothing can be learned through it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: BoundLayer, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _step(layer, x, ids, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TrilaneError(
            "backward: through experts that are in a store, which has no gradients; train the model before its experts "
            "are offloaded, and run it under torch.no_grad()"
        )
