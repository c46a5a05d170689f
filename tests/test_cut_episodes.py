"""An episode is one, however many rows it is trained in: cutting it changes nothing, for every preset and component."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Denominators, Experience, ScoredRows, WeightedRows, collate
from agent_rl.algorithms.samples import Sample
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import load_config
from agent_rl.core.trajectory import BoolArray
from tests.batches import PRESETS
from tests.doubles import example_sample
from tests.pieces import SAMPLED, SCORES, TURN, WIDTH, Pieces
from tests.test_gradients import experience

RECOMPUTED: dict[str, object] = {"proximal": "recompute"}
OPSM = RECOMPUTED | {"negative_mask": {"name": "opsm", "delta": 0.02}}
OTHERS: dict[str, dict[str, object]] = {
    **{name: RECOMPUTED | {"advantage": name} for name in ("turn-returns", "optimal-baseline", "length-weighted")},
    "decoupled over tokens": {"advantage": {"name": "decoupled", "whiten": "tokens"}},
    "turn-gae": {"advantage": "turn-gae", "critic": {"where": "shared"}},
    "geometric weights": RECOMPUTED | {"weight": {"name": "geometric-tis", "normalise": True}},
    **{name: RECOMPUTED | {"rejection": {"name": name, "high": 1.05}} for name in ("sequence", "geometric")},
    "k3": RECOMPUTED | {"rejection": {"name": "k3", "max_k3": 0.005}, "denominators": "kept"},
    **{name: RECOMPUTED | {"objective": name} for name in ("gspo-token", "luspo", "gmpo")},
    **{
        f"{name} less tokens, {kind}": RECOMPUTED
        | {"objective": name, "weight": {"name": "icepop", "low": 0.97, "high": 1.03}, "aggregation": kind}
        for name, kind in (("gspo", "seq-mean-token-mean"), ("gmpo", "token-mean"), ("luspo", "prompt-mean"))
    },
    "kept gspo": RECOMPUTED
    | {"objective": "gspo", "rejection": {"name": "token", "low": 0.97, "high": 1.03}, "denominators": "kept"},
    "gspo over tokens": RECOMPUTED | {"objective": "gspo", "weight": "sequence-tis"},
    **{name: {"aggregation": name} for name in ("seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean")},
    **{f"opsm on {name}": OPSM | {"objective": name} for name in ("ppo-clip", "gspo", "m2po")},
    "no zero advantages": {"aggregation": "seq-mean-token-mean", "count_zero_advantage": False},
}
CASES = [*PRESETS, *OTHERS]


@functools.cache
def algorithm(name: str) -> Algorithm:
    if name in OTHERS:
        return Algorithm(AlgorithmConfig.model_validate(OTHERS[name]))
    return Algorithm(load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm)


def samples() -> list[Sample]:
    made = [example_sample(WIDTH, at, SCORES[i], seed=i, episode=i) for i, at in enumerate(SAMPLED)]
    for sample in made:
        sample.turns[:] = np.arange(WIDTH) // TURN
    return made


def cut(sample: Sample, how: Pieces) -> list[Sample]:
    """Return the rows of an episode, of which each sampled token is trained in one."""
    place, rows = np.arange(WIDTH), []
    delegated = (place >= how.agent[0]) & (place < how.agent[1]) if how.agent else np.zeros(WIDTH, bool)
    for start, end in zip([0, *how.after], [*how.after, WIDTH], strict=True):
        first = 0 if how.opening is None else start
        rows.append(row(sample, (place >= first) & (place < end) & ~delegated, place >= start, how.opening or 0))
        if how.agent and start <= how.agent[0] < end:
            rows.append(row(sample, delegated, delegated, how.opening or 1))
    return [one for one in rows if one.loss_mask.any()]


def row(sample: Sample, shown: BoolArray, own: BoolArray, opening: int) -> Sample:
    """Return the tokens that are shown, behind as many others, trained where they are the row's own."""
    mask = sample.loss_mask & own
    made = replace(sample, loss_mask=mask, rewards=np.where(mask, sample.rewards, 0))
    before = example_sample(opening, [], seed=99)
    joined = {name: np.concatenate([getattr(before, name), getattr(made, name)[shown]]) for name in ARRAYS}
    return replace(made, **joined)


ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs", "rewards", "policy_versions", "turns", "moments", "sources")


