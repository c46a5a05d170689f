"""FusedForward beside transformers, for the families that it knows; and the kernels that it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded import forward as forward_module
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.forward import Forward, FusedForward, is_fusible, packs_weights
from agent_rl.engines.embedded.graphs import GraphedForward
from agent_rl.engines.embedded.module_forward import make_forward
from tests.engines import VOCAB, assert_full, play_all, ragged_plans, shaken

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "use_cache": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=True)),
    "llama with YaRN": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
}


def made(family: str) -> PreTrainedModel:
    """A model whose biases and norms are no longer zeros and ones."""
    torch.manual_seed(0)
    model = shaken(FAMILIES[family]()).eval()
    with torch.no_grad():
        for number, weight in enumerate(p for p in model.parameters() if p.dim() == 1):
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize(("forward", "packed"), [(make_forward, True), (make_forward, False), (GraphedForward, False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_forward_equals_transformers(
    family: str, forward: Callable[..., Forward], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_module, "packs_weights", lambda: packed)
    model = made(family)
    engine = Engine(model, slots=3, max_len=160, forward=forward)
    assert isinstance(engine.forward, FusedForward | GraphedForward)
    for record in play_all(engine, ragged_plans(4), SamplingParams()):
        assert_full(model, record, atol=2e-5)


@pytest.mark.parametrize(
    "changes", [{"mlp_bias": True}, {"hidden_act": "gelu"}, {"rope_parameters": {**YARN, "rope_type": "dynamic"}}]
)
def test_is_fusible_refuses_what_it_would_get_wrong(changes: dict[str, object]) -> None:
    assert is_fusible(LlamaConfig(**SHAPE))
    assert not is_fusible(LlamaConfig(**SHAPE, **changes))


@pytest.mark.parametrize(("vendor", "expected"), [("GenuineIntel", False), ("AuthenticAMD", True)])
def test_weights_are_packed_by_a_rule(vendor: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_module.Path, "exists", lambda _: True)
    monkeypatch.setattr(forward_module.Path, "read_text", lambda _: f"vendor_id\t: {vendor}\n")
    assert packs_weights.__wrapped__() == expected
