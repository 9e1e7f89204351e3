"""Counters of schedulers for Prometheus: a collector that reads ``stats()`` when it is asked, and never in between.

Times are in seconds and sizes in bytes, as Prometheus wants them. Rates and ratios are left to its queries: the hit
rate is the ``hit`` lane's shards over the shards of all lanes. Importing this imports prometheus-client (the extra
``metrics``); it knows neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "trilane.integrations.metrics needs prometheus-client, which is not installed; pip install 'trilane[metrics]'",
        name=error.name,
    ) from error

from trilane.errors import TrilaneError
from trilane.stats import LaneStats, Stats

US = 1e-6  # seconds
COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("steps", "Layer-steps: one layer of one forward pass.", lambda s: s.steps),
    ("rows", "Activation rows of all layer-steps.", lambda s: s.rows),
    ("fills", "Shards brought into slots.", lambda s: s.fills),
    ("background_fills", "Shards brought into slots beside steps.", lambda s: s.background_fills),
    ("evictions", "Shards that gave their slots away.", lambda s: s.evictions),
    ("step_seconds", "Time of whole layer-steps.", lambda s: s.step_us * US),
    ("predicted_step_seconds", "The same, as it was predicted.", lambda s: s.predicted_step_us * US),
    ("plan_seconds", "Time of planning.", lambda s: s.plan_us * US),
)
PART_SECONDS: Mapping[str, Callable[[Stats], float]] = {
    "hits": lambda s: s.hits_us * US,
    "fetch": lambda s: s.fetch_us * US,
    "cpu": lambda s: s.cpu_us * US,
}
LANE_COUNTERS: tuple[tuple[str, str, Callable[[LaneStats], float]], ...] = (
    ("lane_experts", "Experts with at least one shard in the lane.", lambda lane: lane.experts),
    ("lane_shards", "Shards that the lane computed.", lambda lane: lane.shards),
    ("lane_read_bytes", "Bytes of weights that the lane read.", lambda lane: lane.nbytes),
    ("lane_predicted_seconds", "Time of the lane, as it was predicted.", lambda lane: lane.predicted_us * US),
)


class HasStats(Protocol):
    """A scheduler, or the handle of a model that has one."""

    def stats(self) -> Stats: ...


class SchedulerCollector(Collector):
    """What schedulers did since their start, as metrics named ``trilane_...`` with the label ``model``.

    Parameters
    ----------
    sources : mapping
        A name, the value of ``model`` -> an :class:`~trilane.ExpertScheduler` or the handle of an offloaded model.
        Several schedulers go into one collector: Prometheus wants each metric once.

    Raises
    ------
    TrilaneError
        There is no source, or one has no ``stats()``.

    Examples
    --------
    >>> from prometheus_client import REGISTRY, start_http_server
    >>> collector = SchedulerCollector({"my-model": scheduler})  # doctest: +SKIP
    >>> REGISTRY.register(collector)  # doctest: +SKIP
    >>> server, thread = start_http_server(9464, addr="127.0.0.1")  # doctest: +SKIP

    Unregister it before a scheduler is closed.
    """

    def __init__(self, sources: Mapping[str, HasStats]) -> None:
        if not sources:
            raise TrilaneError("sources: none are given, but metrics are read from one or more; pass {name: scheduler}")
        for name, source in sources.items():
            if not callable(getattr(source, "stats", None)):
                raise TrilaneError(
                    f"sources[{name!r}]: {type(source).__name__} has no stats(), which metrics are read from; pass a "
                    "scheduler or the handle of an offloaded model"
                )
        self._sources = dict(sources)

    def describe(self) -> Iterable[Metric]:
        """The metrics without values, so that registering asks no scheduler."""
        return families({})

    def collect(self) -> Iterable[Metric]:
        """Called by a registry, on the thread of whoever scrapes it."""
        return families({name: source.stats() for name, source in self._sources.items()})


def families(found: Mapping[str, Stats]) -> list[Metric]:
    """Snapshots by model as metric families; each family once, with all models."""
    metrics: list[Metric] = [_counter(name, text, found, value) for name, text, value in COUNTERS]
    parts = CounterMetricFamily(
        "trilane_part_seconds",
        "Time of parts of layer-steps, which overlap: hits on the device, fetch over the link, cpu.",
        labels=["model", "part"],
    )
    pinned = GaugeMetricFamily("trilane_store_bytes", "Bytes of experts in host memory.", labels=["model", "memory"])
    warm = GaugeMetricFamily("trilane_warm_shards", "Shards in slots before the first step.", labels=["model"])
    unused = GaugeMetricFamily(
        "trilane_inactive",
        "1 for a lane or feature that is not used, with the reason.",
        labels=["model", "name", "reason"],
    )
    played = GaugeMetricFamily(
        "trilane_played_bytes_per_second", "Rate that a lane plays instead of its own.", labels=["model", "lane"]
    )
    for model, stats in found.items():
        for part, seconds in PART_SECONDS.items():
            parts.add_metric([model, part], seconds(stats))
        pinned.add_metric([model, "pinned"], stats.bytes_pinned)
        pinned.add_metric([model, "pageable"], stats.bytes_pageable)
        warm.add_metric([model], stats.warm_shards)
        for name, reason in stats.inactive.items():
            unused.add_metric([model, name, reason], 1)
        for lane, gb_s in stats.played.items():
            played.add_metric([model, lane], gb_s * 1e9)
    lanes = [_lane_counter(name, text, found, value) for name, text, value in LANE_COUNTERS]
    return [*metrics, *lanes, parts, pinned, warm, unused, played]


def _counter(name: str, text: str, found: Mapping[str, Stats], value: Callable[[Stats], float]) -> Metric:
    family = CounterMetricFamily(f"trilane_{name}", text, labels=["model"])
    for model, stats in found.items():
        family.add_metric([model], value(stats))
    return family


def _lane_counter(name: str, text: str, found: Mapping[str, Stats], value: Callable[[LaneStats], float]) -> Metric:
    family = CounterMetricFamily(f"trilane_{name}", text, labels=["model", "lane"])
    for model, stats in found.items():
        for lane, counts in stats.lanes.items():
            family.add_metric([model, lane], value(counts))
    return family
