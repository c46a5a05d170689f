"""Tiny random models of transformers' causal-LM families, each made of the family's own configuration class.

Run as a program it prints the lists of docs/models.md.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.errors import ConfigError
from tests.engines import VOCAB, Plan, full_logprobs, play_all, shaken

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST = 3e6
"""Parameters of a model that is still tiny."""
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "mamba_n_heads",
)  # fmt: skip
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_2d_position_embeddings")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "mamba_d_head",
)  # fmt: skip
_EIGHT = (
    "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_state", "state_size", "mamba_chunk_size", "chunk_size",
    "hidden_size_per_layer_input", "linear_key_head_dim", "linear_value_head_dim", "global_head_dim",
)  # fmt: skip
_SIZES = {
    VOCAB: ("vocab_size", "vocab_size_per_layer_input"), 32: _WIDTH, 48: _INNER, 2: _LAYERS, 4: (*_HEADS, *_EXPERTS),
    256: _POSITIONS, 16: _EXPERT, 8: _EIGHT,
}  # fmt: skip
SMALL = {name: size for size, names in _SIZES.items() for name in names} | {
    "num_key_value_heads": 2, "rotary_dim": 4, "num_experts_per_tok": 2, "moe_k": 2, "sliding_window": 5,
    "attention_window": 5, "v_head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "mamba_d_conv": 4, "time_step_rank": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "num_nextn_predict_layers": 0, "use_mamba_kernels": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "dropout": 0.0, "attention_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0,
    "layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
"""What configurations are given, where they have the setting."""
_MLA = {"num_key_value_heads": 4}
_KDA = _MLA | {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2, "num_expert_group": 1}
_DECODER = {"is_decoder": True}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_TEXT = _VISION | {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
OWN: dict[str, dict[str, object]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"), _MLA),
    **dict.fromkeys(("youtu", "dots3_note_text"), _MLA),
    "deepseek_v2": _MLA | {"num_experts_per_tok": 2, "topk_method": "greedy"},
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), _DECODER),
    **dict.fromkeys(("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roformer"), _DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "reformer"), _DECODER),
    "xmod": _DECODER | {"default_language": "en_XX"},
    "xlm": {"emb_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2, **_MLA},
    "roc_bert": _DECODER | {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 5},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_head": 16},
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KDA),
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "intermediate_size": [48, 48], "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma3": {
        "text_config": _TEXT | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": _VISION,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 8, "n_mamba_heads": 8,
        "attention_head_dim": 16, "attention_hidden_size": 64,
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_groups": 1},
}  # fmt: skip
"""What a family needs besides."""


def make(kind: str, **changes: object) -> PreTrainedModel:
    """Return a tiny float32 model of a family, with weights so large that all of the context counts.

    `changes` are settings of its configuration.
    """
    known = CONFIG_MAPPING[kind]().to_dict()
    optional = ("num_key_value_heads", "head_dim", "sliding_window", "n_inner")
    own = {name: x for name, x in SMALL.items() if name in known and (known[name] is not None or name in optional)}
    if kinds := known.get("layer_types"):
        own["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    config = CONFIG_MAPPING[kind](**own | OWN.get(kind, {}) | changes)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters with the sizes of `SMALL`")
    torch.manual_seed(0)
    return shaken(AutoModelForCausalLM.from_config(config)).eval()


PLANS: list[Plan] = [
    [([5, 9, 3, 17, 22], 3), ([4, 8], 6), ([7], 2)],
    [([1, 2], 7), ([30, 31, 32, 33, 34, 35, 36, 37, 38], 4)],
    [([40], 5)],
    [([11, 12, 13, 14, 15, 16, 18, 19, 20], 9)],
]
"""Turns of unequal length, several times the window of 5."""


def largest_gap(model: PreTrainedModel, engine: Engine) -> float:
    """Return how far the log-probabilities of engine and training are from the model's own, at most, in nats."""
    gaps = []
    for record in play_all(engine, PLANS, SamplingParams()):
        ids = torch.tensor([record.ids])
        with torch.no_grad():
            plain = torch.log_softmax(model(ids).logits[0].float(), -1).gather(-1, ids.roll(-1).T)[:, 0].roll(1)
        own, trained = torch.tensor(record.column("logprobs")), full_logprobs(model, record.ids)
        gaps += [own - plain[record.sampled], (trained - plain)[record.sampled]]
    return float(torch.cat(gaps).abs().max())


def group_of(kind: str) -> str:
    """Say whether a family is sampled exactly, or why not."""
    try:
        model = make(kind)
    except Exception:  # of a configuration that can't be made small by `SMALL` and `OWN`
        return "Not tried, since no tiny model of them was made"
    try:
        engine = Engine(model, slots=3, max_len=64)
    except ConfigError as error:
        causal = "later tokens" in str(error)
        reason = "their states depend on later tokens" if causal else "token ids alone don't run them"
        return f"Refused, since {reason}"
    if largest_gap(model, engine) > 1e-4:
        return "Wrong"
    return "Exact"


def page() -> str:
    """Return the lists of docs/models.md."""
    groups = defaultdict(list)
    for kind in KINDS:
        groups[group_of(kind)].append(kind)
    parts = (f"{group} ({len(groups[group])}): {', '.join(groups[group])}." for group in sorted(groups))
    return "\n\n".join(textwrap.fill(part, 150, break_on_hyphens=False) for part in parts)


if __name__ == "__main__":
    print(page())
