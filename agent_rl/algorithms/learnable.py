"""Settings under which nothing can be learned from the rewards, and why."""

from __future__ import annotations

from agent_rl.algorithms.config import AlgorithmConfig

ALONE = (
    *("group-relative", "batch-normalised", "leave-one-out", "length-weighted", "best-of-group", "max-likelihood"),
    *("decoupled", "reinforce-pp-baseline", "best-against-worst", "optimal-baseline", "step-grouped"),
)
"""The advantages that are 0 for the only episode of a task."""
COLD = 0.01
"""The temperature of rollouts below which they are as good as greedy: a logit 0.1 under the highest is taken once in
22,000 times at it."""


def nothing_learned(config: AlgorithmConfig, groups: int, samples: int, steps: int, temperature: float) -> str | None:
    """Return why no update would follow the rewards, and what to set; None if some may.

    Args:
        config: of the algorithm.
        groups: tasks of a step.
        samples: episodes of each task.
        steps: of the run; 0 for none, which is no mistake.
        temperature: of the rollouts, at its highest.
    """
    if temperature < COLD:
        alike = f"rollout.temperature={temperature:g} takes the likeliest token nearly always"
        return f"{alike}, so that all episodes of a task are one, and none is better than another: set 1 or so"
    name, filters = str(config.advantage["name"]), {str(chosen["name"]) for chosen in config.filters}
    advice = "set rollout.samples=8 or so, or an advantage that compares with something else, as algorithm=remax does"
    if samples == 1 and name in ALONE:
        return f"rollout.samples=1: advantage={name} compares the episodes of a task, and one alone has 0: {advice}"
    if samples == 1 and "varied-groups" in filters:
        return (
            f"rollout.samples=1: varied-groups keeps tasks whose episodes differ in score, and one does not: {advice}"
        )
    if samples == groups == 1 and name == "reinforce-pp":
        return (
            "rollout.groups=1 and rollout.samples=1: advantage=reinforce-pp compares with the batch's mean, and one "
            "episode is the mean: set rollout.groups=8 or so"
        )
    if name == "pass-at-k" and isinstance(k := config.advantage["k"], int) and samples <= k:
        return (
            f"rollout.samples={samples} is one set of k={k} episodes at most, and advantage=pass-at-k compares sets: "
            f"set rollout.samples to {2 * k} or more, or k lower"
        )
    if 0 < steps <= config.critic.warmup_steps:
        warming = f"critic.warmup_steps={config.critic.warmup_steps} of steps={steps}"
        return f"{warming}: the policy would never learn: set fewer"
    return _one_score(config) or _nothing_kept(config)


def _one_score(config: AlgorithmConfig) -> str | None:
    """Say which shaping makes all scores equal."""
    for chosen in config.shaping:
        if chosen["name"] == "clip" and chosen["low"] == chosen["high"]:
            low = f"shaping=clip with low=high={chosen['low']:g}"
            return f"{low} gives every episode the same score, whatever it earned: set low below high"
        if chosen["name"] == "scale" and chosen["factor"] == 0:
            return "shaping=scale with factor=0 gives every episode the same score, whatever it earned: set another"
    return None


def _nothing_kept(config: AlgorithmConfig) -> str | None:
    """Say which weight or rejection leaves nothing."""
    corrections = [("rejection", chosen) for chosen in config.rejection]
    corrections += [("weight", config.weight)] if config.weight else []
    for part, chosen in corrections:
        if chosen.get("low") == chosen.get("high") == 1:
            return (
                f"{part}={chosen['name']} with low=high=1 leaves the tokens whose old/mu is 1 to the last bit, which "
                "rounding alone denies: set bounds on both sides of 1"
            )
    return None
