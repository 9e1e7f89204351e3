"""Traces on disk: what the blocks of a trace file hold, and files to traces and back.

The format is described in docs/replay.md. Nothing read from a file is believed: counts, ids, sizes and states are
checked before anything uses them, and memory is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trilane.errors import TraceError
from trilane.traces.block_file import (
    FILE_HEAD,
    XZ,
    ZLIB,
    Block,
    BlockAppender,
    Damage,
    check_regular,
    encode_block,
    is_block_file,
    pack_arrays,
    read_blocks,
    sound_block_after,
    unpack_arrays,
)
from trilane.traces.trace import Baseline, Trace, TraceMeta, check_events
from trilane.traces.trace_import import read_npz

log = logging.getLogger("trilane")

# Kinds of blocks; a reader skips those that it does not know.
META, EVENTS, BASELINE = 1, 2, 3
COLUMNS: dict[str, Any] = {
    "kind": np.uint8,
    "layer": np.uint16,
    "rows": np.int32,
    "top_k": np.int32,
    "digest": np.uint32,
}
EVENTS_PER_BLOCK = 1 << 20
ENTRIES_PER_BLOCK = 1 << 23
MAX_TRACE_NBYTES = 1 << 31  # of arrays in memory
MAX_BASELINES = 1 << 10
INFINITE = "inf"  # JSON has no word for it


@dataclass(frozen=True)
class EventBlock:
    """A run of events as columns, with their entries; see `trace.Trace`."""

    columns: dict[str, NDArray[Any]]
    ids: NDArray[Any]
    weights: NDArray[Any] | None


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """The column in the smallest unsigned type that holds it."""
    return column.astype(np.min_scalar_type(int(column.max(initial=0))), copy=False)


def encode_events(block: EventBlock, codec: int = ZLIB) -> bytes:
    """A block of events as it stands in the file."""
    columns = {name: _narrow(column) for name, column in block.columns.items() if column.any()}
    arrays = {**columns, "ids": block.ids}
    if block.weights is not None:
        arrays["weights"] = block.weights
    return encode_block(EVENTS, pack_arrays({"events": len(block.columns["kind"])}, arrays), codec)


def decode_events(payload: bytes, meta: TraceMeta) -> EventBlock:
    """The reverse of `encode_events`; a column that is left out is 0."""
    values, arrays = unpack_arrays(payload)
    num, ids, weights = values.get("events"), arrays.pop("ids", None), arrays.pop("weights", None)
    if type(num) is not int or num < 0 or ids is None or ids.dtype != meta.id_type:
        raise TraceError("trace: a block of events without a count, or with ids of another type")
    if weights is not None and weights.dtype not in (np.uint8, np.float16):
        raise TraceError(f"trace: router weights of type {weights.dtype}; they are uint8 or float16")
    if num > MAX_TRACE_NBYTES // 16:
        raise TraceError(f"trace: a block of {num} events")
    columns = {}
    for name, kind in COLUMNS.items():
        column = arrays.get(name, np.zeros(num, np.uint8))
        if column.shape != (num,) or column.dtype.kind != "u" or column.max(initial=0) > np.iinfo(kind).max:
            raise TraceError(f"trace: column {name} of {column.shape} {column.dtype} in a block of {num} events")
        columns[name] = column.astype(kind)
    if ids.ndim != 1 or (weights is not None and weights.shape != ids.shape):
        raise TraceError("trace: ids and router weights of a block differ in length")
    return EventBlock(columns, ids, weights)


def encode_meta(meta: TraceMeta) -> bytes:
    """The block that says what the trace is of."""
    values = {f.name: getattr(meta, f.name) for f in fields(meta)}
    return encode_block(META, pack_arrays(values, {}))


def decode_meta(payload: bytes) -> TraceMeta:
    """The reverse of `encode_meta`."""
    values = unpack_arrays(payload)[0]
    try:
        return TraceMeta(
            model=str(values["model"]),
            num_experts=tuple(_count(n) for n in values["num_experts"]),
            shard_nbytes=tuple(tuple(_count(n) for n in sizes) for sizes in values["shard_nbytes"]),
            source=str(values["source"]),
            licence=str(values["licence"]),
        )
    except (KeyError, TypeError) as error:
        raise TraceError(f"trace: its description lacks {error} or has a value of a wrong type") from None


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r}, which is no count")
    return value


def encode_baseline(baseline: Baseline) -> bytes:
    """The block that holds settings, rates and state from an event on."""
    distinct: list[dict[str, Any]] = []
    places = []
    for rates in baseline.rates:
        found = next((i for i, one in enumerate(distinct) if one is rates), len(distinct))
        if found == len(distinct):
            distinct.append(rates)
        places.append(found)
    arrays: dict[str, np.ndarray] = {f"state.{k}": v for k, v in baseline.state.items() if isinstance(v, np.ndarray)}
    numbers = {name: value for name, value in baseline.state.items() if not isinstance(value, np.ndarray)}
    for index, rates in enumerate(distinct):
        arrays |= {f"rates.{index}.{k}": np.asarray(v, np.float64) for k, v in rates.items()}
    values = {"settings": baseline.settings, "state": numbers, "rates_of_layer": places}
    return encode_block(BASELINE, pack_arrays(values, arrays))


def decode_baseline(payload: bytes, event: int) -> Baseline:
    """The reverse of `encode_baseline`; whether a state can be used is `replay`'s to check."""
    values, arrays = unpack_arrays(payload)
    try:
        rates: dict[int, dict[str, Any]] = {}
        for name, array in arrays.items():
            group, _, field = name.partition(".")
            if group == "rates":
                index, _, field = field.partition(".")
                rates.setdefault(int(index), {})[field] = array if array.ndim else float(array)
        state = {k.removeprefix("state."): v.copy() for k, v in arrays.items() if k.startswith("state.")}
        places = tuple(rates[_count(place)] for place in values["rates_of_layer"])
        return Baseline(event, dict(values["settings"]), places, {**state, **dict(values["state"])})
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"trace: a baseline is incomplete ({str(error)[:80]})") from None


