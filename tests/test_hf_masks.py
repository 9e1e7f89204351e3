"""The mask of eager attention that a graph can hold: the bits of transformers' own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import build_model  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    AttentionMaskInterface,
    create_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
)

from trilane.integrations.transformers.decode_step import static_cache  # noqa: E402
from trilane.integrations.transformers.masks import EAGER, device_mask, register_device_mask  # noqa: E402


@pytest.fixture
def registered():
    before = AttentionMaskInterface._global_mapping[EAGER]
    register_device_mask()
    assert AttentionMaskInterface._global_mapping[EAGER] is device_mask
    yield
    AttentionMaskInterface.register(EAGER, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_static", [False, True])
def test_the_values_of_transformers_mask(registered, dtype, make, length, padded, is_static):
    model = build_model("gpt_oss", sliding_window=3)
    config = model.config
    found = []
    for mask in (eager_mask, device_mask):
        AttentionMaskInterface.register(EAGER, mask)
        cache = static_cache(model, 16) if is_static else DynamicCache(config=config)
        attended = torch.ones((2, 16 if is_static else length), dtype=torch.int64)
        if padded:
            attended[1, :1] = 0
        found.append(
            make(
                config=config, inputs_embeds=torch.zeros((2, length, config.hidden_size), dtype=dtype),
                attention_mask=attended if padded else None, past_key_values=cache,
                position_ids=torch.arange(length).expand(2, -1),
            )
        )  # fmt: skip
    assert (found[0] is None) == (found[1] is None)
    assert found[0] is None or (found[1].dtype == dtype and torch.equal(*found))


def test_no_mask_stays_none():
    named = {"allow_is_bidirectional_skip": True, "mask_function": lambda *at: torch.tensor(True)}
    assert eager_mask(1, 4, 4, **named) is None and device_mask(1, 4, 4, **named) is None
