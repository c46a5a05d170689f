"""agent_rl.algorithms.algorithm: the parts of an algorithm together, and refused combinations."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from agent_rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Denominators,
    Experience,
    ScoredRows,
    collate,
)
from agent_rl.algorithms.explain import explain
from agent_rl.algorithms.layouts import call
from agent_rl.algorithms.on_tokens import of_tokens
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, Outcome, Reward, group_episodes
from agent_rl.errors import ConfigError
from tests.batches import PRESETS, scored, weigh, weighted
from tests.doubles import example_episode, example_sample

DPO = {"objective": "dpo", "advantage": "best-against-worst", "aggregation": "token-sum"}


def episode(name: str, value: float | None, group: str, **changes: object) -> Episode:
    return example_episode(name, rewards=(Reward("r", value),), group_id=group, **changes)


EPISODES = [
    episode("win", 1.0, "a"),
    episode("loss", 0.0, "a"),
    episode("unscored", None, "a"),
    episode("lost", 1.0, "a", outcome=Outcome.FAILED),
    episode("tie", 1.0, "b"),
    episode("too", 1.0, "b"),
]


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        # 4 sampled tokens an episode; the unscored and the lost never count
        ({}, Denominators(tokens=16, sequences=4)),
        ({"count_zero_advantage": False}, Denominators(tokens=8, sequences=2)),
        ({"filters": ["varied-groups"]}, Denominators(tokens=8, sequences=2)),
    ],
)
def test_zero_advantage_rows_count_as_configured(settings, whole):
    algorithm = Algorithm(AlgorithmConfig(advantage={"name": "group-relative", "std": False}, **settings))
    batch, counted = weigh(algorithm, algorithm.experience(group_episodes(EPISODES)))
    assert batch.rows.episode.tolist() == [0, 1] and counted == whole
    mask = batch.rows.loss_mask
    assert batch.advantages[mask].tolist() == [0.5] * 4 + [-0.5] * 4
    assert not batch.advantages[~mask].any()


def test_max_staleness_keeps_stale_episodes_in_statistics():
    settings = {
        "filters": [{"name": "max-staleness", "steps": 1}],
        "advantage": {"name": "group-relative", "std": False},
    }
    algorithm = Algorithm(AlgorithmConfig(**settings))
    x = Experience.of(group_episodes(EPISODES))
    fresh = torch.where(x.rows.loss_mask, 7, -1)
    fresh[3] = 5  # one token of "win" is two versions old
    fresh[x.rows.starts[1] + 3] = 6
    x = replace(x, rows=replace(x.rows, versions=fresh))
    kept = call(algorithm.filters[0], x.rows, of_tokens(x.rows), x)
    assert kept.tolist() == [False, True, True, True, True, True]
    batch, whole = weigh(algorithm, replace(x, kept=x.kept & kept))
    assert batch.rows.episode.tolist() == [1] and whole == Denominators(12, 3)
    assert batch.advantages.amin().item() == -0.5  # "win" still counts in the mean


def test_over_greedy_takes_the_group_baseline():
    algorithm = Algorithm(AlgorithmConfig(advantage="over-greedy"))
    assert algorithm.needs_greedy
    x = algorithm.experience(group_episodes(EPISODES, [episode("greedy", 0.25, "a"), episode("none", None, "b")]))
    batch, whole = weigh(algorithm, x)
    assert batch.advantages.sum(-1).tolist() == [0.75 * 4, -0.25 * 4]  # group b has no baseline, so no advantage
    assert whole == Denominators(16, 4)
    assert algorithm.diagnose(x, scored(x.rows))["rollout/greedy"] == 0.25
    bare = algorithm.experience(group_episodes(EPISODES))
    assert "rollout/greedy" not in algorithm.diagnose(bare, scored(bare.rows))
    both = algorithm.experience(group_episodes(EPISODES, [episode("greedy", 0.25, "a"), episode("other", 1.0, "b")]))
    assert algorithm.diagnose(both, scored(both.rows))["rollout/greedy"] == (4 * 0.25 + 2 * 1.0) / 6


def test_shaping_comes_before_the_advantage():
    shaping = [{"name": "scale", "factor": 4.0}, {"name": "clip", "low": 1.0, "high": 3.0}]
    algorithm = Algorithm(AlgorithmConfig(shaping=shaping, advantage={"name": "group-relative", "std": False}))
    x = algorithm.experience(group_episodes(EPISODES))
    assert x.scores.tolist()[:2] == [3.0, 1.0] and x.scores[2:4].isnan().all()
    assert weigh(algorithm, x)[0].advantages.amax().item() == 1.0
    assert x.rows.sum(x.rows.rewards).tolist()[:2] == [3.0, 1.0]


def test_format_gate_names_a_missing_component():
    algorithm = Algorithm(AlgorithmConfig(shaping=[{"name": "format-gate", "component": "rr"}]))
    with pytest.raises(ConfigError, match=r"no reward component 'rr'\. Did you mean 'r'"):
        algorithm.experience(group_episodes(EPISODES))


@pytest.mark.parametrize(
    "settings",
    [{}, {"advantage": "decoupled"}, {"shaping": [{"name": "format-gate", "component": "r"}]}],
)
def test_step_whose_episodes_all_failed_trains_nothing(settings: dict[str, object]) -> None:
    failed = [replace(episode(f"{i}", None, "a", outcome=Outcome.FAILED), rewards=()) for i in range(3)]
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    assert not len(weigh(algorithm, algorithm.experience(group_episodes(failed)))[0])


def corrected(**settings: object) -> tuple[Algorithm, Experience, ScoredRows]:
    """Two rows of two tokens; old/mu is e^1, e^-.5 and e^3, 1."""
    algorithm = Algorithm(AlgorithmConfig(proximal="recompute", **settings))
    x = algorithm.experience(group_episodes([episode("win", 1.0, "a"), episode("loss", 0.0, "a")]))
    rows = collate([example_sample(3, [1, 2], episode=e) for e in (0, 1)])
    mu = torch.tensor([[0.0, -2.0, -1.0], [0.0, -4.0, -1.0]])
    old = torch.tensor([[0.0, -1.0, -1.5], [0.0, -1.0, -1.0]])
    x = replace(x, rows=replace(rows, rollout_logprobs=mu.flatten()))
    return algorithm, x, scored(x.rows, old_logprobs=old)


def test_weight_multiplies_the_token_loss():
    algorithm, x, old = corrected(
        weight={"name": "token-tis", "cap": 2.0}, advantage={"name": "group-relative", "std": False}
    )
    batch, whole = weigh(algorithm, x, old)
    torch.testing.assert_close(batch.weights, torch.tensor([[0, 2.0, math.exp(-0.5)], [0, 2.0, 1.0]]))
    terms = algorithm.loss(
        batch.scored.old_logprobs, torch.zeros_like(batch.weights), batch.inputs, whole
    )  # theta is old
    assert terms.loss.item() == pytest.approx((-0.5 * (2 + math.exp(-0.5)) + 0.5 * 3) / 4)
    assert terms.sums["weight"] == pytest.approx(5 + math.exp(-0.5))


@pytest.mark.parametrize(("denominators", "whole"), [("original", Denominators(4, 2)), ("kept", Denominators(2, 1))])
def test_rejection_keeps_rewards_and_chosen_denominators(denominators, whole):
    algorithm, x, old = corrected(rejection={"name": "sequence", "low": 0.5, "high": 2.0}, denominators=denominators)
    batch, counted = weigh(algorithm, x, old)  # products e^.5 and e^3: the second row goes ...
    assert counted == whole and len(batch) == 1
    # ... but its reward is still in the group's statistics: (1 - .5) / sqrt(.5)
    assert batch.advantages[0, 1].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))


def test_diagnose_measures_the_gap_to_old():
    algorithm, x, old = corrected(rejection={"name": "sequence", "low": 0.5, "high": 2.0}, weight="icepop")
    found = algorithm.diagnose(x, old)  # log-ratios 1, -.5, 3, 0
    assert found["mismatch/gap_mean"] == pytest.approx(4.5 / 4) and found["mismatch/turn_0"] == pytest.approx(4.5 / 4)
    assert found["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    assert found["mismatch/weight_mean"] == pytest.approx((math.e + math.exp(-0.5)) / 2, rel=1e-5)
    assert found["policy_version/staleness_0"] == 1


def test_entropy_bonus_keeps_rows_without_advantage():
    algorithm = Algorithm(AlgorithmConfig(entropy=0.5))
    ties = group_episodes([episode("tie", 1.0, "b"), episode("too", 1.0, "b")])
    batch, whole = weigh(algorithm, algorithm.experience(ties))
    assert len(batch) == 2
    entropy = torch.full_like(batch.weights, 3.0).requires_grad_()
    loss = algorithm.loss(batch.rows.rollout_logprobs, entropy, batch.inputs, whole).loss
    loss.backward()
    assert loss.item() == pytest.approx(-1.5)
    assert entropy.grad is not None and entropy.grad[batch.rows.loss_mask].tolist() == pytest.approx([-0.5 / 8] * 8)


@pytest.mark.parametrize("penalty", [{"entropy": 0.5}, {"kl": {"where": "loss"}}])
def test_penalty_keeps_only_rows_that_count(penalty):
    algorithm = Algorithm(AlgorithmConfig(count_zero_advantage=False, **penalty))
    batch, whole = weigh(algorithm, algorithm.experience(group_episodes(EPISODES)))
    assert batch.rows.episode.tolist() == [0, 1] and whole.tokens == 8  # the tie's rows have no gradient of anything


def kl_rows(**kl: object) -> tuple[Algorithm, Experience, ScoredRows]:
    """Two equal episodes; the reference gives each of their sampled tokens e^.5 times the probability."""
    algorithm = Algorithm(AlgorithmConfig(kl=kl, advantage="returns", objective="reinforce"))
    x = algorithm.experience(group_episodes([episode("tie", 1.0, "b"), episode("too", 1.0, "b")]))
    reference = x.rows.rollout_logprobs + 0.5 * x.rows.loss_mask
    return algorithm, x, scored(x.rows, reference_logprobs=reference)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),  # x = theta - reference = -.5
    [
        ("k2", 0.125, -0.5),
        ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k1+", -0.5, -0.5),
        ("unbiased", math.exp(0.5) - 1.5, -0.5),
    ],
)
def test_kl_in_loss_adds_value_and_gradient(kind, value, slope):
    (plain, x, rows), (algorithm, _, _) = kl_rows(), kl_rows(where="loss", coefficient=0.1, kind=kind)
    results = []
    for each in (plain, algorithm):
        batch, whole = weigh(each, x, rows)
        theta = batch.scored.old_logprobs.clone().requires_grad_()
        loss = each.loss(theta, torch.zeros_like(theta), batch.inputs, whole).loss
        (grad,) = torch.autograd.grad(loss, theta)
        results.append((loss.item(), grad[batch.rows.loss_mask]))
    assert results[1][0] - results[0][0] == pytest.approx(0.1 * value, abs=1e-6)
    torch.testing.assert_close(results[1][1] - results[0][1], torch.full((8,), 0.1 * slope / 8), atol=1e-7, rtol=1e-5)


def test_kl_in_reward_enters_returns_and_scores():
    algorithm, x, rows = kl_rows(where="reward", coefficient=0.1, kind="k1")
    batch, _ = weigh(algorithm, x, rows)  # each of 4 tokens earns -0.1 * -.5; the last one the score of 1, too
    assert batch.advantages[0][batch.rows.loss_mask[0]].tolist() == pytest.approx([1.2, 1.15, 1.1, 1.05])
    grouped = Algorithm(
        AlgorithmConfig(kl={"where": "reward", "coefficient": 0.1, "kind": "k1"}, advantage="leave-one-out")
    )
    far = x.rows.rollout_logprobs + 0.5 * x.rows.loss_mask
    far[10:] += 1.0 * x.rows.loss_mask[10:]  # the second row's
    batch, _ = weigh(grouped, x, reference_logprobs=far)
    assert batch.advantages.amin().item() == pytest.approx(-0.4)  # 1.2 against 1.6


def test_loss_sums_by_hand():
    algorithm = Algorithm(AlgorithmConfig())
    mask = torch.tensor([[False, True, True, False]])
    mu = torch.tensor([[0.0, -1.0, -2.0, 0.0]])
    rows = replace(collate([example_sample(4, [1, 2])]), rollout_logprobs=mu[0])
    batch = weighted(rows, advantages=mask.float()).padded()
    new = torch.tensor([[5.0, -1.0 + math.log(2), -2.5, 5.0]], requires_grad=True)
    terms = algorithm.loss(new, torch.full_like(mu, 0.25), batch.inputs, Denominators(2, 1))
    assert terms.loss.item() == pytest.approx(-(1.28 + math.exp(-0.5)) / 2)
    expected = {
        "ratio": 2 + math.exp(-0.5),
        "ratio_max": 2.0,
        "ratio_min": math.exp(-0.5),
        "clip_fraction": 1.0,
        "weight": 2.0,
        "entropy": 0.5,
        "rollout_gap": math.log(2) + 0.5,
        "rollout_kl": (kl := (2 - 1 - math.log(2)) + (math.exp(-0.5) - 1 + 0.5)),
        "old_kl": kl,
    }
    assert terms.sums == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": {"name": "ppo-clip", "clip_low": 0.2}}, "no knob 'clip_low'. Did you mean 'clip_low_eps'"),
        ({"objective": {"name": "ppo-clip", "dual_clip": 0.5}}, "dual_clip=0.5: input should be greater than 1"),
        ({"objective": {"name": "ppo-clip", "clip_low_eps": -0.5}}, "clip_low_eps=-0.5: .* greater than or equal to 0"),
        ({"objective": {"name": "minirl", "ratio_cap": -1}}, "ratio_cap=-1: .* greater than or equal to 1"),
        ({"objective": {"name": "cispo", "clip_high_cap": 0.5}}, "clip_high_cap=0.5: .* greater than or equal to 1"),
        ({"objective": {"name": "sapo", "tau_negative": 0}}, "tau_negative=0: input should be greater than 0"),
        ({"objective": {"name": "dppo-tv", "delta_low": -0.1}}, "delta_low=-0.1: .* greater than or equal to 0"),
        ({"weight": {"name": "token-tis", "cap": 0.5}}, "cap=0.5: input should be greater than or equal to 1"),
        ({"objective": "gpso"}, "no objective 'gpso'. Did you mean 'gspo'"),
        ({"objective": {}}, "needs a name"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "length: field required"),
        ({"advantage": {"name": "pass-at-k", "k": 0}}, "greater than or equal to 1"),
        ({"weight": "token-tis", "proximal": "rollout"}, "set proximal=auto or recompute"),
        ({"rejection": "sequence", "proximal": "rollout"}, "set proximal=auto or recompute"),
        ({"denominators": "kept"}, "needs a rejection"),
        ({"objective": "minirl", "weight": "icepop", "proximal": "recompute"}, "do it twice"),
        ({"clip": 0.2}, "clip"),
        ({"advantage": "over-greedy", "shaping": [{"name": "scale", "factor": 2}]}, "greedy episodes"),
        ({"refill": {"max_rounds": 2}}, "set filters"),
        ({"objective": "dpo"}, "set advantage=best-against-worst"),
        (DPO | {"aggregation": "token-mean"}, "set aggregation=token-sum"),
        (DPO | {"proximal": "recompute"}, "set proximal=auto"),
        (DPO | {"weight": "token-tis"}, "weight=none and rejection=none"),
        (DPO | {"rejection": "sequence"}, "weight=none and rejection=none"),
        (DPO | {"kl": {"where": "loss"}}, "set kl.where=none"),
        (DPO | {"entropy": 0.1}, "set entropy=0"),
        ({"kl": {"where": "loss", "kind": "k1"}}, "no gradient in expectation"),
        ({"kl": {"where": "reward", "kind": "unbiased"}}, "for the loss"),
    ],
)
def test_algorithm_config_refuses_meaningless_settings(settings, message):
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig(**settings)


# Presets


def preset(name: str) -> AlgorithmConfig:
    return load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_explain_names_every_preset_value(name):
    config = preset(name)
    text = explain(config)
    assert config.name == name and config.objective["name"] in text and config.aggregation["name"] in text
    for value in (
        v for part in (config.objective, config.advantage, config.weight or {}) for k, v in part.items() if k != "name"
    ):
        assert str(value) in text


def test_explain_says_how_many_updates_sources_take():
    assert "the source takes 16, a mini-batch each" in explain(preset("dapo"))
    assert "16, a mini-batch each" in explain(preset("dapo-paper")) and "unless" not in explain(preset("dapo-paper"))
    assert "  updates " not in explain(preset("a2c"))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_prefers_the_better_episode(name):
    algorithm = Algorithm(preset(name))
    x = algorithm.experience(group_episodes(EPISODES, [episode("greedy", 0.25, "a")]))
    mu = x.rows.rollout_logprobs
    found = {"reference_logprobs": mu, "values": torch.zeros_like(mu), "sum_pi_squared": torch.zeros_like(mu)}
    x = replace(x, state_values=torch.full_like(x.state_values, 0.25))
    batch, whole = algorithm.compute_weights(x, scored(x.rows, **found))
    batch = algorithm.prepare(batch.scored.old_logprobs, batch)[0].padded()
    theta = batch.scored.old_logprobs.clone().requires_grad_()
    algorithm.loss(theta, torch.zeros_like(theta), batch.inputs, whole).loss.backward()
    assert theta.grad is not None
    by_episode = {int(e): float(g.sum()) for e, g in zip(batch.rows.episode, theta.grad, strict=True)}
    assert by_episode[0] < 0  # raise its log-probability
    assert by_episode[0] < by_episode.get(1, 0.0)  # `returns` has no baseline: a reward of 0 gives no push
    assert not {2, 3} & set(by_episode)


def test_explain_shows_the_values_in_use():
    config = load_config(
        "backend/embedded", TrainConfig, ["algorithm=gspo", "algorithm.objective.clip_low_eps=0.1"]
    ).algorithm
    text = explain(config)
    assert "clip_low_eps=0.1" in text and "GSPO, Zheng et al. 2025" in text and "mean over episodes" in text
