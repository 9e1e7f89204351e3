"""The application: routes and handlers of ``transformers serve`` over one open model, and ``/metrics``.

It knows no socket and no process; ``server.py`` does.
"""

from __future__ import annotations

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from transformers.cli.serving.server import build_server

from trilane.errors import ClosedError, TrilaneError
from trilane.integrations.generation import TextModel
from trilane.integrations.metrics import SchedulerCollector
from trilane.integrations.serving.departures import Departures, TextState
from trilane.integrations.serving.requests import ChatRequests, CompletionRequests, NoTranscription, ResponseRequests
from trilane.integrations.serving.served_model import ServedModel


def build_app(model: TextModel, name: str) -> FastAPI:
    """An application that answers for one model.

    Parameters
    ----------
    model : TextModel
        Open; it stays its owner's. Texts are generated one after the other.
    name : str
        What requests call it.

    Returns
    -------
    fastapi.FastAPI
        ``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, ``/v1/models``, ``/health``, ``/metrics``.

    Raises
    ------
    TrilaneError
        A name that requests cannot use.
    """
    served, state = ServedModel(model, name), TextState()
    app = build_server(
        served,
        ChatRequests(served, state),
        completion_handler=CompletionRequests(served, state),
        response_handler=ResponseRequests(served, state),
        transcription_handler=NoTranscription(served, state),
        generation_state=state,
    )
    app.add_exception_handler(TrilaneError, _failed)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    add_metrics(app, SchedulerCollector({name: model.handle}))
    app.add_middleware(Departures)
    return app


def add_metrics(app: FastAPI, collector: SchedulerCollector) -> None:
    """Let ``/metrics`` answer with a scheduler's counters and the process's memory and time."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """A failure of the scheduler: 503 where the server is stopping."""
    return _error(503 if isinstance(error, ClosedError) else 500, str(error), type(error).__name__)


async def _refused(request: Request, error: HTTPException) -> JSONResponse:
    """A request that the handlers, or the checks before them, did not take."""
    return _error(error.status_code, error.detail, "invalid_request_error")


async def _malformed(request: Request, error: RequestValidationError) -> JSONResponse:
    """A body that is no JSON object, or not said to be one."""
    found = "; ".join(str(each["msg"]) for each in error.errors())
    text = f"body: {found}, but it must be a JSON object, sent with Content-Type: application/json"
    return _error(400, text, "invalid_request_error")


def _error(status: int, message: str, kind: str) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)
