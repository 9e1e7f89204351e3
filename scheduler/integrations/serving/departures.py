"""Clients that leave before their answer: their text ends at its next token, so that those who wait have their turn.

A streamed text ends with its stream, by transformers' own doing; one that is answered as a whole would be written to
its end for nobody. Here the request's handler is cancelled when the connection closes, and with it the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import GenerateManager, GenerationState

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Departures:
    """ASGI middleware: who has left is worked for no more."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = [await receive()]
        while arrived[-1].get("more_body"):
            arrived.append(await receive())
        gone = asyncio.ensure_future(_departure(receive))

        async def replay() -> Message:
            return arrived.pop(0) if arrived else await asyncio.shield(gone)

        work = asyncio.ensure_future(self._app(scope, replay, send))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            gone.cancel()
            work.cancel()


async def _departure(receive: Receive) -> Message:
    """The message that the client has left."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


class _Left(StoppingCriteria):
    """Ends all rows once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **named: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


class _Texts(GenerateManager):
    """Texts one after the other; one whose request is cancelled ends."""

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, torch.Tensor]:
        left = threading.Event()
        asked = {**inputs, "stopping_criteria": StoppingCriteriaList([_Left(left)])}
        text = asyncio.ensure_future(
            super().generate_non_streaming(model, processor, asked, gen_config, request_id=request_id)
        )
        try:
            return await asyncio.shield(text)
        except asyncio.CancelledError:
            left.set()  # it may not even have begun
            text.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise


class TextState(GenerationState):
    """Transformers' own, with texts that end when nobody waits for them."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The manager of a model's texts."""
        if model_id not in self._generate_managers:
            self._generate_managers[model_id] = _Texts()
        return self._generate_managers[model_id]
