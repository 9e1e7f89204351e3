"""Tokens of one row as launches of a CUDA graph of many layers, timed by the GPU's events: for measurements.

Inputs and outputs are in device memory. A few graphs take turns, each with ids and outputs of its own, so that the
host can launch tokens ahead and the GPU never waits for it. A token's ids are copied while nothing of its graph is
running, and are waited for: no copy stands in a queue behind a graph that waits for copies itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trilane.gpu_kernels.driver import Encoded, put_graph
from trilane.gpu_kernels.events import Events, events_of
from trilane.gpu_pause import make_pause
from trilane.host_runner import StepInput

AHEAD = 4  # graphs, and so tokens that are launched at most before the first of them is over


class TokenTimes(NamedTuple):
    """us of each token by the GPU's events, and s of all of them by the host's clock."""

    us: NDArray[np.float64]
    wall_s: float


class TokenGraphs:
    """Layers of a scheduler for one token of one row.

    Parameters
    ----------
    scheduler : ExpertScheduler
        On a GPU.
    top_k : int
    x : float32 (hidden,)
        The input of every layer; router weights are ``1 / top_k``.
    layers : sequence of int, optional
        Layers of a graph, in order, also more than once; None: all once.
    ahead : int
        Graphs that take turns; 1: each token is waited for.
    gap_us : float
        About how long the GPU pauses before each layer, as if it ran the rest of a model.
    """

    def __init__(
        self,
        scheduler: Any,
        top_k: int,
        x: ArrayLike,
        layers: Sequence[int] | None = None,
        ahead: int = AHEAD,
        gap_us: float = 0.0,
    ) -> None:
        self.runner, self.top_k, self.ahead = scheduler._runner, top_k, ahead
        self.layers = list(range(scheduler.store.num_layers)) if layers is None else list(layers)
        self.driver, self.stream = self.runner.driver, self.runner.device.work_stream
        self.side = self.driver.make_stream()
        self.hidden, self._num_ids = scheduler.store.hidden, len(self.layers) * top_k
        self._out_nbytes = 4 * self.hidden * len(self.layers)
        sizes = 4 * self.hidden, 4 * top_k, 4 * self._num_ids * ahead, self._out_nbytes * ahead
        self._blocks = [self.driver.allocate(nbytes) for nbytes in sizes]
        self.driver.synchronize()  # they are zeroed on another stream
        self._put(self._blocks[0], np.asarray(x, np.float32))
        self._put(self._blocks[1], np.full(top_k, 1 / top_k, np.float32))
        self._pause = make_pause(self.driver, self.stream, gap_us) if gap_us else None
        self._encoded = [self._encode(turn) for turn in range(ahead)]
        self._graphs = [self.driver.make_graph(encoded) for encoded in self._encoded]

    def _encode(self, turn: int) -> Encoded:
        x, weights, ids, out = self._blocks
        row, parts = 4 * self.hidden, []
        for place, layer in enumerate(self.layers):
            y = out + self._out_nbytes * turn + row * place
            step = StepInput(layer, 1, self.top_k, x, row, "f32", y, row, "f32")
            where = ids + 4 * (self._num_ids * turn + self.top_k * place)
            parts += [self._pause] if self._pause else []
            parts.append(self.runner.launches.encode(step, where, 4, weights))
        return Encoded.joined(parts)

    def _put(self, address: int, array: NDArray[Any]) -> None:
        """Copy to the device and wait for this copy."""
        kept = np.ascontiguousarray(array)
        self.driver.to_device(address, kept.ctypes.data, kept.nbytes, self.side)
        while not self.driver.finished(self.side):
            pass

    def run(self, trace: ArrayLike, seen: Callable[[int, NDArray[np.float32]], None] | None = None) -> TokenTimes:
        """All tokens of a trace.

        Parameters
        ----------
        trace : integers (tokens, layers, top_k)
        seen : function, optional
            Gets the number of each token and its outputs, float32 (layers, hidden), when it is over.

        Raises
        ------
        WorkerError, RoutingError
            What the runner has found.
        """
        events, begin = events_of(self.driver), time.perf_counter()
        pairs: list[tuple[Any, Any]] = []
        try:
            for token, ids in enumerate(np.ascontiguousarray(trace, np.int32)):
                if token >= self.ahead:
                    self._finish(events, pairs, token - self.ahead, seen)
                pairs.append(self._start(events, token, ids))
            for token in range(max(0, len(pairs) - self.ahead), len(pairs)):
                self._finish(events, pairs, token, seen)
            wall_s = time.perf_counter() - begin
            return TokenTimes(np.array([events.us(*pair) for pair in pairs]), wall_s)
        finally:
            events.close()

    def _start(self, events: Events, token: int, ids: NDArray[np.int32]) -> tuple[Any, Any]:
        """Launch a token; the events before and behind it."""
        turn = token % self.ahead
        self._put(self._blocks[2] + 4 * self._num_ids * turn, ids)
        first = events.record(self.stream)
        put_graph(self.driver, self._graphs[turn], self.stream, f"a graph of {len(self.layers)} layers")
        return first, events.record(self.stream)

    def _finish(
        self, events: Events, pairs: list[tuple[Any, Any]], token: int, seen: Callable[..., None] | None
    ) -> None:
        events.wait(pairs[token][1])
        self.runner.check()
        if seen is not None:
            seen(token, self.outputs(token))

    def outputs(self, token: int) -> NDArray[np.float32]:
        """float32 (layers, hidden): what a token of the last run gave, if no later one used the same graph."""
        out = np.zeros((len(self.layers), self.hidden), np.float32)
        address = self._blocks[3] + self._out_nbytes * (token % self.ahead)
        self.driver.to_host(out.ctypes.data, address, out.nbytes, self.side)
        while not self.driver.finished(self.side):
            pass
        return out

    def close(self) -> None:
        """Give memory and graphs back; nothing may be running."""
        for graph in self._graphs:
            self.driver.destroy_graph(graph)
        for block in self._blocks:
            self.driver.free(block)
        self.driver.destroy_stream(self.side)
