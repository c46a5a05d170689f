"""The embedded model: a small Qwen3 or Qwen3-MoE, made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of the model; the default has 0.7 M parameters."""

    architecture: Literal["qwen3", "qwen3_moe"] = "qwen3"
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 384
    experts: int = 8
    experts_per_token: int = 2
    expert_intermediate: int = 128
    max_positions: int = 4096
    rope_theta: float = 10_000.0


def make_model(config: ModelConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """Make a randomly initialised float32 model with tied embeddings; the same seed gives the same weights."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "use_cache": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.architecture == "qwen3":
            model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape))
        else:
            experts = {
                "num_experts": config.experts,
                "num_experts_per_tok": config.experts_per_token,
                "moe_intermediate_size": config.expert_intermediate,
                "norm_topk_prob": True,
            }
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, decoder_sparse_step=1, mlp_only_layers=[]))
        mimetic_init(model)
    return model.float()


@torch.no_grad()
def mimetic_init(model: PreTrainedModel, strength: float = 0.5, qk_norm: float = 1.7) -> None:
    """Start attention near what trained attention looks like: Wq Wk^T ~ I above the first layer, Wo Wv ~ I everywhere.

    With it a previous-token head in the first layer is all that is missing for induction (copying), which random
    weights of this size take thousands of steps to find. After Trockman & Kolter, "Mimetic Initialization of
    Self-Attention Layers", 2023 (arXiv:2305.09828), with a positive sign for values, since copying keeps the token.

    Args:
        model: a Qwen3 model, changed in place; random numbers come from torch's global generator.
        strength: weight of the added (semi-)orthogonal part.
        qk_norm: the scale of normalised queries and keys; above 1 sharpens attention.
    """
    config = model.config
    heads, kv_heads, dim, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    group = heads // kv_heads
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.q_norm.weight.fill_(qk_norm)
        attention.k_norm.weight.fill_(qk_norm)
        match, carry = (torch.linalg.qr(torch.randn(hidden, hidden))[0] for _ in range(2))
        for kv in range(kv_heads):
            rows = slice(kv * dim, (kv + 1) * dim)
            queries = [slice(h * dim, (h + 1) * dim) for h in range(kv * group, (kv + 1) * group)]
            basis = [(m[rows] if rows.stop <= hidden else m[:dim]) * strength for m in (match, carry)]
            attention.v_proj.weight[rows] += basis[1]
            if index > 0:
                attention.k_proj.weight[rows] += basis[0]
            for query in queries:
                if index > 0:
                    attention.q_proj.weight[query] += basis[0]
                attention.o_proj.weight[:, query] += basis[1].T / group
