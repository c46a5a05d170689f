"""Properties of every preset, for any numbers: invariance to rewards and rows, and the start from REINFORCE.

Shaping and filters act before: what is compared here starts from the scores that they return.
"""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Denominators,
    Experience,
    ScoredRows,
    WeightedRows,
    components,
)
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import load_config
from tests.batches import PRESETS
from tests.doubles import example_sample
from tests.test_gradients import experience

SAMPLED = [[1, 2, 4], [2], [3, 4, 5, 8], [1, 6], [1, 2, 3], [4, 7], [2, 3, 5, 6, 8], [5]]
"""Where eight rows, in two groups of four, have sampled tokens."""
SCORES = [1.0, 0.0, 0.5, 0.25, 2.0, 1.5, 0.75, 3.0]

SHIFTED = {
    "returns": "it has no baseline",
    "turn-returns": "it has no baseline",
    "max-likelihood": "it divides by the mean of the group",
    "optimal-baseline": "with zero_tail a step that one row reaches has no baseline",
}
"""The advantages that change when a constant is added to all rewards, and why. pass-at-k is for rewards of 0 and 1."""

SCALED = {
    "group-relative": "where std is false",
    "best-of-group": "where std is false",
    "leave-one-out": "a difference of rewards",
    "length-weighted": "a difference of rewards",
    "over-greedy": "a difference of rewards",
    "optimal-baseline": "a difference of rewards",
    "returns": "a sum of rewards",
    "turn-returns": "a sum of rewards",
    "step-grouped": "where std is false",
    "state-values": "a difference of rewards and values, which are expected rewards",
    "gae": "the same, where whiten is false",
    "turn-gae": "the same, where whiten is false",
}
"""The advantages that grow with the rewards; all others are normalised, and stay as they are."""

LONG = {"luspo": "its loss of a row is |y| times GSPO's, so that its gradient is |y| times REINFORCE's"}
"""The objectives that do not start from REINFORCE. All others do: SAPO, whose gate is normalised to have slope 1 at
ratio 1, and those with one ratio a sequence, whose slope 1 / |y| each of the |y| tokens of the row carries."""


OTHERS = ("length-weighted", "best-of-group", "max-likelihood", "reinforce-pp-baseline", "optimal-baseline")
"""Advantages that no preset has."""


@functools.cache
def preset(name: str) -> AlgorithmConfig:
    if name in OTHERS:
        return AlgorithmConfig(advantage=name, proximal="recompute")
    return load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm


