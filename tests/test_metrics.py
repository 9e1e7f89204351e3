"""Metrics for Prometheus: names, units and sums are those of ``stats()``, in the form that a scrape wants."""

from __future__ import annotations

import urllib.request

import numpy as np
import pytest
from expert_cases import random_store
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from trilane.errors import TrilaneError
from trilane.integrations.metrics import SchedulerCollector


def scraped(text: str) -> dict:
    """(name, label values in order of their names) -> value."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(s.labels[key] for key in sorted(s.labels))): s.value for s in samples}


@pytest.fixture
def busy(scheduler_of):
    """A scheduler that has done steps on the CPU lane and into slots, on a link whose rate is played."""
    scheduler = scheduler_of(
        random_store(layers=2),
        cache={"slots": 8},
        policy={"admit": "always", "lanes": ("stream", "cpu")},
        host_device={"link_gb_s": 4.0},
    )
    rng = np.random.default_rng(0)
    for step in range(12):
        x = rng.standard_normal((2, 256), dtype=np.float32)
        scheduler.forward(step % 2, x, rng.integers(0, 6, (2, 2)), np.ones((2, 2), np.float32))
    return scheduler


def test_each_metric_is_what_stats_say(busy):
    registry = CollectorRegistry()
    registry.register(SchedulerCollector({"m": busy}))
    found, stats = scraped(generate_latest(registry).decode()), busy.stats()
    assert found["trilane_steps_total", "m"] == stats.steps == 12
    assert found["trilane_rows_total", "m"] == stats.rows == 24
    assert found["trilane_evictions_total", "m"] == stats.evictions
    assert found["trilane_step_seconds_total", "m"] == pytest.approx(stats.step_us * 1e-6) != 0
    for lane, counts in stats.lanes.items():
        assert found["trilane_lane_shards_total", lane, "m"] == counts.shards
        assert found["trilane_lane_read_bytes_total", lane, "m"] == counts.nbytes
        assert found["trilane_lane_predicted_seconds_total", lane, "m"] == pytest.approx(counts.predicted_us * 1e-6)
    parts = [found["trilane_part_seconds_total", "m", part] for part in ("hits", "fetch", "cpu")]
    assert parts == pytest.approx([stats.hits_us * 1e-6, stats.fetch_us * 1e-6, stats.cpu_us * 1e-6])
    shards = {lane: found["trilane_lane_shards_total", lane, "m"] for lane in stats.lanes}
    assert shards["hit"] / sum(shards.values()) == pytest.approx(stats.hit_rate) != 0
    memory = [found["trilane_store_bytes", kind, "m"] for kind in ("pinned", "pageable")]
    assert memory == [stats.bytes_pinned, stats.bytes_pageable] and sum(memory) == busy.store.nbytes
    played = {key[1]: value for key, value in found.items() if key[0] == "trilane_played_bytes_per_second"}
    assert played == {lane: gb_s * 1e9 for lane, gb_s in stats.played.items()} != {}
    unused = {key[2] for key in found if key[0] == "trilane_inactive"}
    assert unused == set(stats.inactive) == {"zero_copy"}


def test_counters_go_on_and_never_back(busy):
    registry = CollectorRegistry()
    registry.register(SchedulerCollector({"m": busy}))
    before = scraped(generate_latest(registry).decode())
    busy.forward(0, np.ones((1, 256), np.float32), [[0, 1]], [[0.5, 0.5]])
    after = scraped(generate_latest(registry).decode())
    assert after["trilane_steps_total", "m"] == before["trilane_steps_total", "m"] + 1
    counters = {key: value for key, value in before.items() if key[0].endswith("_total")}
    assert len(counters) == 8 + 4 * 4 + 3 and all(after[key] >= value for key, value in counters.items())


def test_several_schedulers_share_one_collector_and_each_metric_comes_once(busy, scheduler_of):
    other = scheduler_of(random_store())
    registry = CollectorRegistry()
    registry.register(SchedulerCollector({"busy": busy, "idle": other}))
    text = generate_latest(registry).decode()
    found = scraped(text)
    assert found["trilane_steps_total", "busy"] == 12 and found["trilane_steps_total", "idle"] == 0
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))


def test_registering_asks_no_scheduler_and_metrics_come_once():
    class Untouched:
        def stats(self):
            raise AssertionError("asked before a scrape")

    registry = CollectorRegistry()
    registry.register(SchedulerCollector({"m": Untouched()}))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(SchedulerCollector({"other": Untouched()}))


def test_a_scrape_by_http_from_a_thread_of_its_own(busy):
    registry = CollectorRegistry()
    registry.register(SchedulerCollector({"m": busy}))
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            assert scraped(answer.read().decode())["trilane_steps_total", "m"] == 12
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("sources", [{}, {"m": object()}, {"m": type("Odd", (), {"stats": 3})()}])
def test_what_has_no_stats_is_refused(sources):
    with pytest.raises(TrilaneError, match="sources"):
        SchedulerCollector(sources)
