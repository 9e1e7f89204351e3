"""The trained model as one GGUF file: experts Q4_K by trilane's own quantiser, the rest Q8_0, vectors and routers F32.

    python benchmarks/tiny_moe/export_gguf.py --weights DIR --tokenizer tokenizer.json --out tiny-q4_k.gguf

DIR holds `weights.safetensors.N`, as `train.py` wrote them. The file is complete: sizes, tokenizer and licence note are
in its metadata, as programs that read `qwen3moe` files expect them.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load

from trilane.cpu_kernels.formats import format_of
from trilane.cpu_kernels.quantize import quantize_matrix

TYPES = {
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "f32": gguf.GGMLQuantizationType.F32,
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
NOTE = "Trained on documentation and reference texts of Debian 12 (main); see benchmarks/tiny_moe/README.md"


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    parts = sorted(folder.glob("weights.safetensors.*"))
    if not parts:
        raise FileNotFoundError(f"{folder}: holds no weights.safetensors.0, which train.py writes")
    return {name: value.astype(np.float32) for name, value in load(b"".join(p.read_bytes() for p in parts)).items()}


def named(name: str) -> str:
    """The GGUF name of a parameter that is taken as it is."""
    if name in NAMES:
        return NAMES[name]
    _, _, block, rest = name.split(".", 3)  # model.layers.N.rest
    return f"blk.{block}.{NAMES[rest]}"


def tensors_of(weights: dict[str, np.ndarray]):
    """(GGUF name, values, format) of each tensor; gate and up apart."""
    for name, value in weights.items():
        if name.endswith("gate_up_proj"):
            block, half = name.split(".")[2], value.shape[1] // 2
            yield f"blk.{block}.ffn_gate_exps.weight", value[:, :half], "q4_k"
            yield f"blk.{block}.ffn_up_exps.weight", value[:, half:], "q4_k"
        else:
            small = value.ndim == 1 or name.endswith("mlp.gate.weight")
            yield named(name), value, "f32" if small else "q4_k" if value.ndim == 3 else "q8_0"


def add_sizes(writer: gguf.GGUFWriter, c: dict) -> None:
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])


def add_tokenizer(writer: gguf.GGUFWriter, file: Path) -> None:
    model = json.loads(file.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from model import CONFIG

    writer = gguf.GGUFWriter(arguments.out, "qwen3moe")
    writer.add_name("trilane tiny")
    writer.add_description(NOTE)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_S)
    add_sizes(writer, CONFIG)
    add_tokenizer(writer, arguments.tokenizer)
    for name, value, fmt in tensors_of(read_weights(arguments.weights)):
        if fmt == "f32":
            writer.add_tensor(name, value)
            continue
        rows = quantize_matrix(value.reshape(-1, value.shape[-1]), format_of(fmt))
        writer.add_tensor(name, rows.reshape(*value.shape[:-1], -1), raw_dtype=TYPES[fmt])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