def rows(
    scores: list[float], order: list[int] | None = None, gap: float = 0.2, baseline: float = 0.25
) -> tuple[Experience, ScoredRows]:
    """Return the eight rows in some order, and scores; `gap` is log(mu / old), `baseline` the value of any state."""
    order = order or list(range(len(SAMPLED)))
    samples = [example_sample(9, SAMPLED[i], reward=scores[i], seed=i, episode=place) for place, i in enumerate(order)]
    x = experience(samples, [i // 4 for i in order])
    rows, generator = x.rows, torch.Generator().manual_seed(0)
    squares = torch.rand((len(SAMPLED), 9), generator=generator)[order].flatten()
    moved = torch.rand((len(SAMPLED), 9), generator=generator)[order].flatten()
    old = rows.rollout_logprobs - gap * moved * rows.loss_mask
    values = torch.full_like(old, baseline)
    expected = {name: torch.full_like(getattr(x, name), baseline) for name in ("baselines", "state_values")}
    scored = ScoredRows(rows, old, reference_logprobs=rows.rollout_logprobs, values=values, sum_pi_squared=squares)
    return replace(x, **expected), scored


def weighed(config: AlgorithmConfig, given: tuple[Experience, ScoredRows]) -> tuple[WeightedRows, Denominators]:
    x, scored = given
    if not config.recomputes_old:
        scored = replace(scored, old_logprobs=x.rows.rollout_logprobs)
    return Algorithm(config).compute_weights(x, scored)


def laid_out(config: AlgorithmConfig, given: tuple[Experience, ScoredRows], name: str = "advantages") -> Tensor:
    """Return an array of the weighed rows, `[8, 9]`, in the order of `x`; 0 for rows that were left out."""
    batch = weighed(config, given)[0].padded()
    out = torch.zeros((8, 9), dtype=torch.float64)
    out[batch.rows.episode, : batch.rows.token_ids.shape[1]] = getattr(batch, name).double()
    return out


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=2e-5)


scores_in_some_order = st.permutations(SCORES)
each_preset = pytest.mark.parametrize("name", PRESETS)
each_advantage = pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
few = settings(deadline=None, max_examples=6)


@each_advantage
@few
@given(scores_in_some_order, st.floats(0.5, 8) | st.floats(-8, -0.5))
def test_advantage_ignores_a_constant_reward_shift(name, scores, constant):
    config = preset(name)
    before = laid_out(config, rows(scores))
    after = laid_out(config, rows([s + constant for s in scores], baseline=0.25 + constant))
    # a reward that is discounted is shifted by less than the value of the state before it
    discounted = config.critic.where != "none" and config.advantage.get("gamma") != 1
    assert close(before, after) == (config.advantage["name"] not in SHIFTED and not discounted)


@each_advantage
@few
@given(scores_in_some_order, st.floats(1.5, 30) | st.floats(0.05, 0.6))
def test_advantage_scales_with_rewards_or_stays(name, scores, factor):
    config = preset(name)
    normalised = config.advantage.get("std", False) or config.advantage.get("whiten", False)
    grows = config.advantage["name"] in SCALED and not normalised
    before = laid_out(config, rows(scores))
    after = laid_out(config, rows([s * factor for s in scores], baseline=0.25 * factor))
    assert before.abs().max() > 0.1
    # 1e-6 beside a standard deviation of a twentieth
    assert torch.allclose(after, before * (factor if grows else 1.0), rtol=1e-4, atol=1e-4)


@each_advantage
@few
@given(scores_in_some_order, st.permutations(range(8)))
def test_advantages_follow_their_rows(name, scores, order):
    config = preset(name)
    plain, moved = rows(scores), rows(scores, list(order))
    for array in ("advantages", "weights", "counted"):
        torch.testing.assert_close(laid_out(config, moved, array), laid_out(config, plain, array)[order])
    assert weighed(config, moved)[1] == weighed(config, plain)[1]


def slope(config: AlgorithmConfig, cuts: list[WeightedRows], whole: Denominators, offset: float = 0.0) -> Tensor:
    """Return the gradient by theta's log-probabilities, `[8, 9]`; theta = e^offset old."""
    out = torch.zeros((8, 9), dtype=torch.float64)
    for batch in cuts:
        theta = (batch.scored.old_logprobs + offset).requires_grad_()
        Algorithm(config).loss(theta, torch.zeros_like(theta), batch.inputs, whole).loss.backward()
        assert theta.grad is not None
        out[batch.rows.episode, : theta.shape[1]] += theta.grad.double()
    return out


def starts_from_reinforce(config: AlgorithmConfig, scores: list[float]) -> None:
    batch, whole = Algorithm(config).compute_weights(*rows(scores, gap=0.0))
    plain = config.model_copy(update={"objective": components.objective.check("reinforce")})
    got, expected = slope(config, [batch.padded()], whole), slope(plain, [batch.padded()], whole)
    length = float(str(config.aggregation.get("length", 256)))  # by which all is divided, whatever the episodes have
    assert expected.abs().max() > 1e-4 * min(1, 256 / length)
    if config.objective["name"] in LONG:
        expected = expected * torch.tensor([[len(places)] for places in SAMPLED])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)


@each_preset
@few
@given(scores_in_some_order)
def test_preset_starts_from_reinforce(name, scores):
    starts_from_reinforce(preset(name), scores)


@pytest.mark.parametrize("objective", [o for o in components.objective if o != "dpo"])  # dpo has its own mean
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_objective_starts_from_reinforce_in_any_aggregation(objective, aggregation):
    knobs = {"clip_high_cap": 4.0} if objective == "cispo" else {}
    chosen = {"name": objective, **knobs}
    starts_from_reinforce(AlgorithmConfig(objective=chosen, aggregation=aggregation, proximal="recompute"), SCORES)


@each_preset
@few
@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(1, 60))
def test_gradient_does_not_depend_on_ranks(name, ranks, budget):
    config = preset(name)
    batch, whole = weighed(config, rows(SCORES))
    mine = [[r for r in range(len(batch)) if ranks[r] == rank] for rank in range(4)]
    cuts = [cut for rank in mine if rank for cut in batch.select(rank).cut(budget)]
    expected = slope(config, [batch.padded()], whole, offset=0.05)
    torch.testing.assert_close(slope(config, cuts, whole, offset=0.05), expected, rtol=1e-5, atol=1e-8)


@each_preset
def test_reward_on_an_environment_token_counts(name):
    config, (x, scored) = preset(name), rows(SCORES)
    later = x.rows.rewards.clone().view(8, 9)
    for row, places in enumerate(SAMPLED):
        last = max(places)
        if last < 8:  # another token follows
            later[row, last + 1], later[row, last] = later[row, last].clone(), 0.0
    later = later.flatten()
    assert (later * ~x.rows.loss_mask).sum() == sum(SCORES) - SCORES[2] - SCORES[6]
    moved = replace(x, rows=replace(x.rows, rewards=later))
    assert torch.equal(laid_out(config, (moved, scored)), laid_out(config, (x, scored)))


def test_tables_name_existing_components():
    known = set(components.advantage)
    assert set(SHIFTED) | set(SCALED) <= known and set(LONG) <= set(components.objective)
