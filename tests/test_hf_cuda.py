"""Models of transformers on a GPU: logits and text of the CPU, steps as one graph, and no experts in torch's memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from cuda_backends import gpu_missing  # noqa: E402
from hf_models import build_model, greedy, logits, token_ids  # noqa: E402

from trilane.errors import ClosedError, DeviceError  # noqa: E402
from trilane.integrations.transformers import Decoder, load, offload  # noqa: E402
from trilane.integrations.transformers.experts import is_experts  # noqa: E402

pytestmark = pytest.mark.gpu
KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "gemma4_text", "qwen3_next", "jamba", "deepseek_v4")
NOT_CAPTURED = {"deepseek_v4": "no static cache"}
BOUND = 1e-3  # of the largest logit: the trunk's float32 sums are in another order on a GPU
NEW = 12


@pytest.fixture(autouse=True)
def gpu():
    if gpu_missing():
        pytest.skip(gpu_missing())
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch sees")
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def on_gpu():
    """Offloads to the GPU, and closes what was opened."""
    opened = []

    def take(model, cache=0.25, **sections):
        sections = {"cpu": {"threads": 2}, "cache": {"fraction": cache}} | sections
        opened.append(offload(model, device="cuda", config=sections))
        return opened[-1]

    yield take
    for handle in opened:
        handle.close()


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_text_of_the_cpu(on_gpu, kind):
    model, ids = build_model(kind), token_ids()
    wanted, text = logits(model, ids), greedy(model, ids, NEW)
    handle = on_gpu(model)
    assert {p.device.type for p in model.parameters() if p.numel()} == {"cuda"}
    assert relative(logits(model, ids), wanted) < BOUND
    assert torch.equal(greedy(model, ids.cuda(), NEW).cpu(), text)
    assert handle.stats().steps > 0


@pytest.mark.parametrize("kind", KINDS)
def test_steps_as_one_graph(on_gpu, kind):
    model, ids = build_model(kind), token_ids()
    text = greedy(model, ids, NEW)
    handle = on_gpu(model)
    decoder, plain = Decoder(handle), Decoder(handle, capture=False)
    found = decoder.generate(ids, NEW)
    assert torch.equal(found.cpu(), text)
    assert decoder.captured == (kind not in NOT_CAPTURED) and NOT_CAPTURED.get(kind, "") in decoder.why_not
    assert torch.equal(plain.generate(ids, NEW), found) and plain.why_not == "capture=False"
    assert relative(decoder.logits, plain.logits) < BOUND
    assert torch.equal(decoder.generate(ids, NEW), found)  # all of it from the graph


def test_a_model_that_cannot_be_captured_goes_on_and_says_why(on_gpu, caplog):
    model, ids = build_model("qwen3_moe"), token_ids()
    text = greedy(model, ids, NEW)
    decoder = Decoder(on_gpu(model))
    model.model.norm.register_forward_hook(lambda module, inputs, found: found + float(found.sum()) * 0)
    assert torch.equal(decoder.generate(ids, NEW).cpu(), text)
    assert not decoder.captured and "cannot be captured" in decoder.why_not
    assert "steps run one operation at a time" in caplog.text


@pytest.mark.parametrize("lane", ["stream", "zero_copy", "cpu", None])
def test_each_lane_in_a_graph(on_gpu, lane):
    """The lane changes no bit of the experts, so the text along the same tokens is the same, its logits too."""
    found = []
    for cache in (0.75, 1.0):  # all experts of a layer find a slot, those of both do not
        handle = on_gpu(build_model("qwen3_moe", torch.bfloat16), cache, policy={"force": lane, "admit": "always"})
        decoder = Decoder(handle)
        given = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1))
        with handle.scheduler.request() as request:
            decoder.generate(token_ids(), 40, given=given)
        assert decoder.captured and (lane == "cpu" or request.stats.lanes["hit"].nbytes > 0)  # it fills no slot
        found.append((decoder.picks[:, :40].clone(), decoder.logits.clone()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_padded_batches_ended_rows_and_tokens_as_they_come(on_gpu):
    model, ids = build_model("qwen3_moe"), token_ids()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    text = greedy(model, ids, NEW, attention_mask=mask)
    decoder, seen = Decoder(on_gpu(model)), []
    found = decoder.generate(ids, NEW, attention_mask=mask, on_token=seen.append)
    assert torch.equal(found.cpu(), text) and torch.equal(torch.tensor(seen).T, text[:, ids.shape[1] :])
    end = int(text[0, ids.shape[1] + 4])
    ended = decoder.generate(ids, NEW, attention_mask=mask, eos_token_id=end).cpu()
    first = text[0, ids.shape[1] :].tolist().index(end)
    assert ended[0, ids.shape[1] + first :].eq(end).all() and decoder.captured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_have_the_bits_of_the_host_device(on_gpu, dtype):
    rng = torch.Generator().manual_seed(2)
    x, weights = torch.randn(9, 64, generator=rng).to(dtype), torch.rand(9, 3, generator=rng).to(dtype)
    ids = torch.randint(0, 9, (9, 3), generator=rng)  # 8: none
    model, twin = build_model("qwen3_moe", dtype), build_model("qwen3_moe", dtype)
    on_gpu(model)
    with offload(twin, device="host", config={"cpu": {"threads": 1}}), torch.no_grad():
        for mine, host in zip(filter(is_experts, model.modules()), filter(is_experts, twin.modules()), strict=True):
            wanted = host(x, ids, weights)
            found = mine(x.cuda(), ids.cuda(), weights.cuda())
            assert found.is_cuda and found.dtype == dtype and torch.equal(found.cpu(), wanted)
            assert torch.equal(mine(x, ids, weights), wanted)  # from host memory too
            assert mine(x[:0].cuda(), ids[:0].cuda(), weights[:0].cuda()).shape == (0, 64)


def test_the_experts_are_never_in_torchs_memory(tmp_path):
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64}
    build_model("qwen3_moe", torch.bfloat16, **sizes).save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = {"cpu": {"threads": 2}, "cache": {"fraction": 0.1}}
    with load(tmp_path, device="cuda", config=config) as handle:
        Decoder(handle).generate(token_ids(), NEW)
        trunk = sum(p.numel() * p.element_size() for p in handle.model.parameters())
        peak = torch.cuda.max_memory_allocated() - before
        assert handle.store.nbytes > 190e6 and trunk < 20e6
        assert peak < trunk + 0.25 * handle.store.nbytes
        runner = handle.scheduler._runner
        assert runner.num_slots * runner.device.slot_nbytes < 0.11 * handle.store.nbytes


def test_a_model_and_a_scheduler_in_two_places(on_gpu):
    model = build_model("qwen3_moe")
    with offload(model, device="host", config={"cpu": {"threads": 1}}):
        with pytest.raises(DeviceError, match="the scheduler's device is the host.*device='cuda'"):
            logits(model.to("cuda"), token_ids())
    handle = on_gpu(build_model("qwen3_moe"))
    decoder = Decoder(handle)
    decoder.generate(token_ids(), NEW)
    handle.close()
    with pytest.raises(ClosedError):
        decoder.generate(token_ids(), NEW)
