"""agent_rl.algorithms: batches, the rows of episodes, aggregation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Denominators,
    Experience,
    ScoredRows,
    collate,
    to_samples,
)
from agent_rl.algorithms.components import Part
from agent_rl.algorithms.on_tokens import on_tokens
from agent_rl.core.episode import Outcome, Reward, StopReason, group_episodes
from agent_rl.grid import Grid
from tests.doubles import example_episode, example_sample
from tests.tensors import aggregate

SAMPLED = [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2 + [False]

# Samples


def test_to_samples_places_rewards_on_sampled_tokens():
    rewards = (
        Reward("r", 1.0),
        Reward("step", 0.25, 2.0, turn=0),
        Reward("muted", 9.0, 0.0),
        Reward("late", 3, turn=7),
    )
    (s,) = to_samples([example_episode(rewards=rewards)])
    assert s.loss_mask.tolist() == SAMPLED
    assert s.rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 4.0, 0]  # 2 * .25; 1 + 3: turn 7 sampled nothing
    np.testing.assert_array_equal(s.rollout_logprobs, np.float32([0, 0, 0, -0.5, -0.0625, 0, 0, -0.1, -2.5, 0]))
    assert s.episode == 0


def test_experience_lays_scores_out_by_episode():
    def scored(name: str, value: float | None, group: str, **changes: object):
        return example_episode(name, rewards=(Reward("r", value), Reward("form", 0.5, 0.1)), group_id=group, **changes)

    x = Experience.of(
        group_episodes(
            [
                scored("win", 1.0, "a"),
                scored("unscored", None, "a"),
                scored("lost", 1.0, "b", outcome=Outcome.FAILED),
                scored("long", 0.0, "a", outcome=Outcome.TRUNCATED, stop_reason=StopReason.TOKENS, trajectories=()),
            ]
        )
    )
    np.testing.assert_allclose(x.scores, [1.05, math.nan, 0.05, math.nan])
    np.testing.assert_allclose(x.components, [[1, 0.5], [math.nan, 0.5], [0, 0.5], [math.nan] * 2])
    assert x.component_names == ("r", "form") and x.component_weights.tolist() == [1.0, 0.1]
    assert x.groups.tolist() == [0, 0, 0, 1] and x.lengths.tolist() == [4, 4, 0, 4]
    assert x.kept.tolist() == [True, False, True, False] and x.cut_short.tolist() == [False, False, True, False]
    assert x.rows.episode.tolist() == [0, 1, 3]  # in the order of groups
    part = Part("own", lambda scores: scores, {})
    spread = on_tokens(part, torch.tensor([2.0, math.nan, 4.0, 3.0]), x).view(3, 10)
    assert spread[:, SAMPLED].tolist() == [[2] * 4, [0] * 4, [3] * 4] and spread.sum() == 20


def test_rescored_changes_the_last_sampled_token():
    x = Experience.of(
        group_episodes(
            [example_episode("a", rewards=(Reward("r", 1.0),)), example_episode("b", rewards=(Reward("r", 0),))]
        )
    )
    changed = x.rescored(torch.tensor([0.25, math.nan], dtype=torch.float64))
    assert changed.rows.rewards.tolist() == [0] * 8 + [0.25, 0] + [0] * 10
    assert x.rows.rewards[8] == 1


def test_experience_without_sampled_tokens_has_no_rows():
    x = Experience.of(group_episodes([example_episode(trajectories=())]))
    assert len(x.rows) == 0 and len(x.rescored(x.scores + 1).rows) == 0
    assert collate([]).token_ids.shape == (0,) and collate([]).padded().token_ids.shape == (0, 0)


# Batches


def test_micro_batches_are_padded_on_the_right():
    rows = collate([example_sample(3, [2]), example_sample(5, [1, 4])])
    assert rows.loss_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1] and rows.starts.tolist() == [0, 3]
    batch = rows.padded()
    assert len(batch) == 2 and torch.equal(rows.select([1]).token_ids, batch.token_ids[1])
    assert batch.token_ids[0, 3:].tolist() == [0, 0] and batch.turns[0, 3:].tolist() == [-1, -1]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 1]]
    assert batch.lengths.tolist() == [3, 5] and batch.token_ids.dtype == torch.int64
    assert (batch.rollout_logprobs[~batch.loss_mask] == 0).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=15), st.integers(1, 200), st.randoms())
def test_cut_keeps_all_rows_and_the_budget(lengths, budget, random):
    samples = [example_sample(n, [n - 1], seed=i) for i, n in enumerate(lengths)]
    batch = collate(samples)
    cuts = batch.cut_rows(budget)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    for cut, part in zip(cuts, batch.cut(budget), strict=True):
        assert part.token_ids.shape == (len(cut), max(lengths[row] for row in cut))
        assert len(cut) == 1 or part.token_ids.numel() <= budget
        for row, ids in zip(cut, part.token_ids, strict=True):
            assert ids[: lengths[row]].tolist() == samples[row].token_ids.tolist()
    again = collate(random.sample(samples, len(samples))).cut(budget)
    assert [part.lengths.tolist() for part in again] == [part.lengths.tolist() for part in batch.cut(budget)]


# Aggregation

LOSS = torch.tensor([[1.0, 2.0, 3.0, math.nan], [10.0, *[math.nan] * 3], [math.nan] * 4])
MASK = ~LOSS.isnan()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ({"name": "seq-mean-token-sum-norm", "length": 5}, (6 / 5 + 10 / 5) / 2),
    ],
)
def test_aggregate_by_hand_ignores_unmasked_tokens(chosen, expected):
    loss = LOSS.clone().requires_grad_()
    got = aggregate(chosen, loss, MASK, Denominators.of(MASK))
    assert got.item() == pytest.approx(expected)
    got.backward()
    assert loss.grad is not None
    assert (loss.grad[~MASK] == 0).all() and (loss.grad[MASK] != 0).all()


def test_denominators_count_sampled_tokens():
    assert Denominators.of(MASK) == Denominators(tokens=4, sequences=2)
    assert Denominators.of(MASK[2:]) == Denominators.of(MASK[:0]) == Denominators(1, 1)


def test_collate_keeps_experts_of_two_widths() -> None:
    """An engine sends what its highest expert needs: one row fits in a byte, the next one does not."""
    narrow, wide = np.full((3, 1, 1), 127, np.int8), np.full((2, 1, 1), 200, np.int16)
    samples = [replace(example_sample(len(r), [1]), routed_experts=r) for r in (narrow, wide)]
    batch = collate(samples)
    assert batch.routed_experts is not None
    assert batch.routed_experts[..., 0, 0].tolist() == [127] * 3 + [200] * 2
    assert batch.padded().routed_experts[..., 0, 0].tolist() == [[127] * 3, [200, 200, -1]]


# Long rows


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "reinforce-pp"},
        {"advantage": "turn-returns", "weight": "sequence-tis", "rejection": "geometric", "proximal": "recompute"},
        {"filters": ["varied-groups"], "shaping": [{"name": "scale", "factor": 2.0}]},
        {"advantage": "gae", "critic": {"where": "shared"}},
    ],
    ids=["returns", "corrections", "filters", "critic"],
)
def test_long_row_widens_no_other(monkeypatch, settings):
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    lengths = [3000, *[30] * 299]
    samples = [example_sample(n, list(range(1, n, 2)), float(i % 2), seed=i, episode=i) for i, n in enumerate(lengths)]
    x = algorithm.experience(
        group_episodes([example_episode(str(i), rewards=(Reward("r", i % 2),)) for i in range(300)])
    )
    x = replace(x, rows=collate(samples))
    cells, plain = [], Grid.of

    def counted(starts, lengths):
        grid = plain(starts, lengths)
        cells.append((grid.inside.numel(), int(grid.inside.sum())))
        return grid

    monkeypatch.setattr(Grid, "of", counted)
    mu = x.rows.rollout_logprobs
    scored = ScoredRows(x.rows, mu + 0.01 * x.rows.loss_mask, values=0.5 * mu)
    batch, _ = algorithm.compute_weights(x, scored)
    algorithm.diagnose(x, scored)
    parts = batch.cut(4096)
    assert len(batch.advantages) == int(batch.rows.lengths.sum()) and sum(map(len, parts)) == len(batch)
    assert sum(laid for laid, _ in cells) <= 1.2 * sum(real for _, real in cells) > 0
