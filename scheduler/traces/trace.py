"""Routing traces in memory: which experts a model chose, layer-step by layer-step, and what else a replay needs.

A trace is data: `trace_file` reads and writes it, `recorder` makes one from a live run, `replay` runs one through the
decision code. The general form takes any model and any batch; most imported traces are `tokens` by `layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilane.errors import TraceError

# Kinds of events
STEP = 1  # a planned layer-step: ids of rows x top_k
WAVE = 2  # the same step's next plan, for what found no slot; no ids
HINT = 3  # likely experts of a layer, for which background fills were reserved
SETTLED = 4  # reserved fills ended, in the order of their reservation: LANDED, GIVEN_UP, or still UNDER_WAY
REQUEST = 5  # a conversation or request begins here
BACKGROUND = 6  # the policy reserved fills for what it missed of late; its one id: how many at most
GAP = 7  # layer-steps that whoever recorded did not hear of; how many, as NUMBER_NBYTES ids of a byte each
TOUCHED = 8  # a use of an expert in such a step, heard of later: its id, then how many steps ago as in a GAP
KINDS = (STEP, WAVE, HINT, SETTLED, REQUEST, BACKGROUND, GAP, TOUCHED)
HAS_IDS = (STEP, HINT, SETTLED, BACKGROUND, GAP, TOUCHED)
NOT_PLANNED = 0  # the digest of a step that nobody planned, since all it used was in slots
GIVEN_UP, LANDED, UNDER_WAY = 0, 1, 2  # ids of SETTLED
NUMBER_NBYTES = 4
MAX_EXPERTS = 0xFFFF  # of a layer: one id more is kept for "no expert"
MAX_LAYERS = 1 << 14
MAX_MODEL_EXPERTS = 1 << 22  # of all layers
MAX_MODEL_SHARDS = 1 << 26


@dataclass(frozen=True)
class TraceMeta:
    """What a trace is of.

    Attributes
    ----------
    model : str
    num_experts : tuple of int
        By MoE layer.
    shard_nbytes : tuple of tuples of int
        Bytes of each shard of an expert, by layer; empty where they are unknown.
    source, licence : str
        Where the routing came from, and its terms; may be empty.
    """

    model: str
    num_experts: tuple[int, ...]
    shard_nbytes: tuple[tuple[int, ...], ...] = ()
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.num_experts) <= MAX_LAYERS:
            raise TraceError(f"trace: {len(self.num_experts)} layers, but it must have 1 to {MAX_LAYERS}")
        for layer, count in enumerate(self.num_experts):
            if not 1 <= count <= MAX_EXPERTS:
                raise TraceError(f"trace: layer {layer} has {count} experts, but a layer has 1 to {MAX_EXPERTS}")
        if sum(self.num_experts) > MAX_MODEL_EXPERTS:
            raise TraceError(f"trace: {sum(self.num_experts)} experts in all, but at most {MAX_MODEL_EXPERTS} can be")
        if self.shard_nbytes and len(self.shard_nbytes) != len(self.num_experts):
            raise TraceError(f"trace: shard sizes of {len(self.shard_nbytes)} layers, but {self.num_layers} layers")
        for layer, sizes in enumerate(self.shard_nbytes):
            if not 1 <= len(sizes) <= 1 << 12 or not all(1 <= size < 1 << 40 for size in sizes):
                raise TraceError(f"trace: layer {layer} has impossible shard sizes {str(sizes)[:80]}")
        if sum(n * len(s) for n, s in zip(self.num_experts, self.shard_nbytes, strict=False)) > MAX_MODEL_SHARDS:
            raise TraceError(f"trace: more than {MAX_MODEL_SHARDS} shards in all")

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    @property
    def no_expert(self) -> int:
        """The id that stands for "no expert" in a trace."""
        return 0xFF if max(self.num_experts) <= 0xFF else MAX_EXPERTS

    @property
    def id_type(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.no_expert == 0xFF else np.uint16


@dataclass(frozen=True)
class Baseline:
    """All that the plans from an event on depend on: settings, rates, and the scheduler's state there.

    Attributes
    ----------
    event : int
        Index of the first event that it holds for.
    settings : dict
        ``clock``, ``options`` (`plan.Options` by name) and what else is of use to people.
    rates : tuple of dict
        `cost.Rates` by name, for each layer.
    state : dict
        The arrays and numbers of `state.State` by name.
    """

    event: int
    settings: dict[str, Any]
    rates: tuple[dict[str, Any], ...]
    state: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """Routing of consecutive layer-steps. Event ``i`` owns ``ids[start[i] : start[i + 1]]``.

    Attributes
    ----------
    meta : TraceMeta
    kind : uint8 (events,)
        STEP, WAVE, HINT, SETTLED, REQUEST, BACKGROUND.
    layer : uint16 (events,)
    rows, top_k : int32 (events,)
        Of a step; other events with ids have one row.
    digest : uint32 (events,)
        Hash of the plan that the live run made (`recorder.plan_digest`); 0 where none is known.
    ids : uint8 or uint16 (entries,)
        Expert ids, rows one after another; ``meta.no_expert`` is a skipped rank.
    weights : float16, uint8 or None (entries,)
        Router weights beside the ids; uint8 are 255ths.
    baselines : tuple of Baseline
        In order of their events; none in an imported trace.
    """

    meta: TraceMeta
    kind: NDArray[np.uint8]
    layer: NDArray[np.uint16]
    rows: NDArray[np.int32]
    top_k: NDArray[np.int32]
    digest: NDArray[np.uint32]
    ids: NDArray[Any]
    weights: NDArray[Any] | None = None
    baselines: tuple[Baseline, ...] = field(default=(), repr=False)

    @property
    def num_events(self) -> int:
        return len(self.kind)

    @property
    def start(self) -> NDArray[np.int64]:
        """First entry of each event, and the number of entries."""
        counts = self.rows.astype(np.int64) * self.top_k
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def passes(self) -> NDArray[np.int64]:
        """For each step the number of its pass over the layers, from 0 up: a token at batch 1."""
        layers = self.layer[self.kind == STEP].astype(np.int64)
        return np.concatenate([np.zeros(min(1, len(layers)), np.int64), np.cumsum(layers[1:] <= layers[:-1])])

    def tokens(self) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """Ids and router weights as (tokens, layers, top_k), where the trace has that form.

        Raises
        ------
        TraceError
            Batches of several rows, layers left out, or ranks that differ.
        """
        step = self.kind == STEP
        layers, top_k = self.layer[step], self.top_k[step]
        num, left_over = divmod(len(layers), self.meta.num_layers)
        one_row = (self.rows[step] == 1).all() and (self.top_k[step] == (top_k[0] if len(top_k) else 0)).all()
        if not len(layers) or left_over or not one_row or (layers != np.tile(range(self.meta.num_layers), num)).any():
            raise TraceError(
                "trace: it is not one row for every layer of every token, with equal numbers of experts; "
                "this use needs that form"
            )
        mine = np.repeat(step, np.diff(self.start))
        shape = (num, self.meta.num_layers, int(top_k[0]))
        return self.ids[mine].reshape(shape), _as_float32(self.weights, mine, shape)

    def slice(self, events: slice) -> Trace:
        """The events of a range, with what belongs to them (its start has no baseline unless it is the first)."""
        first, stop, _ = events.indices(self.num_events)
        a, b = self.start[first], self.start[max(first, stop)]
        kept = tuple(base for base in self.baselines if first <= base.event < max(stop, first + 1))
        moved = tuple(Baseline(base.event - first, base.settings, base.rates, base.state) for base in kept)
        return Trace(
            self.meta,
            kind=self.kind[first:stop],
            layer=self.layer[first:stop],
            rows=self.rows[first:stop],
            top_k=self.top_k[first:stop],
            digest=self.digest[first:stop],
            ids=self.ids[a:b],
            weights=None if self.weights is None else self.weights[a:b],
            baselines=moved,
        )

    def first_passes(self, num: int) -> Trace:
        """The first ``num`` passes over the layers."""
        steps = np.flatnonzero(self.kind == STEP)
        beyond = np.flatnonzero(self.passes >= num)
        return self if not len(beyond) else self.slice(slice(0, int(steps[beyond[0]])))


def _as_float32(weights: NDArray[Any] | None, mine: NDArray[np.bool_], shape: Sequence[int]) -> Any:
    if weights is None:
        return None
    scale = np.float32(255) if weights.dtype == np.uint8 else np.float32(1)
    return weights[mine].reshape(shape).astype(np.float32) / scale


def trace_of_tokens(
    meta: TraceMeta, ids: NDArray[Any], weights: NDArray[Any] | None = None, starts: Sequence[int] = ()
) -> Trace:
    """A trace from ids (tokens, layers, top_k), with a request beginning at each token of ``starts``."""
    tokens, layers, top_k = ids.shape
    if layers != meta.num_layers or not top_k:
        raise TraceError(f"trace: ids of {layers} layers and {top_k} ranks, but the model has {meta.num_layers} layers")
    if ids.dtype.kind not in "iu" or (weights is not None and weights.shape != ids.shape):
        raise TraceError(f"trace: ids of type {ids.dtype} and weights that must have their shape {ids.shape}")
    if ids.size and (ids.min() < 0 or (ids >= np.array(meta.num_experts)[:, None]).any()):
        raise TraceError(f"trace: ids from {ids.min()} to {ids.max()}, but layers have {max(meta.num_experts)} experts")
    begin = np.unique(np.array(starts, np.int64)) * layers
    if len(begin) and not 0 <= begin[0] <= begin[-1] <= tokens * layers:
        raise TraceError(f"trace: a request starts outside of its {tokens} tokens")
    kind = np.insert(np.full(tokens * layers, STEP, np.uint8), begin, REQUEST)
    return Trace(
        meta,
        kind=kind,
        layer=np.insert(np.tile(np.arange(layers, dtype=np.uint16), tokens), begin, 0),
        rows=(kind == STEP).astype(np.int32),
        top_k=np.where(kind == STEP, top_k, 0).astype(np.int32),
        digest=np.zeros(len(kind), np.uint32),
        ids=ids.reshape(-1).astype(meta.id_type),
        weights=None if weights is None else weights.reshape(-1),
    )


def as_batches(trace: Trace, num_rows: int) -> Trace:
    """The trace's tokens as ``num_rows`` streams side by side: stream ``b`` is the ``b``-th part of the tokens.

    Raises
    ------
    TraceError
        The trace is no sequence of single tokens, or has fewer of them.
    """
    ids, _ = trace.tokens()
    steps = len(ids) // num_rows
    if steps == 0:
        raise TraceError(f"trace: {len(ids)} tokens cannot be {num_rows} streams; use a smaller batch")
    streams = ids[: steps * num_rows].reshape(num_rows, steps, *ids.shape[1:]).transpose(1, 2, 0, 3)
    num = steps * trace.meta.num_layers
    return Trace(
        trace.meta,
        kind=np.full(num, STEP, np.uint8),
        layer=np.tile(np.arange(trace.meta.num_layers, dtype=np.uint16), steps),
        rows=np.full(num, num_rows, np.int32),
        top_k=np.full(num, ids.shape[2], np.int32),
        digest=np.zeros(num, np.uint32),
        ids=np.ascontiguousarray(streams).reshape(-1),
    )


def check_events(trace: Trace) -> None:
    """Refuse a trace whose events cannot be replayed: counts, layers and ids are all within their limits.

    Raises
    ------
    TraceError
    """
    kind, layer, rows, top_k = trace.kind, trace.layer, trace.rows, trace.top_k
    if len({len(column) for column in (kind, layer, rows, top_k, trace.digest)}) != 1:
        raise TraceError("trace: its columns differ in length")
    if not np.isin(kind, KINDS).all() or (layer >= trace.meta.num_layers).any():
        raise TraceError("trace: an event of an unknown kind, or of a layer that the model does not have")
    if (rows < 0).any() or (top_k < 0).any() or (rows[~np.isin(kind, HAS_IDS)] != 0).any():
        raise TraceError("trace: an event has an impossible number of rows")
    if (rows[np.isin(kind, (HINT, SETTLED, BACKGROUND, GAP, TOUCHED))] > 1).any():
        raise TraceError("trace: an event that is no step has several rows")
    if (top_k[kind == HINT] > np.array(trace.meta.num_experts)[layer[kind == HINT]]).any():
        raise TraceError("trace: a hint names more experts than its layer has")
    for one, count in ((BACKGROUND, 1), (GAP, NUMBER_NBYTES), (TOUCHED, 1 + NUMBER_NBYTES)):
        if (rows * top_k != count)[kind == one].any():
            raise TraceError(f"trace: an event of kind {one} does not have {count} entries")
    for name, entries in (("ids", trace.ids), ("weights", trace.weights)):
        if entries is not None and len(entries) != trace.start[-1]:
            raise TraceError(f"trace: {len(entries)} {name}, but its events have {trace.start[-1]}")
    _check_ids(trace)


def _check_ids(trace: Trace) -> None:
    counts = np.diff(trace.start)
    experts = np.array(trace.meta.num_experts, np.int64)
    limit = np.where(trace.kind == SETTLED, UNDER_WAY + 1, experts[trace.layer])
    limit[trace.kind == BACKGROUND] = MAX_EXPERTS
    limit[trace.kind == GAP] = 256
    limit[trace.kind == TOUCHED] = np.maximum(limit[trace.kind == TOUCHED], 256)
    limit = np.repeat(limit, counts)
    skips = np.repeat(trace.kind == STEP, counts) & (trace.ids == trace.meta.no_expert)
    if ((trace.ids >= limit) & ~skips).any():
        raise TraceError("trace: an expert id that its layer does not have")
