"""The demo: text of the bundled model, then a conversation's routing through the live scheduler, lane by lane.

A store with gpt-oss-20b's shape in miniature (24 layers, 32 experts, top-4, MXFP4, its gate and biases; random
weights, every expert another one) serves the routing of one conversation. It runs with everything resident, with
each lane alone and with all lanes, and every output must have the bits of the first run. The text is generated in the
same ways, where the extra for models is installed (integrations/generation/text_demo.py).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typer import BadParameter

from trilane.commands.interrupt import run_program
from trilane.commands.numbers import number, whole
from trilane.commands.text_extra import missing_for_text
from trilane.config import Config
from trilane.cpu_kernels.formats import format_of
from trilane.engine import ExpertScheduler
from trilane.expert import HIT
from trilane.probes.machine import describe_machine
from trilane.shared_cores import sharing_text
from trilane.stats import Stats
from trilane.step_bench import limit_us
from trilane.store import ExpertStore, Gate
from trilane.traces.trace import Trace
from trilane.traces.trace_import import bundled_trace

SEED = 20
SCALE_EXPONENTS = (118, 121)  # E8M0 bytes of weights of about 0.01 to 0.04
# Slower than one core computes, so that a lane that sleeps to its played end has done its work by then.
PLAYED = {"link_gb_s": 1.0, "link_fix_us": 10.0, "zero_copy_gb_s": 0.9, "hit_gb_s": 6.0, "cpu_gb_s": 1.0}
OWN_SPEED: dict[str, float] = {}


@dataclass(frozen=True)
class Run:
    """One pass over the conversation."""

    name: str
    digest: str
    stats: Stats
    limit_us: float
    num_workers: int
    num_cpus: int


def make_store(trace: Trace, hidden: int, intermediate: int) -> ExpertStore:
    """Random MXFP4 experts with biases, no two alike."""
    rng, fmt, num_experts = np.random.default_rng(SEED), format_of("mxfp4"), trace.meta.num_experts[0]

    def matrix(rows: int, columns: int) -> np.ndarray:
        blocks = rng.integers(0, 256, (num_experts, rows, columns // fmt.block_size, fmt.block_nbytes), np.uint8)
        blocks[..., 0] = rng.integers(*SCALE_EXPONENTS, blocks.shape[:-1], np.uint8)
        return blocks.reshape(num_experts, rows, -1)

    def bias(size: int) -> np.ndarray:
        return rng.standard_normal((num_experts, size)).astype(np.float32) * np.float32(0.02)

    layers = (
        {
            "gate": matrix(intermediate, hidden),
            "up": matrix(intermediate, hidden),
            "down": matrix(hidden, intermediate),
            "gate_bias": bias(intermediate),
            "up_bias": bias(intermediate),
            "down_bias": bias(hidden),
        }
        for _ in range(trace.meta.num_layers)
    )
    return ExpertStore.from_arrays(layers, formats="mxfp4", gate=Gate("swiglu_oai"))


def run_conversation(
    name: str, store: ExpertStore, trace: Trace, tokens: int, options: Mapping[str, Any], *, warm: bool = False
) -> Run:
    """Every layer of every token through one scheduler; ``warm``: once before, unmeasured."""
    with ExpertScheduler(store, config=Config.from_mapping(options)) as scheduler:
        if warm:
            _pass(scheduler, trace, tokens)
        with scheduler.request() as request:
            digest, limit = _pass(scheduler, trace, tokens)
        runner = scheduler._runner
        return Run(name, digest, request.stats, limit, runner.num_threads, runner.device.budget.num_concurrent)


def _pass(scheduler: ExpertScheduler, trace: Trace, tokens: int) -> tuple[str, float]:
    """A digest of all outputs, and the sum of the steps' limits in us."""
    rng, digest, limit = np.random.default_rng(SEED), hashlib.blake2b(digest_size=16), 0.0
    out = np.empty((1, scheduler.store.hidden), np.float32)
    ids, weights = trace.tokens()
    assert weights is not None
    for token in range(tokens):
        hidden = rng.standard_normal(out.shape).astype(np.float32)
        for layer in range(trace.meta.num_layers):
            scheduler.forward(layer, hidden, ids[token, layer][None], weights[token, layer][None], out=out)
            digest.update(out.tobytes())
            limit += _step_limit_us(scheduler, layer)
            hidden = hidden + out
            hidden /= np.sqrt(np.mean(hidden * hidden), dtype=np.float32)
    return digest.hexdigest(), limit


def _step_limit_us(scheduler: ExpertScheduler, layer: int) -> float:
    explanation = scheduler.explain(layer)
    assert explanation is not None
    sizes = scheduler.store.layers[layer].layout.shard_nbytes
    hit = missed = 0
    for expert in explanation.plan.experts:
        for lane, nbytes in zip(expert.lanes, sizes.tolist(), strict=True):
            hit, missed = (hit + nbytes, missed) if lane == HIT else (hit, missed + nbytes)
    return limit_us(scheduler._runner.rates[layer], hit, missed)


