"""A layer of a store whose experts come as torch tensors of a model's own layout; and a store filled layer by layer.

Tensors are read where they lie: transposed and interleaved ones as strided views, one expert at a time. What has the
wanted format already is copied as it is, by compiled code. It knows tensors and stores, no schedulers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trilane.arrays import ELEMENT_OF
from trilane.cpu_kernels.arena import allocate_arena
from trilane.cpu_kernels.formats import FORMATS, Float32Array, Format, UInt8Array
from trilane.cpu_kernels.layout import ExpertLayout
from trilane.cpu_kernels.pack import ExpertPacker, Rows, address_of, pack_biases
from trilane.cpu_kernels.quantize import quantize_matrix
from trilane.errors import StoreError
from trilane.integrations.transformers.experts import ModuleExperts
from trilane.store import ExpertStore
from trilane.store_fill import Progress, fill
from trilane.store_layers import MATRICES, check_same_hidden, formats_by_matrix, needed_matrices, place_layers

Formats = str | Mapping[str, str] | None
STORED_AS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def view_tensor(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A tensor in host memory as NumPy sees it, without a copy; bfloat16 as uint16."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class TensorLayer:
    """One layer: its layout follows from shapes alone, its tensors may come later.

    Parameters
    ----------
    experts : ModuleExperts
    formats : mapping of Format
        For some matrices; the others stay as they are.

    Raises
    ------
    StoreError
        A format that does not exist or does not suit the sizes.
    """

    def __init__(self, experts: ModuleExperts, formats: Mapping[str, Format]) -> None:
        self.experts, self.gate = experts, experts.gate
        self.num_experts, hidden, intermediate = experts.shape
        self._given: dict[str, torch.Tensor] = {}
        stored = FORMATS[STORED_AS[experts.dtype]]
        self._formats = {name: formats.get(name, stored) for name in needed_matrices(self.gate)}
        try:
            self.layout = ExpertLayout(
                hidden, intermediate, self._formats.get("gate"), self._formats["up"], self._formats["down"],
                bool(experts.module.has_bias),
            )  # fmt: skip
        except ValueError as error:
            raise StoreError(
                f"{experts}: {error}; choose another format for it, one for each matrix if need be"
            ) from None
        self._packer = ExpertPacker(self.layout)
        self._matrices: dict[str, NDArray[np.generic]] = {}
        self._biases: dict[str, Float32Array] = {}

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that have not been given yet."""
        return tuple(name for name in self.experts.tensors if name not in self._given)

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Take one parameter; kept until :meth:`release`.

        Raises
        ------
        StoreError
            Another shape than the module's own, or no float type.
        """
        wanted = self.experts.tensors[name]
        if tuple(tensor.shape) != wanted or tensor.dtype not in STORED_AS:
            raise StoreError(
                f"{self.experts}, {name}: {tensor.dtype} of shape {tuple(tensor.shape)}, but floats of shape {wanted} "
                "are needed; load a checkpoint of this model that is not quantised"
            )
        self._given[name] = tensor.detach().to("cpu")
        if not self.missing:
            self._split()

    def _split(self) -> None:
        """The matrices and biases that the kernels know, as views of the module's tensors."""
        module = self.experts.module
        for name, tensor in self._given.items():
            if name.endswith("_bias"):
                self._biases |= self._parts(name.removesuffix("_bias"), view_tensor(tensor.float()))
            else:
                rows = view_tensor(tensor)
                self._matrices |= self._parts(name, rows.transpose(0, 2, 1) if module.is_transposed else rows)

    def _parts(self, name: str, rows: NDArray) -> dict[str, NDArray]:
        """By matrix, of a tensor (num_experts, rows, ...)."""
        if name == "down_proj":
            return {"down": rows}
        if not self.experts.module.has_gate:
            return {"up": rows}
        if not self.experts.module.is_concatenated:
            return {"gate": rows[:, ::2], "up": rows[:, 1::2]}
        half = rows.shape[1] // 2
        return {"gate": rows[:, :half], "up": rows[:, half:]}

    def pack(self, expert: int, out: UInt8Array) -> None:
        """Write one expert's packed bytes to ``out``."""
        rows = {name: self._source_rows(name, expert) for name in self._formats}
        self._packer.pack(out, *(Rows(address_of(rows[name])) if name in rows else Rows() for name in MATRICES))
        if self.layout.has_bias:
            biases = [self._biases[name][expert] if name in self._biases else None for name in MATRICES]
            pack_biases(self.layout, out, biases)

    def _source_rows(self, name: str, expert: int) -> NDArray[np.generic]:
        values, fmt = self._matrices[name][expert], self._formats[name]
        if ELEMENT_OF[values.dtype] == fmt.name and values.flags.c_contiguous:
            return values  # read where it lies
        try:
            return quantize_matrix(values, fmt)
        except ValueError as error:
            raise StoreError(f"{self.experts}, expert {expert}, {name}: {error}") from None

    def release(self) -> None:
        """Let go of the tensors."""
        self._matrices, self._biases = {}, {}
        self._given = dict.fromkeys(self._given, torch.empty(0))


class StoreBuilder:
    """A store that is filled as a model's tensors come, a layer at a time, in any order and from any thread.

    Parameters
    ----------
    experts : sequence of ModuleExperts
    formats : str, mapping or None
        As for :meth:`~trilane.ExpertStore.from_safetensors`: None leaves weights as they are.
    threads : int, optional
        Threads that pack and quantise; the CPUs allowed if None.
    progress : callable, optional
        Called with (experts done, experts in all).
    """

    def __init__(
        self,
        experts: Sequence[ModuleExperts],
        formats: Formats = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        wanted = {} if formats is None else formats_by_matrix(formats)
        self.layers = [TensorLayer(one, wanted) for one in experts]
        check_same_hidden(self.layers)
        placed = place_layers(self.layers)
        last = placed[-1]
        self._store = ExpertStore(placed, allocate_arena(last.offset + last.num_experts * last.stride))
        self._threads, self._progress = threads, progress
        self._done, self._lock = 0, threading.Lock()

    def put(self, index: int, name: str, tensor: torch.Tensor) -> None:
        """Take one parameter of a layer; with its last one the layer is packed, and its tensors are let go.

        Raises
        ------
        StoreError
        """
        layer = self.layers[index]
        with self._lock:
            layer.give(name, tensor)
            if not layer.missing:
                fill([layer], lambda _, expert: self._store.expert_bytes(index, expert), self._threads, None)
                layer.release()
                self._report(layer.num_experts)

    def _report(self, num_experts: int) -> None:
        self._done += num_experts
        if self._progress is not None:
            self._progress(self._done, sum(layer.num_experts for layer in self.layers))

    def finish(self) -> ExpertStore:
        """The store.

        Raises
        ------
        StoreError
            A layer did not get all of its tensors.
        """
        for layer in self.layers:
            if layer.missing:
                raise StoreError(
                    f"{layer.experts}: {', '.join(layer.missing)} did not come, but a store needs all experts; the "
                    "checkpoint lacks these tensors, or names them in a way that transformers does not know"
                )
        return self._store
