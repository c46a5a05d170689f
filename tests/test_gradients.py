"""The loss of a model, for every preset: its gradient depends neither on the cut nor on unsampled tokens."""

import functools
import math
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms import Algorithm, Denominators, Experience, Rows, WeightedRows, collate
from agent_rl.algorithms.batch import LossInputs
from agent_rl.algorithms.loss import EXTREMES
from agent_rl.algorithms.samples import Sample
from agent_rl.backends.embedded.config import ModelConfig, TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.config import load_config
from tests.batches import PRESETS, flat, scored, weigh, weighted
from tests.doubles import example_sample

LENGTHS = (6, 17, 9, 17, 30, 4, 12, 8)


@functools.cache
def model():
    tiny = ModelConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, layers=2, intermediate=64)
    return make_model(tiny, 50, 0).double()


@functools.cache
def algorithm(name: str) -> Algorithm:
    extra = {"rloo": ["algorithm.entropy=0.1"], "gspo": ["algorithm.kl.where=loss"]}
    overrides = [f"algorithm={name}", *extra.get(name, [])]
    return Algorithm(load_config("backend/embedded", TrainConfig, overrides).algorithm)


def samples_of(order: list[int]) -> list[Sample]:
    """Rows with gaps, in two groups of four, in some order; two rows have nothing to learn from."""
    rng = np.random.default_rng(5)
    rows = []
    for i, (n, reward) in enumerate(zip(LENGTHS, [1, 0, 1, 0, 0.5, 1.5, 0, 0], strict=True)):
        sampled = sorted(rng.choice(np.arange(1, n), n // 2, replace=False).tolist())
        rows.append(example_sample(n, sampled, reward=reward, seed=i, episode=order.index(i)))
    return [rows[i] for i in order]


def experience(samples: list[Sample], groups: list[int]) -> Experience:
    scores = torch.tensor([float(s.rewards.sum()) for s in samples], dtype=torch.float64)
    return Experience(
        rows=collate(samples),
        scores=scores,
        components=scores[:, None],
        component_names=("r",),
        component_weights=torch.ones(1, dtype=torch.float64),
        has_component=torch.ones(len(samples), 1, dtype=torch.bool),
        groups=torch.tensor(groups),
        lengths=torch.tensor([int(s.loss_mask.sum()) for s in samples]),
        cut_short=torch.zeros(len(samples), dtype=torch.bool),
        kept=torch.ones(len(samples), dtype=torch.bool),
        baselines=torch.full((len(samples),), 0.25, dtype=torch.float64),
        tasks=({},) * len(samples),
        tool_errors=torch.zeros(len(samples), dtype=torch.int64),
        states=torch.zeros(len(samples), 1, dtype=torch.int64),
        state_values=torch.full((len(samples), 1), 0.25, dtype=torch.float64),
    )


def scores_of(name: str, rows: Rows) -> dict[str, Tensor]:
    """Made-up model outputs for the rows: those that the algorithm reads."""
    mask, found = rows.loss_mask, {"values": torch.where(rows.loss_mask, rows.token_ids / 50, 0.0)}
    if algorithm(name).needs_reference:
        found["reference_logprobs"] = rows.rollout_logprobs - 0.3 * mask
    if algorithm(name).config.recomputes_old:
        found["old_logprobs"] = rows.rollout_logprobs - 0.2 * mask
    return found


def weigh_in_order(name: str, order: list[int]) -> tuple[WeightedRows, Denominators]:
    x = experience(samples_of(order), [i // 4 for i in order])
    if algorithm(name).config.advantage["name"] == "best-against-worst":  # of equals the first is taken
        x = replace(x, scores=x.scores + 0.01 * torch.tensor(order))
    batch, whole = algorithm(name).compute_weights(x, scored(x.rows, **scores_of(name, x.rows)))
    with torch.no_grad():
        logprobs = flat(batch.rows, score_tokens(model(), batch.padded().rows.token_ids).logprobs)
    return algorithm(name).prepare(logprobs, batch)[0], whole


def gradient(
    name: str, cuts: list[WeightedRows], whole: Denominators, pad_id: int = 0
) -> tuple[float, Tensor, dict[str, float]]:
    total, sums = 0.0, dict[str, float]()
    model().zero_grad()
    for batch in cuts:
        entropic = algorithm(name).config.entropy > 0
        padding = torch.arange(batch.rows.token_ids.shape[1]) >= batch.rows.lengths[:, None]
        ids = batch.rows.token_ids.masked_fill(padding, pad_id)
        scores = score_tokens(model(), ids, entropy_gradient=entropic)
        terms, loss = algorithm(name).loss(scores.logprobs, scores.entropy, batch.inputs, whole), 0.0
        if batch.critic is not None:
            loss = algorithm(name).value_loss(scores.hidden.mean(-1), batch.critic, whole).loss
        loss = terms.loss + loss
        loss.backward()
        total += loss.item()
        joined = {key: (EXTREMES.get(key, operator.add), value) for key, value in terms.sums.items()}
        sums = {key: of(sums[key], value) if sums else value for key, (of, value) in joined.items()}
    return total, torch.cat([p.grad.flatten() for p in model().parameters()]), sums


@functools.cache
def reference(name: str) -> tuple[float, Tensor, dict[str, float]]:
    batch, whole = weigh_in_order(name, list(range(len(LENGTHS))))
    return gradient(name, [batch.padded()], whole)


@pytest.mark.parametrize("name", PRESETS)
@settings(deadline=None, max_examples=5)
@given(
    st.one_of(st.sampled_from([1, 100, 10**6]), st.integers(1, 300)),
    st.integers(0, 49),
    st.permutations(range(len(LENGTHS))),
)
def test_gradient_is_invariant_to_cut_and_padding(name, budget, pad_id, order):
    batch, whole = weigh_in_order(name, list(order))
    loss, grad, sums = gradient(name, batch.cut(budget), whole, pad_id)
    expected_loss, expected, expected_sums = reference(name)
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-6 * float(expected.norm()))  # advantages are float32
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert sums == pytest.approx(expected_sums, rel=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_loss_ignores_unsampled_tokens(name):
    batch, whole = weigh_in_order(name, list(range(len(LENGTHS))))
    batch = batch.padded()
    scores = score_tokens(model(), batch.rows.token_ids)
    inputs, mask = batch.inputs, batch.rows.loss_mask
    clean, entropy = scores.logprobs.detach(), scores.entropy.detach()

    def run(logprobs: Tensor, entropy: Tensor, changed: LossInputs) -> tuple[Tensor, Tensor, dict[str, float]]:
        leaf = logprobs.clone().requires_grad_()
        terms = algorithm(name).loss(leaf, entropy, changed, whole)
        (slope,) = torch.autograd.grad(terms.loss, leaf)
        return terms.loss.detach(), slope, terms.sums

    loss, slope, sums = run(clean, entropy, inputs)
    assert (slope[~mask] == 0).all()
    assert (slope[mask] != 0).any()

    def noisy(values: Tensor, noise: float) -> Tensor:
        return torch.where(mask, values, torch.full_like(values, noise))

    for noise in (-7.0, math.nan, math.inf, -math.inf):
        # one at a time: a NaN in one may hide the effect of a NaN in another
        dirty = [
            replace(inputs, **{f: noisy(values, noise)})
            for f in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages")
            if (values := getattr(inputs, f)) is not None
        ]
        for got in (
            run(noisy(clean, noise), entropy, inputs),
            run(clean, noisy(entropy, noise), inputs),
            *(run(clean, entropy, d) for d in dirty),
        ):
            assert torch.equal(got[0], loss)
            assert torch.equal(got[1], slope)
            assert got[2] == sums


@pytest.mark.parametrize("name", PRESETS)
def test_advantages_ignore_values_in_gaps(name):
    order = list(range(len(LENGTHS)))
    x = experience(samples_of(order), [i // 4 for i in order])
    rows, squares = x.rows, torch.full_like(x.rows.rollout_logprobs, 0.5)
    found = {"old_logprobs": rows.rollout_logprobs, "sum_pi_squared": squares} | scores_of(name, rows)
    batch, whole = weigh(algorithm(name), x, **found)
    dirty = {f: torch.where(rows.loss_mask, v, torch.full_like(v, math.nan)) for f, v in found.items()}
    mu = torch.where(rows.loss_mask, rows.rollout_logprobs, math.nan)
    again, whole_again = weigh(algorithm(name), replace(x, rows=replace(rows, rollout_logprobs=mu)), **dirty)
    assert whole_again == whole
    assert torch.equal(again.advantages, batch.advantages) and torch.equal(again.weights, batch.weights)


def test_gradient_ignores_tokens_after_the_last_sample():
    def gradients(*changed: int) -> Tensor:
        sample = example_sample(12, [3, 4, 8], seed=1)
        sample.token_ids[list(changed)] = (sample.token_ids[list(changed)] + 7) % 50
        batch = collate([sample])
        batch = weighted(batch, advantages=batch.loss_mask.float())
        return gradient("grpo", [batch.padded()], Denominators(3, 1))[1]

    assert torch.equal(gradients(), gradients(9, 10, 11))  # behind the last sampled token: no token attends to them
    assert not torch.equal(gradients(), gradients(5))  # between two: through attention only
