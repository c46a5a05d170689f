"""Metrics check: verl called our loss, weights and critic, so that no part is dropped silently.

Everything that a loss reads must be there when it is called; but a verl that takes another way might not call ours at
all. Metrics that only our code reports show that it did.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.errors import ConfigError


def require_metrics(config: AlgorithmConfig, metrics: Mapping[str, object]) -> None:
    """Check that a step with something to learn went through our loss, weights and critic.

    Raises:
        ConfigError: naming what left no trace, its setting, and the metric that is not there.
    """
    expected = {"actor/agent_rl/loss": "agent_rl's loss (algorithm.objective)"}
    if config.recomputes_old:
        expected["rollout_corr/kl"] = "an old policy that is recomputed (algorithm.proximal)"
    if config.entropy:
        expected["actor/agent_rl/entropy"] = "an entropy bonus (algorithm.entropy)"
    if config.kl.where != "none":
        expected["actor/agent_rl/reference_kl"] = "a KL penalty (algorithm.kl)"
    if config.critic.where != "none":
        expected["critic/vf_loss"] = "a critic (algorithm.critic)"
    if silent := [f"{what} must report {name}" for name, what in expected.items() if name not in metrics]:
        raise ConfigError(
            f"algorithm={config.name} asks for what this step did not do: {'; '.join(silent)}. The run would continue "
            "without: the installed verl takes another way than the one that agent_rl was built on (0.9.1)"
        )
