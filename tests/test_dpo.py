"""DPO over the whole batch: values by hand, the gradient for every cut against the loss itself, and pairs."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Denominators, WeightedRows, collate
from agent_rl.algorithms.objectives.pairwise import dpo_loss, sequence_logprob
from agent_rl.core.episode import Episode, Outcome, Reward, StopReason, group_episodes
from tests.batches import by_row, flat, weigh, weighted
from tests.doubles import example_episode, example_sample

PARTS = {"advantage": "best-against-worst", "aggregation": "token-sum"}


def algorithm(**knobs: object) -> Algorithm:
    return Algorithm(AlgorithmConfig(objective={"name": "dpo", **knobs}, **PARTS))


def rows(*cells: list[float]) -> Tensor:
    return torch.tensor(cells, dtype=torch.float64)


def pairs_of(groups: list[int], sides: list[int], sampled: list[list[int]], width: int) -> WeightedRows:
    """A weighed batch: row b is of the better (1) or worse (-1) episode of its group."""
    samples = [example_sample(width, at, seed=i, episode=i) for i, at in enumerate(sampled)]
    batch = collate(samples)
    advantages = batch.padded().loss_mask * torch.tensor(sides, dtype=torch.float32)[:, None]
    return weighted(batch, advantages=advantages, group=torch.tensor(groups))


def with_reference(batch: WeightedRows, reference: Tensor) -> WeightedRows:
    return replace(batch, scored=replace(batch.scored, reference_logprobs=flat(batch.rows, reference)))


# --- values ---


def test_dpo_prepare_by_hand() -> None:
    """Group 7: an episode of two rows against one of one. Group 3 is at the reference."""
    batch = pairs_of([7, 3, 7, 7, 3], [1, -1, 1, -1, 1], [[1, 2], [1], [2], [1, 2], [2]], 3)
    nan = math.nan  # not sampled
    theta = rows([nan, -1, -2], [nan, -4, nan], [nan, nan, -1.5], [nan, -1, -1], [nan, nan, -0.5])
    reference = rows([nan, -1.5, -2], [nan, -4, nan], [nan, nan, -2], [nan, -0.5, -0.5], [nan, nan, -0.5])
    batch = with_reference(batch, reference)
    theta = theta.flatten()
    prepared, metrics = algorithm(beta=0.5).prepare(theta, batch)
    # group 7: (-4.5 + 5.5) - (-2 + 1) = 2, m = 1: loss ln(1 + 1/e) = .31326169, slope .5 / (1 + e) = .13447071
    # group 3: m = 0: loss ln 2, slope .5 / 2 = .25; and the mean over two pairs
    assert metrics == pytest.approx(
        {
            "train/loss": (0.31326169 + 0.69314718) / 2,
            "train/pairs": 2,
            "rewards/chosen": 0.5 * (1 + 0) / 2,
            "rewards/rejected": 0.5 * (-1 + 0) / 2,
            "rewards/margins": (1 + 0) / 2,
            "rewards/accuracies": 0.5,
            "logps/chosen": (-4.5 - 0.5) / 2,
            "logps/rejected": (-2 - 4) / 2,
        }
    )
    up, flat = 0.13447071 / 2, 0.25 / 2
    expected = rows([0, up, up], [0, -flat, 0], [0, 0, up], [0, -up, -up], [0, 0, flat])
    torch.testing.assert_close(prepared.advantages.double(), expected.flatten(), rtol=1e-6, atol=1e-9)
    # a fifth the other way round: .8 * .13447071 - .2 * .5 / (1 + 1/e) = .8 * .13447071 - .2 * .36552929
    smooth, metrics = algorithm(beta=0.5, label_smoothing=0.2).prepare(theta, batch)
    assert smooth.advantages[1].item() == pytest.approx(0.03447071 / 2, rel=1e-5)
    assert metrics["train/loss"] == pytest.approx((0.8 * 0.31326169 + 0.2 * 1.31326169 + 0.69314718) / 2)


# --- the gradient ---


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(7)), st.integers(1, 7), st.floats(0.05, 2), st.floats(0, 0.4), st.integers(0, 9))
def test_dpo_gradient_matches_the_loss_in_any_cut(
    order: list[int], cut: int, beta: float, smoothing: float, seed: int
) -> None:
    """Three pairs, one of them with two rows on each side; theta's log-probabilities share parameters."""
    groups, sides = [0, 0, 1, 1, 2, 2, 2], [1, -1, -1, 1, 1, 1, -1]
    sampled = [[1, 2, 5], [3], [2, 4], [1, 2, 3, 4, 5], [5], [1], [2, 3]]
    batch = pairs_of([groups[i] for i in order], [sides[i] for i in order], [sampled[i] for i in order], 6)
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 6, 4, generator=g, dtype=torch.float64)[torch.tensor([i % 6 for i in order])]
    parameters = torch.randn(4, generator=g, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, 6, generator=g, dtype=torch.float64)
    batch = with_reference(batch, reference)

    def theta(of: list[int]) -> Tensor:
        return -(weight[of] @ parameters).square()

    def by_episode(logprobs: Tensor, side: int) -> Tensor:
        per_row = sequence_logprob(logprobs, by_row(batch.rows, batch.rows.loss_mask))
        wanted = [[r for r, i in enumerate(order) if groups[i] == p and sides[i] == side] for p in range(3)]
        return torch.stack([per_row[of].sum() for of in wanted])

    every = list(range(7))
    policies = (theta(every), reference)
    chosen_and_rejected = [by_episode(policy, side) for policy in policies for side in (1, -1)]
    direct, margin = dpo_loss(*chosen_and_rejected, beta=beta, label_smoothing=smoothing)
    (expected,) = torch.autograd.grad(direct.mean(), parameters)

    ours = algorithm(beta=beta, label_smoothing=smoothing)
    prepared, metrics = ours.prepare(flat(batch.rows, theta(every).detach()), batch)
    assert metrics["train/loss"] == pytest.approx(direct.mean().item(), rel=1e-12)
    assert metrics["rewards/margins"] == pytest.approx(margin.mean().item(), rel=1e-9, abs=1e-12)
    found = torch.zeros_like(expected)
    for start in range(0, 7, cut):
        part = every[start : start + cut]
        logprobs = theta(part)[:, : int(batch.rows.lengths[part].max())]
        loss = ours.loss(logprobs, torch.zeros_like(logprobs), prepared.padded(part).inputs, Denominators(1, 1)).loss
        found += torch.autograd.grad(loss, parameters)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.norm()))  # float32 advantages


