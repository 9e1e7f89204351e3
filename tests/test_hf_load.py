"""load: experts from a checkpoint straight to a store; what comes instead of them; damaged checkpoints; peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from hf_models import ONE_THREAD, build_model, greedy, logits, token_ids  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, Qwen3MoeForCausalLM  # noqa: E402

from trilane import ExpertStore  # noqa: E402
from trilane.cpu_kernels.layout import unpack_expert  # noqa: E402
from trilane.errors import StoreError  # noqa: E402
from trilane.integrations.transformers import TrilaneConfig, handle_of, load, offload  # noqa: E402

ON_HOST = {"device": "host", "config": ONE_THREAD}


@pytest.fixture
def saved(tmp_path):
    """Saves a model and tells where."""

    def save(kind="qwen3_moe", **changes):
        build_model(kind, **changes).save_pretrained(tmp_path)
        return tmp_path

    return save


def change_weights(folder, change):
    """Rewrite the tensors of a checkpoint of one file."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ----------------------------------------------------------------------------------- where experts come from
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "nemotron_h", "granitemoe"])
def test_a_store_stands_for_the_checkpoints_experts(saved, kind):
    folder, ids = saved(kind), token_ids()
    with load(folder, **ON_HOST) as handle:
        wanted, text = logits(handle.model, ids), greedy(handle.model, ids, 4)

    def spoil(tensors):  # they are not looked at
        for name, tensor in tensors.items():
            if ".experts." in name or "_linear" in name:
                tensor.fill_(float("nan"))

    store = ExpertStore.from_safetensors(folder)
    change_weights(folder, spoil)
    with load(folder, store=store, **ON_HOST) as handle:
        assert handle.store is store
        assert torch.equal(logits(handle.model, ids), wanted)
        assert torch.equal(greedy(handle.model, ids, 4), text)


def test_weights_may_come_by_their_names(saved):
    model, ids = build_model("qwen3_moe"), token_ids()
    trunk = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".experts." not in name}
    with offload(model, **ON_HOST) as handle:
        wanted = logits(model, ids)
        options = {"store": handle.store, "model_config": build_model("qwen3_moe").config, "state_dict": trunk}
        for model_class in (AutoModelForCausalLM, Qwen3MoeForCausalLM):
            with load(None, model_class=model_class, dtype=torch.float32, **options, **ON_HOST) as other:
                assert isinstance(other.model, Qwen3MoeForCausalLM)
                assert torch.equal(logits(other.model, ids), wanted)
    with pytest.raises(StoreError, match="weights must come from somewhere"):
        load(None, **ON_HOST)


def test_the_hook_may_be_used_alone(saved):
    folder, ids = saved(), token_ids()
    with load(folder, **ON_HOST) as handle:
        wanted = logits(handle.model, ids)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, quantization_config=TrilaneConfig(**ON_HOST))
    with handle_of(model) as handle:
        assert handle.model is model and torch.equal(logits(model, ids), wanted)
        assert model.config.quantization_config.to_dict() == {
            "quant_method": "trilane", "formats": None, "device": "host",
        }  # fmt: skip
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(folder)


def test_another_head_and_another_type(saved):
    folder = saved()
    with load(folder, model_class=AutoModel, dtype=torch.bfloat16, **ON_HOST) as handle:
        assert type(handle.model).__name__ == "Qwen3MoeModel"
        assert {layer.layout.up.name for layer in handle.store.layers} == {"bf16"}
        with torch.no_grad():
            assert handle.model(token_ids()).last_hidden_state.dtype == torch.bfloat16


def test_experts_are_packed_as_they_come(saved):
    seen = []
    with load(saved(), progress=lambda *now: seen.append(now), threads=1, **ON_HOST):
        assert seen == [(8, 16), (16, 16)]


# ------------------------------------------------------------------------------------------------------ what is refused
def test_a_store_has_its_formats(saved):
    store = ExpertStore.from_safetensors(saved())
    with pytest.raises(StoreError, match="'q8_0' given beside a store"):
        load(saved(), store=store, formats="q8_0", **ON_HOST)
    with pytest.raises(StoreError, match="has 2 layers, but Qwen3MoeForCausalLM has 3"):
        load(saved(num_hidden_layers=3), store=store, **ON_HOST)


def test_missing_experts_are_named(saved):
    folder = saved()
    change_weights(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "1.mlp.experts" in name])
    with pytest.raises(StoreError, match=r"model.layers.1.mlp.experts .*gate_up_proj, down_proj did not come"):
        load(folder, **ON_HOST)


