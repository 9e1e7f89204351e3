"""Traces from NumPy archives: ``ids`` (tokens, layers, top_k), ``w255`` router weights, ``starts`` of conversations.

Archives of single tokens only; their memory is bounded before anything of them is unpacked.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from importlib.resources import files
from typing import Any, BinaryIO

import numpy as np

from trilane.errors import TraceError
from trilane.traces.trace import Trace, TraceMeta, trace_of_tokens

BUNDLED = "gptoss20b_conversation.npz"
# An expert of gpt-oss-20b in MXFP4 (hidden and intermediate size 2880, with biases) in this package's layout.
GPTOSS20B_SHARDS = (1_177_088,) * 11 + (294_272,)


def read_npz(file: BinaryIO, name: str, *, max_nbytes: int) -> Trace:
    """The trace in an open .npz file.

    Raises
    ------
    TraceError
        It is no such archive, or it unpacks to more than ``max_nbytes``.
    """
    if file.seek(0, os.SEEK_END) == 0:
        raise TraceError(f"{name}: it is empty (0 bytes), but a trace names its model first; record or copy it again")
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            nbytes = sum(member.file_size for member in archive.infolist())
            if nbytes > max_nbytes:
                raise TraceError(f"{name}: it unpacks to {nbytes} bytes, more than {max_nbytes}; split it")
            arrays = {m.filename.removesuffix(".npy"): _read_array(archive, m) for m in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{name}: it is neither a trace file nor a .npz archive of ids ({str(error)[:80]}); give one of the two"
        ) from None
    return import_arrays(arrays, name)


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array; a head that promises more than the member holds is refused before it is believed."""
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read_head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read_head(stream)
    nbytes = kind.itemsize
    for n in shape:
        nbytes *= n
    if kind.hasobject or not 0 <= nbytes <= member.file_size:
        raise ValueError(f"array {member.filename} of {nbytes} bytes in {member.file_size}")
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def import_arrays(arrays: dict[str, np.ndarray], name: str = "trace") -> Trace:
    """A trace from the arrays of an archive.

    Parameters
    ----------
    arrays : dict
        ``ids`` unsigned (tokens, layers, top_k); optional: ``w255`` uint8 of its shape, ``starts`` int (requests + 1,),
        ``n_experts``, and ``meta``, a JSON text (an object with ``model``, ``num_experts``, ``source``, ``licence``).

    Raises
    ------
    TraceError
    """
    ids = arrays.get("ids")
    if ids is None or ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
        raise TraceError(f"{name}: it has no array ids of integers (tokens, layers, top_k)")
    said = _meta(arrays.get("meta"))
    try:
        known = arrays["n_experts"] if "n_experts" in arrays else said.get("num_experts", int(ids.max()) + 1)
        num_experts = int(np.asarray(known).reshape(-1)[0])
        starts = np.asarray(arrays.get("starts", np.zeros(1, np.int64))).astype(np.int64)
    except (TypeError, ValueError, IndexError) as error:
        raise TraceError(f"{name}: n_experts or starts does not fit ({str(error)[:80]})") from None
    meta = TraceMeta(
        model=str(said.get("model", "")),
        num_experts=(num_experts,) * ids.shape[1],
        source=str(said.get("source", "")),
        licence=str(said.get("licence", "")),
    )
    weights = arrays.get("w255")
    if weights is not None and weights.dtype != np.uint8:
        raise TraceError(f"{name}: w255 of type {weights.dtype}; router weights are uint8 here, 255ths")
    return trace_of_tokens(meta, ids, weights, starts[starts < len(ids)].tolist())


def _meta(text: Any) -> dict[str, Any]:
    """The archive's description; {} where it is none that this file knows."""
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def bundled_trace() -> Trace:
    """One real conversation of gpt-oss-20b: 240 tokens, 24 layers, 4 of 32 experts."""
    with (files("trilane") / "data" / BUNDLED).open("rb") as file, np.load(file) as arrays:
        trace = import_arrays(dict(arrays))
    return replace(trace, meta=replace(trace.meta, shard_nbytes=(GPTOSS20B_SHARDS,) * trace.meta.num_layers))