def run_demo(tokens: int, hidden: int, slots: float, played: Mapping[str, float]) -> bool:
    """Run everything and print it; whether all outputs had the same bits."""
    trace = bundled_trace()
    tokens = min(tokens, len(trace.tokens()[0]))
    print(f"machine: {describe_machine().line}")
    meta = trace.meta
    print(f"routing: {tokens} tokens of a conversation of {meta.model} ({meta.licence}; {meta.source})")
    start = time.perf_counter()
    store = make_store(trace, hidden, hidden)
    print(f"store:   {store}, MXFP4, hidden {hidden}, made in {time.perf_counter() - start:.1f} s")
    print(f"speeds:  {_describe_speeds(played)}")
    print("running: the first time, the code is compiled and cached, which takes a minute or two ...", flush=True)
    base: dict[str, Any] = {"host_device": dict(played), "cache": {"fraction": slots}}
    resident = {**base, "cache": {"fraction": 1.0}, "policy": {"force": "stream"}}
    runs = [run_conversation("all resident", store, trace, tokens, resident, warm=True)]
    for name, policy in (
        ("stream alone", {"force": "stream"}),
        ("zero-copy alone", {"force": "zero_copy"}),
        ("CPU alone", {"force": "cpu"}),
        ("all lanes", {}),
    ):
        runs.append(run_conversation(name, store, trace, tokens, {**base, "policy": policy}))
    _print_runs(runs, slots)
    return _print_verdict(runs)


def _describe_speeds(played: Mapping[str, float]) -> str:
    if not played:
        return "the machine's own; lanes share its cores and its memory"
    rates = ", ".join(f"{name.removesuffix('_gb_s')} {rate:g} GB/s" for name, rate in played.items() if "gb_s" in name)
    return f"PLAYED, lanes sleep to act as a slower machine's: {rates}"


def _print_runs(runs: list[Run], slots: float) -> None:
    print(f"\nslots for {slots:.0%} of the experts (the first run: all); us per layer-step, means")
    print(f"{'run':16s} {'measured':>9s} {'predicted':>9s} {'limit':>7s} {'hit rate':>8s}")
    for run in runs:
        s = run.stats
        print(
            f"{run.name:16s} {s.step_us / s.steps:9.0f} {s.predicted_step_us / s.steps:9.0f} "
            f"{run.limit_us / s.steps:7.0f} {s.hit_rate or 0:8.1%}"
        )
    stats = runs[-1].stats
    print(f"\n{runs[-1].name}, by lane")
    print(f"{'lane':10s} {'experts':>8s} {'shards':>8s} {'GB':>7s} {'predicted ms':>12s} {'measured ms':>12s}")
    for name, lane in stats.lanes.items():
        print(
            f"{name:10s} {lane.experts:8d} {lane.shards:8d} {lane.nbytes / 1e9:7.2f} "
            f"{lane.predicted_us / 1e3:12.1f} {lane.observed_us / 1e3:12.1f}"
        )
    print(f"fills {stats.fills}, evictions {stats.evictions}, planning {stats.plan_us / stats.steps:.1f} us a step")


def _print_verdict(runs: list[Run]) -> bool:
    best = min(runs[1:-1], key=lambda run: run.stats.step_us)
    ratio = runs[-1].stats.step_us / best.stats.step_us
    print(f"\nall lanes took {ratio:.2f} x the best single lane ({best.name})")
    reason = sharing_text(runs[-1].num_workers, runs[-1].num_cpus, ratio)
    if reason is not None and not runs[-1].stats.played:  # lanes that are played sleep most of the time
        print(reason)
    different = [run.name for run in runs if run.digest != runs[0].digest]
    if different:
        print(f"FAILED: outputs differ from the all-resident run: {', '.join(different)}")
    else:
        outputs = runs[0].stats.steps
        print(f"all {outputs} outputs of every run are bit-identical to the all-resident run ({runs[0].digest})")
    return not different


def main(arguments: list[str] | None = None) -> int:
    """Command line of the demo; 0 if every run gave the same bits."""
    parser = argparse.ArgumentParser(prog="python -m trilane.demo", description=__doc__)
    for name, parse, value, text in (
        ("--tokens", whole(1, 96), 96, "tokens of the conversation, at most 240 (default: 96)"),
        ("--hidden", whole(32, 960), 960, "hidden and intermediate size, a multiple of 32 (default: 960)"),
        ("--slots", number(0, 0.375, most=1), 0.375, "slots as a part of all experts, 0 to 1 (default: 0.375)"),
        ("--text-tokens", whole(1, 64), 64, "tokens of the text (default: 64)"),
    ):
        parser.add_argument(name, type=_for_argparse(parse), default=value, metavar="N", help=text)
    parser.add_argument("--own-speed", action="store_true", help="play no rates: the machine as it is")
    parser.add_argument("--no-text", action="store_true", help="leave the text out; it needs torch and transformers")
    options = parser.parse_args(arguments)
    if options.hidden % 32:
        parser.error(f"--hidden: {options.hidden} must be a multiple of 32: give {-(-options.hidden // 32) * 32}")
    played = OWN_SPEED if options.own_speed else PLAYED
    is_same = options.no_text or _run_text(options.text_tokens)
    return 0 if run_demo(options.tokens, options.hidden, options.slots, played) and is_same else 1


def _for_argparse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A number's rule and remedy as argparse shows them."""

    def take(text: str) -> Any:
        try:
            return parse(text)
        except BadParameter as error:
            raise argparse.ArgumentTypeError(error.message) from None

    return take


def _run_text(num_tokens: int) -> bool:
    """The part with text; without torch and transformers, a line that says how to have it."""
    missing = missing_for_text()
    if missing:
        print(f"text:    left out, since {', '.join(missing)} is not installed (pip install 'trilane[hf]')\n")
        return True
    from trilane.integrations.generation.text_demo import run_text_demo

    return run_text_demo(num_tokens)


if __name__ == "__main__":
    run_program("demo", lambda: sys.exit(main()))
