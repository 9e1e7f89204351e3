"""Decoding step by step over a key-value cache: the ids chosen, and the logits that they were chosen from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from trilane.integrations.transformers import OffloadedModel

# All but cuDNN's: on an H200 that gave the same inputs two kinds of bits, by turns (torch 2.11).
REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Choose = Callable[[torch.Tensor], torch.Tensor]  # logits (rows, vocabulary) to ids (rows,)


class Step(NamedTuple):
    """One token of each row: ids int64 (rows,), and logits (rows, vocabulary) in the model's own type."""

    ids: torch.Tensor
    logits: torch.Tensor


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row; the first one of equals."""
    return logits.argmax(-1)


def sampler(temperature: float, seed: int) -> Choose:
    """Tokens drawn by their probability, the same ones for the same seed and logits; greedy at temperature 0."""
    if temperature == 0:
        return greedy
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        shares = (logits.float().cpu() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)

    return draw


def decode(
    handle: OffloadedModel, ids: torch.Tensor, mask: torch.Tensor, max_tokens: int, choose: Choose = greedy
) -> Iterator[Step]:
    """Decode up to ``max_tokens`` tokens for each row; whoever reads them may stop earlier.

    Attention runs in ways that give the same bits each time, since decodings are compared bit by bit.

    Parameters
    ----------
    handle : OffloadedModel
    ids, mask : (rows, tokens) int64 tensors
        Prompts filled up on the left; the mask is 0 there.
    max_tokens : int
    choose : callable
        Ids of logits.
    """
    model = handle.model
    place = model.get_input_embeddings().weight.device
    ids, mask = ids.to(place), mask.to(place)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(max_tokens):
        with torch.no_grad(), sdpa_kernel(REPEATABLE):
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip
        chosen = choose(logits)
        yield Step(chosen, logits)
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), -1)