def test_weights_that_a_format_cannot_hold_are_named(saved):
    folder = saved()
    name = "model.layers.0.mlp.experts.5.down_proj.weight"
    change_weights(folder, lambda tensors: tensors[name][3].fill_(float("inf")))
    with pytest.raises(StoreError, match=r"layers.0.*expert 5, down: weight \[3, 0\] is inf"):
        load(folder, formats="q8_0", **ON_HOST)
    with pytest.raises(StoreError, match="q4_k"):  # rows of 64
        load(folder, formats="q4_k", **ON_HOST)


def test_checkpoints_that_are_quantised(saved):
    folder, ids = saved("gpt_oss"), token_ids()
    with load(folder, **ON_HOST) as handle:
        wanted = logits(handle.model, ids)
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(StoreError, match=r"quantised \(fp8\).*dequantize=True"):
        load(folder, **ON_HOST)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(StoreError, match=r"experts are in mxfp4.*store=ExpertStore.from_safetensors"):
        load(folder, **ON_HOST)
    with load(folder, store=ExpertStore.from_safetensors(folder), **ON_HOST) as handle:
        assert torch.equal(logits(handle.model, ids), wanted)


def to_mxfp4(tensors):
    """Give a gpt-oss checkpoint experts as they are published: nibbles and scales, rows of the output."""
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (num_experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(120, 124, (num_experts, rows, columns // 32), np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)


def weights_of(store, layer, part):
    """A matrix of all experts of a layer as float32 (num_experts, rows, columns)."""
    where = store.layers[layer]
    sources = (unpack_expert(where.layout, store.expert_bytes(layer, e)) for e in range(where.num_experts))
    fmt = getattr(where.layout, part)
    return torch.from_numpy(np.stack([fmt.dequantize_rows(getattr(source, part)) for source in sources]))


def test_experts_in_mxfp4_stay_so(saved):
    folder, ids = saved("gpt_oss"), token_ids()
    change_weights(folder, to_mxfp4)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    store, model = ExpertStore.from_safetensors(folder), build_model("gpt_oss")
    with torch.no_grad():  # the model's own code with the weights that the nibbles stand for
        for index, layer in enumerate(model.model.layers):
            gate, up, down = (weights_of(store, index, part).transpose(1, 2) for part in ("gate", "up", "down"))
            layer.mlp.experts.gate_up_proj.copy_(torch.stack([gate, up], -1).flatten(2))
            layer.mlp.experts.down_proj.copy_(down)
    wanted = logits(model, ids)
    with load(folder, store=store, dtype=torch.float32, **ON_HOST) as handle:
        assert {layer.layout.down.name for layer in handle.store.layers} == {"mxfp4"}
        error = (logits(handle.model, ids) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 1e-4 < float(error.median()) < 0.05  # of rows in eight bits


# ---------------------------------------------------------------------------------------------------- memory
MEASURE = """
import json, sys, threading, time
import torch
from hf_models import ONE_THREAD
from trilane.integrations.transformers import load

def resident():  # bytes of the process's own; pages of files are the system's
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("RssAnon")).split()[1])

options = {"device": "host", "config": ONE_THREAD | {"cache": {"slots": 0}}, "threads": 1}
load(sys.argv[1], **options).close()  # compiles, and imports what loads late

def measure(formats):
    before, most, done = resident(), [0], threading.Event()

    def watch():
        while not done.wait(0.004):
            most[0] = max(most[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    handle = load(sys.argv[2], formats=formats, **options)
    done.set()
    watcher.join()
    trunk = sum(p.numel() * p.element_size() for p in handle.model.parameters())
    return {"most": most[0] - before, "store": handle.store.nbytes, "trunk": trunk}

print(json.dumps([measure(None), measure("q8_0")]))
"""
SLACK = 8 << 20  # buffers of the allocator, and objects


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs linux: /proc tells a process's own memory")
def test_peak_memory_is_the_store_and_a_layer(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    build_model("qwen3_moe").save_pretrained(small)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64, "num_hidden_layers": 8}
    build_model("qwen3_moe", torch.bfloat16, **sizes).save_pretrained(large)
    layer = 64 * 3 * 256 * 256 * 2
    # The C library gives large tensors back at once. These are small ones, which it would keep, so it is told.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    here = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for found, part in zip(json.loads(done.stdout.splitlines()[-1]), (1, 34 / 64), strict=True):
        print({name: f"{nbytes / 1e6:.0f} MB" for name, nbytes in (found | {"layer": layer}).items()})
        assert found["store"] == pytest.approx(8 * layer * part, rel=0.03)
        assert found["most"] < found["store"] + found["trunk"] + 1.5 * layer + SLACK
