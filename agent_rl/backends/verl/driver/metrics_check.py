"""Expected metrics: what each feature of an algorithm must report, so that none is dropped without a word.

A trainer that doesn't know a setting, or takes a path on which nobody reads it, trains on without it: the loss falls,
and the KL penalty was never there. Metrics that only the feature itself can compute tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature, the setting that asks for it, and what shows that it took part."""

    what: str
    setting: str
    wanted: Callable[[AlgorithmConfig], bool]
    metrics: tuple[str, ...]


FEATURES = (
    Feature("agent_rl's loss", "algorithm.objective", lambda c: True, ("actor/agent_rl/loss", "actor/agent_rl/ratio")),
    Feature("a KL penalty", "algorithm.kl", lambda c: c.kl.where != "none", ("actor/agent_rl/reference_kl",)),
    Feature("an entropy bonus", "algorithm.entropy", lambda c: c.entropy > 0, ("actor/agent_rl/entropy",)),
    Feature(
        "a mask of negative rows",
        "algorithm.negative_mask",
        lambda c: c.negative_mask["name"] != "none",
        ("actor/agent_rl/masked_fraction",),
    ),
    Feature(
        "an old policy that is recomputed",
        "algorithm.proximal",
        lambda c: c.proximal == "recompute",
        ("rollout_corr/kl", "mismatch/gap_mean"),
    ),
    Feature(
        "weights by old/mu",
        "algorithm.weight",
        lambda c: c.weight["name"] != "none",
        ("rollout_corr/rollout_is_mean",),
    ),
    Feature(
        "a rejection by old/mu",
        "algorithm.rejection",
        lambda c: c.rejection["name"] != "none",
        ("rollout_corr/rollout_rs_masked_fraction",),
    ),
    Feature(
        "a critic",
        "algorithm.critic",
        lambda c: c.critic.where != "none",
        ("critic/vf_loss", "critic/vf_clipfrac", "critic/values/mean", "critic/returns/mean"),
    ),
    Feature("M2PO's mask", "algorithm.objective", lambda c: c.objective["name"] == "m2po", ("train/clip_fraction",)),
    Feature(
        "DPO's pairs",
        "algorithm.objective",
        lambda c: c.objective["name"] == "dpo",
        ("rewards/margins", "rewards/accuracies", "train/pairs"),
    ),
)


def require_metrics(config: AlgorithmConfig, metrics: Mapping[str, object]) -> None:
    """Check that a step in which there was something to learn reported all that the algorithm has.

    Raises:
        ConfigError: naming each feature that left no trace, its setting, and the metric that is not there.
    """
    silent = [
        f"{feature.what} ({feature.setting}) must report {', '.join(lacking)}"
        for feature in FEATURES
        if feature.wanted(config) and (lacking := [name for name in feature.metrics if name not in metrics])
    ]
    if silent:
        raise ConfigError(
            f"algorithm={config.name} asks for what this step did not do: {'; '.join(silent)}. The run would go on "
            "without: the installed verl takes another way than the one that agent_rl was built on (0.9.1)"
        )
