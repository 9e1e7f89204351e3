"""Where a model's bytes would go: its routed experts as a store packs them, shared experts, trunk, KV cache, by layer.

The *trunk* is all that a token needs beside routed experts. Where the numbers come from is in find_sizes.py; no machine
is known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from trilane.cpu_kernels.formats import Format
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.expert import Geometry, make_geometry
from trilane.readers.attention import KvCache
from trilane.store_layers import layer_offsets


@dataclass(frozen=True)
class LayerSizes:
    """One layer's bytes.

    Attributes
    ----------
    number : int
        In the model, counting all layers.
    num_experts : int
        Routed ones; 0 in a dense layer.
    layout : ExpertLayout or None
        Of a routed expert.
    shared_nbytes, other_nbytes : int
        Shared experts; attention, router, norms, a dense MLP.
    """

    number: int
    num_experts: int
    layout: ExpertLayout | None
    shared_nbytes: int
    other_nbytes: int

    @property
    def experts_nbytes(self) -> int:
        """Of all routed experts, as a store packs them."""
        return self.num_experts * self.layout.expert_nbytes if self.layout is not None else 0


@dataclass(frozen=True)
class ModelSizes:
    """A model's bytes.

    Attributes
    ----------
    name, architecture : str
    layers : tuple of LayerSizes
    outside_nbytes : int
        Of the trunk, in no layer: embeddings, last norm and matrix, towers for images.
    lookup_nbytes : int
        Of these, a table of embeddings that is nothing else, of which a token reads one row.
    unused_nbytes : int
        In the files, but of no use here: layers for multi-token prediction, experts of other models.
    kv : KvCache or None
    experts_per_token : int or None
        None where the files do not say.
    num_params, num_active : int or None
        Parameters in all, and those that a token reads; None for files, whose tensors may be of any scheme.
    notes : tuple of str
        What was taken for granted, and why formats are what they are.
    """

    name: str
    architecture: str
    layers: tuple[LayerSizes, ...]
    outside_nbytes: int
    lookup_nbytes: int
    unused_nbytes: int
    kv: KvCache | None
    experts_per_token: int | None
    num_params: int | None
    num_active: int | None
    notes: tuple[str, ...]

    @property
    def moe_layers(self) -> tuple[LayerSizes, ...]:
        return tuple(layer for layer in self.layers if layer.num_experts)

    @property
    def num_experts(self) -> tuple[int, ...]:
        """By layer with experts."""
        return tuple(layer.num_experts for layer in self.moe_layers)

    @property
    def shard_nbytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of each shard of an expert, by layer with experts."""
        return tuple(tuple(_layout(layer).shard_nbytes.tolist()) for layer in self.moe_layers)

    @property
    def geometry(self) -> Geometry:
        return make_geometry(self.num_experts, self.shard_nbytes)

    @property
    def store_nbytes(self) -> int:
        """Of a store of all routed experts in host memory."""
        return layer_offsets(layer.experts_nbytes for layer in self.moe_layers)[1]

    @property
    def num_expert_weights(self) -> int:
        """Weights of all routed experts, without biases."""
        return sum(layer.num_experts * _num_weights(_layout(layer)) for layer in self.moe_layers)

    @property
    def shared_nbytes(self) -> int:
        return sum(layer.shared_nbytes for layer in self.layers)

    @property
    def trunk_nbytes(self) -> int:
        """All that a token needs beside routed experts: with shared experts and embeddings, without the KV cache."""
        return self.outside_nbytes + sum(layer.shared_nbytes + layer.other_nbytes for layer in self.layers)

    def store_nbytes_in(self, fmt: Format) -> int | None:
        """`store_nbytes` with all matrices in a format; None where rows do not fit it."""
        try:
            return layer_offsets(
                layer.num_experts * _in_format(_layout(layer), fmt).expert_nbytes for layer in self.moe_layers
            )[1]
        except ValueError:
            return None


def _layout(layer: LayerSizes) -> ExpertLayout:
    assert layer.layout is not None, "a layer with experts has a layout"
    return layer.layout


def _num_weights(layout: ExpertLayout) -> int:
    return (2 if layout.gate is None else 3) * layout.hidden * layout.intermediate


def _in_format(layout: ExpertLayout, fmt: Format) -> ExpertLayout:
    gate = None if layout.gate is None else fmt
    return ExpertLayout(layout.hidden, layout.intermediate, gate, fmt, fmt, layout.has_bias)


def formats_text(layout: ExpertLayout) -> str:
    """Its formats, each once: "q4_k/q6_k"."""
    found = (layout.gate, layout.up, layout.down)
    return "/".join(dict.fromkeys(fmt.name for fmt in found if fmt is not None))
