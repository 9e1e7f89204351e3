"""A whole model of transformers at decode: experts in a store, a part of them in slots, the model as one CUDA graph.

Method: a model of the shape of Qwen3-30B-A3B with fewer layers and random weights. Its experts come from a GGUF file of
random valid blocks, written just before, so that loading it reads the page cache. Tokens are given (random ones, other
ones in each run), so that all ways to run the model do the same work; a run's time is the wall clock's from before its
prompt of one token until the GPU is done, medians of the runs. Embeddings are larger than what attention adds, so
that routing follows the token: about uniform, the worst case. "Trunk alone" is the same graph with experts that give
zeros. The limit is what a token would take if all misses ran at the rate that link and processor together reach on
this machine (joint_rate.py), nothing else overlapped, and hits cost nothing. ``--compile`` adds the decoder that
compiles the trunk.

    python -m benchmarks.bench_hf [--layers 12] [--fraction 0.25] [--tokens 128] [--runs 5] [--compile]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.bench_store import write_model
from trilane import ExpertStore
from trilane.cpu_kernels.formats import format_of
from trilane.integrations.transformers import Decoder, load
from trilane.probes.machine import describe_machine

NUM_BLOCKS = 4099  # distinct ones; a prime, so that rows and experts differ
WEIGHT_SIZE = 0.02
SIZES = {"embed_tokens": 1.0, "o_proj": 0.002}  # of other weights
NO_EXPERTS = "no_experts"


def say(text):
    print(text, flush=True)


def seconds(work):
    begin = time.perf_counter()
    found = work()
    return found, time.perf_counter() - begin


# ------------------------------------------------------------------------------------------------ the model
def model_config(args):
    return Qwen3MoeConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=8 * args.intermediate,
        moe_intermediate_size=args.intermediate, num_hidden_layers=args.layers, num_experts=args.experts,
        num_experts_per_tok=args.top_k, num_attention_heads=args.hidden // 64, num_key_value_heads=4, head_dim=128,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip


def random_trunk(config, dtype):
    """Weights of everything but the experts, by their names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    trunk = {}
    for name, tensor in model.state_dict().items():
        if ".experts." not in name:
            size = SIZES.get(name.split(".")[-2], WEIGHT_SIZE) * torch.randn(tensor.shape, generator=generator)
            trunk[name] = (torch.ones(tensor.shape) if tensor.ndim == 1 else size).to(dtype)
    return trunk


@functools.cache
def valid_bytes(kind, size):
    """That many bytes of blocks of finite weights."""
    fmt = format_of(kind)
    rng = np.random.default_rng(0)
    blocks = fmt.quantize(WEIGHT_SIZE * rng.standard_normal((NUM_BLOCKS, fmt.block_size), np.float32))
    return np.resize(blocks.reshape(-1), size).data


def load_store(args):
    """The experts, from a file in the page cache."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "experts.gguf"
        sizes = {"hidden": args.hidden, "intermediate": args.intermediate, "experts": args.experts}
        _, wrote = seconds(
            lambda: write_model(path, args.layers, args.format, args.format, bytes_of=valid_bytes, **sizes)
        )
        times = []
        for _ in range(3):
            store = None  # one at a time in memory
            store, took = seconds(lambda: ExpertStore.from_gguf(path))
            times.append(took)
    gb = store.nbytes / 1e9
    say(f"store: {store}; written in {wrote:.1f} s")
    say(f"loading: {gb / min(times):.1f} GB/s from the page cache at best, runs {gb_s(gb, times)} GB/s")
    return store


def gb_s(gb, times):
    return " ".join(f"{gb / took:.1f}" for took in times)


# --------------------------------------------------------------------------------------------------- running
def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(decoder, args, seed, tokens):
    """us a token of a run along random tokens."""
    generator = torch.Generator().manual_seed(seed)
    given = torch.randint(0, args.vocab, (tokens + 1,), generator=generator)

    def work():
        decoder.generate(given[None, :1], tokens, given=given[1:])
        finish()

    return 1e6 * seconds(work)[1] / tokens


def median_us(decoder, args, tokens, runs=None):
    """(median, all) us a token, after a run that captures and fills the slots."""
    run(decoder, args, 0, tokens)
    times = [run(decoder, args, 1 + k, tokens) for k in range(runs or args.runs)]
    return statistics.median(times), times


@torch.library.custom_op("trilane_bench::no_experts", mutates_args=())
def no_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts that give zeros; a compiler does not see that they need no router."""
    return torch.zeros_like(x)


@no_experts.register_fake
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def trunk_us(handle, args, compiled=False):
    """us a token without the experts."""
    if NO_EXPERTS not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NO_EXPERTS, lambda module, x, ids, weights: no_experts(x, ids, weights))
    before = handle.model.config._experts_implementation
    handle.model.set_experts_implementation(NO_EXPERTS)
    try:
        return median_us(Decoder(handle, compile=compiled), args, args.tokens)[0]
    finally:
        handle.model.set_experts_implementation(before)


