"""A GPU that rests for a while, as if it ran the rest of a model between two layers: for measurements."""

from __future__ import annotations

import numpy as np

from trilane.gpu_kernels.build import PAUSE
from trilane.gpu_kernels.driver import Driver, Encoded, put_graph
from trilane.gpu_kernels.events import events_of
from trilane.gpu_kernels.launch import Launch

PAUSE_CYCLES = 1_000_000  # by which the clock of the multiprocessors is known
RUNS = 3


def make_pause(driver: Driver, stream: int, us: float) -> Encoded:
    """A launch that takes about so many us and does nothing; it is timed on the stream."""
    kernels = driver.load_kernels(PAUSE)

    def pause_of(cycles: float) -> Encoded:
        launch = Launch("pause_cycles", (1, 1), 1, 0, (np.int64(cycles),))
        return driver.encode(kernels, [launch], early=False)

    return pause_of(us * PAUSE_CYCLES / _time_us(driver, stream, pause_of(PAUSE_CYCLES)))


def _time_us(driver: Driver, stream: int, encoded: Encoded) -> float:
    """us of some launches in a graph."""
    graph, events = driver.make_graph(encoded), events_of(driver)
    times = []
    for _ in range(RUNS):
        first = events.record(stream)
        put_graph(driver, graph, stream, "a pause")
        last = events.record(stream)
        events.wait(last)
        times.append(events.us(first, last))
    events.close()
    driver.destroy_graph(graph)
    return float(np.median(times))
