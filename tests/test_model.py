"""The model made on the spot: reproducible, and able to copy after a few steps."""

from __future__ import annotations

import pytest
import torch

from agent_rl.backends.embedded.config import ModelConfig, WarmStartConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.optimizer import Optimizer, schedule
from agent_rl.backends.embedded.scoring import score_tokens
from tests.engines import TINY


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_make_model_depends_on_the_seed_only(architecture: str) -> None:
    config = ModelConfig(architecture=architecture, **TINY)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = make_model(config, 40, seed=1).state_dict()
    assert torch.equal(torch.rand(3), expected)  # the global generator was left alone
    again, other = (make_model(config, 40, seed=s).state_dict() for s in (1, 2))
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert all(weight.isfinite().all() and weight.dtype == torch.float32 for weight in first.values())


def test_default_model_has_the_stated_size() -> None:
    model = make_model(ModelConfig(), 576, seed=0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.7e6, rel=0.1)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "shape", [{"layers": 1}, {"hidden": 8, "heads": 1, "kv_heads": 1}], ids=["one layer", "narrow"]
)
def test_small_model_gets_no_copying_heads(shape: dict[str, int]) -> None:
    model = make_model(ModelConfig(**{**TINY, **shape}), 40, seed=0)
    assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.2)  # transformers' own


def test_copying_takes_one_head_of_a_layer() -> None:
    config = ModelConfig()
    for layer in make_model(config, 40, seed=0).model.layers[:2]:
        first, *others = layer.self_attn.v_proj.weight.detach().split(config.head_dim)
        assert len(others) == 3 and float(first.std()) > 0.05
        assert [float(other.std()) for other in others] == pytest.approx([0.02] * 3, rel=0.1)  # transformers' own


def test_model_learns_copying_within_25_steps() -> None:
    model = make_model(ModelConfig(), 200, seed=0)
    config = WarmStartConfig().optimizer
    optimizer, generator = Optimizer(model, config), torch.Generator().manual_seed(0)
    for step in range(25):
        strings = torch.randint(0, 200, (16, 24), generator=generator)
        logprobs = score_tokens(model, torch.cat([strings, strings], 1)).logprobs
        loss = -logprobs[:, 25:].mean()  # of the repeat, save its first token
        loss.backward()
        optimizer.step(schedule(config, step, 1000))
    assert float(loss.detach()) < 1.0  # without copying it stays at log(200) = 5.3: the strings are new