def tell(name, us, times):
    say(f"{name}: {1e6 / us:.1f} tok/s, {us:.0f} us a token; runs {' '.join(f'{t:.0f}' for t in times)}")


def tell_misses(stats, args, store):
    """Missed bytes a token."""
    lanes = {name: lane.nbytes for name, lane in stats.lanes.items()}
    steps, expert = args.tokens * args.runs * args.layers, store.layers[0].layout.expert_nbytes
    missed = sum(nbytes for name, nbytes in lanes.items() if name != "hit")
    share = ", ".join(f"{name} {nbytes / max(1, sum(lanes.values())):.0%}" for name, nbytes in lanes.items())
    say(f"misses: {missed / expert / steps:.2f} of {args.top_k} experts a layer; bytes by lane: {share}")
    return missed / (args.tokens * args.runs)


def tell_memory(handle, args):
    free, total = torch.cuda.mem_get_info()
    slots = handle.scheduler._runner.num_slots * handle.scheduler._runner.device.slot_nbytes
    own = torch.cuda.max_memory_allocated()
    say(
        f"device memory: {(total - free) / 1e9:.2f} GB in use, of which torch at most {own / 1e9:.2f} and slots "
        f"{slots / 1e9:.2f}; the experts have {handle.store.nbytes / 1e9:.2f} GB"
    )


def tell_limit(handle, missed, trunk, us):
    from benchmarks.joint_rate import measure_joint_rate

    runner = handle.scheduler._runner
    rate = measure_joint_rate(runner.driver, runner.num_threads, most_nbytes=handle.store.nbytes)
    limit = missed / rate.both / 1e3 + trunk
    say(
        f"limit: {missed / 1e6:.1f} MB missed a token at {rate.both:.1f} GB/s ({rate.cpu_together:.1f} processor and "
        f"{rate.link_together:.1f} link, at once) and {trunk:.0f} us of trunk: {limit:.0f} us, "
        f"{1e6 / limit:.1f} tok/s; reached {limit / us:.0%}"
    )


def measure(handle, args, on_gpu, compiled=False):
    """The decoder's own speed, what it missed, its trunk's time and its limit."""
    decoder, begin = Decoder(handle, compile=compiled), time.perf_counter()
    run(decoder, args, 0, args.tokens)  # captures, and fills the slots
    if compiled:
        say(f"compiled: {decoder.compiled}, the first run took {time.perf_counter() - begin:.0f} s")
    with handle.scheduler.request() as request:
        times = [run(decoder, args, 1 + k, args.tokens) for k in range(args.runs)]
    us = statistics.median(times)
    tell("captured" if decoder.captured else f"not captured ({decoder.why_not})", us, times)
    missed = tell_misses(request.stats, args, handle.store)
    say(f"hit rate {request.stats.hit_rate:.1%}" if request.stats.hit_rate is not None else "no step was counted")
    alone = trunk_us(handle, args, compiled)
    say(f"trunk alone: {alone:.0f} us a token; experts cost {(us - alone) / args.layers:.1f} us a layer")
    if on_gpu:
        tell_limit(handle, missed, alone, us)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("layers", 12), ("hidden", 2048), ("intermediate", 768), ("experts", 128), ("top_k", 8), ("vocab", 32000),
        ("tokens", 128), ("runs", 5), ("eager_tokens", 24),
    ):  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--fraction", type=float, default=0.25, help="slots as a part of the experts")
    parser.add_argument("--compile", action="store_true", help="also with the model around the experts compiled")
    parser.add_argument("--format", default="q4_k")
    parser.add_argument("--device", default="auto", help="host, cuda or auto")
    parser.add_argument("--folder", help="where the file of experts is written; the system's temporary folder")
    return parser.parse_args()


def main():
    args, begin = parsed(), time.perf_counter()
    say(describe_machine().line)
    store, config = load_store(args), model_config(args)
    on_gpu = args.device != "host" and torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    trunk = random_trunk(config, dtype)
    options = {"cache": {"fraction": args.fraction}}
    handle = load(
        None, store=store, model_config=config, state_dict=trunk, dtype=dtype, device=args.device, config=options
    )
    say(f"ready after {time.perf_counter() - begin:.0f} s: {handle.scheduler.profile.machine}")
    with handle:
        measure(handle, args, on_gpu)
        tell("eager", *median_us(Decoder(handle, capture=False), args, args.eager_tokens))
        if on_gpu:
            tell_memory(handle, args)
        if args.compile:
            measure(handle, args, on_gpu, compiled=True)
        say(f"not used: {dict(handle.stats().inactive)}")
    say(f"all in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
