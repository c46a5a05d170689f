"""A critic's part in an algorithm: GAE and targets through `compute_weights`, the value loss, and refused settings."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agent_rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Denominators,
    Experience,
    ScoredRows,
    WeightedRows,
    collate,
)
from agent_rl.algorithms.batch import CriticTargets
from agent_rl.algorithms.explain import explain
from agent_rl.algorithms.objectives.value import critic_metrics
from agent_rl.core.episode import Episode, Reward, group_episodes
from tests.batches import scored, weigh
from tests.doubles import example_episode, example_sample

SHARED = {"where": "shared", "clip_eps": None}


def algorithm(advantage: dict[str, object], **settings: object) -> Algorithm:
    return Algorithm(AlgorithmConfig(advantage={"lam": 0.5, "whiten": False} | advantage, critic=SHARED, **settings))


def episode(name: str, value: float | None, *more: Reward) -> Episode:
    """Four sampled tokens, in two turns of two with the environment's in between."""
    return example_episode(name, rewards=(Reward("r", value), *more))


def valued(x: Experience, *rows: list[float], **found: Tensor) -> ScoredRows:
    """Give the sampled tokens of each row their values, and all others one that must not be read."""
    values = torch.full_like(x.rows.rollout_logprobs, math.nan)
    values[x.rows.loss_mask] = torch.tensor(rows).flatten()
    return scored(x.rows, values=values, **found)


def at_sampled(x: Tensor, batch: WeightedRows) -> list[list[float]]:
    sampled = batch.rows.loss_mask
    assert not x[~sampled].any()
    return [row[mask].tolist() for row, mask in zip(x, sampled, strict=True)]


def targets(batch: WeightedRows) -> CriticTargets:
    assert batch.critic is not None
    return batch.critic


@pytest.mark.parametrize(
    ("knobs", "rewards", "advantages"),
    [
        # deltas -.25, .25, .25, 1 - .75, halved from each to the one before
        ({}, (), [-0.03125, 0.4375, 0.375, 0.25]),
        ({"lam": 0.0}, (), [-0.25, 0.25, 0.25, 0.25]),
        ({"lam": 1.0}, (), [0.5, 0.75, 0.5, 0.25]),  # reward minus value
        # V' counts half, and so does the discount: deltas -.375, 0, -.125, .25
        ({"gamma": 0.5}, (), [-0.37890625, -0.015625, -0.0625, 0.25]),
        # the first turn earns 2 on its last token: deltas -.25, 2.25, .25, .25
        ({}, (Reward("r", 2.0, turn=0),), [0.96875, 2.4375, 0.375, 0.25]),
    ],
)
def test_gae_by_hand(knobs: dict[str, object], rewards: tuple[Reward, ...], advantages: list[float]) -> None:
    values = [0.5, 0.25, 0.5, 0.75]
    judge = algorithm({"name": "gae"} | knobs)
    x = judge.experience(group_episodes([episode("win", 1.0, *rewards)]))
    batch, whole = weigh(judge, x, valued(x, values))
    assert at_sampled(batch.advantages, batch) == [pytest.approx(advantages)]
    assert at_sampled(targets(batch).returns, batch) == [
        pytest.approx([a + v for a, v in zip(advantages, values, strict=True)])
    ]
    assert torch.equal(targets(batch).valued, batch.rows.loss_mask) and whole == Denominators(4, 1, valued=4)


def test_turn_gae_values_turn_starts_by_hand() -> None:
    judge = algorithm({"name": "turn-gae"})
    x = judge.experience(group_episodes([episode("win", 1.0)]))
    batch, whole = weigh(judge, x, valued(x, [0.5, 9.0, 0.25, 9.0]))
    # deltas .25 - .5 and 1 - .25
    assert at_sampled(batch.advantages, batch) == [[0.125, 0.125, 0.75, 0.75]]
    assert at_sampled(targets(batch).returns, batch) == [[0.625, 0.0, 1.0, 0.0]]
    assert at_sampled(targets(batch).valued, batch) == [[True, False, True, False]] and whole == Denominators(
        4, 1, valued=2
    )


