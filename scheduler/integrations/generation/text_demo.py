"""The part of the demo that writes text: the bundled model with every expert in a slot, then with few slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from trilane.bundled_model import TINY
from trilane.integrations.generation.decode import Step, decode, sampler
from trilane.integrations.generation.identity import all_resident, compare_steps, other_scheduler
from trilane.integrations.generation.text_model import TextModel, open_text_model
from trilane.shared_cores import sharing_text

PROMPT = "And the king said unto the prophet,"
SLOTS = 0.125
TEMPERATURE, SEED = 0.6, 0  # livelier than the likeliest token always; the same seed draws the same tokens
LANES: dict[str, dict[str, Any]] = {
    "stream alone": {"force": "stream"},
    "zero-copy alone": {"force": "zero_copy"},
    "CPU alone": {"force": "cpu"},
    "all lanes": {},
}


def run_text_demo(num_tokens: int, prompt: str = PROMPT) -> bool:
    """Write a text once for each way to serve misses; whether all are the same, token for token and bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside the team of workers more would only wait
    opened = open_text_model(TINY, device="host", options={"cache": {"fraction": SLOTS}})
    try:
        with opened.handle:
            return _compare(opened, num_tokens, prompt)
    finally:
        torch.set_num_threads(threads)


def _compare(opened: TextModel, num_tokens: int, prompt: str) -> bool:
    handle, (ids, mask) = opened.handle, opened.encode([prompt])
    print(f"text:    {opened.handle.store}, a trained model of 28 million weights, experts in Q4_K")
    with all_resident(handle) as resident:
        list(decode(resident, ids, mask, 2))  # compiles and warms
        wanted, seconds = _timed(decode(resident, ids, mask, num_tokens, sampler(TEMPERATURE, SEED)))
    print(f"\n{prompt}{opened.tokenizer.decode([int(step.ids[0]) for step in wanted])}\n")
    print(f"slots for {SLOTS:.1%} of the experts (the first run: all), {num_tokens} tokens of one seed")
    print(f"{'run':16s} {'tokens/s':>9s} {'hit rate':>9s}  text and logits")
    _print_row("all resident", num_tokens / seconds, 1.0, "")
    is_same, rates = True, dict[str, float]()
    for name, policy in LANES.items():
        with ExitStack() as stack:
            options = {"cache": {"fraction": SLOTS}, "policy": policy}
            other = stack.enter_context(other_scheduler(handle, options))
            found, seconds = _timed(decode(other, ids, mask, num_tokens, sampler(TEMPERATURE, SEED)))
            rate = other.scheduler.stats().hit_rate or 0.0
            runner = other.scheduler._runner
            threads = runner.num_threads, runner.device.budget.num_concurrent
        differences = compare_steps(wanted, found)
        is_same &= not differences
        rates[name] = num_tokens / seconds
        _print_row(name, rates[name], rate, f"FAILED: {differences[0]}" if differences else "identical")
    *alone, together = rates.values()
    reason = sharing_text(*threads, max(alone) / together)
    print(f"{reason}\n" if reason else "")
    return is_same


def _timed(steps: Iterable[Step], clock: Callable[[], float] = time.perf_counter) -> tuple[list[Step], float]:
    began = clock()
    return list(steps), clock() - began


def _print_row(name: str, tokens_s: float, hit_rate: float, verdict: str) -> None:
    print(f"{name:16s} {tokens_s:9.1f} {hit_rate:9.1%}  {verdict}")
