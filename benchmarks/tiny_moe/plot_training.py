"""The loss curve of the tiny model, and its experts' use by domain, from what `train.py` wrote.

python benchmarks/tiny_moe/plot_training.py     writes loss.png and prints the table beside it
"""

import csv
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).parent


def draw_loss() -> None:
    with (HERE / "loss.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    figure, axes = plt.subplots(figsize=(6, 3.4), dpi=90)
    tokens = [row["tokens"] / 1e6 for row in rows]
    axes.plot(tokens, [row["loss"] for row in rows], lw=1, label="one batch of training text")
    axes.plot(tokens, [row["held_out_loss"] for row in rows], lw=1.6, label="held-out text, mean of ten domains")
    axes.set(xlabel="million tokens", ylabel="nats a token", ylim=(2, 6))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "loss.png")


def print_use() -> None:
    """For each domain: held-out loss, and the experts most used in each layer with their share of tokens."""
    report = json.loads((HERE / "report.json").read_text())
    for domain, found in report["held_out"].items():
        layers = []
        for shares in found["use"]:
            order = sorted(range(len(shares)), key=lambda expert: -shares[expert])[:3]
            layers.append(" ".join(f"{expert}:{shares[expert]:.0%}" for expert in order))
        print(f"| {domain} | {found['loss']:.2f} | " + " | ".join(layers) + " |")


if __name__ == "__main__":
    draw_loss()
    print_use()