@pytest.mark.parametrize(
    ("name", "advantages", "returns"),
    [
        # one line of values .5, .25 | 0, .75 with 1 at its end: deltas -.25, -.25, .75, .25
        ("gae", [[-0.15625, 0.1875], [0.875, 0.25]], [[0.34375, 0.4375], [0.875, 1.0]]),
        # turns of values .5 and 0: deltas -.5 and 1
        ("turn-gae", [[0.0, 0.0], [1.0, 1.0]], [[0.5, 0.0], [1.0, 0.0]]),
    ],
)
def test_gae_spans_the_rows_of_an_episode(name: str, advantages: list[list[float]], returns: list[list[float]]) -> None:
    judge = algorithm({"name": name})
    x = judge.experience(group_episodes([episode("other", 0.0), episode("win", 1.0)]))
    samples = [example_sample(6, [2, 3, 4, 5], 0.0, episode=0)]
    samples += [example_sample(5, [1, 3], 0.0, episode=1), example_sample(4, [2, 3], 1.0, episode=1)]
    samples[2].turns[:], samples[2].moments[:] = 1, range(5, 9)
    x = replace(x, rows=collate(samples))
    values = torch.zeros(3, 6)
    values[1, [1, 3]], values[2, [2, 3]] = torch.tensor([0.5, 0.25]), torch.tensor([0.0, 0.75])
    batch, _ = weigh(judge, x, values=values)
    assert at_sampled(batch.advantages, batch) == [[0.0] * 4, *advantages]
    assert at_sampled(targets(batch).returns, batch) == [[0.0] * 4, *returns]


def test_whitening_leaves_critic_targets_unchanged() -> None:
    x = Experience.of(group_episodes([episode("win", 1.0), episode("loss", 0.0)]))
    values = valued(x, [0.5, 0.25, 0.5, 0.75], [0.5, 0.5, 0.5, 0.5])
    raw, white = (weigh(algorithm({"name": "gae", "whiten": w}), x, values)[0] for w in (False, True))
    assert torch.equal(targets(raw).returns, targets(white).returns) and targets(raw).returns.any()
    found = white.advantages[white.rows.loss_mask]
    assert found.mean().item() == pytest.approx(0, abs=1e-6) and found.std().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["gae", "turn-gae"])
def test_critic_trains_on_kept_episodes_only(name: str) -> None:
    judge = algorithm({"name": name, "whiten": True})
    episodes = [episode("win", 1.0), episode("unscored", None), episode("filtered", 5.0), episode("loss", 0.0)]
    x = judge.experience(group_episodes(episodes))
    x = replace(x, kept=x.kept & torch.tensor([True, True, False, True]))
    batch, whole = weigh(judge, x, valued(x, *([[0.5, 0.25, 0.5, 0.75]] * 4)))
    assert batch.rows.episode.tolist() == [0, 3] and whole.valued == (8 if name == "gae" else 4)
    alone = judge.experience(group_episodes([episodes[0], episodes[3]]))
    expected, _ = weigh(judge, alone, valued(alone, *([[0.5, 0.25, 0.5, 0.75]] * 2)))
    assert torch.equal(batch.advantages, expected.advantages) and torch.equal(
        targets(batch).returns, targets(expected).returns
    )


def test_critic_trains_on_rows_without_policy_loss() -> None:
    judge = algorithm({"name": "gae"}, count_zero_advantage=False)
    foreseen = replace(episode("foreseen", 1.0), group_id="easy")
    x = judge.experience(group_episodes([foreseen, episode("win", 1.0)]))
    batch, whole = weigh(judge, x, valued(x, [1.0] * 4, [0.0] * 4))
    assert not batch.advantages[0].any() and whole == Denominators(4, 1, valued=8)
    rejecting = algorithm(
        {"name": "gae"}, proximal="recompute", rejection={"name": "sequence", "low": 0.5, "high": 2.0}
    )
    far = x.rows.rollout_logprobs + 3.0 * x.rows.loss_mask
    batch, whole = weigh(rejecting, x, valued(x, [1.0] * 4, [0.0] * 4, old_logprobs=far))
    assert not batch.weights.any() and targets(batch).valued.sum() == whole.valued == 8


def test_kl_in_reward_enters_advantages_and_targets() -> None:
    judge = algorithm({"name": "gae", "lam": 1.0}, kl={"where": "reward", "coefficient": 0.5, "kind": "k1"})
    x = judge.experience(group_episodes([episode("win", 1.0)]))
    nearer = x.rows.rollout_logprobs - 0.5 * x.rows.loss_mask  # each token costs .5 * .5
    batch, _ = weigh(judge, x, valued(x, [0.25] * 4, reference_logprobs=nearer))
    assert at_sampled(targets(batch).returns, batch) == [pytest.approx([0.0, 0.25, 0.5, 0.75], abs=1e-7)]
    assert at_sampled(batch.advantages, batch) == [pytest.approx([-0.25, 0.0, 0.25, 0.5], abs=1e-7)]


def test_gae_values_truncated_ends_at_zero() -> None:
    judge = algorithm({"name": "gae"})
    x = judge.experience(group_episodes([episode("short", 0.0)]))
    batch, _ = weigh(judge, replace(x, cut_short=torch.tensor([True])), valued(x, [0.5] * 4))
    assert batch.advantages[batch.rows.loss_mask][-1].item() == -0.5


