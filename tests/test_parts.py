"""Body, head and logits of causal LMs that keep them in different places."""

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.parts import body_of, head_of, positions_of, rows_of, states_of
from agent_rl.errors import ConfigError

SHAPE = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GQA = {**SHAPE, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GQA, final_logit_softcapping=0.05)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, num_key_value_heads=1, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, num_key_value_heads=1, logits_scaling=6.0)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GQA)),
}


def made(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[family]().eval()


@pytest.mark.parametrize("family", MODELS)
def test_states_through_the_head_are_the_models_logits(family: str) -> None:
    model, ids = made(family), torch.randint(50, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(head_of(model).logits(states_of(model, ids)), model(ids).logits)
    assert body_of(model)(ids).last_hidden_state.shape == states_of(model, ids).shape == (2, 7, 16)
    assert rows_of(model) == 50 and positions_of(model) == model.config.max_position_embeddings


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_scores_and_gradients_of_scaled_or_capped_logits_are_autograds(family: str, chunk: int) -> None:
    model, ids = made(family).double(), torch.randint(50, (2, 7))
    plain = copy.deepcopy(model)
    scores = score_tokens(model, ids, 0.7, entropy_gradient=True, precision=PrecisionConfig(chunk=chunk))
    log_p = torch.log_softmax(plain(ids).logits[:, :-1] / 0.7, -1)
    expected = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(scores.logprobs[:, 1:], expected)
    weights = torch.randn(2, 6, dtype=torch.float64)
    (weights * (scores.logprobs + scores.entropy)[:, 1:]).sum().backward()
    (weights * (expected + entropy)).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_parts_within_peft_are_those_with_its_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, ids = made("qwen3"), torch.randint(50, (1, 5))
    before = states_of(model, ids)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    assert not torch.equal(states_of(wrapped, ids), before)
    torch.testing.assert_close(head_of(wrapped).logits(states_of(wrapped, ids)), wrapped(ids).logits)
    assert body_of(wrapped) is wrapped.base_model.model.model


def test_head_of_a_model_without_one_is_refused() -> None:
    encoder = BertModel(BertConfig(**SHAPE))
    with pytest.raises(ConfigError, match="bert has no linear output head"):
        head_of(encoder)


def test_long_rope_ends_where_it_would_rotate_otherwise() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    positions = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    model = Phi3ForCausalLM(Phi3Config(**SHAPE, **positions, rope_parameters=rope, pad_token_id=0))
    assert positions_of(model) == 16
    with pytest.raises(ConfigError, match=r"max_len=17 exceeds the model's 16 positions; set rollout.context=16"):
        Engine(model, max_len=17)
