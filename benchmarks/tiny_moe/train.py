"""Train the tiny model within a given time, and save it with what is to be known of it.

    python train.py --data DIR --out DIR --seconds 280 [--device cuda] [--batch 128] [--length 512]

DIR holds what `build_corpus.py` wrote. The learning rate follows the clock, so that training ends well whatever the
speed. Written: `weights.safetensors.N` (float16, parts of 15 MiB), `loss.csv`, `report.json` (held-out loss and
expert use by domain, speed, comparison with transformers) and `samples.txt`.
"""

import argparse
import csv
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import CONFIG, TinyMoe
from torch import Tensor

PART_NBYTES = 15 * 2**20


class Corpus:
    """Tokens by domain, on the device: random windows to train on, consecutive ones held out."""

    def __init__(self, folder: Path, device: str):
        self.facts = json.loads((folder / "corpus.json").read_text())
        self.domains = list(self.facts["train"])
        self.train, self.held = (self._read(folder / f"{name}.xz", device) for name in ("train", "held"))
        counts = torch.tensor([self.facts["train"][domain]["tokens"] for domain in self.domains], dtype=torch.float64)
        self.starts = torch.cat((torch.zeros(1, dtype=torch.float64), counts.cumsum(0))).long().to(device)
        self.shares = (counts**0.75 / (counts**0.75).sum()).to(device)

    @staticmethod
    def _read(path: Path, device: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(lzma.decompress(path.read_bytes()), "<u2").astype(np.int32)).to(device)

    def batch(self, rows: int, length: int) -> Tensor:
        """[rows, length + 1] windows, domains drawn by their share."""
        domain = torch.multinomial(self.shares, rows, replacement=True)
        first, last = self.starts[domain], self.starts[domain + 1] - length - 1
        begin = first + (torch.rand(rows, device=domain.device, dtype=torch.float64) * (last - first)).long()
        return self.train[begin[:, None] + torch.arange(length + 1, device=domain.device)].long()

    def held_out(self, domain: str, length: int) -> Tensor:
        """[rows, length + 1] consecutive windows of the domain's held-out documents."""
        counts = [self.facts["held"][name]["tokens"] for name in self.domains]
        at = self.domains.index(domain)
        tokens = self.held[sum(counts[:at]) : sum(counts[: at + 1])]
        rows = max(1, (len(tokens) - 1) // length)
        index = torch.arange(rows, device=tokens.device)[:, None] * length + torch.arange(
            length + 1, device=tokens.device
        )
        return tokens[index.clamp(max=len(tokens) - 1)].long()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


@torch.no_grad()
def held_out_report(model: TinyMoe, corpus: Corpus, length: int, autocast, most_rows: int) -> dict:
    """Loss per token and share of the tokens per expert and layer, by domain."""
    report = {}
    for domain in corpus.domains:
        windows = corpus.held_out(domain, length)[:most_rows]
        losses, uses = [], []
        for rows in windows.split(16):
            with autocast:
                logits, use, _ = model(rows[:, :-1])
            losses.append(cross_entropy(logits, rows[:, 1:]) * len(rows))
            uses.append(use * len(rows))
        loss = (torch.stack(losses).sum() / len(windows)).item()
        report[domain] = {"loss": loss, "use": (torch.stack(uses).sum(0) / len(windows)).tolist()}
    return report


def learning_rate(progress: float, peak: float) -> float:
    """Linear over the first 2 % of the time, then a cosine to 1 % of the peak."""
    if progress < 0.02:
        return peak * (0.05 + 0.95 * progress / 0.02)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.02) / 0.98))))


def optimizer_of(model: TinyMoe, peak: float, device: str) -> torch.optim.Optimizer:
    wide = [weight for weight in model.parameters() if weight.dim() > 1]
    flat = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")


def step_of(model: TinyMoe, optimizer: torch.optim.Optimizer, rows: Tensor, balance_share: float, autocast) -> Tensor:
    with autocast:
        logits, _, balance = model(rows[:, :-1])
        loss = cross_entropy(logits, rows[:, 1:])
    (loss + balance_share * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def compiled(model: TinyMoe, corpus: Corpus, arguments, autocast) -> bool:
    """Compile the layers and try a backward pass; without a working compiler, the model stays as it is."""
    try:
        for layer in model.model.layers:
            layer.compile()
        with autocast:
            logits, _, _ = model(corpus.batch(arguments.batch, arguments.length)[:, :-1])
        logits.float().mean().backward()
        torch.cuda.synchronize()
    except Exception as problem:  # whatever a missing or broken compiler raises: speed is lost, nothing else
        print(f"not compiled: {type(problem).__name__}: {str(problem)[:500]}", flush=True)
        for layer in model.model.layers:
            layer._compiled_call_impl = None
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


def train(model: TinyMoe, plain: TinyMoe, corpus: Corpus, arguments, begun: float, autocast) -> list[dict]:
    """Steps until the time is over; `plain` ends with the weights whose held-out loss was least."""
    optimizer = optimizer_of(model, arguments.lr, arguments.device)
    started, rows_log, step, next_report = time.perf_counter(), [], 0, 0.0
    best, kept = math.inf, plain.state_dict()
    length_s = arguments.seconds - (started - begun)
    while (progress := (time.perf_counter() - started) / length_s) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.lr)
        balance_share = 0.001 + 0.009 * max(0.0, 1 - 10 * progress)
        windows = corpus.batch(arguments.batch, arguments.length)
        loss = step_of(model, optimizer, windows, balance_share, autocast)
        step += 1
        if step % 2 == 0 and arguments.device == "cuda":
            torch.cuda.synchronize()
        if progress >= next_report:
            held = held_out_report(plain, corpus, arguments.length, autocast, most_rows=min(16, arguments.held_rows))
            mean = sum(entry["loss"] for entry in held.values()) / len(held)
            row = {
                "step": step, "seconds": round(time.perf_counter() - started, 2),
                "tokens": step * arguments.batch * arguments.length, "lr": optimizer.param_groups[0]["lr"],
                "loss": loss.item(), "held_out_loss": mean,
            }  # fmt: skip
            rows_log.append(row)
            if mean < best and progress > 0.3:
                best, kept = mean, {name: weight.clone() for name, weight in plain.state_dict().items()}
            print(row, flush=True)
            next_report += 0.01 if next_report < 0.05 else 0.025
    held = held_out_report(plain, corpus, arguments.length, autocast, most_rows=min(16, arguments.held_rows))
    mean = sum(entry["loss"] for entry in held.values()) / len(held)
    rows_log.append({**rows_log[-1], "step": step, "seconds": round(time.perf_counter() - started, 2),
                     "tokens": step * arguments.batch * arguments.length, "held_out_loss": mean})  # fmt: skip
    print(rows_log[-1], f"best before: {best}", flush=True)
    if best < mean:
        plain.load_state_dict(kept)
    return rows_log


