"""The classes that vLLM asks for: a quantisation configuration, and the method of routed experts.

Written for vLLM's main branch of 2026, in which ``RoutedExperts`` hold the experts' parameters. Linear layers and
embeddings keep vLLM's own methods. Importing this imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from trilane.errors import DeviceError, StoreError
from trilane.integrations.vllm import NAME
from trilane.integrations.vllm.layers import LayerSizes, OffloadedLayers


class TrilaneConfig(QuantizationConfig):
    """What ``--quantization trilane`` stands for; one for each model that is built."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.layers = OffloadedLayers(options or {})

    def get_name(self) -> str:
        """ "trilane"."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Types that hidden states may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability times ten of the oldest GPU that the kernels are compiled for."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: options come with the model's configuration."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TrilaneConfig:
        """Of ``quantization_config``, see :class:`OffloadedLayers`."""
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Take the model that vLLM loads as the store's source, unless another was named."""
        self.layers.options.setdefault("store", model_name)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer; None leaves it to vLLM."""
        if isinstance(layer, RoutedExperts):
            return TrilaneMoEMethod(layer.moe_config, self.layers, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class TrilaneMoEMethod(FusedMoEMethodBase):
    """The routed experts of one layer, in a scheduler that all layers share."""

    def __init__(self, moe: Any, layers: OffloadedLayers, name: str) -> None:
        super().__init__(moe)
        self._layers, self._name, self._number = layers, name, -1

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Announce the layer, and give it empty parameters whose loader drops what vLLM reads for them.

        Raises
        ------
        DeviceError
            The model is spread over several GPUs.
        StoreError
            Router weights are applied to the input.
        """
        parallel = self.moe.moe_parallel_config
        if parallel.tp_size > 1 or parallel.use_ep:
            raise DeviceError(
                f"{self._name}: tensor parallel size {parallel.tp_size}, expert parallel {parallel.use_ep}, but a "
                "scheduler serves one GPU; run vLLM with --tensor-parallel-size 1 and without --enable-expert-parallel"
            )
        if layer.apply_router_weight_on_input:
            raise StoreError(
                f"{self._name}: router weights go into the experts' input, but the kernels apply them to the output; "
                "this model cannot be offloaded"
            )
        activation = getattr(layer.activation, "value", layer.activation)
        self._number = self._layers.add(
            LayerSizes(self._name, num_experts, hidden_size, intermediate_size_per_partition, str(activation))
        )
        for name in ("w13_weight", "w2_weight"):
            empty = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            empty.weight_loader = drop_weight
            layer.register_parameter(name, empty)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Open the store and the scheduler, once for all layers."""
        self._layers.open()

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels do not run."""
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts' output (rows, hidden); shared experts are run by vLLM beside it."""
        return self._layers.forward(self._number, x, topk_ids, topk_weights)


def drop_weight(*args: Any, return_success: bool = False, **named: Any) -> bool | None:
    """Take a weight of a checkpoint and keep nothing: the store reads the file itself."""
    return True if return_success else None
