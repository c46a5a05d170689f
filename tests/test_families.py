"""Every family of causal language models in transformers: engine, training and the model itself agree."""

import pytest
import torch

from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.engines.embedded import module_forward
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.model_folder import in_format
from agent_rl.engines.embedded.module_forward import ModuleForward, WholeForward
from agent_rl.moe.routes import recorded, replayed, routers
from tests.families import KINDS, group_of, largest_gap, make, page
from tests.tree import ROOT


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mistral", "mixtral", "bloom"])
def test_family_is_sampled_and_trained_as_it_computes(kind: str) -> None:
    model = make(kind)
    assert largest_gap(model, Engine(model, slots=3, max_len=64)) < 1e-4
    ids = torch.tensor([[5, 9, 3, 17, 22, 4]])
    before = score_tokens(model, ids).logprobs.sum()
    before.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight += 1e-4 * weight.grad
        assert score_tokens(model, ids).logprobs.sum() > before


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "cohere2", "mixtral"])
def test_sliding_family_is_sampled_over_the_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind)
    engine = Engine(model, slots=3, max_len=64)  # of a window of 5
    assert isinstance(engine.forward, ModuleForward) and largest_gap(model, engine) < 1e-4
    assert model.config.get_text_config().sliding_window == 5  # again, after the comparison
    attend = KVCache.attend
    monkeypatch.setattr(KVCache, "attend", lambda *args, window, **kwargs: attend(*args, **kwargs))
    assert isinstance(Engine(model, slots=3, max_len=64).forward, WholeForward)


def test_window_without_effect_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mixtral")
    model.config.sliding_window = None
    assert isinstance(Engine(model, slots=3, max_len=64).forward, ModuleForward)
    model.config.sliding_window = 40
    monkeypatch.setattr(module_forward, "PROBE_WINDOW", sum(module_forward.PROBE))
    assert isinstance(Engine(model, slots=3, max_len=64).forward, WholeForward)


@pytest.mark.parametrize("seed", [6, 11])
def test_rounding_of_routers_does_not_choose_the_forward(seed: int) -> None:
    model, generator = make("olmoe"), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.dim() > 1):
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    in_format(model, "bfloat16")
    assert isinstance(Engine(model, slots=1, max_len=64).forward, ModuleForward)


@pytest.mark.sandbox
@pytest.mark.filterwarnings("ignore")  # of families that transformers will drop
def test_families_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    assert page() in text
    assert "Wrong" not in text and len(KINDS) > 150


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_routes_replay_in_every_family_with_a_router(kind: str) -> None:
    model, ids = make(kind), torch.tensor([[5, 9, 3, 17, 22, 4]])
    with torch.no_grad():
        with recorded(model) as routes:
            plain = model(ids, use_cache=False).logits
        given = torch.stack(routes.own, 1)[None]
        with replayed(model, given):
            torch.testing.assert_close(model(ids, use_cache=False).logits, plain)
        with recorded(model) as other, replayed(model, (given + 1) % 4):
            assert not torch.allclose(model(ids, use_cache=False).logits, plain)
    assert len(other.own) == len(routers(model)) == given.shape[2]


def test_family_that_sees_later_tokens_is_refused() -> None:
    assert group_of("xlnet") == "Refused, since their states depend on later tokens"