@torch.no_grad()
def samples_of(model: TinyMoe, corpus: Corpus, folder: Path, autocast, num_tokens: int) -> str:
    """For each domain: 24 tokens of a held-out document, continued greedily and at temperature 0.7."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = torch.cat([corpus.held_out(domain, 24)[:1, :24] for domain in corpus.domains])
    texts = []
    for temperature in (0.0, 0.7):
        ids = prompts
        for _ in range(num_tokens):
            with autocast:
                logits = model(ids)[0][:, -1].float()
            drawn = torch.multinomial((logits / (temperature or 1.0)).softmax(-1), 1)
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True) if temperature == 0 else drawn), 1)
        for domain, row in zip(corpus.domains, ids.tolist(), strict=True):
            given, told = tokenizer.decode(row[:24]), tokenizer.decode(row[24:])
            texts.append(f"=== {domain}, temperature {temperature}\n{given}[...]{told}\n")
    return "\n".join(texts)


def save_weights(model: TinyMoe, out: Path) -> None:
    """One safetensors file of float16 in parts: `cat weights.safetensors.*` makes it whole."""
    from safetensors.torch import save

    half = {name: weight.to("cpu", torch.float16).contiguous() for name, weight in model.state_dict().items()}
    data = save(half)
    for at, begin in enumerate(range(0, len(data), PART_NBYTES)):
        (out / f"weights.safetensors.{at}").write_bytes(data[begin : begin + PART_NBYTES])


@torch.no_grad()
def difference_from_transformers(model: TinyMoe, ids: Tensor) -> dict:
    """Largest difference of the logits from Qwen3MoeForCausalLM with the same weights, all in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(ids.device).eval()
    missing, unexpected = reference.load_state_dict(model.state_dict(), strict=False)
    with torch.autocast(ids.device.type, enabled=False):
        ours, theirs = model(ids)[0].float(), reference(ids).logits.float()
    return {
        "missing": [name for name in missing if name != "lm_head.weight"],
        "unexpected": list(unexpected),
        "largest_difference": (ours - theirs).abs().max().item(),
        "largest_logit": theirs.abs().max().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=280, help="for compiling and training together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--sample-tokens", type=int, default=160)
    parser.add_argument("--held-rows", type=int, default=64, help="windows per domain of the last evaluation, at most")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    device = arguments.device
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False)
    corpus = Corpus(arguments.data, device)
    model = TinyMoe(CONFIG, arguments.dropout).to(device).train()
    plain = TinyMoe(CONFIG).to(device).eval()
    plain.load_state_dict(model.state_dict(), assign=True)  # the same storage: never compiled, for evaluation
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(
        f"{num_parameters:,} parameters, {len(corpus.train):,} tokens, {time.perf_counter() - begun:.1f} s", flush=True
    )
    is_compiled = device == "cuda" and not arguments.no_compile and compiled(model, corpus, arguments, autocast)
    print(f"compiled: {is_compiled}, {time.perf_counter() - begun:.1f} s", flush=True)
    log = train(model, plain, corpus, arguments, begun, autocast)
    save_weights(plain, arguments.out)
    with (arguments.out / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, log[0].keys())
        writer.writeheader()
        writer.writerows(log)
    report = {"config": CONFIG, "parameters": num_parameters, "compiled": is_compiled, "torch": torch.__version__}
    report["steps"], report["tokens"] = log[-1]["step"], log[-1]["tokens"]
    report["held_out"] = held_out_report(plain, corpus, arguments.length, autocast, arguments.held_rows)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "samples.txt").write_text(
        samples_of(plain, corpus, arguments.data, autocast, arguments.sample_tokens)
    )
    torch.set_float32_matmul_precision("highest")
    report["transformers"] = difference_from_transformers(plain, corpus.held_out(corpus.domains[0], 128)[:2, :128])
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report["transformers"], f"{time.perf_counter() - begun:.1f} s in all", flush=True)
    print({domain: round(entry["loss"], 3) for domain, entry in report["held_out"].items()}, flush=True)


if __name__ == "__main__":
    main()
