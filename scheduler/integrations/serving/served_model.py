"""One model that is open, in the place where the server of transformers keeps the models that it loads itself.

Its handlers ask a model manager for a model and a tokenizer by name; this one has one name, and answers with ours.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from tokenizers.processors import TemplateProcessing
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import get_response_template

from trilane.bundled_model import TINY
from trilane.errors import TrilaneError
from trilane.integrations.generation import TextModel

PROBE = [{"role": "user", "content": "a"}]
LAST_MESSAGE = "{{ messages[-1]['content'] }}"  # what `trilane run` does without a chat template


class ServedModel(ModelManager):
    """A :class:`TextModel` under one name.

    Parameters
    ----------
    model : TextModel
        Stays its owner's: it is neither unloaded nor closed here. Its generation settings are completed: sampling is
        on, so that a request's temperature counts, and all tokens that end a text are named.
    name : str
        What requests call it; a request for another name is refused.

    Raises
    ------
    TrilaneError
        A name that the server would take apart.
    """

    def __init__(self, model: TextModel, name: str) -> None:
        super().__init__(model_timeout=-1)  # loads nothing without a name
        self.force_model = checked_name(name)
        self.tokenizer, self.has_template = served_tokenizer(model), bool(model.tokenizer.chat_template)
        self.model = model.handle.model
        self.model.generation_config = served_generation(model)
        self.most_tokens = model.most_tokens
        self._created = int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is: there are no revisions."""
        return model_id

    def load_model_and_processor(
        self,
        model_id_and_revision: str,
        progress_callback: Any = None,
        tqdm_class: Any = None,
        gguf_file: str | None = None,
    ) -> tuple[Any, Any]:
        """The model and its tokenizer.

        Raises
        ------
        fastapi.HTTPException
            404 for another name.
        """
        if model_id_and_revision != self.force_model:
            text = f"model: {model_id_and_revision!r} is not served here; ask for {self.force_model!r}"
            raise HTTPException(status_code=404, detail=text)
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": self.force_model, "cached": True})
        return self.model, self.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """What ``/v1/models`` lists: this one."""
        return [{"id": self.force_model, "object": "model", "created": self._created, "owned_by": "trilane"}]

    def shutdown(self) -> None:
        """Nothing: the model is its owner's, and ``/reset`` leaves it where it is."""


def served_name(model: str, name: str | None = None) -> str:
    """What clients call a model: the name that is given, else its file without the ending, or its folder.

    Raises
    ------
    TrilaneError
        A name that requests cannot use.
    """
    path = Path(model).resolve()
    own = model if model == TINY else path.stem if path.suffix == ".gguf" else path.name
    return checked_name(own if name is None else name)


def checked_name(name: str) -> str:
    """The name, if requests can use it.

    Raises
    ------
    TrilaneError
    """
    if not name or ":" in name or not name.isprintable():
        raise TrilaneError(f"name: {name!r}, but it must have printable characters and no colon; give another (--name)")
    return name


def served_tokenizer(model: TextModel) -> Any:
    """A copy of the model's tokenizer that gives, when it is called, what :meth:`TextModel.encode` gives."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    begins = bool(getattr(tokenizer, "add_bos_token", False)) and tokenizer.bos_token_id is not None
    if not tokenizer.chat_template:
        tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + LAST_MESSAGE
    reading = get_response_template(tokenizer, model.handle.model)
    if reading is not None and not is_read_by(tokenizer, reading):
        tokenizer.response_template = plain_answer(tokenizer, model.stops)
    if begins and tokenizer("a").input_ids[:1] != [tokenizer.bos_token_id]:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer


def is_read_by(tokenizer: Any, reading: Mapping[str, Any]) -> bool:
    """Whether a response template finds in the tokenizer's chats where the answer begins.

    transformers has such templates by architecture, for the chat template that is usual there; with another one, it
    would take the prompt for a part of the answer.
    """
    chat = tokenizer.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
    anchors = reading.get("start_anchor", ())
    found = any(anchor in chat for anchor in ([anchors] if isinstance(anchors, str) else anchors))
    return found or ("start_anchor_pattern" in reading and bool(re.search(reading["start_anchor_pattern"], chat)))


def plain_answer(tokenizer: Any, stops: frozenset[int]) -> dict[str, Any]:
    """A response template for which all behind the prompt is the answer, up to a token that ends the text."""
    content: dict[str, Any] = {"content": "text", "content_args": {"strip": False}}
    if stops:
        content["close"] = tokenizer.convert_ids_to_tokens(sorted(stops))
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": r"\Z", "fields": {"content": content}}


def served_generation(model: TextModel) -> Any:
    """The model's generation settings, completed for requests: without sampling, a temperature would be passed over."""
    settings = copy.deepcopy(model.handle.model.generation_config)
    settings.do_sample = True
    settings.eos_token_id = sorted(model.stops) or None
    if settings.pad_token_id is None:
        settings.pad_token_id = next(iter(settings.eos_token_id or [0]))
    return settings
