"""The tiny model for training: Qwen3-MoE with the parameter names of transformers, its experts computed densely.

All 16 experts are one wide gated MLP whose intermediate blocks are scaled by the router's weights (zero for experts
that were not chosen): two large products instead of many small ones, which is the fastest on a GPU at this size, and
the same function. The state dict loads into `Qwen3MoeForCausalLM` as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 6144,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.001,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, D] by its positions, halves of D paired."""
    low, high = x.chunk(2, -1)
    return (x.float() * cos + torch.cat((-high, low), -1).float() * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Experts(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        experts, inner, hidden = c["num_experts"], c["moe_intermediate_size"], c["hidden_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [S, hidden], weights [S, experts] -> [S, hidden]."""
        experts, twice, hidden = self.gate_up_proj.shape
        wide = F.linear(x, self.gate_up_proj.reshape(experts * twice, hidden)).view(-1, experts, twice)
        gate, up = wide.chunk(2, -1)
        inner = F.silu(gate) * up * weights.to(wide.dtype).unsqueeze(-1)
        down = self.down_proj.permute(1, 0, 2).reshape(hidden, experts * (twice // 2))
        return F.linear(inner.reshape(len(x), -1), down)


class SparseBlock(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.gate = nn.Linear(c["hidden_size"], c["num_experts"], bias=False)
        self.experts = Experts(c)
        self.top_k = c["num_experts_per_tok"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [S, hidden] -> output, share of the tokens for each expert, mean probability of each expert."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        top, ids = probabilities.topk(self.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, ids, top)
        return self.experts(x, weights), (weights > 0).float().mean(0), probabilities.mean(0)


class Layer(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = SparseBlock(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), dropout, self.training)
        rows, length, hidden = x.shape
        mixed, used, probability = self.mlp(self.post_attention_layernorm(x).reshape(-1, hidden))
        return x + F.dropout(mixed.view(rows, length, hidden), dropout, self.training), used, probability


class Trunk(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class TinyMoe(nn.Module):
    """`forward(ids [B, T])` -> logits [B, T, vocab], expert use [layers, experts], load-balancing loss."""

    def __init__(self, c: dict, dropout: float = 0.0):
        super().__init__()
        self.model = Trunk(c)
        self.dropout = dropout
        self.config = c
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                small = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(weight, std=0.02 / (2 * c["num_hidden_layers"]) ** 0.5 if small else 0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        theta, half = c["rope_parameters"]["rope_theta"], c["head_dim"] // 2
        rates = theta ** (-torch.arange(half, device=ids.device).float() / half)
        angles = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids)
        uses, probabilities = [], []
        for layer in self.model.layers:
            x, used, probability = layer(x, cos, sin, self.dropout)
            uses.append(used)
            probabilities.append(probability)
        use, probability = torch.stack(uses), torch.stack(probabilities)
        balance = c["num_experts"] * (use * probability).sum(1).mean()
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), use, balance
