"""Experts modules of a transformers model: where they are, how their tensors lie, and models that have none.

An experts module is a class under transformers' ``use_experts_implementation``: all of a layer's routed experts in
stacked tensors, called with hidden rows, ids and router weights. Shared experts and the router are outside of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trilane.errors import StoreError
from trilane.integrations.transformers.gates import probe_gate
from trilane.store_layers import Gate, StoreLayer

MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # set by use_experts_implementation
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is one that transformers lets an experts implementation run."""
    return all(hasattr(module, mark) for mark in MARKS)


@dataclass(frozen=True)
class ModuleExperts:
    """One experts module of a model; read once, since its parameters go when a store takes its place.

    Attributes
    ----------
    name : str
        As in ``model.named_modules()``.
    module : torch.nn.Module
    gate : Gate
        What :func:`~trilane.integrations.transformers.gates.probe_gate` found.
    tensors : mapping of tuple of int
        Shape of each parameter that holds experts: the matrices, and their biases where it has some.
    dtype : torch.dtype
    """

    name: str
    module: Any
    gate: Gate
    tensors: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, module: Any) -> ModuleExperts:
        """Read an experts module; its parameters may be on the meta device.

        Raises
        ------
        StoreError
            Parameters or an activation that are not known here.
        """
        matrices = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        names = (*matrices, *(f"{matrix}_bias" for matrix in matrices)) if module.has_bias else matrices
        found = {tensor: _parameter(name, module, tensor, names) for tensor in names}
        shapes = {tensor: tuple(value.shape) for tensor, value in found.items()}
        return cls(name, module, probe_gate(module, name), shapes, found["down_proj"].dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, hidden, intermediate), from the shape of the down matrix."""
        num_experts, *sides = self.tensors["down_proj"]
        hidden, intermediate = reversed(sides) if self.module.is_transposed else sides
        return num_experts, hidden, intermediate

    def parameter(self, name: str) -> torch.nn.Parameter:
        """One of the parameters, as it is now."""
        return self.module._parameters[name]

    def check_layer(self, layer: StoreLayer, index: int) -> None:
        """Refuse a store's layer that cannot stand for this module's experts.

        Raises
        ------
        StoreError
        """
        num_experts, hidden, intermediate = self.shape
        wanted = {
            "num_experts": num_experts,
            "hidden": hidden,
            "intermediate": intermediate,
            "biases": bool(self.module.has_bias),
            "gate": _gate_text(self.gate),
        }
        found = {
            "num_experts": layer.num_experts,
            "hidden": layer.layout.hidden,
            "intermediate": layer.layout.intermediate,
            "biases": layer.layout.has_bias,
            "gate": _gate_text(layer.gate),
        }
        for what, value in wanted.items():
            if found[what] != value:
                raise StoreError(
                    f"store, layer {index}: {what} is {found[what]}, but {self} has {value}; attach the store that was "
                    "made from this model's weights"
                )

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"


def _parameter(name: str, module: Any, tensor: str, names: tuple[str, ...]) -> torch.Tensor:
    """A parameter of an experts module, if it is a stack of float matrices, or of biases."""
    found, where = module._parameters.get(tensor), f"{name} ({type(module).__name__})"
    if found is None:
        raise StoreError(
            f"{where}: has no parameter {tensor!r}, but {', '.join(names)} are needed; this version of the class "
            "lays its experts out in a way that is not known here"
        )
    if found.numel() == 0:
        raise StoreError(
            f"{where}: its parameters are empty, since a store took their place before; use handle_of(model), or load "
            "the model again"
        )
    if found.dtype not in FLOATS or found.ndim != (2 if tensor.endswith("bias") else 3):
        raise StoreError(
            f"{where}, {tensor}: {found.dtype} of shape {tuple(found.shape)}, but a stack of float32, float16 or "
            "bfloat16 matrices is needed; load the model without its quantisation (dequantize=True, where its "
            "quantiser has that)"
        )
    return found


def _gate_text(gate: Gate) -> str:
    """A gate with those of its numbers that matter."""
    numbers = {"silu_glu_clamped": ("limit",), "swiglu_oai": ("alpha", "limit")}.get(gate.kind, ())
    return " ".join([gate.kind, *(f"{name} {getattr(gate, name):g}" for name in numbers)])


def find_module_experts(model: torch.nn.Module) -> list[ModuleExperts]:
    """All experts modules of a model, in the order of its layers.

    Raises
    ------
    StoreError
        None, or one whose activation the kernels do not have.
    """
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not found:
        raise StoreError(_none_text(model))
    return [ModuleExperts.of(name, module) for name, module in found]


def _none_text(model: torch.nn.Module) -> str:
    own = sorted({type(module).__name__ for module in model.modules() if "expert" in type(module).__name__.lower()})
    kind = type(model).__name__
    if not own:
        return (
            f"model: {kind} has no experts, but a mixture-of-experts model is needed; dense models gain nothing from "
            "a cache of experts, run them as they are"
        )
    return (
        f"model: the experts of {kind} ({', '.join(own)}) are not on transformers' experts interface "
        "(use_experts_implementation), but it is by this interface that they are run here; make a store of the weights "
        "and call ExpertScheduler.forward where the model's code runs its experts"
    )
