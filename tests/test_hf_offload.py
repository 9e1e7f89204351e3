"""offload and attach: what comes through the experts interface, and which models and stores are refused."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from expert_cases import random_store  # noqa: E402
from hf_models import ONE_THREAD, build_model, greedy, logits, token_ids  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from trilane.errors import ClosedError, ConfigError, DeviceError, StoreError, TrilaneError  # noqa: E402
from trilane.integrations.transformers import attach, handle_of, offload  # noqa: E402
from trilane.integrations.transformers.experts import is_experts  # noqa: E402
from trilane.store import Gate  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 32


@pytest.fixture
def offloaded():
    """Offloads on the host device, and closes what was opened."""
    opened = []

    def take(model, **options):
        opened.append(offload(model, device="host", config=ONE_THREAD, **options))
        return opened[-1]

    yield take
    for handle in opened:
        handle.close()


def experts_of(model):
    return next(module for module in model.modules() if is_experts(module))


# ------------------------------------------------------------------------------------- through the interface
def steps(rng, rows, top_k=3):
    """Hidden rows, ids of which some are none and some come twice in a row, and weights that are 0 for none."""
    ids = torch.from_numpy(rng.integers(0, EXPERTS + 1, (rows, top_k)))
    ids[rows // 2 :, 1] = ids[rows // 2 :, 0]
    weights = torch.from_numpy(rng.random((rows, top_k), np.float32)).masked_fill(ids == EXPERTS, 0)
    return torch.from_numpy(rng.standard_normal((rows, HIDDEN), np.float32)), ids, weights


def by_hand(module, x, ids, weights):
    """The experts one by one, from the module's own weights and activation."""
    y = torch.zeros_like(x)
    for row in range(len(x)):
        for k, expert in enumerate(ids[row].tolist()):
            if expert < EXPERTS:
                h = module._apply_gate((module.gate_up_proj[expert] @ x[row])[None])[0]
                y[row] += weights[row, k] * (module.down_proj[expert] @ h)
    return y


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_skipped_repeated_and_no_rows(offloaded, rows):
    model = build_model("qwen3_moe")
    module, arguments = experts_of(model), steps(np.random.default_rng(rows), rows)
    with torch.no_grad():
        wanted = by_hand(module, *arguments)
        offloaded(model)
        found = module(*arguments)
    assert found.shape == (rows, HIDDEN) and found.dtype == torch.float32
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_and_router_weights_of_each_type(offloaded, dtype):
    model = build_model("qwen3_moe", dtype)
    module, (x, ids, weights) = experts_of(model), steps(np.random.default_rng(1), 5)
    with torch.no_grad():
        wanted = by_hand(module, x.to(dtype), ids, weights.to(dtype)).float()
        offloaded(model)
        found = module(x.to(dtype), ids.int(), weights.to(dtype))
        strided = module(x.to(dtype).T.contiguous().T, ids.T.contiguous().T, weights.to(dtype))
    assert found.dtype == dtype and torch.equal(found, strided)
    assert torch.allclose(found.float(), wanted, rtol=0.05, atol=0.05 if dtype != torch.float32 else 1e-4)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_batches_that_are_padded_at_their_left(offloaded, kind):
    model, ids = build_model(kind), token_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    wanted, text = logits(model, ids, attention_mask=mask), greedy(model, ids, 4, attention_mask=mask)
    offloaded(model)
    found = logits(model, ids, attention_mask=mask)
    assert torch.allclose(found[mask == 1], wanted[mask == 1], rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy(model, ids, 4, attention_mask=mask), text)


def test_the_cache_of_slots_changes_no_bit(offloaded):
    ids, found = token_ids(), []
    for cache in ({"slots": 0}, {"fraction": 1.0}):
        with offload(build_model("qwen3_moe"), device="host", config=ONE_THREAD | {"cache": cache}) as handle:
            found += [logits(handle.model, ids), logits(handle.model, ids)]
            assert (handle.stats().hit_rate > 0) == (cache != {"slots": 0})
    assert all(torch.equal(other, found[0]) for other in found)


def test_threads_may_share_a_model(offloaded):
    model, ids = build_model("qwen3_moe"), token_ids()
    offloaded(model)
    wanted, found = logits(model, ids), {}
    threads = [threading.Thread(target=lambda k=k: found.update({k: logits(model, ids)})) for k in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(found[k], wanted) for k in range(3))


