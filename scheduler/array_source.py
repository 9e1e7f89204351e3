"""A layer of a store whose experts come as arrays: checked, then packed expert by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trilane.arrays import view_array
from trilane.cpu_kernels.formats import Format
from trilane.cpu_kernels.layout import ExpertLayout, pack_expert
from trilane.cpu_kernels.quantize import quantize_matrix
from trilane.errors import StoreError, did_you_mean
from trilane.store_layers import BIASES, MATRICES, Gate, formats_by_matrix, needed_matrices

LAYER_KEYS = (*MATRICES, "gate_up", *BIASES, "gate_up_bias")


def array_formats(formats: str | Mapping[str, str], gate: Gate) -> dict[str, Format]:
    """A format for each matrix that experts with that gate have.

    Raises
    ------
    StoreError
        One is missing or does not exist.
    """
    given = formats_by_matrix(formats)
    needed = needed_matrices(gate)
    for matrix in needed:
        if matrix not in given:
            raise StoreError(f"formats: none for {matrix!r}; give one name for all, or one for each matrix")
    return {matrix: given[matrix] for matrix in needed}


class ArrayLayer:
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
        for name in self._formats:
            if self._arrays[name].ndim != 3:
                shape = self._arrays[name].shape
                raise self._error(name, f"shape {shape}, but (num_experts, rows, columns) is needed; stack them")
        try:
            return ExpertLayout(
                hidden=self._shared_size("hidden"),
                intermediate=self._shared_size("intermediate"),
                gate=self._formats.get("gate"),
                up=self._formats["up"],
                down=self._formats["down"],
                has_bias="up_bias" in self._arrays,
            )
        except ValueError as error:
            raise StoreError(f"layer {self._index}: {error}") from None

    def _shared_size(self, which: str) -> int:
        """The hidden or the intermediate size as most matrices have it, so that the odd one out is the one named."""
        sizes = []
        for name in ("up", "gate", "down"):
            if name in self._arrays:
                _, rows, columns = self._arrays[name].shape
                if self._arrays[name].dtype == np.uint8:
                    fmt = self._formats[name]
                    columns = columns // fmt.block_nbytes * fmt.block_size
                sizes.append(rows if (which == "hidden") == (name == "down") else columns)
        return max(sizes, key=sizes.count)  # of equally many, the first: up's

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
                raise self._error(name, f"shape {array.shape}, but {wanted} is needed beside the others; pass that")

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
