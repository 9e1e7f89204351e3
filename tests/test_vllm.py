"""The plugin of vLLM, played with a stand-in of the classes that it meets: registration, loading, steps, refusals."""

import importlib.metadata

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import vllm_stand_in as stand_in  # noqa: E402
from hf_models import build_model  # noqa: E402

import trilane.integrations.vllm as plugin  # noqa: E402
from trilane import ConfigError, DeviceError, ExpertScheduler, StoreError, TrilaneError  # noqa: E402

OPTIONS = {"quant_method": "trilane", "device": "host", "config": {"cache": {"fraction": 0.25}, "cpu": {"threads": 1}}}


@pytest.fixture
def config_class(monkeypatch):
    stand_in.install(monkeypatch)
    plugin.register()
    plugin.register()  # vLLM may call it again
    return stand_in.CONFIGS["trilane"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small Qwen3-MoE model, and the folder that it is saved in."""
    folder, model = tmp_path_factory.mktemp("vllm") / "model", build_model("qwen3_moe")
    model.save_pretrained(folder)
    return model, folder


def build_layers(config, model, numbers=None, **moe):
    """What vLLM builds of a model: its layers with routed experts."""
    sizes = model.config
    numbers = range(sizes.num_hidden_layers) if numbers is None else numbers
    moe = {"num_experts": sizes.num_experts, "intermediate_size_per_partition": sizes.moe_intermediate_size} | moe
    return [
        stand_in.RoutedExperts(
            f"model.layers.{number}.mlp.experts", torch.float32,
            stand_in.MoEConfig(hidden_dim=sizes.hidden_size, **moe), config,
        )
        for number in numbers
    ]  # fmt: skip


def load(layers):
    """What vLLM does with a checkpoint: each weight to its parameter, then each layer is finished."""
    for layer in layers:
        names = [f"{e}.{m}_proj.weight" for e in range(layer.moe_config.num_experts) for m in ("gate", "up", "down")]
        assert len(list(layer.load_weights((name, torch.ones(2, 2)) for name in names))) == len(names)
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)


def open_model(config_class, checkpoint, **options):
    model, folder = checkpoint
    config = config_class.from_config(OPTIONS | options)
    config.maybe_update_config(str(folder), hf_config=model.config)
    layers = build_layers(config, model)
    load(layers)
    return config, layers


def routing(model, rows=5):
    torch.manual_seed(0)
    x = torch.randn(rows, model.config.hidden_size)
    ids = torch.rand(rows, model.config.num_experts).argsort(-1)[:, :2].to(torch.int32)
    return x, torch.rand(rows, 2), ids


def test_the_entry_point_is_declared():
    (found,) = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "trilane"]
    assert found.load() is plugin.register


def test_layers_give_the_bits_of_the_scheduler_and_the_values_of_the_model(config_class, checkpoint):
    config, layers = open_model(config_class, checkpoint)
    model, scheduler = checkpoint[0], config.layers.scheduler
    assert config.get_name() == "trilane" and sum(p.numel() for layer in layers for p in layer.parameters()) == 0
    x, weights, ids = routing(model)
    with scheduler, ExpertScheduler(scheduler.store, config={"cache": {"fraction": 1.0}}) as other:
        for index, layer in enumerate(layers):
            found = layer.forward_modular(x, weights, ids)
            assert torch.equal(found, other.forward(index, x, ids, weights))
            wanted = model.model.layers[index].mlp.experts(x, ids.long(), weights)
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) and wanted.abs().max() > 1e-3
        assert layers[0].forward_modular(x[:0], weights[:0], ids[:0]).shape == (0, x.shape[1])
        half = layers[0].forward_modular(x.bfloat16(), weights, ids)
        assert half.dtype == torch.bfloat16
    assert scheduler.stats().steps == len(layers) + 1


def test_formats_and_a_store_that_is_named(config_class, checkpoint):
    config, _ = open_model(config_class, checkpoint, formats="q8_0", store=str(checkpoint[1]))
    with config.layers.scheduler as scheduler:
        assert scheduler.store.layers[0].layout.gate.name == "q8_0"


def test_other_layers_keep_their_own_methods(config_class):
    config = config_class()
    assert isinstance(config.get_quant_method(stand_in.LinearBase(), "lm_head"), stand_in.UnquantizedLinearMethod)
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None
    assert config.get_config_filenames() == [] and torch.bfloat16 in config.get_supported_act_dtypes()


def test_options_are_checked(config_class):
    with pytest.raises(ConfigError, match="stroe: is unknown.*'store'"):
        config_class.from_config({"stroe": "model"})


@pytest.mark.parametrize("parallel", ({"tp_size": 2}, {"use_ep": True}))
def test_a_model_on_several_gpus_is_refused(config_class, checkpoint, parallel):
    with pytest.raises(DeviceError, match="a scheduler serves one GPU"):
        build_layers(config_class(OPTIONS), checkpoint[0], moe_parallel_config=stand_in.ParallelConfig(**parallel))


@pytest.mark.parametrize(
    "change, text",
    (
        ({"numbers": [0]}, "layers with experts, but the model has 1"),
        ({"num_experts": 3}, r"\(3, .* in the model, but"),
        ({"activation": stand_in.MoEActivation.GELU}, "'gelu' in vLLM, but 'silu_glu' in the store"),
    ),
)
def test_a_store_of_another_model_is_refused(config_class, checkpoint, change, text):
    config = config_class(OPTIONS | {"store": str(checkpoint[1])})
    layers = build_layers(config, checkpoint[0], **change)
    with pytest.raises(StoreError, match=text):
        load(layers)
    assert config.layers.scheduler is None
    x, weights, ids = routing(checkpoint[0])
    with pytest.raises(TrilaneError, match="have not been loaded"):
        layers[0].forward_modular(x, weights, ids)


def test_names_that_cannot_be_told_apart_are_refused(config_class, checkpoint):
    with pytest.raises(StoreError, match="is there already"):
        build_layers(config_class(OPTIONS), checkpoint[0], [0, 0])


def test_router_weights_on_the_input_are_refused(config_class):
    moe = stand_in.MoEConfig(4, 64, 64)
    with pytest.raises(StoreError, match="router weights go into the experts' input"):
        stand_in.RoutedExperts("layers.0.mlp", torch.float32, moe, config_class(), apply_router_weight_on_input=True)


def test_slots_need_a_size_on_a_gpu_and_a_store_a_name(config_class, checkpoint, monkeypatch):
    config = config_class(OPTIONS | {"device": "auto", "config": {}})
    layers = build_layers(config, checkpoint[0])
    with pytest.raises(ConfigError, match="store: no model is named"):
        load(layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="cache: no size is given.*cache.nbytes"):
        load(layers)