class _Reader:
    """Collects the blocks of one file."""

    def __init__(self, name: str, max_nbytes: int) -> None:
        self.name, self.max_nbytes = name, max_nbytes
        self.meta: TraceMeta | None = None
        self.blocks: list[EventBlock] = []
        self.baselines: list[Baseline] = []
        self.num_events = self.nbytes = 0

    def take(self, block: Block) -> None:
        self.nbytes += len(block.payload)
        if block.kind == META and self.meta is None:
            self.meta = decode_meta(block.payload)
        elif self.meta is None:
            raise TraceError(f"{self.name}: it does not begin with a description of the model")
        elif block.kind == EVENTS:
            events = decode_events(block.payload, self.meta)
            self.blocks.append(events)
            self.num_events += len(events.columns["kind"])
            self.nbytes += 16 * len(events.columns["kind"])
        elif block.kind == BASELINE:
            self.baselines.append(decode_baseline(block.payload, self.num_events))
        if self.nbytes > self.max_nbytes or len(self.baselines) > MAX_BASELINES:
            raise TraceError(f"{self.name}: more than {self.max_nbytes} bytes in memory; split the trace, or raise it")

    def trace(self) -> Trace:
        if self.meta is None:
            raise TraceError(f"{self.name}: it has no description of the model; the recording ended before it began")
        parts = self.blocks or [EventBlock({n: np.zeros(0, k) for n, k in COLUMNS.items()}, self._no_ids(), None)]
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMNS}
        weights = [part.weights for part in parts if part.weights is not None]
        kinds = {w.dtype for w in weights}
        keep = len(weights) == len(parts) and len(kinds) == 1  # else some events have none
        trace = Trace(
            self.meta,
            **columns,
            ids=np.concatenate([part.ids for part in parts]),
            weights=np.concatenate(weights) if keep else None,
            baselines=tuple(self.baselines),
        )
        check_events(trace)
        return trace

    def _no_ids(self) -> NDArray[Any]:
        assert self.meta is not None
        return np.zeros(0, self.meta.id_type)


