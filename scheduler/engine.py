"""ExpertScheduler: what an engine embeds. Checks arguments at the boundary, runs steps, tells what happened.

The one file that knows decisions and devices. A step itself is in host_runner.py; errors of the layers below
are turned into the public ones here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trilane.arguments import apart_from, bad_id, check_hidden, check_ids, check_out, check_routing, check_topk_ids
from trilane.arrays import HostView, like_input
from trilane.calibrate import this_machine
from trilane.config import Config
from trilane.cpu_kernels.team import TeamClosed, TeamError, TeamForked
from trilane.devices import check_device
from trilane.errors import (
    ArrayError,
    ArrayTypeError,
    ClosedError,
    DeviceError,
    ForkError,
    RoutingError,
    StoreError,
    TrilaneError,
    WorkerError,
)
from trilane.expert import Outcome, Plan
from trilane.forecast import Forecast
from trilane.host_runner import HostRunner, StepInput
from trilane.journal import StoryEntry
from trilane.layer_rates import rates_of_layers
from trilane.profile import MachineProfile
from trilane.recorder import Recorder, record_path
from trilane.settings.effective_config import EffectiveConfig, resolve_config
from trilane.start_profile import start_profile
from trilane.stats import Stats, make_stats
from trilane.store import ExpertStore
from trilane.warm_file import warm_file

log = logging.getLogger("trilane")


@dataclass(frozen=True)
class Explanation:
    """The last decision of a layer: the plan with its predicted times, and the observed ones."""

    plan: Plan
    outcome: Outcome

    def __str__(self) -> str:
        observed = ", ".join(f"{name} {us:.1f}" for name, us in self.outcome.observed_us if us is not None)
        return f"{self.plan}\nobserved us: {observed or 'not yet'}"


class Ticket:
    """A submitted layer-step; give it to :meth:`ExpertScheduler.wait`."""

    def __init__(self, layer: int, result: Any, held: tuple[Any, ...]) -> None:
        self.layer = layer
        self.done = False
        self._result, self._held = result, held


class Request:
    """Work done between the start and the end of a ``with scheduler.request()`` block."""

    def __init__(self, scheduler: ExpertScheduler) -> None:
        self._scheduler = scheduler
        self._start = scheduler._runner.totals.copy()
        self._end: np.ndarray | None = None

    @property
    def stats(self) -> Stats:
        """What was done so far, or in all once the block has ended."""
        end = self._scheduler._runner.totals if self._end is None else self._end
        return self._scheduler._make_stats(end - self._start)

    def _finish(self) -> None:
        self._end = self._scheduler._runner.totals.copy()


class ExpertScheduler:
    """Serves routed experts over three lanes, with the same bits whichever lane served them.

    Parameters
    ----------
    store : ExpertStore
        The experts in host RAM; may be shared by several schedulers.
    profile : MachineProfile or path, optional
        The machine's measured rates. None: the saved profile of this machine; where there is none, the machine is
        measured once, in about five seconds, and the profile is saved (``profile.missing`` can refuse that). A GPU
        has a profile of its own; where none is saved that knows the store's formats, its lanes are measured with the
        store at each start, in about a second.
    config : Config, EffectiveConfig, mapping or path, optional
        Options; see :class:`~trilane.Config`. A path names a YAML file. Variables such as
        ``TRILANE_CACHE_SLOTS`` apply over a file, and where nothing is given; options that are passed as
        objects or mappings are taken as they are. One exception: ``TRILANE_RECORD_PATH`` holds for all that do not
        set ``record.path``, so that any program can be recorded from outside.
    device : str
        ``"host"``: slots, link and device are played by the machine's own memory and cores. ``"cuda"``: an NVIDIA
        GPU. ``"auto"``: the GPU if one can be used, else the host.

    Raises
    ------
    ConfigError, DeviceError, ProfileError

    Notes
    -----
    One step is in flight at a time, and one thread uses a scheduler at a time. Rows with a NaN or infinite
    element give NaN rows. Ids of -1 and ``num_experts`` are skipped; a row of which all are skipped gives
    zeros. A token that names an expert twice gets it twice.

    Examples
    --------
    >>> import numpy as np
    >>> from trilane import Config, ExpertScheduler, ExpertStore
    >>> rng = np.random.default_rng(0)
    >>> layer = {name: rng.standard_normal((8, 256, 256), np.float32) for name in ("gate", "up", "down")}
    >>> store = ExpertStore.from_arrays([layer], formats="q8_0")
    >>> with ExpertScheduler(store, config=Config(cache={"slots": 4})) as scheduler:  # doctest: +SKIP
    ...     y = scheduler.forward(0, np.ones((1, 256), np.float32), [[1, 5]], [[0.5, 0.5]])
    """

    def __init__(
        self,
        store: ExpertStore,
        *,
        profile: MachineProfile | str | os.PathLike[str] | None = None,
        config: Config | EffectiveConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        device: str = "host",
    ) -> None:
        check_device(device)
        if not isinstance(store, ExpertStore):
            raise StoreError(
                f"store: {str(store)[:80]!r} is a {type(store).__name__}, but an ExpertStore is needed; load a model "
                "first with ExpertStore.from_gguf(path), from_safetensors(folder) or from_arrays(layers)"
            )
        self.store = store
        self.config = resolve_config(config)
        self._pid = os.getpid()
        self._ticket: Ticket | None = None
        self._failure: TrilaneError | None = None
        self._steps: Any = None  # reads a caller's arrays for a GPU
        self._forecast: Forecast | None = None
        with _public_errors():
            self._runner: Any = self._open_gpu(device) if device != "host" else None
            if self._runner is None:
                self.profile = start_profile(profile, self.config)
                self._runner = HostRunner(store, self.config, knee=self.profile.knee())
        self._finalizer = weakref.finalize(self, self._runner.close)
        with self._closing_on_error():
            if self._steps is not None:
                self.profile = self._steps.start_profile(profile, self.config)
            self._runner.rates = rates_of_layers(self.profile, self._runner)
            if self.config.warm_start.enabled:
                self._warm_up()
            if (path := record_path(self.config)) is not None:
                self._runner.record(path)

    def _open_gpu(self, device: str) -> Any:
        """A runner on the GPU; None where the device is "auto" and no GPU can be used."""
        from trilane.cuda_runner import CudaRunner
        from trilane.cuda_steps import CudaSteps

        try:
            runner = CudaRunner(self.store, self.config)
        except DeviceError as error:
            if device == "cuda":
                raise
            log.info("device 'auto' is the host: %s", error)
            return None
        self._steps = CudaSteps(runner)
        return runner

    def _warm_up(self) -> None:
        """Take over what the run before left; a recording begins with it in its baseline."""
        machine = this_machine() if self._steps is None else self._steps.machine()
        self._runner.warm_up(warm_file(self.config, self.store, machine))

    # ------------------------------------------------------------------------------------------- running
    def forward(
        self,
        layer: int,
        hidden: Any,
        topk_ids: Any,
        topk_weights: Any,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Run the routed experts of one layer: :meth:`submit`, then :meth:`wait`.

        Parameters
        ----------
        layer : int
            Index of the MoE layer in the store.
        hidden : array (rows, hidden)
            float32, float16 or bfloat16 (NumPy: as uint16). NumPy, DLPack or ``__array_interface__``.
        topk_ids : integer array (rows, top_k)
            Expert ids; -1 and ``num_experts`` mean "none".
        topk_weights : float array (rows, top_k)
            Router weights, used as float32.
        out : array (rows, hidden), optional
            Where the result goes; any of the float types. It may be ``hidden`` itself.
        stream : int or stream object, optional
            On a GPU: where the step runs; a handle, a torch or CuPy stream, or an object with ``__cuda_stream__``.
            None: the current stream of the library that ``hidden`` comes from. The host device takes none.

        Returns
        -------
        ``out``, or a new array of the kind and type of ``hidden``.

        Raises
        ------
        ArrayError, RoutingError, WorkerError, ClosedError, ForkError
        """
        return self.wait(self.submit(layer, hidden, topk_ids, topk_weights, out=out, stream=stream))

    def submit(
        self,
        layer: int,
        hidden: Any,
        topk_ids: Any,
        topk_weights: Any,
        out: Any = None,
        stream: Any = None,
    ) -> Ticket:
        """Start a layer-step and return at once; the arguments are those of :meth:`forward`.

        ``hidden`` and ``out`` must stay as they are until :meth:`wait`. A batch larger than a step takes is
        run in parts, of which only the last is still in flight on return.
        """
        self._check_usable()
        if self._steps is not None:
            with self._failing():
                on_gpu = self._steps.submit(self._check_layer(layer), hidden, topk_ids, topk_weights, out, stream)
            return Ticket(layer, on_gpu.result, (on_gpu,))
        if stream is not None:
            raise ArrayError(f"stream: {stream!r}, but the host device has no streams; leave it out")
        if self._ticket is not None:
            raise TrilaneError(
                f"submit: a step of layer {self._ticket.layer} is in flight and there can be one only; "
                "wait for its ticket first"
            )
        layer = self._check_layer(layer)
        x = check_hidden(hidden, self.store.hidden)
        ids, weights = check_routing(topk_ids, topk_weights, len(x.array))
        result = like_input(hidden, x.array.shape) if out is None else out
        y = check_out(result, x)
        ticket = Ticket(layer, result, (x, y))
        with self._failing():
            self._start(layer, x, ids, weights, y)
        if len(x.array) and ids.shape[1]:
            self._ticket = ticket
        else:
            y.array[...] = 0
            ticket.done = True
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        """Wait for a submitted step and return its output."""
        if ticket.done:
            return ticket._result
        self._check_usable()
        if self._steps is not None:
            with self._failing():
                self._steps.finish(ticket._held[0])
            ticket.done = True
            return ticket._result
        if ticket is not self._ticket:
            raise TrilaneError("wait: that ticket is not in flight; wait once for what submit() returned")
        self._ticket = None
        with self._failing():
            self._runner.finish()
        ticket.done = True
        return ticket._result

    def _start(self, layer: int, x: HostView, ids: np.ndarray, weights: np.ndarray, y: HostView) -> None:
        """Run all parts of a batch but the last to their end, and start that one."""
        rows, top_k = ids.shape
        if rows == 0 or top_k == 0:
            return
        most = self._runner.max_rows(top_k)
        if rows > most:  # nothing may run before all of the batch is known to be sound
            check_ids(layer, ids, self.store.layers[layer].num_experts)
            x = apart_from(x, y)
        for start in range(0, rows, most):
            if start:
                self._runner.finish()
            part = slice(start, min(rows, start + most))
            self._runner.take_routing(ids[part], weights[part])
            step = StepInput(
                layer, part.stop - start, top_k,
                x.address + start * x.array.strides[0], x.array.strides[0], x.element,
                y.address + start * y.array.strides[0], y.array.strides[0], y.element,
            )  # fmt: skip
            if not self._runner.begin(step):
                check_ids(layer, ids, self.store.layers[layer].num_experts)

    def hint(self, layer: int, expert_ids: Iterable[int]) -> int:
        """Say which experts of a layer are likely soon, most likely first.

        Idle link time copies those that are worth more than what they displace; a submitted step ends that.

        Returns
        -------
        int
            Background fills started.
        """
        self._check_usable()
        layer = self._check_layer(layer)
        found = np.asarray(list(expert_ids)).reshape(-1)
        if found.size and found.dtype.kind not in "iu":
            raise ArrayTypeError(f"expert_ids: dtype {found.dtype}, but integers are needed; convert them")
        ids = found.tolist()
        num = self.store.layers[layer].num_experts
        for expert in ids:
            if not -1 <= expert <= num:
                raise RoutingError(bad_id(layer, expert, num, "hint"))
        wanted = list(dict.fromkeys(e for e in ids if 0 <= e < num))
        if self._ticket is not None or not wanted:
            return 0
        with self._failing():
            return self._runner.start_fills(layer, wanted)

    # ------------------------------------------------------------------------------------------- looking
    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, so that arrays there are taken as they are."""
        return self._steps is not None

    def predict_us(self, layer: int, topk_ids: Any) -> float:
        """What a step with these ids would take if it came now, by the cost model. Nothing changes.

        So an engine can see what more rows cost: ``predict_us(layer, ids[:n])`` for n = 1, 2, 3 draft tokens of
        speculative decoding, say, or with and without a request that could wait. A row whose experts others need too,
        or that lie in slots, costs little; one whose experts must be fetched costs most of a step.

        Parameters
        ----------
        layer : int
            Index of the MoE layer in the store.
        topk_ids : integer array (rows, top_k)
            Expert ids as for :meth:`forward`, in host memory.

        Returns
        -------
        float
            us of the layer-step; infinite where it finds no slot and no other lane is allowed. A background fill that
            is under way counts as missing. The first call compiles its code, which takes a while once.

        Raises
        ------
        ArrayError, RoutingError, WorkerError, ClosedError, ForkError
            More rows than one step takes are an ArrayError too.
        """
        self._check_usable()
        layer = self._check_layer(layer)
        ids, runner = check_topk_ids(topk_ids), self._runner
        check_ids(layer, ids, self.store.layers[layer].num_experts)
        if ids.size == 0:
            return 0.0
        most = runner.max_rows(ids.shape[1])
        if len(ids) > most:
            raise ArrayError(f"topk_ids: {len(ids)} rows, but one step takes {most} here; ask about so many at most")
        with self._failing():
            forecast = self._forecast = Forecast.of(runner, self._forecast)
            with runner.threads.holding() if self._steps is not None else contextlib.nullcontext():
                forecast.ask(layer, ids)
            return forecast.predict_us(runner.rates[layer])

    def check(self) -> None:
        """Raise what the device has found since the last call: for callers who replay graphs that hold steps.

        Raises
        ------
        RoutingError, WorkerError, DeviceError, ClosedError, ForkError
        """
        self._check_usable()
        if self._steps is not None:
            with self._failing():
                self._runner.check()

    def stats(self) -> Stats:
        """A snapshot of all counters since the start."""
        return self._make_stats(self._runner.totals)

    @contextlib.contextmanager
    def request(self) -> Iterator[Request]:
        """Count the work inside a ``with`` block: ``with scheduler.request() as r: ...; r.stats``."""
        request = Request(self)
        self._runner.begin_request()
        try:
            yield request
        finally:
            request._finish()

    def explain(self, layer: int) -> Explanation | None:
        """The last decision of a layer with its costs; None before its first step."""
        found = self._runner.explain(self._check_layer(layer))
        return None if found is None else Explanation(*found)

    def story(self, layer: int, expert: int) -> tuple[StoryEntry, ...]:
        """What happened to an expert in recent steps, oldest first."""
        layer = self._check_layer(layer)
        num = self.store.layers[layer].num_experts
        if not 0 <= expert < num:
            raise RoutingError(bad_id(layer, expert, num, "story"))
        return self._runner.story(layer, expert)

    def _make_stats(self, totals: np.ndarray) -> Stats:
        runner = self._runner
        return make_stats(
            totals,
            bytes_pinned=runner.pinned_nbytes,
            bytes_pageable=self.store.nbytes - runner.pinned_nbytes,
            inactive=_inactive(self.config, runner.num_slots, runner.recorder) | runner.notes(),
            played=runner.played.given(),
            warm_shards=runner.warm_shards,
        )

    # -------------------------------------------------------------------------------------------- ending
    def save_warm_start(self) -> Path | None:
        """Save now what :meth:`close` saves for the next start: for programs that may be killed.

        Returns
        -------
        Path or None
            The file; None where ``warm_start.enabled`` is not set, no step has run yet, or it could not be written,
            which the log says.
        """
        self._check_usable()
        with self._failing():
            return self._runner.save_warm_start()

    def close(self) -> None:
        """Save for a warm start if that is asked for, stop the threads and free the slots; may be called again."""
        self._finalizer()

    def __enter__(self) -> ExpertScheduler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- checking
    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                f"scheduler: made in process {self._pid}, but used in its forked child {os.getpid()}, which has "
                "none of its threads; make a scheduler in the child, or start it with the spawn method"
            )
        if not self._finalizer.alive:
            raise ClosedError("scheduler: it has been closed; make a new one")
        if self._failure is not None:
            raise type(self._failure)(f"{self._failure} (the scheduler stopped then; make a new one)")

    def _check_layer(self, layer: int) -> int:
        if (
            isinstance(layer, bool)
            or not isinstance(layer, (int, np.integer))
            or not 0 <= layer < self.store.num_layers
        ):
            raise RoutingError(
                f"layer: {layer!r}, but the store has layers 0 to {self.store.num_layers - 1}; pass the index "
                "of the MoE layer, counted without dense layers"
            )
        return int(layer)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn errors of the lanes into public ones; after a dead or hanging worker nothing runs any more."""
        try:
            with _public_errors():
                yield
        except WorkerError as error:
            self._failure = error
            self._ticket = None
            raise

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            with _public_errors():
                yield
        except BaseException:
            self.close()
            raise


@contextlib.contextmanager
def _public_errors() -> Iterator[None]:
    try:
        yield
    except TeamForked as error:
        raise ForkError(str(error)) from error
    except TeamClosed as error:
        raise ClosedError(str(error)) from error
    except TeamError as error:
        raise WorkerError(str(error)) from error


def _inactive(config: Config, num_slots: int, recorder: Recorder | None) -> dict[str, str]:
    """Lanes and features that do nothing, with the reason."""
    reasons = {}
    policy = config.policy
    for lane in ("stream", "zero_copy", "cpu"):
        if policy.force is not None and lane != policy.force:
            reasons[lane] = f"policy.force sends every miss to {policy.force}"
        elif lane not in policy.lanes:
            reasons[lane] = "policy.lanes leaves it out"
    if num_slots == 0:
        reasons["cache"] = "there are no slots (section cache)"
        reasons.setdefault("stream", "there are no slots to stream to")
    if recorder is not None and recorder.failure is not None:
        reasons["record"] = f"the recording ended: {recorder.failure}"
    return reasons