# --- pairs ---


def episode(name: str, value: float | None, group: str, **changes: object) -> Episode:
    return example_episode(name, rewards=(Reward("r", value),), group_id=group, **changes)


GROUP = [
    episode("best", 1.0, "a", stop_reason=StopReason.LENGTH, outcome=Outcome.TRUNCATED),
    episode("worst", 0.0, "a"),
    episode("good", 0.75, "a"),
    episode("lost", None, "a", outcome=Outcome.FAILED),
    episode("mute", -1.0, "a", trajectories=()),
    episode("alone", 1.0, "b"),
]


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [
        ({}, {0: 1.0, 1: -1.0}),  # nothing was sampled in `mute`, the worst
        ({"filters": ["not-overlong"]}, {2: 1.0, 1: -1.0}),  # never half a pair
        ({"shaping": [{"name": "clip", "low": 0.0, "high": 0.75}]}, {0: 1.0, 1: -1.0}),
        ({"shaping": [{"name": "scale", "factor": -1.0}]}, {1: 1.0, 0: -1.0}),
        ({"advantage": {"name": "best-against-worst", "margin": 0.99}}, {0: 1.0, 1: -1.0}),
        ({"advantage": {"name": "best-against-worst", "margin": 1.0}}, {}),
    ],
)
def test_dpo_pairs_the_best_and_worst_trainable(parts: dict[str, object], chosen: dict[int, float]) -> None:
    ours = Algorithm(AlgorithmConfig(**{"objective": "dpo", **PARTS, **parts}))  # type: ignore[arg-type]
    batch, _ = weigh(ours, ours.experience(group_episodes(GROUP)))
    sides = batch.advantages.sum(-1).sign().tolist()
    assert dict(zip(batch.rows.episode.tolist(), sides, strict=True)) == chosen
    assert batch.group.tolist() == [0] * len(chosen)


def test_dpo_alone_needs_theta_and_reference() -> None:
    assert algorithm().needs_scores_before_update and algorithm().needs_reference
    plain = Algorithm(AlgorithmConfig())
    assert not plain.needs_scores_before_update and not plain.needs_reference
    assert Algorithm(AlgorithmConfig(kl={"where": "loss"})).needs_reference
    batch = pairs_of([0], [1], [[1]], 2)
    prepared, metrics = plain.prepare(batch.scored.old_logprobs, batch)
    assert prepared is batch and metrics == {}
