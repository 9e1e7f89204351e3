"""Whole models from GGUF files: the logits of the model that the file was written from; what is refused, and how."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

import gguf  # noqa: E402
import numpy as np  # noqa: E402
from gguf_models import ARCHITECTURES, shake_vectors, write_model  # noqa: E402
from hf_models import build_model, logits, token_ids  # noqa: E402

from trilane.errors import ModelFileError, StoreError  # noqa: E402
from trilane.integrations.gguf import load_gguf  # noqa: E402
from trilane.integrations.gguf.trunk import read_tensor  # noqa: E402
from trilane.readers.gguf import open_gguf  # noqa: E402

CASES = [(kind, False) for kind in ARCHITECTURES] + [("deepseek_v2", True), ("deepseek_v3", True)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


def changes_of(kind):
    """Configurations that a file's metadata can say."""
    if kind == "gpt_oss":
        return {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}
    return {"use_qk_norm": True} if kind == "glm4_moe" else {}


@pytest.mark.parametrize(("kind", "split_latent"), CASES)
def test_the_logits_are_those_of_the_model_in_the_file(tmp_path, kind, split_latent):
    model = build_model(kind, **changes_of(kind))
    shake_vectors(model)
    ids = token_ids()
    wanted = logits(model, ids)
    write_model(tmp_path / "model.gguf", model, kind, split_latent=split_latent)
    with load_gguf(tmp_path / "model.gguf", device="host", config={"cache": {"fraction": 0.5}}) as handle:
        assert type(handle.model) is type(model)
        found = logits(handle.model, ids)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_a_missing_tensor_is_named(tmp_path):
    model = build_model("qwen3_moe")
    write_model(tmp_path / "model.gguf", model, "qwen3_moe", leave_out="blk.1.attn_k_norm.weight")
    with pytest.raises(ModelFileError, match=r"no tensor for model\.layers\.1\.self_attn\.k_norm\.weight"):
        load_gguf(tmp_path / "model.gguf", device="host")


def test_an_unknown_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "granitemoe")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"architecture 'granitemoe' cannot be built .* qwen3moe"):
        load_gguf(tmp_path / "model.gguf", device="host")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "Q5_K", "Q5_0", "IQ4_NL"])
def test_every_type_of_a_trunk_tensor_is_dequantised(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(4).integers(0, 60, (3, 512 // block * nbytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_tensor("output.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_gguf(tmp_path / "model.gguf")
    found = read_tensor(files, files.tensors["output.weight"])
    np.testing.assert_allclose(found, gguf.quants.dequantize(raw, kind), rtol=1e-6, atol=1e-30)


def test_a_type_that_nothing_reads_is_refused(tmp_path, monkeypatch):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_tensor("output.weight", np.zeros((1, 176), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q5_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"output\.weight.*q5_k.*install the package gguf"):
        read_tensor(files, files.tensors["output.weight"])
