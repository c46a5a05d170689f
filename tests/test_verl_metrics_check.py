"""agent_rl.backends.verl.driver.metrics_check: a feature without metrics stops the run."""

import pytest

from agent_rl.algorithms import AlgorithmConfig
from agent_rl.backends.verl.driver.metrics_check import require_metrics
from agent_rl.errors import ConfigError

BARE = {"actor/agent_rl/loss": -0.1}


@pytest.mark.parametrize(
    ("settings", "metrics"),
    [
        ({}, {}),
        ({"kl": {"where": "loss"}}, {"actor/agent_rl/reference_kl": 0.0}),
        ({"kl": {"where": "reward", "kind": "k1"}}, {"actor/agent_rl/reference_kl": 0.0}),
        ({"entropy": 0.01}, {"actor/agent_rl/entropy": 2.0}),
        ({"proximal": "recompute"}, {"rollout_corr/kl": 0.0}),
        ({"advantage": "gae", "critic": {"where": "separate"}}, {"critic/vf_loss": 0.0}),
    ],
)
def test_require_metrics_checks_each_metric(settings: dict[str, object], metrics: dict[str, float]) -> None:
    config = AlgorithmConfig.model_validate({"name": "mine"} | settings)
    reported = BARE | metrics
    require_metrics(config, reported)
    for name in reported:
        with pytest.raises(ConfigError, match=rf"algorithm=mine asks for .*must report {name}"):
            require_metrics(config, {k: v for k, v in reported.items() if k != name})


def test_require_metrics_names_the_setting() -> None:
    message = r"a KL penalty \(algorithm.kl\) must report actor/agent_rl/reference_kl\. The"
    with pytest.raises(ConfigError, match=message):
        require_metrics(AlgorithmConfig.model_validate({"kl": {"where": "loss"}}), BARE)