def read_trace(path: Path | str, *, max_nbytes: int = MAX_TRACE_NBYTES) -> Trace:
    """Read a trace file, or a .npz of ids (see `trace_import`).

    Parameters
    ----------
    max_nbytes : int
        Refuse a trace that takes more memory.

    Raises
    ------
    TraceError
        It is no trace, its content is inconsistent, or it is larger than ``max_nbytes``.
    OSError

    Notes
    -----
    What follows the last sound block is left out with a warning: the end of a recording that was killed.
    """
    check_regular(Path(path))
    with open(path, "rb") as file:
        if not is_block_file(file):
            return read_npz(file, str(path), max_nbytes=max_nbytes)
        reader = _Reader(str(path), max_nbytes)
        for block in read_blocks(file, str(path)):
            if isinstance(block, Damage):
                log.warning("%s: %s at byte %d; the last %d bytes are left out", path, block.why, *block[:2])
            else:
                reader.take(block)
        return reader.trace()


def read_meta(file: BinaryIO, name: str) -> tuple[TraceMeta | None, int]:
    """The description of an open trace file, and where a writer may go on: behind its last sound block.

    Raises
    ------
    TraceError
        Sound blocks follow a damaged part: to append would lose them.
    """
    meta, end = None, FILE_HEAD.size
    for block in read_blocks(file, name):
        if isinstance(block, Damage):
            if (sound := sound_block_after(file, block.offset)) is not None:
                raise TraceError(
                    f"{name}: {block.why} at byte {block.offset}, but sound blocks follow from byte {sound} on; "
                    "to append would lose them: record to another file"
                )
            log.warning("%s: %s at byte %d; its torn end of %d bytes is cut off", name, block.why, *block[:2])
            break
        if meta is None and block.kind == META:
            meta = decode_meta(block.payload)
        end = block.end
    return meta, end


def open_appender(path: Path | str, meta: TraceMeta) -> BlockAppender:
    """A trace file to append to: a new one, or one of the same model.

    Raises
    ------
    TraceError
        The file is of another model, is no trace, is being written, or is damaged in its middle.
    OSError
    """
    appender = BlockAppender(Path(path))
    try:
        found, end = (None, 0) if appender.is_new else read_meta(appender.file, str(path))
        if found is None:
            appender.begin()
            appender.append(encode_meta(meta))
        elif difference := _difference(found, meta):
            raise TraceError(f"{path}: it holds a trace of another model ({difference}); record to another file")
        else:
            appender.begin(end)
    except BaseException:
        appender.close()
        raise
    return appender


def _difference(old: TraceMeta, new: TraceMeta) -> str | None:
    for name in ("model", "num_experts", "shard_nbytes"):
        a, b = getattr(old, name), getattr(new, name)
        if a != b:
            return f"its {name} is {str(a)[:60]}, and not {str(b)[:60]}"
    return None


def append_trace(path: Path | str, trace: Trace, *, codec: int = XZ) -> None:
    """Write a trace's events to a new file or behind those of the same model; baselines included.

    Raises
    ------
    TraceError, OSError
    """
    appender = open_appender(path, trace.meta)
    try:
        for block in _encoded(trace, codec):
            appender.append(block)
    finally:
        appender.close()


def _encoded(trace: Trace, codec: int) -> Iterator[bytes]:
    """The trace's blocks, in order."""
    baselines = {base.event: base for base in trace.baselines}
    start, num = trace.start, trace.num_events
    full = np.searchsorted(start, range(0, int(start[-1]), ENTRIES_PER_BLOCK)).tolist()
    cuts = sorted({0, *full, *range(0, num, EVENTS_PER_BLOCK), num, *baselines})
    for first, stop in pairwise([*cuts, num]):
        if first in baselines:
            yield encode_baseline(baselines[first])
        part = trace.slice(slice(first, stop))
        if stop > first:
            yield encode_events(
                EventBlock({name: getattr(part, name) for name in COLUMNS}, part.ids, part.weights), codec
            )
