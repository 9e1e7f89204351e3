"""A small engine that embeds the scheduler: a Qwen3-MoE model from a GGUF file, decoded greedily, in NumPy.

    python docs/examples/small_engine.py [--slots 0.125] [--tokens 32] [--device cuda] [PROMPT ...]

Attention, norms, routers and the KV cache are the engine's; routed experts are the scheduler's. docs/embedding.md
explains the calls. Texts are in two groups: while the experts of one are computed, the engine attends for the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from trilane import ArrayError, ExpertScheduler, ExpertStore, ModelFileError
from trilane.cpu_kernels.formats import FORMATS
from trilane.readers.gguf import open_gguf
from trilane.readers.model_file import ModelFiles

Floats = NDArray[np.float32]


@dataclass
class Text:
    """A sequence of token ids; keys and values (layers, tokens, kv heads, head size) of the first ``cached`` ones."""

    tokens: list[int]
    keys: Floats
    values: Floats
    cached: int = 0
    logits: list[Floats] = field(default_factory=list)  # (vocabulary,) of each step


@dataclass
class Group:
    """Texts whose new tokens are the rows of one step: hidden states x (rows, hidden), and the rows of each."""

    texts: list[Text]
    spans: list[slice] = field(default_factory=list)
    x: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    ticket: Any = None


class SmallEngine:
    """The trunk of a Qwen3-MoE model; its experts are in ``scheduler``, whose layers are those of the model."""

    def __init__(self, path: Any, scheduler: ExpertScheduler) -> None:
        files = open_gguf(path)
        if files.metadata.get("general.architecture") != "qwen3moe":
            raise ModelFileError(f"{path}: not of architecture qwen3moe, the only one that this example knows")
        self.scheduler = scheduler
        size = {key[9:]: files.metadata[key] for key in files.metadata if key.startswith("qwen3moe.")}
        self.num_layers, self.top_k = size["block_count"], size["expert_used_count"]
        self.num_heads, self.num_kv = size["attention.head_count"], size["attention.head_count_kv"]
        self.head_size, self.epsilon = size["attention.key_length"], size["attention.layer_norm_rms_epsilon"]
        self.max_tokens = size["context_length"]
        self.frequencies = size["rope.freq_base"] ** (-np.arange(0, self.head_size, 2) / self.head_size)
        self.weights = {name: read_floats(files, name) for name in files.tensors if "_exps" not in name}
        self.weights.setdefault("output.weight", self.weights["token_embd.weight"])

    def start(self, prompt: Sequence[int], num_tokens: int) -> Text:
        """A sequence with room for ``num_tokens`` more."""
        if not 0 < len(prompt) <= self.max_tokens - num_tokens:
            raise ArrayError(f"prompt: {len(prompt)} tokens, but 1 to {self.max_tokens - num_tokens} fit; cut it")
        shape = (self.num_layers, len(prompt) + num_tokens, self.num_kv, self.head_size)
        return Text(list(prompt), np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def step(self, groups: Sequence[Group]) -> None:
        """Compute all tokens that are not in the cache yet, and the logits of each text's last one."""
        for group in groups:
            self._embed(group)
        last = groups[-1]
        for layer in range(self.num_layers):
            for group in groups:
                self._add_experts(group)  # of the layer before; nothing is left to do if there is another group
                self._attend(layer, group)  # while the experts of the other group are computed
                routed = self._route(layer, group.x)
                self._add_experts(last)  # one step can be in flight
                group.ticket, last = self.scheduler.submit(layer, *routed), group
        self._add_experts(last)
        for group in groups:
            self._predict(group)

    def _embed(self, group: Group) -> None:
        new = [text.tokens[text.cached :] for text in group.texts]
        ends = np.cumsum([len(tokens) for tokens in new])
        group.spans = [slice(end - len(tokens), end) for end, tokens in zip(ends, new, strict=True)]
        group.x = self.weights["token_embd.weight"][np.concatenate(new)]

    def _add_experts(self, group: Group) -> None:
        if group.ticket is not None:
            group.x, group.ticket = group.x + self.scheduler.wait(group.ticket), None

    def _route(self, layer: int, x: Floats) -> tuple[Floats, NDArray[np.int64], Floats]:
        """What a step takes: normed rows, and ids and weights (rows, top_k) of their experts, likeliest first."""
        h = self._norm(x, f"blk.{layer}.ffn_norm")
        share = softmax(h @ self.weights[f"blk.{layer}.ffn_gate_inp.weight"].T)
        ids = np.argsort(-share, axis=-1, kind="stable")[:, : self.top_k]
        chosen = np.take_along_axis(share, ids, axis=-1)
        return h, ids, chosen / chosen.sum(axis=-1, keepdims=True)

    def _attend(self, layer: int, group: Group) -> None:
        h = self._norm(group.x, f"blk.{layer}.attn_norm")
        qkv = (h @ self.weights[f"blk.{layer}.attn_{name}.weight"].T for name in "qkv")
        q, k, v = (one.reshape(len(h), -1, self.head_size) for one in qkv)
        q, k = self._norm(q, f"blk.{layer}.attn_q_norm"), self._norm(k, f"blk.{layer}.attn_k_norm")
        out = np.empty_like(q)
        for text, rows in zip(group.texts, group.spans, strict=True):
            places = np.arange(text.cached, len(text.tokens))
            text.keys[layer, places] = self._rotate(k[rows], places)
            text.values[layer, places] = v[rows]
            out[rows] = self._mix(self._rotate(q[rows], places), text, layer, places)
        group.x = group.x + out.reshape(len(out), -1) @ self.weights[f"blk.{layer}.attn_output.weight"].T

    def _mix(self, q: Floats, text: Text, layer: int, places: NDArray[np.int64]) -> Floats:
        """Causal attention of new rows q (rows, heads, head size) over the cache; a kv head serves several heads."""
        keys, values = text.keys[layer, : len(text.tokens)], text.values[layer, : len(text.tokens)]
        q = q.reshape(len(q), self.num_kv, -1, self.head_size)
        scores = np.einsum("rkhd,tkd->rkht", q, keys) / np.float32(np.sqrt(self.head_size))
        future = np.arange(len(text.tokens)) > places[:, None]
        scores[np.broadcast_to(future[:, None, None], scores.shape)] = -np.inf
        return np.einsum("rkht,tkd->rkhd", softmax(scores), values).reshape(len(q), self.num_heads, self.head_size)

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.epsilon))
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x: Floats, places: NDArray[np.int64]) -> Floats:
        """Rotary positions: the first half of a head's elements pairs with the second."""
        angle = np.outer(places, self.frequencies).astype(np.float32)[:, None, :]
        cos, sin, (first, second) = np.cos(angle), np.sin(angle), np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def _predict(self, group: Group) -> None:
        last = self._norm(group.x[[rows.stop - 1 for rows in group.spans]], "output_norm")
        for text, logits in zip(group.texts, last @ self.weights["output.weight"].T, strict=True):
            text.cached = len(text.tokens)
            text.logits.append(logits)


