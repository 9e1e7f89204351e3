"""The expert weights in host RAM: one arena, every expert packed shard after shard, the truth for all lanes.

Knows weights and where they lie. It knows no slots, lanes or decisions. What layers are made of is in
array_source.py and file_source.py; how the arena is filled, in store_fill.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trilane.array_source import ArrayLayer, array_formats
from trilane.cpu_kernels.arena import Arena, allocate_arena, available_nbytes
from trilane.errors import StoreError
from trilane.store_fill import Progress, fill
from trilane.store_layers import (
    EXPERT_ALIGNMENT,
    Gate,
    LayerSource,
    StoreLayer,
    check_same_hidden,
    formats_by_matrix,
    place_layers,
)

if TYPE_CHECKING:  # who takes weights from arrays needs no reader of files
    from trilane.readers.model_file import ModelFiles
    from trilane.readers.moe import MoeModel

__all__ = ["EXPERT_ALIGNMENT", "ExpertStore", "Gate", "StoreLayer"]


class ExpertStore:
    """All expert weights of a model in one arena of host RAM.

    Made by :meth:`from_gguf`, :meth:`from_safetensors` or :meth:`from_arrays`. The bytes never change afterwards,
    so schedulers may share a store.

    Attributes
    ----------
    layers : tuple of StoreLayer
    model : MoeModel or None
        What was found in the model's files, for the layers that were loaded: print it. None for arrays.
    """

    def __init__(self, layers: Sequence[StoreLayer], arena: Arena) -> None:
        self.layers = tuple(layers)
        self.arena = arena
        self.model: MoeModel | None = None

    @classmethod
    def from_arrays(
        cls,
        layers: Iterable[Mapping[str, Any]],
        *,
        formats: str | Mapping[str, str] = "q4_k",
        gate: str | Gate = "silu_glu",
        threads: int | None = None,
        progress: Progress | str | None = None,
    ) -> ExpertStore:
        """Pack experts given as arrays.

        Parameters
        ----------
        layers : iterable of mappings
            One mapping per MoE layer, with ``gate`` and ``up`` (num_experts, intermediate, hidden) or
            ``gate_up`` (num_experts, 2 * intermediate, hidden; gate rows first), and ``down``
            (num_experts, hidden, intermediate). Elements are float32, float16 or bfloat16 (as uint16), which
            are quantised to ``formats``; or uint8 rows of source blocks already in that format
            (num_experts, rows, row bytes), as in a GGUF file. Optional float32 biases ``gate_bias``,
            ``up_bias`` (num_experts, intermediate) or ``gate_up_bias``, and ``down_bias`` (num_experts,
            hidden): all of them or none.
        formats : str or mapping
            One format name for all matrices, or one each for "gate", "up" and "down".
        gate : str or Gate
            The activation kind; ``relu2`` has no gate matrix.
        threads : int, optional
            Threads that fill the arena; the CPUs allowed if None.
        progress : callable or "auto", optional
            Called with (experts done, experts in all) as the arena fills; "auto" draws a bar if stderr is a
            terminal.

        Raises
        ------
        StoreError
            With the layer and matrix, what it is, the rule and the remedy.
        MemoryError
            The arena does not fit.
        """
        spec = gate if isinstance(gate, Gate) else Gate(gate)
        wanted = array_formats(formats, spec)
        sources = [ArrayLayer(index, layer, wanted, spec) for index, layer in enumerate(layers)]
        if not sources:
            raise StoreError("layers: none given, but a store needs at least one MoE layer; pass a mapping each")
        return cls._from_sources(sources, threads, progress)

    @classmethod
    def from_gguf(
        cls,
        path: str | Path,
        *,
        formats: str | Mapping[str, str] | None = None,
        gate: str | Gate | None = None,
        layers: Iterable[int] | None = None,
        requantize: bool = False,
        threads: int | None = None,
        progress: Progress | str | None = None,
    ) -> ExpertStore:
        """Load the routed experts of a GGUF model.

        Parameters
        ----------
        path : str or Path
            A file, any one of its shards (``name-00001-of-00003.gguf``), or a folder that holds one model.
        formats : str or mapping, optional
            Convert to this format on the way; one name for all matrices, or names for some of "gate", "up" and
            "down". None: bytes are used as they are.
        gate : str or Gate, optional
            The activation kind; None: what the model's architecture is known to have.
        layers : iterable of int, optional
            Numbers of the model's layers to load, as in its tensors' names; None: all that have experts.
        requantize : bool
            Allow ``formats`` to convert weights that are quantised already, which loses accuracy twice.
        threads : int, optional
            Threads that fill the arena; the CPUs allowed if None.
        progress : callable or "auto", optional
            Called with (experts done, experts in all); "auto" draws a bar if stderr is a terminal.

        Raises
        ------
        ModelFileError
            A file is missing, damaged, or was changed while it was read.
        StoreError
            No experts, an activation that is not known, a format that is not supported: with the tensor, what it
            is, the rule and the remedy.
        MemoryError
            The arena does not fit.
        """
        from trilane.readers.finder import find_experts
        from trilane.readers.gguf import open_gguf

        files = open_gguf(path)
        return cls._from_model(files, find_experts(files), formats, gate, layers, requantize, threads, progress)

    @classmethod
    def from_safetensors(
        cls,
        path: str | Path,
        *,
        formats: str | Mapping[str, str] | None = None,
        gate: str | Gate | None = None,
        layers: Iterable[int] | None = None,
        prefix: str | None = None,
        requantize: bool = False,
        threads: int | None = None,
        progress: Progress | str | None = None,
    ) -> ExpertStore:
        """Load the routed experts of a checkpoint in safetensors files.

        Parameters
        ----------
        path : str or Path
            The model's folder, its ``model.safetensors.index.json``, or any one of its files. ``config.json``, which
            names the activation, is read from the same folder.
        formats, gate, layers, requantize, threads, progress
            As for :meth:`from_gguf`. Weights in bfloat16 stay so unless ``formats`` says otherwise.

        prefix : str, optional
            What stands before ``layers.N`` in the experts' names; needed only where a checkpoint holds several models.

        Raises
        ------
        ModelFileError, StoreError, MemoryError
            As :meth:`from_gguf`.
        """
        from trilane.readers.finder import find_experts
        from trilane.readers.safetensors import open_safetensors

        files = open_safetensors(path)
        return cls._from_model(files, find_experts(files, prefix), formats, gate, layers, requantize, threads, progress)

    @classmethod
    def _from_model(
        cls,
        files: ModelFiles,
        model: MoeModel,
        formats: str | Mapping[str, str] | None,
        gate: str | Gate | None,
        layers: Iterable[int] | None,
        requantize: bool,
        threads: int | None,
        progress: Progress | str | None,
    ) -> ExpertStore:
        from trilane.file_source import FileLayer, choose_gate, choose_layers

        wanted = {} if formats is None else formats_by_matrix(formats)
        spec = choose_gate(files, model, gate)
        chosen = model if layers is None else choose_layers(model, layers)
        release = _is_tight(chosen.expert_nbytes)
        sources = [FileLayer(files, layer, wanted, spec, requantize, release) for layer in chosen.layers]
        store = cls._from_sources(sources, threads, progress)
        files.check_unchanged()  # what was read before a change that came late
        store.model = chosen
        return store

    @classmethod
    def _from_sources(
        cls, sources: Sequence[LayerSource], threads: int | None, progress: Progress | str | None
    ) -> ExpertStore:
        check_same_hidden(sources)
        placed = place_layers(sources)
        last = placed[-1]
        store = cls(placed, allocate_arena(last.offset + last.num_experts * last.stride))
        fill(sources, store.expert_bytes, threads, progress)
        return store

    @property
    def hidden(self) -> int:
        return self.layers[0].layout.hidden

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

    def expert_bytes(self, layer: int, expert: int) -> np.ndarray:
        """The packed bytes of an expert (uint8 view of the arena)."""
        where = self.layers[layer]
        return self.arena.view(where.offset + expert * where.stride, where.stride)

    def __repr__(self) -> str:
        experts = sum(layer.num_experts for layer in self.layers)
        return f"ExpertStore({self.num_layers} layers, {experts} experts, {self.nbytes / 1e9:.2f} GB)"


def _is_tight(nbytes: int) -> bool:
    """Whether a file's experts in the system's cache, beside a store of them, would push other things out of memory."""
    available = available_nbytes()
    return available is not None and available < 2 * nbytes
