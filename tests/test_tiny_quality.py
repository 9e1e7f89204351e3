"""What the experts' arithmetic costs in quality: perplexity of the tiny model on text that it has not seen.

Offloaded, its experts are computed from Q4_K blocks by the integer kernels; plain transformers computes the same
weights dequantised, in float32.
"""

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import numpy as np  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from trilane.bundled_model import tiny_path  # noqa: E402
from trilane.integrations.generation import open_text_model  # noqa: E402
from trilane.integrations.gguf.architectures import Facts, architecture_of  # noqa: E402
from trilane.integrations.gguf.config import config_of  # noqa: E402
from trilane.integrations.gguf.trunk import read_tensor, read_trunk  # noqa: E402
from trilane.readers.gguf import open_gguf  # noqa: E402

HELD_OUT = Path(__file__).parent.parent / "benchmarks" / "tiny_moe" / "held_out"
WINDOW = 512
pytestmark = pytest.mark.usefixtures("one_torch_thread")
MOST_APART = 0.005
# Measured, plain transformers in float32; a model or a tokenizer that is read wrongly is far from these.
KNOWN = {"computing": 25.61, "database": 10.93, "scripture": 26.17}


@pytest.fixture(scope="module")
def plain():
    """Qwen3MoeForCausalLM of transformers with every weight of the file in float32."""
    files = open_gguf(tiny_path())
    facts = Facts(files)
    row = architecture_of(facts)
    config = config_of(facts, row)
    weights = read_trunk(files, row, config, torch.float32)
    for block in range(config.num_hidden_layers):
        gate, up, down = (
            read_tensor(files, files.tensors[f"blk.{block}.ffn_{one}_exps.weight"]) for one in ("gate", "up", "down")
        )
        stem = f"model.layers.{block}.mlp.experts"
        weights[f"{stem}.gate_up_proj"] = torch.from_numpy(np.concatenate((gate, up), 1))
        weights[f"{stem}.down_proj"] = torch.from_numpy(down)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


@pytest.fixture(scope="module")
def offloaded():
    with open_text_model("tiny", slots=4, device="host").handle as handle:
        yield handle.model


@pytest.fixture(scope="module")
def tokenizer():
    from trilane.integrations.gguf import gguf_tokenizer

    return gguf_tokenizer(tiny_path())


@torch.no_grad()
def perplexity(model, ids):
    """Of consecutive windows, each token but a window's first one predicted."""
    losses = []
    for window in ids.split(WINDOW):
        logits = model(window[None], use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


@pytest.mark.parametrize("domain", sorted(KNOWN))
def test_offloaded_perplexity_is_that_of_the_dequantised_weights(plain, offloaded, tokenizer, domain):
    ids = torch.tensor(tokenizer((HELD_OUT / f"{domain}.txt").read_text()).input_ids)
    wanted, found = perplexity(plain, ids), perplexity(offloaded, ids)
    print(f"{domain}: {len(ids)} tokens, perplexity {wanted:.3f} dequantised in float32, {found:.3f} offloaded")
    assert wanted == pytest.approx(KNOWN[domain], rel=0.01)
    assert abs(found / wanted - 1) <= MOST_APART


def test_the_tokenizer_of_the_file_takes_text_apart_and_puts_it_together(tokenizer):
    for file in HELD_OUT.glob("*.txt"):
        text = file.read_text()
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text) / 2.2
    odd = "tabs\tand  spaces\n\n  naïve café — 日本 \U0001f600 don't 12345"
    assert tokenizer.decode(tokenizer(odd).input_ids) == odd
