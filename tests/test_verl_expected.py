"""agent_rl.backends.verl.driver.metrics_check: a feature that left no trace in the metrics stops the run."""

import pytest

from agent_rl.algorithms import AlgorithmConfig
from agent_rl.backends.verl.driver.metrics_check import FEATURES, require_metrics
from agent_rl.errors import ConfigError

BARE = {"actor/agent_rl/loss": -0.1, "actor/agent_rl/ratio": 1.0}
OLD = {"rollout_corr/kl": 0.0, "mismatch/gap_mean": 0.0}
SETTINGS = [
    ({}, {}),
    ({"kl": {"where": "loss"}}, {"actor/agent_rl/reference_kl": 0.0}),
    ({"kl": {"where": "reward", "kind": "k1"}}, {"actor/agent_rl/reference_kl": 0.0}),
    ({"entropy": 0.01}, {"actor/agent_rl/entropy": 2.0}),
    ({"negative_mask": {"name": "opsm", "delta": 1.0}}, {"actor/agent_rl/masked_fraction": 0.0}),
    ({"proximal": "recompute"}, OLD),
    ({"proximal": "recompute", "weight": "token-tis"}, OLD | {"rollout_corr/rollout_is_mean": 1.0}),
    (
        {"proximal": "recompute", "rejection": {"name": "worst-token", "low": 0.1, "high": 9.0}},
        OLD | {"rollout_corr/rollout_rs_masked_fraction": 0.0},
    ),
    (
        {"advantage": "gae", "critic": {"where": "separate"}},
        dict.fromkeys(("critic/vf_loss", "critic/vf_clipfrac", "critic/values/mean", "critic/returns/mean"), 0.0),
    ),
    ({"objective": "m2po"}, {"train/clip_fraction": 0.0}),
    (
        {"objective": "dpo", "advantage": "best-against-worst", "aggregation": "token-sum"},
        dict.fromkeys(("rewards/margins", "rewards/accuracies", "train/pairs"), 0.0),
    ),
]


@pytest.mark.parametrize(("settings", "metrics"), SETTINGS)
def test_each_of_a_feature_s_metrics_must_be_there(settings: dict[str, object], metrics: dict[str, float]) -> None:
    config = AlgorithmConfig.model_validate({"name": "mine"} | settings)
    reported = BARE | metrics
    require_metrics(config, reported)
    for name in reported:
        with pytest.raises(ConfigError, match=rf"algorithm=mine asks for .*must report .*{name}"):
            require_metrics(config, {k: v for k, v in reported.items() if k != name})


def test_every_feature_has_a_case_above() -> None:
    for feature in FEATURES:
        assert any(feature.wanted(AlgorithmConfig.model_validate(settings)) for settings, _ in SETTINGS), feature.what
        assert feature.setting.split(".")[1] in AlgorithmConfig.model_fields


def test_the_feature_and_its_setting_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"a KL penalty \(algorithm.kl\) must report actor/agent_rl/reference_kl\. The"
    ):
        require_metrics(AlgorithmConfig.model_validate({"kl": {"where": "loss"}}), BARE)
