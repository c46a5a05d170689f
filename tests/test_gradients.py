"""The loss of a model: its gradient hangs neither on how a batch is cut nor on tokens that nobody sampled."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Batch, Denominators, collate, micro_batches
from agent_rl.algorithms.aggregation import AGGREGATIONS
from agent_rl.backends.embedded.logprobs import token_logprobs
from agent_rl.backends.embedded.model import ModelConfig, make_model
from agent_rl.types import Sample
from tests.doubles import example_sample


@functools.cache
def model():
    tiny = ModelConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, layers=2, intermediate=64)
    return make_model(tiny, 50, 0).double()


def batch_of_samples() -> list[Sample]:
    rng = np.random.default_rng(5)
    lengths = [6, 17, 9, 17, 30, 4, 12]
    return [
        example_sample(
            n, sorted(rng.choice(np.arange(1, n), n // 2, replace=False).tolist()), advantage=float(a), seed=i
        )
        for i, (n, a) in enumerate(zip(lengths, rng.normal(size=len(lengths)), strict=True))
    ]


def gradient(algorithm: Algorithm, cuts: list[list[Sample]], pad_id: int = 0) -> tuple[float, Tensor, dict[str, float]]:
    whole, total, sums = Denominators.of([s for cut in cuts for s in cut]), 0.0, dict[str, float]()
    model().zero_grad()
    for cut in cuts:
        batch = collate(cut, pad_id)
        logprobs, _ = token_logprobs(model(), batch.token_ids)
        terms = algorithm.loss(logprobs, batch.rollout_logprobs, batch, whole)
        terms.loss.backward()
        total += terms.loss.item()
        sums = {name: sums.get(name, 0.0) + value for name, value in terms.sums.items()}
    return total, torch.cat([p.grad.flatten() for p in model().parameters()]), sums


def algorithms() -> list[Algorithm]:
    return [
        Algorithm(AlgorithmConfig(aggregation=a, correction=c))
        for a, c in zip(AGGREGATIONS, ["none", "token-tis", "token-tis"], strict=True)
    ]


@functools.cache
def reference(index: int) -> tuple[float, Tensor, dict[str, float]]:
    return gradient(algorithms()[index], [batch_of_samples()])


@pytest.mark.parametrize("index", range(3))
@settings(deadline=None, max_examples=8)
@given(st.one_of(st.sampled_from([1, 100, 10**6]), st.integers(1, 300)), st.integers(0, 49), st.randoms())
def test_the_gradient_does_not_hang_on_how_the_batch_is_cut_or_padded(index, budget, pad_id, random):
    samples = batch_of_samples()
    random.shuffle(samples)
    loss, grad, sums = gradient(algorithms()[index], micro_batches(samples, budget), pad_id)
    expected_loss, expected, expected_sums = reference(index)
    assert float(expected.norm()) > 0.01
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-10)
    assert loss == pytest.approx(expected_loss, rel=1e-5)  # float32
    assert sums == pytest.approx(expected_sums, rel=1e-6)


@pytest.mark.parametrize("index", range(3))
def test_a_token_that_the_policy_did_not_sample_has_no_loss(index):
    batch = collate(batch_of_samples())
    whole = Denominators(60, 7)
    clean, _ = token_logprobs(model(), batch.token_ids)

    def run(logprobs: Tensor, old: Tensor, changed: Batch) -> tuple[Tensor, Tensor, dict[str, float]]:
        leaf = logprobs.detach().clone().requires_grad_()
        terms = algorithms()[index].loss(leaf, old, changed, whole)
        (slope,) = torch.autograd.grad(terms.loss, leaf)
        return terms.loss.detach(), slope, terms.sums

    loss, slope, sums = run(clean, batch.rollout_logprobs, batch)
    assert (slope[~batch.loss_mask] == 0).all()
    assert (slope[batch.loss_mask] != 0).any()
    inputs = [clean, batch.rollout_logprobs, batch.rollout_logprobs, batch.advantages]
    for noise in (-7.0, math.nan, math.inf, -math.inf):
        noisy = [torch.where(batch.loss_mask, x, torch.full_like(x, noise)) for x in inputs]
        # one at a time: a NaN in one may hide what comes of a NaN in another
        for dirty in [noisy] + [[*inputs[:i], noisy[i], *inputs[i + 1 :]] for i in range(4)]:
            changed = Batch(batch.token_ids, batch.loss_mask, dirty[2], dirty[3], batch.lengths)
            got = run(dirty[0], dirty[1], changed)
            assert torch.equal(got[0], loss)
            assert torch.equal(got[1], slope)
            assert got[2] == sums


def test_a_token_that_nothing_sampled_comes_after_changes_no_gradient():
    first, second = (example_sample(12, [3, 4, 8], seed=1) for _ in range(2))
    second.token_ids[9:] = (second.token_ids[9:] + 7) % 50  # behind the last sampled token: nobody attends to it
    algorithm = algorithms()[0]
    assert torch.equal(gradient(algorithm, [[first]])[1], gradient(algorithm, [[second]])[1])
    second.token_ids[5] = (second.token_ids[5] + 7) % 50  # between two: through attention only
    assert not torch.equal(gradient(algorithm, [[first]])[1], gradient(algorithm, [[second]])[1])
