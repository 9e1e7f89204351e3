"""Experts modules of a transformers model: where they are, how their tensors lie, and models that have none of the kind.

An experts module is a class under transformers' ``use_experts_implementation``: all of a layer's routed experts in
stacked tensors, called with hidden rows, ids and router weights. Shared experts and the router are outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
    """One experts module of a model; its tensors are known by shape alone, they may be on the meta device.

    Attributes
    ----------
    name : str
        As in ``model.named_modules()``.
    module : torch.nn.Module
    gate : Gate
        What :func:`~trilane.integrations.transformers.gates.probe_gate` found.
    """

    name: str
    module: Any
    gate: Gate

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.module.has_gate else "up_proj"

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """The parameters that hold the experts."""
        matrices = (self.up_name, "down_proj")
        return (*matrices, *(f"{name}_bias" for name in matrices)) if self.module.has_bias else matrices

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, hidden, intermediate), from the shape of the down matrix."""
        num_experts, *sides = self.parameter("down_proj").shape
        hidden, intermediate = reversed(sides) if self.module.is_transposed else sides
        return int(num_experts), int(hidden), int(intermediate)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.parameter("down_proj").dtype

    def parameter(self, name: str) -> torch.Tensor:
        """One of the parameters.

        Raises
        ------
        StoreError
            The module has none of that name, or it is no stack of float matrices.
        """
        found = self.module._parameters.get(name)
        if found is None:
            raise StoreError(
                f"{self}: has no parameter {name!r}, but {', '.join(self.tensor_names)} are needed; this version of the "
                "model's class lays its experts out in a way that is not known here"
            )
        if found.dtype not in FLOATS or found.ndim != (2 if name.endswith("bias") else 3):
            raise StoreError(
                f"{self}, {name}: {found.dtype} of shape {tuple(found.shape)}, but a stack of float32, float16 or "
                "bfloat16 matrices is needed; load the model without its quantisation (dequantize=True, where its "
                "quantiser has that)"
            )
        return found

    def check_layer(self, layer: StoreLayer, index: int) -> None:
        """Refuse a store's layer that cannot stand for this module's experts.

        Raises
        ------
        StoreError
        """
        wanted = dict(zip(("num_experts", "hidden", "intermediate"), self.shape, strict=True))
        wanted |= {"biases": bool(self.module.has_bias), "gate": _gate_text(self.gate)}
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
    return [ModuleExperts(name, module, probe_gate(module, name)) for name, module in found]


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
