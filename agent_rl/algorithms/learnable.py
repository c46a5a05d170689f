"""Settings under which nothing can be learned from the rewards, and why."""

from __future__ import annotations

from agent_rl.algorithms.config import AlgorithmConfig

ALONE = (
    *("group-relative", "batch-normalised", "leave-one-out", "length-weighted", "best-of-group", "max-likelihood"),
    *("decoupled", "reinforce-pp-baseline", "best-against-worst", "optimal-baseline", "step-grouped"),
)
"""The advantages that are 0 for the only episode of a task."""


def nothing_learned(config: AlgorithmConfig, samples: int, steps: int) -> str | None:
    """Return why no update would follow the rewards, and what to set; None if some may.

    Args:
        config: of the algorithm.
        samples: episodes of each task.
        steps: of the run; 0 for none, which is no mistake.
    """
    name, filters = str(config.advantage["name"]), {str(chosen["name"]) for chosen in config.filters}
    advice = "set rollout.samples=8 or so, or an advantage that compares with something else, as algorithm=remax does"
    if samples == 1 and name in ALONE:
        return f"rollout.samples=1: advantage={name} compares the episodes of a task, and one alone has 0: {advice}"
    if samples == 1 and "varied-groups" in filters:
        return (
            f"rollout.samples=1: varied-groups keeps tasks whose episodes differ in score, and one does not: {advice}"
        )
    if name == "pass-at-k" and isinstance(k := config.advantage["k"], int) and samples <= k:
        return (
            f"rollout.samples={samples} is one set of k={k} episodes at most, and advantage=pass-at-k compares sets: "
            f"set rollout.samples to {2 * k} or more, or k lower"
        )
    if 0 < steps <= config.critic.warmup_steps:
        warming = f"critic.warmup_steps={config.critic.warmup_steps} of steps={steps}"
        return f"{warming}: the policy would never learn: set fewer"
    return None