def given_rows(name: str, rows: list[Sample]) -> tuple[Experience, ScoredRows, Tensor]:
    """Return the episodes in these rows, their scores, and theta; numbers follow from the token, not from its row."""
    whole = experience(samples(), [i // 4 for i in range(8)])
    x = replace(whole, rows=collate(rows), states=torch.zeros(8, 3, dtype=torch.int64))
    x = replace(x, state_values=torch.arange(24.0, dtype=torch.float64).view(8, 3).cos())
    mu, seen = x.rows.rollout_logprobs, x.rows.loss_mask
    noise = [(1.7 * x.rows.token_ids + 3.1 * x.rows.episode_of_token + k).sin() for k in range(5)]
    old = mu - 0.1 * noise[0] * seen if algorithm(name).config.recomputes_old else mu
    found = ScoredRows(
        x.rows, old, reference_logprobs=mu - 0.3 * noise[1], values=noise[2], sum_pi_squared=0.5 + noise[3] / 2
    )
    return x, found, old + 0.2 * noise[4]


def learned(name: str, rows: list[Sample]) -> tuple[WeightedRows, Denominators, Tensor, float]:
    """Return all rows weighed, the counts, the gradient of each token, and the loss."""
    ours, (x, scored, theta) = algorithm(name), given_rows(name, rows)
    weighed, whole, wanted = ours.compute_weights_in_place_order(x, scored)
    index = torch.nonzero(wanted)[:, 0]
    places = x.rows.places(index)
    batch, _ = ours.prepare(theta[places], weighed.select(index))
    gradient, loss = torch.zeros_like(theta), 0.0
    for part in batch.cut_rows(12):
        grid = batch.rows.grid(torch.tensor(part))
        leaf = grid.lay(theta[places]).requires_grad_()
        terms = ours.loss(leaf, torch.zeros_like(leaf), batch.padded(part).inputs, whole)
        terms.loss.backward()
        assert leaf.grad is not None
        found = torch.zeros(len(places))
        grid.put(leaf.grad, found)
        gradient[places] += found
        loss += terms.loss.item()
    return weighed, whole, gradient, loss


@functools.cache
def uncut(name: str) -> tuple[WeightedRows, Denominators, Tensor, float]:
    return learned(name, samples())


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=4)
@given(st.integers(0, 2**32 - 1).map(np.random.default_rng))
def test_cutting_episodes_into_rows_changes_nothing(name: str, random: np.random.Generator) -> None:
    rows = [row for sample in samples() for row in cut(sample, Pieces.drawn(random))]
    (one, whole, gradient, loss), (parts, counts, found, total) = uncut(name), learned(name, rows)
    sampled, ours = torch.nonzero(one.rows.loss_mask)[:, 0], parts.rows.in_time
    assert counts == whole and torch.equal(parts.rows.token_ids[ours], one.rows.token_ids[sampled])
    for array in ("advantages", "weights", "counted"):
        expected, got = getattr(one, array)[sampled].double(), getattr(parts, array)[ours].double()
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    if one.critic is not None and parts.critic is not None:
        torch.testing.assert_close(parts.critic.returns[ours], one.critic.returns[sampled], rtol=1e-6, atol=1e-6)
        assert torch.equal(parts.critic.valued[ours], one.critic.valued[sampled])
    scale = float(gradient.abs().max())
    assert scale > 1e-5
    torch.testing.assert_close(found[ours], gradient[sampled], rtol=1e-5, atol=1e-6 * scale)
    assert total == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_cutting_keeps_episode_wide_diagnostics() -> None:
    """Sequences in the metrics are episodes, too."""
    name = "geometric weights"
    plain, *_ = given_rows(name, samples()), None
    rows = [row for sample in samples() for row in cut(sample, Pieces([4]))]
    metrics = [algorithm(name).diagnose(x, scored) for x, scored, _ in (plain, given_rows(name, rows))]
    assert len(rows) > 8 and metrics[0] == pytest.approx(metrics[1], rel=1e-6, abs=1e-7)
    shared = metrics[0].keys()
    assert "mismatch/seq_eff_sample_size" in shared and "rollout_corr/rollout_rs_seq_masked_fraction" in shared