# --- the value loss ---


def rows() -> tuple[Algorithm, WeightedRows, Denominators]:
    """Rows of many lengths with gaps, weighed by a critic that is wrong by a different amount at each token."""
    judge = algorithm({"name": "turn-gae"})
    samples = [
        example_sample(n, list(range(1 + e % 3, n, 2)), reward=float(e % 2), seed=e, episode=e)
        for e, n in enumerate((6, 17, 9, 17, 30, 4))
    ]
    for sample in samples:
        sample.turns[:] = [t // 4 for t in range(len(sample.turns))]
    x = judge.experience(group_episodes([episode(str(e), float(e % 2)) for e in range(6)]))
    x = replace(x, rows=collate(samples))
    values = torch.where(x.rows.loss_mask, x.rows.token_ids / 50, math.nan)
    return judge, *judge.compute_weights(x, scored(x.rows, values=values))


@pytest.mark.parametrize("budget", [1, 20, 40, 10**6])
def test_value_loss_is_a_mean_in_any_cut(budget: int) -> None:
    judge, batch, whole = rows()
    assert 6 < whole.valued < whole.tokens
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    losses, sums = [], {"vf_loss": 0.0, "vf_clipfrac": 0.0}
    for part in batch.cut(budget):
        terms = judge.value_loss(scale * part.rows.token_ids.double().cos(), targets(part), whole)
        losses.append(terms.loss)
        sums = {name: sums[name] + terms.sums[name] for name in sums}
    torch.stack(losses).sum().backward()
    valued, returns = targets(batch).valued, targets(batch).returns
    predicted, target = batch.rows.token_ids.double().cos()[valued], returns[valued].double()
    by_hand = (predicted - target).square().mean() / 2
    assert sum(losses).item() == pytest.approx(0.5 * by_hand.item(), rel=1e-12)  # 0.5: the coefficient
    assert sums == pytest.approx({"vf_loss": by_hand.item() * whole.valued, "vf_clipfrac": 0.0}, rel=1e-12)
    assert scale.grad is not None
    assert scale.grad.item() == pytest.approx(0.5 * ((predicted - target) * predicted).mean().item(), rel=1e-12)


@pytest.mark.parametrize("noise", [0.0, 7.0, math.nan, math.inf])
def test_value_loss_ignores_unvalued_tokens(noise: float) -> None:
    judge, batch, whole = rows()
    critic, valued = targets(batch), targets(batch).valued
    critic = replace(critic, returns=torch.where(valued, critic.returns, noise))
    values = torch.where(valued, 0.25, noise).requires_grad_()
    judge.value_loss(values, critic, whole).loss.backward()
    assert values.grad is not None
    assert (values.grad[~valued] == 0).all() and (values.grad[valued] != 0).all()


def test_critic_metrics_by_hand() -> None:
    mask = torch.tensor([[False, True, True, False], [False, False, True, True]])
    returns = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 9.0, 3.0, 4.0]])
    found = critic_metrics(returns - torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]), returns, mask)
    assert found == {"critic/values/mean": 2.0, "critic/returns/mean": 2.5, "critic/vf_explained_var": 1.0}
    assert critic_metrics(returns, returns, mask & False) == {}
    assert "critic/vf_explained_var" not in critic_metrics(returns, torch.ones_like(returns), mask)


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "gae"}, "set critic.where=shared or separate"),
        ({"advantage": "turn-gae"}, "set critic.where=shared or separate"),
        ({"critic": {"where": "shared"}}, "advantage=gae or turn-gae"),
        ({"critic": {"warmup_steps": 3}}, "without a critic nothing would learn"),
        ({"advantage": {"name": "gae", "lam": 1.5}, "critic": SHARED}, "lam"),
        ({"advantage": "gae", "critic": SHARED | {"clip_eps": 0.0}}, "clip_eps"),
    ],
)
def test_critic_refuses_meaningless_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)


def test_critic_is_explained_with_values_in_use() -> None:
    separate = {"where": "separate", "coefficient": 0.75, "clip_eps": 0.125, "lr": 0.003, "warmup_steps": 7}
    text = explain(AlgorithmConfig(advantage={"name": "gae", "lam": 0.875}, critic=separate))
    for said in ("lam=0.875", "critic", "separate", "0.75", "clip_eps=0.125", "lr=0.003", "7 steps", "V_old +- clip"):
        assert said in text
    assert "V_old +-" not in explain(AlgorithmConfig(advantage="gae", critic=SHARED))
    assert "critic" not in explain(AlgorithmConfig())
