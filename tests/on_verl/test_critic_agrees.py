"""One critic, two backends: its values, advantages over them, and the gradient of its loss."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from agent_rl.algorithms import Algorithm, ScoredRows, WeightedRows
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.critic import Critic
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.verl.driver.exchange import SentBatch, compute_weights
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.worker.loss import loss_function, value_loss_function
from agent_rl.core.episode import group_episodes
from agent_rl.errors import ConfigError
from on_verl.test_backends_agree import EPISODES, VOCABULARY, gradient, in_verl, preset

CASES = [
    ("ppo",),
    ("ppo", "critic.clip_eps=null", "critic.coefficient=2"),
    ("a2c", "critic.where=separate"),
    ("ppo", "advantage={name: turn-gae, lam: 0.8}"),
]


@pytest.fixture
def critic(request: pytest.FixtureRequest) -> Critic:
    tiny = ModelConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, layers=2, intermediate=64)
    found = Critic(make_model(tiny, VOCABULARY, 0), preset(*request.param), OptimizerConfig())
    torch.nn.init.normal_(found.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return found.double()


def in_engine(critic: Critic, ids: torch.Tensor) -> torch.Tensor:
    """A row's values as verl's engine has them: at position t, of the state after token t."""
    return critic.head(critic.trunk(input_ids=ids[None]).last_hidden_state)[0, :, 0]


def on_verl(critic: Critic) -> tuple[TensorDict, SentBatch]:
    """The batch as it is when the critic is updated."""
    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    with torch.no_grad():
        values = [in_engine(critic, ids).float() for ids in data["input_ids"].unbind()]
    nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    data["values"] = response_from_nested(nested, data["response_mask"])  # as verl's _compute_values does
    weighed = compute_weights(critic.algorithm, receive(keys, extra, padding), data)
    data.update(weighed.sent)
    return data, weighed


def embedded(critic: Critic) -> tuple[WeightedRows, torch.Tensor]:
    """The weighed batch, and the critic's loss on it."""
    x = critic.algorithm.experience(group_episodes(EPISODES))
    values = critic.float().values(None, x.rows, token_budget=100)
    scored = ScoredRows(x.rows, x.rows.rollout_logprobs, values=values)
    batch, whole = critic.double().algorithm.compute_weights(x, scored)
    padded = batch.padded()
    return batch, critic.loss(torch.empty(0), padded.rows.token_ids, padded.critic, whole)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("critic", CASES, indirect=True, ids=" ".join)
def test_critic_learns_alike_on_both_backends(critic: Critic, ranks: int) -> None:
    data, weighed = on_verl(critic)
    batch, expected_loss = embedded(critic)
    expected = gradient(expected_loss, critic)
    ours = weighed.batch.select(torch.nonzero(weighed.wanted)[:, 0])
    torch.testing.assert_close(ours.advantages, batch.advantages, rtol=0, atol=1e-5)
    for name in ("returns", "valued"):
        torch.testing.assert_close(getattr(ours.critic, name), getattr(batch.critic, name), rtol=0, atol=1e-5)
    valued = ours.critic.valued
    assert torch.equal(ours.critic.values[valued] != 0, torch.ones(int(valued.sum()), dtype=torch.bool))

    function, total = value_loss_function(critic.algorithm.config), torch.zeros(len(expected), dtype=torch.float64)
    reported = 0.0
    for rank in range(ranks):
        share = list(range(rank, len(data), ranks))
        for start in range(0, len(share), 2):
            part = tu.index_select_tensor_dict(data, share[start : start + 2])
            values = [in_engine(critic, ids) for ids in part["input_ids"].unbind()]
            tu.assign_non_tensor(part, dp_size=ranks)
            loss, metrics = function({"values": torch.nested.as_nested_tensor(values, layout=torch.jagged)}, part)
            reported += float(metrics["critic/vf_loss"].values[0]) / ranks  # verl takes the mean over them
            total += gradient(loss, critic) / ranks
    assert float(expected.norm()) > 1e-3
    assert critic.algorithm.config.critic.coefficient * reported == pytest.approx(expected_loss.item(), rel=1e-5)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5 * float(expected.norm()))


@pytest.mark.parametrize("critic", CASES[:1], indirect=True, ids=" ".join)
def test_compute_weights_names_missing_inputs(critic: Critic) -> None:
    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    for algorithm, name in [
        (critic.algorithm, "values"),
        (preset("dpo"), "reference_logprobs"),
        (preset("grpo", "advantage=optimal-baseline", "proximal=recompute"), "sum_pi_squared"),
    ]:
        with pytest.raises(ConfigError, match=f"reads {name}, which were not computed"):
            compute_weights(algorithm, receive(keys, extra, padding), data)


def test_loss_function_names_missing_inputs() -> None:
    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    data.update(compute_weights(preset("grpo"), receive(keys, extra, padding), data).sent)
    tu.assign_non_tensor(data, dp_size=1)
    nothing = torch.nested.as_nested_tensor([x.double() for x in data["input_ids"].unbind()], layout=torch.jagged)

    def lacking(algorithm: Algorithm) -> None:
        loss_function(algorithm.config)({"log_probs": nothing}, data)

    with pytest.raises(RuntimeError, match=r"algorithm.entropy=0.1, and verl's engine computed no entropies"):
        lacking(preset("grpo", "entropy=0.1"))
    with pytest.raises(ConfigError, match=r"'kl\.where=loss' reads reference_logprobs, which were not computed"):
        lacking(preset("grpo", "kl.where=loss"))