@pytest.mark.parametrize("formats", ["mxfp4", "q4_k", {"down": "q6_k", "up": "q4_k", "gate": "q4_k"}])
def test_formats_with_rows_of_whole_blocks(offloaded, formats):
    model, ids = build_model("qwen3_moe", hidden_size=256, moe_intermediate_size=256), token_ids()
    wanted = logits(model, ids)
    store = offloaded(model, formats=formats).store
    names = {"gate": formats, "up": formats, "down": formats} if isinstance(formats, str) else formats
    layout = store.layers[0].layout
    assert {"gate": layout.gate.name, "up": layout.up.name, "down": layout.down.name} == names
    error = (logits(model, ids) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 1e-3 < float(error.median()) < (0.4 if formats == "mxfp4" else 0.2)


# ---------------------------------------------------------------------------------------------- stores and models
def test_a_store_that_exists_gives_the_bits_of_the_one_that_is_made(offloaded):
    first = offloaded(build_model("gpt_oss"))
    wanted = logits(first.model, token_ids())
    model = build_model("gpt_oss")
    for module in filter(is_experts, model.modules()):
        module.to("meta")  # nothing is read of it
    with attach(model, first.store, device="host", config=ONE_THREAD) as handle:
        assert handle.store is first.store and handle.model is model and handle_of(model) is handle
        assert torch.equal(logits(model, token_ids()), wanted)
        assert "GptOss" in repr(handle)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": 3}, "has 3 layers, but Qwen3MoeForCausalLM has 2 layers with experts"),
        ({"experts": 4}, "num_experts is 4, but model.layers.0.mlp.experts (Qwen3MoeExperts) has 8"),
        ({"hidden": 32}, "hidden is 32, but"),
        ({"intermediate": 64}, "intermediate is 64, but"),
        ({"kind": "gelu_tanh_glu"}, "gate is gelu_tanh_glu, but"),
        ({"bias": True}, "biases is True, but"),
    ],
)
def test_stores_of_other_models_are_refused_and_nothing_is_lost(changes, text):
    model = build_model("qwen3_moe")
    wanted = logits(model, token_ids())
    sizes = {"layers": 2, "experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    with pytest.raises(StoreError) as raised:
        attach(model, random_store("q8_0", **(sizes | changes)), device="host")
    assert text in str(raised.value)
    assert torch.equal(logits(model, token_ids()), wanted)


def test_numbers_of_a_gate_are_compared():
    store = random_store("q8_0", "swiglu_oai", layers=2, experts=EXPERTS, hidden=HIDDEN, intermediate=96)
    object.__setattr__(store.layers[1], "gate", Gate("swiglu_oai", limit=5.0))
    with pytest.raises(StoreError, match="layer 1: gate is swiglu_oai alpha 1.702 limit 5, but .* limit 7"):
        attach(build_model("gpt_oss"), store, device="host")


TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("llama4_text", {"num_local_experts": 2, "moe_layers": [0]}, "Llama4TextExperts"),
        (
            "dbrx",
            {"d_model": 64, "n_heads": 4, "n_layers": 1, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
            "DbrxExperts",
        ),
        ("llama", {}, "LlamaForCausalLM has no experts"),
    ],
)
def test_models_that_are_not_on_the_interface_are_named(kind, changes, text):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(TINY | changes)))
    with pytest.raises(StoreError, match=text):
        offload(model, device="host")


def test_what_cannot_be_done_is_said_before_anything_is_lost():
    model = build_model("qwen3_moe")
    wanted = logits(model, token_ids())
    with pytest.raises(StoreError, match="q4_k.*choose another format"):
        offload(model, formats="q4_k", device="host")  # rows of 64
    with pytest.raises(StoreError, match="no_such"):
        offload(model, formats="no_such", device="host")
    with pytest.raises(ConfigError, match="cache.slot"):
        offload(model, config={"cache": {"slot": 3}}, device="host")
    with pytest.raises(DeviceError, match="'tpu'"):
        offload(model, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="torch sees no GPU"):
            offload(model, device="cuda")
    assert torch.equal(logits(model, token_ids()), wanted)
    with pytest.raises(TrilaneError, match="has its own experts"):
        handle_of(model)


def test_a_model_without_weights_has_none_to_take():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_model("qwen3_moe").config)
    with pytest.raises(StoreError, match="on the meta device.*attach a store"):
        offload(model, device="host")


# ------------------------------------------------------------------------------------------------ afterwards
def test_an_offloaded_model_is_neither_saved_nor_trained_nor_offloaded_again(offloaded, tmp_path):
    model = build_model("qwen3_moe")
    offloaded(model)
    with pytest.raises(TrilaneError, match="a state dict would be without"):
        model.save_pretrained(tmp_path)
    with pytest.raises(TrilaneError, match="cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(StoreError, match="its parameters are empty"):
        offloaded(model)
    found = model(token_ids(), use_cache=False).logits  # gradients are on, as they are unless told
    assert torch.equal(found.detach(), logits(model, token_ids()))
    with pytest.raises(TrilaneError, match="no gradients"):
        found.sum().backward()


def test_a_copied_model_shares_the_experts_and_a_closed_one_says_so(offloaded):
    model = build_model("qwen3_moe")
    handle = offloaded(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, token_ids()), logits(model, token_ids()))
    assert handle_of(twin) is handle
    handle.close()
    handle.close()
    with pytest.raises(ClosedError, match="has been closed"):
        logits(model, token_ids())


def test_a_model_of_the_same_configuration_has_no_store(offloaded):
    model = build_model("qwen3_moe")
    offloaded(model)
    other = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(TrilaneError, match=r"no store is attached.*offload\(model\)"):
        logits(other, token_ids())
    other.set_experts_implementation("eager")
    assert logits(other, token_ids()).shape == (2, 11, 128)


def test_each_layers_tensors_are_freed_as_it_is_packed():
    model, alive = build_model("qwen3_moe"), []
    tensors = [weakref.ref(p) for module in filter(is_experts, model.modules()) for p in module.parameters()]
    count = lambda *now: alive.append(sum(tensor() is not None for tensor in tensors))  # noqa: E731
    with offload(model, device="host", config=ONE_THREAD, progress=count):
        assert alive == [4, 2] and not any(tensor() is not None for tensor in tensors)


def test_progress_counts_experts():
    seen = []
    with offload(build_model("qwen3_moe"), device="host", progress=lambda *now: seen.append(now), threads=1):
        assert seen == [(8, 16), (16, 16)]


def test_weights_that_a_format_cannot_hold_are_named():
    model = build_model("qwen3_moe")
    with torch.no_grad():
        experts_of(model).down_proj[5, 3, 2] = np.nan
    with pytest.raises(StoreError, match=r"layers.0.*expert 5, down: weight \[3, 2\] is nan"):
        offload(model, formats="q8_0", device="host")
