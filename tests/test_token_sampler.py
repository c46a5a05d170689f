"""The sampler against a naive reference, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.token_sampler import sample
from agent_rl.errors import PolicyError

MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=7, top_p=0.8),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=6, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=3),
]


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution that vLLM samples from: temperature, then min-p, then top-k, then top-p; plain Python."""
    scaled = [x / (params.temperature or 1.0) for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = [i for i in order if weights[i] >= params.min_p]  # the likeliest one weighs 1
    kept = kept[: params.top_k or None]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and mass >= params.top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


def many_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(0, 2, (rows, 12)), dtype=torch.float32)


@pytest.mark.parametrize("seed", range(5))
def test_sample_matches_the_reference_row_by_row(seed: int) -> None:
    logits = many_logits(len(MIXED), seed)
    expected = [reference(row, p) for row, p in zip(logits.tolist(), MIXED, strict=True)]
    for draw in np.linspace(0, 1, 23, endpoint=False).tolist():
        ids, logprobs = sample(logits, MIXED, [draw] * len(MIXED))
        for row, params in enumerate(MIXED):
            token = int(ids[row])
            if params.temperature == 0:
                assert (token, float(logprobs[row])) == (int(logits[row].argmax()), 0.0)
                continue
            assert float(logprobs[row]) == pytest.approx(math.log(expected[row][token]), abs=1e-5)
            below = sum(expected[row][:token])  # the draw falls into the token's interval of the cumulative mass
            assert below - 1e-5 <= draw <= below + expected[row][token] + 1e-5


@pytest.mark.parametrize("params", [p for p in MIXED if p.temperature], ids=str)
def test_sample_follows_the_distribution(params: SamplingParams) -> None:
    n = 20_000
    logits = many_logits(1)
    draws = np.random.default_rng(1).random(n).tolist()
    ids, _ = sample(logits.expand(n, -1), [params] * n, draws)
    counts = np.bincount(ids.numpy(), minlength=12)
    expected = n * np.asarray(reference(logits[0].tolist(), params))
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    assert chi_square < 35  # 11 degrees of freedom at most: beyond this by chance once in 4000


@pytest.mark.parametrize("draw", [0.0, np.nextafter(1.0, 0.0)])
def test_sample_never_draws_a_token_of_mass_0(draw: float) -> None:
    logits = torch.tensor([[-30.0, 1.0, 2.0, 1.0, -30.0], [float("-inf"), 0.0, 0.0, 0.0, float("-inf")]])
    ids, logprobs = sample(logits, [SamplingParams(top_k=3), SamplingParams()], [draw, draw])
    assert ids.tolist() == ([1, 1] if draw == 0 else [3, 3])
    assert logprobs.isfinite().all()


def test_sample_rows_are_independent() -> None:
    logits = many_logits(len(MIXED))
    together = sample(logits, MIXED, [0.37] * len(MIXED))
    for row, params in enumerate(MIXED):
        alone = sample(logits[row : row + 1], [params], [0.37])
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[row], atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sample_refuses_logits_without_a_softmax(bad: float) -> None:
    logits = many_logits(3)
    logits[1, 5] = bad
    with pytest.raises(PolicyError, match="1 of 3 rows"):
        sample(logits, [SamplingParams()] * 3, [0.5] * 3)
