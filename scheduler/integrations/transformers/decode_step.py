"""One decode step of a whole model over tensors that stay where they are, so that a CUDA graph can hold it.

Token, position and number of the step are on the device and move on by themselves: a step reads what the one before
wrote, and the host need not come between. It knows models and caches, no schedulers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

NOT_GIVEN = -1  # in the tokens to feed: take what the model says


def static_cache(model: Any, capacity: int) -> StaticCache | None:
    """A cache of that many tokens whose tensors never move; None where the model's layers have none of that kind.

    Layers with a sliding window keep all tokens too: those of transformers count in Python when their window is full,
    which a graph would not see. The attention mask has the window in any case.
    """
    try:
        cache = StaticCache(config=model.config, max_cache_len=capacity)
    except (KeyError, NotImplementedError, TypeError, ValueError):
        return None
    whole = {
        StaticSlidingWindowLayer: StaticLayer,
        LinearAttentionAndStaticSlidingWindowAttentionLayer: LinearAttentionAndStaticFullAttentionLayer,
    }
    for index, layer in enumerate(cache.layers):
        if type(layer) in whole:
            cache.layers[index] = whole[type(layer)](max_cache_len=capacity)
    return cache if cache.is_compileable else None


class DecodeStep:
    """The tensors of a run, and the step over them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    rows : int
        Sequences side by side.
    capacity : int
        Tokens that a sequence can have in all.
    padded : bool
        Whether some prompts are padded at their left.
    compiled : callable, optional
        What to call in place of the model for steps of one token.

    Attributes
    ----------
    cache : Cache
    is_static : bool
        Whether nothing of the cache moves; else a step cannot be captured.
    tokens, picks : (rows, capacity) int64 tensors
        Token after each step: what was fed on, and what the model would have taken.
    logits : (rows, vocabulary) tensor
        Of the last step.
    """

    def __init__(
        self, model: Any, rows: int, capacity: int, padded: bool, compiled: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.rows, self.capacity, self.padded = model, rows, capacity, padded
        device = model.get_input_embeddings().weight.device
        found = static_cache(model, capacity)
        self.is_static = found is not None
        self._of_one_token = compiled if compiled is not None and self.is_static else model  # else sizes change
        self.cache: Any = found if found is not None else DynamicCache(config=model.config)
        integers = {"dtype": torch.int64, "device": device}
        self.ids, self.position = torch.zeros((rows, 1), **integers), torch.zeros((rows, 1), **integers)
        self.number = torch.zeros(1, **integers)
        self.tokens, self.picks = torch.zeros((rows, capacity), **integers), torch.zeros((rows, capacity), **integers)
        self.given = torch.full((rows, capacity), NOT_GIVEN, **integers)
        self.mask = torch.ones((rows, capacity), **integers) if padded else None
        self.logits: torch.Tensor | None = None
        names = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def begin(self, prompt: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor | None) -> None:
        """Run the prompt, and take its last row's token.

        Parameters
        ----------
        prompt : (rows, length) int64
        mask : (rows, length), optional
            0 for padding; as ``padded`` says.
        given : (rows, steps) int64, optional
            Tokens to feed on instead of the model's own.
        """
        self._empty_cache()
        length = prompt.shape[1]
        self.number.zero_()
        self.given.fill_(NOT_GIVEN)
        if given is not None:
            self.given[:, : given.shape[1]] = given
        if mask is None:
            positions = torch.arange(length, device=prompt.device).expand(self.rows, -1)
        else:
            assert self.mask is not None
            self.mask.fill_(1)
            self.mask[:, :length] = mask
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.position.copy_(positions[:, -1:] + 1)
        self._take(self._run(self.model, prompt, positions.contiguous(), mask))

    def advance(self) -> None:
        """One more token for each row. Nothing is waited for."""
        mask = self.mask
        if mask is not None and not self.is_static:
            mask = mask[:, : self.cache.get_seq_length() + 1]
        logits = self._run(self._of_one_token, self.ids, self.position, mask)
        self.position.add_(1)
        self._take(logits)

    @property
    def is_compiled(self) -> bool:
        """Whether steps of one token run what the compiler has made."""
        return self._of_one_token is not self.model

    def leave_uncompiled(self) -> None:
        """Run the model itself from now on."""
        self._of_one_token = self.model

    def _run(
        self, model: Callable[..., Any], ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        found = model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True,
            **self._last_only,
        )  # fmt: skip
        return found.logits[:, -1]

    def _take(self, logits: torch.Tensor) -> None:
        """Note the step's token, and make it the next one's input."""
        self.logits = logits
        pick = logits.argmax(-1, keepdim=True)
        given = self.given.index_select(1, self.number)
        token = torch.where(given == NOT_GIVEN, pick, given)
        self.picks.index_copy_(1, self.number, pick)
        self.tokens.index_copy_(1, self.number, token)
        self.ids.copy_(token)
        self.number.add_(1)

    def _empty_cache(self) -> None:
        """Forget the run before; where tensors may not move they are emptied in place."""
        if self.is_static:
            self.cache.reset()
        else:
            self.cache = DynamicCache(config=self.model.config)
