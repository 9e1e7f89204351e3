"""The part of vLLM that the plugin meets: the same modules, classes and signatures, so that its calls can be played.

Signatures are those of vLLM's main branch (commit 02a0c2ce for ``FusedMoEMethodBase``, 002d6073 for ``RoutedExperts``).
What these classes do is only what happens around the plugin: a method is asked for, weights are created, loaded and
processed, and the method is applied.
"""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

METHODS: list[str] = ["fp8", "gguf"]
CONFIGS: dict[str, type] = {}


class QuantizationConfig(ABC):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    def maybe_update_config(self, model_name, hf_config=None, revision=None): ...  # noqa: B027

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...


class FusedMoEMethodBase(ABC):
    def __init__(self, moe):
        super().__init__()
        self.moe, self.moe_quant_config, self.moe_kernel = moe, None, None

    @abstractmethod
    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ): ...

    @abstractmethod
    def get_fused_moe_quant_config(self, layer): ...

    def process_weights_after_loading(self, layer): ...  # noqa: B027

    @property
    def is_monolithic(self):
        return False

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        raise NotImplementedError


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"


@dataclass
class ParallelConfig:
    tp_size: int = 1
    use_ep: bool = False


@dataclass
class MoEConfig:
    num_experts: int
    hidden_dim: int
    intermediate_size_per_partition: int
    activation: MoEActivation = MoEActivation.SILU
    moe_parallel_config: ParallelConfig = field(default_factory=ParallelConfig)


class RoutedExperts(torch.nn.Module):
    def __init__(
        self, layer_name, params_dtype, moe_config, quant_config, apply_router_weight_on_input: bool = False
    ) -> None:
        super().__init__()
        self.layer_name, self.moe_config, self.quant_config = layer_name, moe_config, quant_config
        self.activation, self.apply_router_weight_on_input = moe_config.activation, apply_router_weight_on_input
        self.quant_method = quant_config.get_quant_method(self, layer_name)
        assert isinstance(self.quant_method, FusedMoEMethodBase)
        self.quant_method.create_weights(
            layer=self,
            num_experts=moe_config.num_experts,
            hidden_size=moe_config.hidden_dim,
            unpadded_hidden_size=moe_config.hidden_dim,
            intermediate_size_per_partition=moe_config.intermediate_size_per_partition,
            params_dtype=params_dtype,
            weight_loader=self.weight_loader,
            global_num_experts=moe_config.num_experts,
        )

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        raise AssertionError("the parameter's own loader is called")

    def load_weights(self, weights):
        """Of one expert each, named ``3.gate_proj.weight`` and so on."""
        for name, weight in weights:
            expert, matrix, kind = name.split(".")
            shard, param_name = {"gate_proj": ("w1", "w13_"), "up_proj": ("w3", "w13_"), "down_proj": ("w2", "w2_")}[
                matrix
            ]
            param = getattr(self, param_name + kind)
            if param.weight_loader(
                param=param, loaded_weight=weight, weight_name=f"{self.layer_name}.{param_name}{kind}", shard_id=shard,
                expert_id=int(expert), return_success=True,
            ):  # fmt: skip
                yield param_name + kind

    def forward_modular(self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
        assert not self.quant_method.is_monolithic
        if self.quant_method.moe_quant_config is None:
            self.quant_method.moe_quant_config = self.quant_method.get_fused_moe_quant_config(self)
        return self.quant_method.apply(
            layer=self, x=x, topk_weights=topk_weights, topk_ids=topk_ids, shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )  # fmt: skip


class LinearBase(torch.nn.Module):
    pass


class UnquantizedLinearMethod:
    pass


def register_quantization_config(quantization: str) -> Any:
    def register(config):
        if quantization in METHODS:
            raise ValueError(f"{quantization} exists")
        if not issubclass(config, QuantizationConfig):
            raise ValueError("must be a QuantizationConfig")
        METHODS.append(quantization)
        CONFIGS[quantization] = config
        return config

    return register


def install(monkeypatch: Any) -> None:
    """Put the modules where the plugin imports them from; all is as before after the test."""
    monkeypatch.setattr(sys.modules[__name__], "METHODS", ["fp8", "gguf"])
    layers = "vllm.model_executor.layers"
    contents = {
        f"{layers}.quantization": {
            "QUANTIZATION_METHODS": METHODS, "register_quantization_config": register_quantization_config
        },
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        f"{layers}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
        f"{layers}.fused_moe.routed_experts": {"RoutedExperts": RoutedExperts},
        f"{layers}.linear": {"LinearBase": LinearBase, "UnquantizedLinearMethod": UnquantizedLinearMethod},
    }  # fmt: skip
    for name in ("vllm", "vllm.model_executor", layers, f"{layers}.fused_moe", *contents):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "trilane.integrations.vllm.method", raising=False)
