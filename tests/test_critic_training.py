"""The critic of the embedded trainer: the parameters its loss reaches, its learning, and its exact resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_rl.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Denominators,
    Experience,
    WeightedRows,
    collate,
)
from agent_rl.algorithms.objectives.value import explained_variance
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.critic import FILE, Critic
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.embedded.run import resume_run
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.core.episode import group_episodes
from agent_rl.gym.registry import spec
from agent_rl.view.progress import Progress
from tests.batches import by_row, scored
from tests.doubles import example_episode, example_sample
from tests.runs import config, metrics_of, weights, whole_and_killed

WHERE = ("shared", "separate")
TINY = ModelConfig(hidden=32, layers=2, heads=2, kv_heads=2, head_dim=16, intermediate=64)


def settings(where: str, **critic: object) -> dict[str, object]:
    return {"advantage": "gae", "critic": {"where": where, "clip_eps": None, "lr": 0.01} | critic}


def new_critic(where: str) -> tuple[torch.nn.Module, Critic]:
    policy = make_model(TINY, 50, 0)
    algorithm = Algorithm(AlgorithmConfig(**settings(where)))
    return policy, Critic(policy, algorithm, OptimizerConfig(warmup_steps=0))


def state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fixed_batch(algorithm: Algorithm) -> tuple[WeightedRows, Denominators]:
    """Rows whose first token encodes the reward."""
    x = Experience.of(group_episodes([example_episode(str(e)) for e in range(8)]))
    rows = [example_sample(12, [4, 5, 8, 9, 11], reward=float(e % 2), seed=e, episode=e) for e in range(8)]
    for e, row in enumerate(rows):
        row.token_ids[0] = 48 + e % 2
    x = replace(x, rows=collate(rows))
    return algorithm.compute_weights(x, scored(x.rows, values=torch.zeros_like(x.rows.rollout_logprobs)))


@pytest.mark.parametrize("where", WHERE)
def test_new_critic_predicts_zero_and_draws_nothing(where: str) -> None:
    before = torch.get_rng_state()
    policy, critic = new_critic(where)
    assert torch.equal(torch.get_rng_state(), before)
    batch, _ = fixed_batch(critic.algorithm)
    assert not critic.values(policy, batch.rows, 10**6).any()


@pytest.mark.parametrize("where", WHERE)
def test_fitted_critic_explains_variance(where: str) -> None:
    policy, critic = new_critic(where)
    batch, whole = fixed_batch(critic.algorithm)
    before = explained_variance(critic.values(policy, batch.rows, 40), batch.critic.returns, batch.critic.valued)
    assert before == 0
    losses = []
    for _ in range(30):
        for part in batch.cut(40):
            critic.loss(
                score_tokens(policy, part.rows.token_ids).hidden, part.rows.token_ids, part.critic, whole
            ).backward()
        losses.append(critic.step(1.0)["critic/vf_loss"])
    after = explained_variance(critic.values(policy, batch.rows, 40), batch.critic.returns, batch.critic.valued)
    assert after > 0.7 and losses[-1] < 0.2 * losses[0]  # in the shared case only the head is stepped here


@pytest.mark.parametrize("where", WHERE)
def test_value_loss_reaches_its_own_trunk_only(where: str) -> None:
    policy, critic = new_critic(where)
    policy.double()
    critic.double()
    torch.nn.init.ones_(critic.head.weight)  # a head of zeros passes nothing on
    batch, whole = fixed_batch(critic.algorithm)

    def gradients(budget: int) -> tuple[list[Tensor], list[Tensor]]:
        policy.zero_grad()
        critic.zero_grad()
        for part in batch.cut(budget):
            critic.loss(
                score_tokens(policy, part.rows.token_ids).hidden, part.rows.token_ids, part.critic, whole
            ).backward()
        return tuple([p.grad.clone() for p in m.parameters() if p.grad is not None] for m in (policy, critic))

    of_policy, of_critic = gradients(10**6)
    assert bool(of_policy) == (where == "shared") and any(g.norm() > 0 for g in (of_policy or of_critic))
    assert len(of_critic) == len(list(critic.parameters())) and all(g.norm() > 0 for g in of_critic)
    for budget in (1, 40):
        for whole_batch, cut in zip((of_policy, of_critic), gradients(budget), strict=True):
            for a, b in zip(whole_batch, cut, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("where", WHERE)
def test_warmup_trains_the_critic_only(where: str, folder: Path, tmp_path: Path) -> None:
    chosen = config(tmp_path, algorithm=settings(where, warmup_steps=2))
    trainer = Trainer(spec("calculator-v0"), load_actor(folder / "checkpoint", slots=8, context=256), chosen)
    assert trainer.critic is not None
    policy, critic = state(trainer.actor.model), state(trainer.critic)
    for _ in range(2):
        metrics = trainer.train_step().metrics
        assert metrics["train/grad_norm"] == 0
    assert same(state(trainer.actor.model), policy) and not same(state(trainer.critic), critic)
    for _ in range(2):
        metrics = trainer.train_step().metrics
    assert not same(state(trainer.actor.model), policy)
    names = ("vf_loss", "vf_clipfrac", "grad_norm", "values/mean", "returns/mean")
    assert all(metrics[f"critic/{name}"] >= 0 for name in names) and metrics["critic/vf_loss"] > 0


@pytest.mark.parametrize("where", WHERE)
def test_old_values_precede_the_update(where: str, folder: Path, tmp_path: Path) -> None:
    chosen = config(tmp_path, algorithm=settings(where, clip_eps=1e-4), updates={"epochs": 3})
    trainer = Trainer(spec("calculator-v0"), load_actor(folder / "checkpoint", slots=8, context=256), chosen)
    assert trainer.critic is not None
    with torch.no_grad():
        weight = trainer.critic.head.weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    episodes = trainer.train_step().episodes
    x = trainer.algorithm.experience(group_episodes(episodes))
    found, _ = trainer.scorer.score(x.rows, x.groups[x.rows.episode], trainer.step)
    with torch.no_grad():
        ids = x.rows.padded().token_ids.to(weight.device)
        values = trainer.critic(ids, score_tokens(trainer.actor.model, ids).hidden).cpu()
    expected = torch.where(x.rows.padded().loss_mask, values, 0.0)
    torch.testing.assert_close(by_row(x.rows, found.values), expected, rtol=0, atol=1e-5)
    assert found.values is not None and found.values.any()
    assert trainer.update(x)["critic/vf_clipfrac"] > 0  # by the third update


@pytest.mark.sandbox
@pytest.mark.parametrize("where", ["shared", "separate"])
def test_critic_run_resumes_bit_for_bit(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(tmp_path, algorithm=settings(where), eval={"n": 4, "dev_n": 4, "every": 0})
    folder, killed = whole_and_killed(chosen, monkeypatch, dies_in="update")
    AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
    resume_run(killed, Progress())
    assert same(weights(folder), weights(killed)) and metrics_of(folder) == metrics_of(killed)
    one, two = (torch.load(f / "checkpoint" / FILE, weights_only=True) for f in (folder, killed))
    assert same(one["weights"], two["weights"]) and any(w.any() for w in one["weights"].values())
    assert [float(row["critic/vf_loss"]) > 0 for row in metrics_of(folder) if row["kind"] == "train"] == [True] * 4
