"""Text after a prompt, a token at a time: on a GPU as one graph of the whole model, so that no Python runs in between.

The first steps of a run are ordinary ones, which also prepare what a graph must find ready; then the step is captured
once and replayed. Where a model cannot be captured the steps go on as they began, and the log says why. ``compile``
joins the many small operations of the model around our layers before that, by torch's compiler.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trilane.cuda_threads import WAIT_NAP_S
from trilane.errors import ArrayError
from trilane.integrations.transformers.decode_step import NOT_GIVEN, DecodeStep
from trilane.integrations.transformers.handle import OffloadedModel
from trilane.integrations.transformers.masks import register_device_mask

ROOM = 256  # a run's capacity is a multiple of it, so that the next one can use the same graph
ORDINARY_STEPS = 2  # before a capture
AHEAD = 4  # graphs that are launched at most before the first of them is over
OnToken = Callable[[list[int]], object]
log = logging.getLogger("trilane")


class Decoder:
    """Decodes with a model whose experts are in a store; greedy, or along given tokens.

    Parameters
    ----------
    handle : OffloadedModel
    capture : bool
        On a GPU, run steps as a CUDA graph of the whole model where it can be captured.
    compile : bool
        Run steps through ``torch.compile``, which takes a minute or more before the first one and needs a C
        compiler. The model's own sums may then have other bits; lanes and slots still change none.

    Attributes
    ----------
    captured : bool
        Whether steps are replayed from a graph.
    why_not : str
        Why they are not; empty if they are, or before the first run.
    compiled : bool
        Whether steps run what the compiler has made; the log says why they do not.

    Examples
    --------
    >>> decoder = Decoder(handle)  # doctest: +SKIP
    >>> decoder.generate(tokenizer("The", return_tensors="pt").input_ids, 20)  # doctest: +SKIP
    """

    def __init__(self, handle: OffloadedModel, *, capture: bool = True, compile: bool = False) -> None:
        self.handle, self.model = handle, handle.model
        self.captured, self.why_not = False, ""
        self._capture = capture
        self._compiled = _compiled(self.model.forward) if compile else None
        self._step: DecodeStep | None = None
        self._graph: Any = None
        self._stream: Any = None
        self._num_steps = 0
        self._launched: deque[Any] = deque()  # an event behind each graph that may still run

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        on_token: OnToken | None = None,
    ) -> torch.Tensor:
        """Tokens after a prompt.

        Parameters
        ----------
        input_ids : (rows, length) integer tensor
            Prompts, of any device; shorter ones padded at their left.
        max_new_tokens : int
        attention_mask : (rows, length) tensor, optional
            0 where a prompt is padded.
        given : (steps,) or (rows, steps) integer tensor, optional
            Tokens to feed on whatever the model says ("teacher forcing"); after them it is greedy. What the model
            would have taken is in :attr:`picks`.
        eos_token_id : int or ints, optional
            Ends a row, which is filled with its last token then; None: all ``max_new_tokens`` are made.
        on_token : callable, optional
            Called with the new token of each row as they come; ends the run if it returns True.

        Returns
        -------
        (rows, length + new) int64 tensor, where the model is

        Raises
        ------
        ArrayError
            A shape that does not fit, or padding at the right.
        TrilaneError
            A step failed.
        """
        prompt, mask, given = self._checked(input_ids, max_new_tokens, attention_mask, given)
        ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        if max_new_tokens == 0:
            return prompt
        with self._on_stream():
            step = self._prepared(len(prompt), prompt.shape[1] + max_new_tokens, mask is not None)
            watch = _Watch(step, ends, on_token) if ends or on_token is not None else None
            step.begin(prompt, mask, given)
            made = self._run(step, max_new_tokens, watch)
            self.handle.scheduler.check()
            new = step.tokens[:, :made].clone()
        if ends:
            new = _filled_after_end(new, ends)
        return torch.cat([prompt, new], dim=1)

    @property
    def picks(self) -> torch.Tensor:
        """(rows, capacity) int64: what the model itself would have taken after each step of the last run."""
        if self._step is None:
            raise ArrayError("picks: nothing has been decoded yet; call generate first")
        return self._step.picks

    @property
    def logits(self) -> torch.Tensor:
        """(rows, vocabulary): logits of the last step."""
        if self._step is None or self._step.logits is None:
            raise ArrayError("logits: nothing has been decoded yet; call generate first")
        return self._step.logits

    # ------------------------------------------------------------------------------------------- the steps
    def _run(self, step: DecodeStep, wanted: int, watch: _Watch | None) -> int:
        """Make tokens after the prompt's; how many there are in the end.

        A token is looked at while the next step is under way, so that the GPU waits for nobody.
        """
        for made in range(1, wanted):
            if watch is not None:
                watch.note()
            self._advance(step)
            if watch is not None and watch.is_over():
                return made
        if watch is not None:
            watch.note()
            watch.is_over()
        return wanted

    def _advance(self, step: DecodeStep) -> None:
        if self._graph is None and self._may_capture(step) and self._num_steps >= ORDINARY_STEPS:
            self._make_graph(step)
        if self._graph is None:
            self._ordinary_step(step)
        else:
            self._replay()
        self._num_steps += 1

    def _replay(self) -> None:
        """Launch the graph, few ahead of the GPU: what a driver queues without bound may stand before copies."""
        while len(self._launched) >= AHEAD:
            _wait_until(self._launched.popleft().query)
        self._graph.replay()
        self._launched.append(torch.cuda.Event())
        self._launched[-1].record()
        self.handle.scheduler.check()

    def _ordinary_step(self, step: DecodeStep) -> None:
        """A step without a graph; the first one is compiled if that is asked for, and goes on without if it fails."""
        try:
            step.advance()
        except Exception as error:
            if not step.is_compiled or not _is_of_compiler(error):
                raise
            log.warning("decoder: steps are not compiled, since %s", str(error).strip().splitlines()[0])
            self._compiled = None
            step.leave_uncompiled()
            step.advance()

    @property
    def compiled(self) -> bool:
        return self._step is not None and self._step.is_compiled and self._num_steps > 0

    def _may_capture(self, step: DecodeStep) -> bool:
        if self.why_not:
            return False
        if not self._capture:
            self.why_not = "capture=False"
        elif self._stream is None:
            self.why_not = "the model is not on a GPU"
        elif not step.is_static:
            self._give_up(f"transformers has no static cache for all layers of {type(self.model).__name__}")
        return not self.why_not

    def _make_graph(self, step: DecodeStep) -> None:
        """Capture the step; the stream's work so far is waited for."""
        _wait_until(self._stream.query)
        graph, before = torch.cuda.CUDAGraph(), step.logits
        try:
            # The scheduler's own threads go on meanwhile; what they call must not end the capture.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                step.advance()
        except Exception as error:  # whatever a model does that no graph can hold
            step.logits = before
            self._give_up(f"{type(self.model).__name__} cannot be captured: {str(error).splitlines()[0]}")
            return
        self._graph, self.captured = graph, True

    def _give_up(self, reason: str) -> None:
        self.why_not = reason
        log.warning("decoder: steps run one operation at a time, since %s", reason)

    def _prepared(self, rows: int, length: int, padded: bool) -> DecodeStep:
        """The step for a run; the one before, with its graph, where it has the room."""
        known = self._step
        if known is not None and (known.rows, known.padded) == (rows, padded) and known.capacity >= length:
            return known
        self._graph, self._step, self.captured, self._num_steps, self.why_not = None, None, False, 0, ""
        self._step = DecodeStep(self.model, rows, -(-length // ROOM) * ROOM, padded, self._compiled)
        return self._step

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """All of a run on one stream of our own, since none can be captured on the default one."""
        device = self.model.get_input_embeddings().weight.device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            register_device_mask()
        outer = torch.cuda.current_stream(device)
        _wait_until(self._stream.query)  # of a run before, whose steps the scheduler does not see in a graph
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def _checked(
        self, input_ids: torch.Tensor, max_new_tokens: int, mask: torch.Tensor | None, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The arguments on the model's device, int64; no mask where nothing is padded."""
        device = self.model.get_input_embeddings().weight.device
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ArrayError(f"input_ids: shape {tuple(input_ids.shape)}, but (rows, length) of at least one token")
        if max_new_tokens < 0:
            raise ArrayError(f"max_new_tokens: {max_new_tokens}, but it must be 0 or more")
        if mask is not None:
            if mask.shape != input_ids.shape:
                raise ArrayError(
                    f"attention_mask: shape {tuple(mask.shape)}, but input_ids has {tuple(input_ids.shape)}; give both "
                    "the same"
                )
            mask = mask.to(device, torch.int64)
            if not bool((mask[:, -1] == 1).all()):
                raise ArrayError("attention_mask: padding at the right, but prompts must end together; pad at the left")
            mask = None if bool((mask == 1).all()) else mask
        if given is not None:
            if given.ndim not in (1, 2) or (given.ndim == 2 and len(given) not in (1, len(input_ids))):
                raise ArrayError(
                    f"given: shape {tuple(given.shape)}, but (steps,) or ({len(input_ids)}, steps) is needed: a row "
                    "for each of input_ids"
                )
            given = given.to(device, torch.int64).expand(len(input_ids), -1)[:, :max_new_tokens]
            if given.numel() and int(given.min()) <= NOT_GIVEN:
                raise ArrayError(f"given: token {int(given.min())}, but tokens are 0 and above; leave such out")
        return input_ids.to(device, torch.int64), mask, given


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Each capacity is compiled for itself: sizes that may change make slower code. Tuning by coordinate descent also
    has products with a single row made by kernels that read each weight once, beside what comes before and after."""
    options = {"coordinate_descent_tuning": True}
    return torch.compile(forward, fullgraph=True, dynamic=False, options=options)


class _Watch:
    """Looks at the tokens of a run one step behind it.

    Made before the run's first step: pinned memory is made by the driver, which may wait for the GPU meanwhile.
    """

    def __init__(self, step: DecodeStep, ends: set[int], on_token: OnToken | None) -> None:
        self._step, self._ends, self._on_token = step, ends, on_token
        self._ended = [False] * step.rows
        self._on_gpu = step.ids.is_cuda
        self._host = torch.zeros((step.rows, 1), dtype=torch.int64, pin_memory=self._on_gpu)
        self._event = torch.cuda.Event() if self._on_gpu else None

    def note(self) -> None:
        """Have the last step's tokens copied out, behind the step."""
        self._host.copy_(self._step.ids, non_blocking=self._on_gpu)
        if self._event is not None:
            self._event.record()

    def is_over(self) -> bool:
        """Whether the tokens that were noted end the run."""
        if self._event is not None:
            _wait_until(self._event.query)
        tokens = self._host[:, 0].tolist()
        self._ended = [ended or token in self._ends for ended, token in zip(self._ended, tokens, strict=True)]
        stop = self._on_token is not None and self._on_token(tokens) is True
        return stop or (bool(self._ends) and all(self._ended))


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch's compiler could not do it; asked where it has run, since to load it takes a second."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))


def _wait_until(is_done: Callable[[], bool]) -> None:
    """Ask again and again: nothing of the driver is held meanwhile, which the scheduler's copies could need."""
    while not is_done():
        time.sleep(WAIT_NAP_S)


def _filled_after_end(tokens: torch.Tensor, ends: set[int]) -> torch.Tensor:
    """Rows that ended go on with the token that ended them."""
    is_end = torch.isin(tokens, torch.tensor(sorted(ends), device=tokens.device))
    first = torch.where(is_end.any(1), is_end.int().argmax(1), tokens.shape[1] - 1)
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return tokens.gather(1, torch.minimum(columns, first[:, None]))
