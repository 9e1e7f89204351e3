"""What is asked of a request before it reaches the handlers of transformers: a clear refusal in place of a failure.

The handlers themselves, their fields and their answers are not known here beyond what is checked.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fastapi import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.transcription import TranscriptionHandler


class ChatRequests(ChatCompletionHandler):
    """``/v1/chat/completions``; ``max_completion_tokens``, which newer clients send, is ``max_tokens``."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            refuse("messages", messages, "must be a list of one message or more, each with role and content")
        for number, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                refuse(f"messages[{number}].role", message.get("role"), "must be a text such as 'user'")
        if not self.model_manager.has_template and not messages[-1].get("content"):
            refuse("messages[-1].content", "", "must be a text: the model has no chat template, and goes on from it")
        if "max_completion_tokens" in body:
            body.setdefault("max_tokens", body.pop("max_completion_tokens"))
        check_numbers(body, self.model_manager.most_tokens)
        return await super().handle_request(body, request_id)


class CompletionRequests(CompletionHandler):
    """``/v1/completions``."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            refuse("prompt", prompt, "must be a text of one character or more; one prompt a request")
        check_numbers(body, self.model_manager.most_tokens)
        return await super().handle_request(body, request_id)


class ResponseRequests(ResponseHandler):
    """``/v1/responses``; streamed only if that is asked for, as OpenAI has it."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        given = body.get("input")
        if not isinstance(given, (str, list)) or not given:
            refuse("input", given, "must be a text, or a list of one message or more")
        body.setdefault("stream", False)
        check_numbers(body, self.model_manager.most_tokens)
        return await super().handle_request(body, request_id)


class NoTranscription(TranscriptionHandler):
    """``/v1/audio/transcriptions``: the models here have no ears."""

    async def handle_request(self, request: Any) -> Any:
        raise HTTPException(status_code=404, detail="audio: the model takes text only; ask /v1/chat/completions")


def check_numbers(body: dict[str, Any], most_tokens: int | None) -> None:
    """Refuse lengths and temperatures that no text can be made with; the model is made for ``most_tokens`` in all."""
    for name in ("max_tokens", "max_output_tokens"):
        tokens = body.get(name)
        if tokens is not None and (not is_number(tokens) or tokens != int(tokens) or tokens < 1):
            refuse(name, tokens, "must be a whole number from 1 on")
        if tokens is not None and most_tokens is not None and tokens > most_tokens:
            refuse(name, tokens, f"must be at most {most_tokens}, the tokens that the model is made for")
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if temperature is not None and not (is_number(temperature) and 0 <= temperature <= 100):
        refuse("temperature", temperature, "must be a number from 0, always the likeliest token, to 100")
    if top_p is not None and not (is_number(top_p) and 0 < top_p <= 1):
        refuse("top_p", top_p, "must be a number above 0 and up to 1")


def is_number(value: Any) -> bool:
    """A finite one; JSON's true is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def refuse(field: str, value: Any, rule: str) -> NoReturn:
    """Answer 400 with the field, its value and the rule."""
    raise HTTPException(status_code=400, detail=f"{field}: {str(value)[:80]!r}, but it {rule}")
