"""The expert weights in host RAM: one arena, every expert packed shard after shard, the truth for all lanes.

Knows weights and where they lie. It knows no slots, lanes or decisions. Filling is done by several threads,
each of which is the first to touch the pages it writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.arrays import view_array
from trilane.cpu_kernels.arena import Arena, allocate_arena
from trilane.cpu_kernels.cpus import read_cpu_budget
from trilane.cpu_kernels.float_env import exact_floats
from trilane.cpu_kernels.formats import Format, format_of
from trilane.cpu_kernels.gate import GATES
from trilane.cpu_kernels.layout import ExpertLayout, pack_expert
from trilane.cpu_kernels.quantize import quantize_matrix
from trilane.errors import StoreError, did_you_mean

MATRICES = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")
LAYER_KEYS = (*MATRICES, "gate_up", *BIASES, "gate_up_bias")
GATELESS = "relu2"
EXPERT_ALIGNMENT = 4096


@dataclass(frozen=True)
class Gate:
    """The activation between the two matrix products.

    Attributes
    ----------
    kind : str
        ``silu_glu``, ``gelu_tanh_glu``, ``silu_glu_clamped``, ``swiglu_oai`` (gpt-oss) or ``relu2`` (no gate).
    alpha, limit : float
        Parameters of ``swiglu_oai`` (both) and ``silu_glu_clamped`` (limit).
    """

    kind: str = "silu_glu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in GATES:
            raise StoreError(
                f"gate: kind {self.kind!r} is unknown, but must be one of {', '.join(GATES)}."
                f"{did_you_mean(str(self.kind), GATES)}"
            )
        if not math.isfinite(self.alpha):
            raise StoreError(f"gate: alpha is {self.alpha}, but must be a finite number; take the model's own")
        if not self.limit > 0:
            raise StoreError(f"gate: limit is {self.limit}, but must be above 0; take the model's own")


@dataclass(frozen=True)
class StoreLayer:
    """One MoE layer of a store: ``num_experts`` experts of one layout, from ``offset`` in the arena on."""

    layout: ExpertLayout
    num_experts: int
    gate: Gate
    offset: int

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return self.layout.expert_nbytes


class ExpertStore:
    """All expert weights of a model in one arena of host RAM.

    Made by :meth:`from_arrays`. The bytes never change afterwards, so schedulers may share a store.
    """

    def __init__(self, layers: Sequence[StoreLayer], arena: Arena) -> None:
        self.layers = tuple(layers)
        self.arena = arena

    @classmethod
    def from_arrays(
        cls,
        layers: Iterable[Mapping[str, Any]],
        *,
        formats: str | Mapping[str, str] = "q4_k",
        gate: str | Gate = "silu_glu",
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
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
        progress : callable, optional
            Called with (experts done, experts in all) as the arena fills.

        Raises
        ------
        StoreError
            With the layer and matrix, what it is, the rule and the remedy.
        MemoryError
            The arena does not fit.
        """
        spec = gate if isinstance(gate, Gate) else Gate(gate)
        wanted = _formats_of(formats, spec)
        sources = [_LayerSource(index, layer, wanted, spec) for index, layer in enumerate(layers)]
        if not sources:
            raise StoreError("layers: none given, but a store needs at least one MoE layer; pass a mapping each")
        _check_same_hidden(sources)
        placed = _place_layers(sources)
        last = placed[-1]
        store = cls(placed, allocate_arena(last.offset + last.num_experts * last.stride))
        _fill(store, sources, threads or read_cpu_budget().num_concurrent, progress)
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


def _formats_of(formats: str | Mapping[str, str], gate: Gate) -> dict[str, Format]:
    if not isinstance(formats, (str, Mapping)):
        raise StoreError(f"formats: {formats!r} is neither a name nor a mapping of names; pass 'q4_k', for example")
    if isinstance(formats, Mapping):
        unknown = [name for name in formats if name not in MATRICES]
        if unknown:
            raise StoreError(f"formats: {unknown[0]!r} is no matrix; give formats for {', '.join(MATRICES)}")
    needed = [m for m in MATRICES if m != "gate" or gate.kind != GATELESS]
    found = {}
    for matrix in needed:
        name = formats if isinstance(formats, str) else formats.get(matrix)
        if name is None:
            raise StoreError(f"formats: none for {matrix!r}; give one name for all, or one for each matrix")
        try:
            found[matrix] = format_of(name)
        except ValueError as error:
            raise StoreError(f"formats: {error}") from None
    return found


