"""Every architecture on transformers' experts interface: its own logits, with its experts in a store."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import ARCHITECTURES, ONE_THREAD, build_model, greedy, logits, token_ids  # noqa: E402

from trilane.integrations.transformers import Decoder, load, offload  # noqa: E402

FLOAT_BOUND = 1e-4  # of the largest logit: float32 sums in another order
Q8_BOUND = 0.04  # of half of the rows: in a random model some routers choose between experts that are nearly equal
GATES = {
    "deepseek_v4": "silu_glu_clamped",
    "gemma4_text": "gelu_tanh_glu",
    "gpt_oss": "swiglu_oai",
    "nemotron_h": "relu2",
}


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


def median_relative(found, wanted):
    """Of each row's error against its size."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_loaded_model_keeps_its_logits_and_its_text(kind):
    model, ids = build_model(kind), token_ids()
    wanted, text = logits(model, ids), greedy(model, ids, 5)
    before = sum(p.numel() for p in model.parameters())
    with offload(model, device="host", config=ONE_THREAD) as handle:
        gates = {layer.gate.kind for layer in handle.store.layers}
        assert gates == {GATES.get(kind, "silu_glu")}
        kept = sum(p.numel() for p in model.parameters())
        weights = sum(layer.num_experts * layer.layout.source_nbytes // 4 for layer in handle.store.layers)
        assert kept == before - weights
        assert relative(logits(model, ids), wanted) < FLOAT_BOUND
        assert handle.stats().steps == handle.store.num_layers  # each layer's experts ran here, once
        assert torch.equal(greedy(model, ids, 5), text)
        decoder = Decoder(handle)
        assert torch.equal(decoder.generate(ids, 5), text)
        assert decoder._step.is_static == (kind != "deepseek_v4")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_checkpoint_goes_to_the_store_as_it_is_or_quantised(kind, tmp_path):
    model, ids = build_model(kind), token_ids()
    model.save_pretrained(tmp_path)
    wanted = logits(model, ids)
    with offload(model, device="host", config=ONE_THREAD) as handle:
        same_bits = logits(model, ids)
        arena = handle.store.arena.bytes[: handle.store.nbytes].copy()
    with load(tmp_path, device="host", config=ONE_THREAD, dtype=torch.float32) as handle:
        assert (handle.store.arena.bytes[: handle.store.nbytes] == arena).all()
        assert torch.equal(logits(handle.model, ids), same_bits)
    with load(tmp_path, formats="q8_0", device="host", config=ONE_THREAD, dtype=torch.float32) as handle:
        assert {layer.layout.down.name for layer in handle.store.layers} == {"q8_0"}
        assert 1e-4 < median_relative(logits(handle.model, ids), wanted) < Q8_BOUND
