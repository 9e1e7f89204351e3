"""Tensors on a GPU through the experts interface, on a played one: taken where they are, the host device's bits."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import ONE_THREAD, build_model  # noqa: E402

import trilane.cuda_arrays  # noqa: E402
import trilane.cuda_steps  # noqa: E402
from trilane.errors import RoutingError  # noqa: E402
from trilane.integrations.transformers import offload  # noqa: E402
from trilane.integrations.transformers.experts import is_experts  # noqa: E402
from trilane.integrations.transformers.forward import bind  # noqa: E402


@pytest.fixture
def in_vram(monkeypatch, played):
    """Opens schedulers on a played GPU whose memory holds torch's tensors: there it is host memory too."""

    def open_one(store):
        scheduler = played(store, cache={"fraction": 0.5})
        stream = scheduler._runner.device.work_stream
        for module in (trilane.cuda_arrays, trilane.cuda_steps):
            monkeypatch.setattr(module, "is_on_device", lambda value: isinstance(value, torch.Tensor))
        monkeypatch.setattr(trilane.cuda_arrays, "_current_stream", lambda value: stream)
        forward = scheduler.forward

        def forward_and_wait(*arguments):  # torch frees what it made in the order of a GPU's stream; here, at once
            y = forward(*arguments)
            scheduler._runner.wait_for(stream)
            return y

        monkeypatch.setattr(scheduler, "forward", forward_and_wait)
        return scheduler

    return open_one


def test_rows_ids_and_weights_as_a_model_has_them(in_vram):
    model, rng = build_model("qwen3_moe", torch.bfloat16), torch.Generator().manual_seed(1)
    (first, second), wanted = filter(is_experts, model.modules()), []
    x, weights = torch.randn(6, 64, generator=rng).bfloat16(), torch.rand(6, 3, generator=rng)
    ids = torch.randint(0, 9, (6, 3), generator=rng)  # 8: none
    cases = [
        (x, ids, weights),
        (x, ids.int(), weights.bfloat16()),
        (x.float(), ids.T.contiguous().T, weights.T.contiguous().T),
        (x[::2], ids[:3], weights[:3]),
        (x[:0], ids[:0], weights[:0]),
    ]
    with offload(model, device="host", config=ONE_THREAD) as handle, torch.no_grad():
        wanted = [[module(*case) for case in cases] for module in (first, second)]
        scheduler = in_vram(handle.store)
        for index, module in enumerate((first, second)):
            bind(module, scheduler, index, threading.RLock())
            for case, bits in zip(cases, wanted[index], strict=True):
                found = module(*case)
                assert found.dtype == case[0].dtype and torch.equal(found, bits)
        scheduler.check()
        with pytest.raises(RoutingError, match="named an expert that its layer does not have"):
            first(x, ids + 9, weights)