def read_floats(files: ModelFiles, name: str) -> Floats:
    """A tensor of the trunk in float32, whatever block format the file has it in."""
    tensor = files.tensors[name]
    if tensor.format not in FORMATS:
        raise ModelFileError(f"{tensor}: {tensor.format} is not among {', '.join(FORMATS)}; take the model in another")
    found, raw = FORMATS[tensor.format], files.files[tensor.path].read(tensor.offset, tensor.nbytes, tensor)
    return found.dequantize_rows(raw.reshape(-1, found.block_nbytes)).reshape(tensor.shape)


def softmax(x: Floats) -> Floats:
    """Along the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def generate(engine: SmallEngine, prompts: Sequence[Sequence[int]], num_tokens: int, num_groups: int = 2) -> list[Text]:
    """Continue all prompts greedily."""
    texts = [engine.start(prompt, num_tokens) for prompt in prompts]
    groups = [Group(texts[first::num_groups]) for first in range(min(num_groups, len(texts)))]
    for _ in range(num_tokens):
        engine.step(groups)
        for text in texts:
            text.tokens.append(int(text.logits[-1].argmax()))
    return texts


def main() -> None:
    """Continue some prompts with the bundled model, and say how many experts were found in slots."""
    from trilane.bundled_model import tiny_path, tiny_prompts
    from trilane.integrations.gguf import gguf_tokenizer  # of transformers; an engine has its own

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", nargs="*", default=tiny_prompts()[3:7], metavar="PROMPT")
    parser.add_argument("--slots", type=float, default=0.25, help="slots as a fraction of all experts")
    parser.add_argument("--tokens", type=int, default=32, help="tokens for each prompt")
    parser.add_argument("--groups", type=int, default=2, help="1: nothing runs beside the experts")
    parser.add_argument("--device", default="host", help="host, cuda or auto")
    given = parser.parse_args()
    threadpool_limits(1, user_api="blas")  # the scheduler's workers have the cores; two pools would wait for each other
    store, tokenizer = ExpertStore.from_gguf(tiny_path()), gguf_tokenizer(tiny_path())
    with ExpertScheduler(store, config={"cache": {"fraction": given.slots}}, device=given.device) as scheduler:
        engine, ids = SmallEngine(tiny_path(), scheduler), [tokenizer(text).input_ids for text in given.prompts]
        generate(engine, ids, 2, given.groups)  # compiles and warms
        began = time.perf_counter()
        with scheduler.request() as request:
            texts = generate(engine, ids, given.tokens, given.groups)
        seconds = time.perf_counter() - began
        print(*(tokenizer.decode(text.tokens) for text in texts), sep="\n\n", end="\n\n")
        print(f"{len(ids) * given.tokens / seconds:.1f} tokens/s, {request.stats}")


if __name__ == "__main__":
    main()