class _LayerSource:
    """The arrays of one layer, checked; packs one expert at a time."""

    def __init__(self, index: int, arrays: Mapping[str, Any], formats: dict[str, Format], gate: Gate) -> None:
        self._index = index
        self._formats = formats
        self.gate = gate
        views = {name: self._view(name, value) for name, value in arrays.items() if value is not None}
        self._check_merged(views)
        self._arrays = _split_gate_up(views)
        self._check_names()
        self.num_experts = len(self._arrays["up"])
        self.layout = self._make_layout()
        self._check_shapes()

    def _error(self, name: str, text: str) -> StoreError:
        return StoreError(f"layer {self._index}, {name}: {text}")

    def _view(self, name: str, value: Any) -> np.ndarray:
        if name not in LAYER_KEYS:
            hint = did_you_mean(name, LAYER_KEYS)
            raise self._error(name, f"no such matrix; the names are {', '.join(LAYER_KEYS)}.{hint}")
        array = view_array(value, f"layer {self._index}, {name}").array
        kinds = ("float32", "float16", "uint16", "uint8") if "bias" not in name else ("float32",)
        if array.dtype.name not in kinds:
            raise self._error(name, f"dtype {array.dtype}, but one of {', '.join(kinds)} is needed; convert it")
        return array

    def _check_merged(self, views: dict[str, np.ndarray]) -> None:
        for end in ("", "_bias"):
            both = views.get(f"gate_up{end}")
            twice = [name for name in (f"gate{end}", f"up{end}") if name in views]
            if both is not None and twice:
                raise self._error(f"gate_up{end}", f"given beside {twice[0]}; give one or the other")
            if both is not None and (both.ndim < 2 or both.shape[1] % 2):
                rows = both.shape[1] if both.ndim > 1 else both.shape
                raise self._error(f"gate_up{end}", f"{rows} rows, but an even number is needed: gate, then up")

    def _check_names(self) -> None:
        has_bias = any(name in self._arrays for name in BIASES)
        wanted = [*self._formats] + [f"{m}_bias" for m in self._formats if has_bias]
        for name in wanted:
            if name not in self._arrays:
                raise self._error(name, f"missing; a {self.gate.kind} layer needs {', '.join(wanted)}")
        for name in self._arrays:
            if name not in wanted:
                raise self._error(name, f"given, but {self.gate.kind} has no gate; leave it out")

    def _make_layout(self) -> ExpertLayout:
        down, up = self._arrays["down"], self._arrays["up"]
        for name in self._formats:
            if self._arrays[name].ndim != 3:
                shape = self._arrays[name].shape
                raise self._error(name, f"shape {shape}, but (num_experts, rows, columns) is needed; stack them")
        try:
            return ExpertLayout(
                hidden=down.shape[1],
                intermediate=up.shape[1],
                gate=self._formats.get("gate"),
                up=self._formats["up"],
                down=self._formats["down"],
                has_bias="up_bias" in self._arrays,
            )
        except ValueError as error:
            raise StoreError(f"layer {self._index}: {error}") from None

    def _check_shapes(self) -> None:
        hidden, intermediate = self.layout.hidden, self.layout.intermediate
        sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        for name, array in self._arrays.items():
            rows, columns = sizes[name.removesuffix("_bias")]
            wanted: tuple[int, ...] = (self.num_experts, rows)
            if not name.endswith("bias"):
                packed = array.dtype == np.uint8
                wanted += (self._formats[name].row_source_nbytes(columns) if packed else columns,)
            if array.shape != wanted:
                raise self._error(name, f"shape {array.shape}, but {wanted} is needed, after up and down")

    def pack(self, expert: int, out: np.ndarray) -> None:
        """Write one expert's packed bytes to ``out``."""
        rows = {name: self._source_rows(name, expert) for name in self._formats}
        biases = {name: self._arrays[name][expert] for name in BIASES if name in self._arrays}
        pack_expert(self.layout, out, gate=rows.pop("gate", None), **rows, **biases)

    def _source_rows(self, name: str, expert: int) -> np.ndarray:
        values = self._arrays[name][expert]
        if values.dtype == np.uint8:
            return values
        return quantize_matrix(np.ascontiguousarray(values), self._formats[name])


def _split_gate_up(views: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace ``gate_up`` and ``gate_up_bias`` by views of their halves (gate rows first)."""
    split = dict(views)
    for name, suffix in (("gate_up", ""), ("gate_up_bias", "_bias")):
        both = split.pop(name, None)
        if both is not None:
            half = both.shape[1] // 2
            split[f"gate{suffix}"], split[f"up{suffix}"] = both[:, :half], both[:, half:]
    return split


def _check_same_hidden(sources: Sequence[_LayerSource]) -> None:
    first = sources[0].layout.hidden
    for index, source in enumerate(sources):
        if source.layout.hidden != first:
            raise StoreError(
                f"layer {index}: hidden size {source.layout.hidden}, but layer 0 has {first} and all layers "
                "of a store must agree; make one store per hidden size"
            )
        if source.num_experts == 0:
            raise StoreError(f"layer {index}: no experts, but at least one is needed; leave the layer out")


def _place_layers(sources: Sequence[_LayerSource]) -> list[StoreLayer]:
    placed, end = [], 0
    for source in sources:
        offset = -(-end // EXPERT_ALIGNMENT) * EXPERT_ALIGNMENT
        placed.append(StoreLayer(source.layout, source.num_experts, source.gate, offset))
        end = offset + source.num_experts * source.layout.expert_nbytes
    return placed


def _fill(
    store: ExpertStore,
    sources: Sequence[_LayerSource],
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Pack all experts with ``threads`` threads; neighbouring experts go to different threads."""
    jobs = [(layer, e) for layer, source in enumerate(sources) for e in range(source.num_experts)]

    def pack(job: tuple[int, int]) -> None:
        with exact_floats():  # threads inherit the caller's mode, and quantised bytes must not depend on it
            sources[job[0]].pack(job[1], store.expert_bytes(*job))

    with ThreadPoolExecutor(threads, "trilane-fill") as pool:
        for done, _ in enumerate(pool.map(pack, jobs), start=1):
            if progress is not None:
                progress(done, len(jobs))
