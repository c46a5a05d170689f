"""Scoring: in chunks, in every precision, and against a plain computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.scoring import score_tokens
from tests.engines import DEVICE, VOCAB, tiny

IDS = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}


def plain(hidden: Tensor, weight: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and sums of squares with whole logits and autograd alone."""
    log_p = ((hidden @ weight.T) / temperature).log_softmax(-1)
    chosen = torch.stack([log_p[b, t, IDS[b, t + 1]] for b in range(3) for t in range(11)]).view(3, 11)
    return chosen, -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("entropic", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 7, 33, 1000])  # 33 tokens are predicted
def test_score_tokens_in_chunks_is_exact(dtype: torch.dtype, entropic: bool, chunk: int) -> None:
    model, error = tiny().to(dtype), EXACT[dtype]
    a, b = (torch.randn(2, 3, 11, dtype=dtype, generator=torch.Generator().manual_seed(2)) / 10).to(DEVICE)
    temperature = 1.3

    model.zero_grad()
    hidden = model.model(input_ids=IDS[:, :-1]).last_hidden_state
    expected = plain(hidden, model.lm_head.weight, temperature)
    ((expected[0] * a).sum() + (expected[1] * b).sum() * entropic).backward()
    gradients = [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    precision = PrecisionConfig(chunk=chunk)
    scores = score_tokens(model, IDS, temperature, entropy_gradient=entropic, precision=precision)
    assert scores.entropy.requires_grad == entropic and not scores.sum_pi_squared.requires_grad
    loss = (scores.logprobs[:, 1:] * a).sum()
    (loss + (scores.entropy[:, 1:] * b).sum() if entropic else loss).backward()
    for value, whole in zip((scores.logprobs, scores.entropy, scores.sum_pi_squared), expected, strict=True):
        assert value.dtype == dtype and (value[:, 0] == 0).all()
        assert torch.allclose(value[:, 1:], whole, rtol=error, atol=error)
    scale = max(float(g.abs().max()) for g in gradients)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=error * max(1.0, scale))


def test_score_tokens_differentiates_a_head_bias() -> None:
    model = tiny().double()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB, dtype=torch.float64, device=DEVICE))
    loss = score_tokens(model, IDS, 2.0, precision=PrecisionConfig(chunk=5)).logprobs.sum()
    loss.backward()
    found = model.lm_head.bias.grad
    with torch.no_grad():  # a central difference
        for token in (0, int(IDS[0, 1])):
            ends = []
            for step in (1e-5, -2e-5):
                model.lm_head.bias[token] += step
                ends.append(float(score_tokens(model, IDS, 2.0).logprobs.sum()))
            model.lm_head.bias[token] += 1e-5
            assert float(found[token]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_score_tokens_returns_the_predicting_hidden_state() -> None:
    model = tiny()
    scores = score_tokens(model, IDS)
    assert scores.hidden.shape == (3, 12, 32) and (scores.hidden[:, 0] == 0).all()
    again = (scores.hidden[:, 1:] @ model.lm_head.weight.T).log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    assert torch.allclose(again, scores.logprobs[:, 1:], atol=1e-6)
    assert scores.hidden.requires_grad


def test_tokens_at_a_time_depends_on_the_vocabulary() -> None:
    assert PrecisionConfig().tokens_at_a_time(576) > 4096
    assert PrecisionConfig().tokens_at_a_time(151_936) == 110
    assert PrecisionConfig().tokens_at_a_time(10**9) == 1
    assert PrecisionConfig(chunk=7).tokens_at_a_time(576) == 7


def test_score_tokens_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; whatever has the vocabulary's width goes through `log_softmax`."""
    real, seen = torch.log_softmax, list[int]()

    def watched(logits: Tensor, dim: int) -> Tensor:
        seen.append(len(logits))
        return real(logits, dim)

    monkeypatch.setattr(torch, "log_softmax", watched)
    score_tokens(tiny(), IDS, precision=PrecisionConfig(chunk=10)).logprobs.sum().backward()
    assert seen == [10, 10, 10, 3] * 2
    seen.clear()
    score_tokens(tiny(), IDS).logprobs.sum().backward()
    assert seen == [33]  # kept, not recomputed


def test_wanted_tokens_score_as_all_do() -> None:
    """Their values, and the gradients of a loss on them, are those of a head over every token."""
    model = tiny().double()
    wanted = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.4
    wanted[1] = False  # a row without any
    weights = torch.randn(IDS.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    found = []
    for some in (None, wanted):
        model.zero_grad()
        scores = score_tokens(model, IDS, 0.7, wanted=some, entropy_gradient=True)
        values = torch.stack([scores.logprobs, scores.entropy, scores.sum_pi_squared])
        found.append((torch.where(wanted, values, 0.0), values))
        (found[-1][0][:2] * weights).sum().backward()
        found[-1] += (torch.cat([p.grad.flatten() for p in model.parameters()]),)
    (all_of, _, whole), (same, exact, part) = found
    assert torch.equal(same[:, :, 1:], exact[:, :, 1:]) and (same != 0).any()
    assert torch.allclose(all_of, same, rtol=1e-12) and torch.allclose(whole, part, rtol=1e-9, atol=1e-12)
