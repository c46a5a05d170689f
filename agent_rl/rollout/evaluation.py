"""Evaluation: success rate and reward over a split's tasks, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from agent_rl.core.display import Displayed
from agent_rl.core.episode import Episode, Outcome
from agent_rl.policy.interruption import interruptions


@dataclass(frozen=True, slots=True)
class Rate:
    """A proportion with its 95 % Wilson interval (Wilson 1927), which stays sensible near 0 and 1."""

    successes: int
    n: int

    @property
    def value(self) -> float:
        """The proportion; NaN if nothing was counted."""
        return self.successes / self.n if self.n else math.nan

    @property
    def share(self) -> str:
        """The proportion in words."""
        return f"{self.value:.1%}" if self.n else "unknown"

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval."""
        if not self.n:
            return (0.0, 1.0)
        z, p, n = 1.959964, self.value, self.n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))  # min and max: rounding at 0 and 1

    def __str__(self) -> str:
        if not self.n:
            return "unknown: no episode has a reward that says it"
        low, high = self.interval
        return f"{self.value:6.1%} [{low:.1%}, {high:.1%}] of {self.n}"


@dataclass(frozen=True, slots=True)
class Evaluation(Displayed):
    """What a set of episodes says about a policy. Failed episodes count as neither success nor failure."""

    success: Rate
    reward: float
    """Mean over the scored episodes; NaN if none was."""
    failed: int
    """Episodes that an infrastructure failure took."""
    turns: float
    tool_calls: float
    tool_errors: float
    of_env: Mapping[str, Evaluation] = field(default_factory=dict)
    """The same of each environment, where the episodes are of several."""

    def row(self, split: str, sampling: str) -> dict[str, float | int | str]:
        """Return the evaluation as a row of metrics."""
        names, of_env = {"split": split, "sampling": sampling}, dict[str, float | int]()
        for env, found in self.of_env.items():
            of_env |= {
                f"success/{env}": found.success.value,
                f"n/{env}": found.success.n,
                f"reward/{env}": found.reward,
            }
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "of_env"}
        return names | asdict(self.success) | own | {"success": self.success.value} | of_env


def summarise(episodes: list[Episode]) -> Evaluation:
    """Summarise finished episodes; all means are per episode."""
    known = [e.success for e in episodes if e.success is not None]
    rewards = [e.reward for e in episodes if e.reward is not None]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    own = {env: [e for e in episodes if e.env == env] for env in dict.fromkeys(e.env for e in episodes)}
    return Evaluation(
        success=Rate(sum(known), len(known)),
        reward=mean(rewards),
        failed=sum(e.outcome is Outcome.FAILED for e in episodes),
        turns=mean([float(e.turns) for e in episodes]),
        tool_calls=mean([float(e.tool_calls) for e in episodes]),
        tool_errors=mean([float(sum(e.tool_errors.values())) for e in episodes]),
        of_env={env: summarise(part) for env, part in own.items()} if len(own) > 1 else {},
    )


def trajectory_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Count forks, interruptions and rewards that broke.

    Returns:
        `rollout/forks`: trajectories beyond the first, per episode; 0 as long as every message could be appended.
        `rollout/interrupted`: the share of replies that were cut short with given tokens.
        `rollout/broken_rewards`: rewards whose method failed, per episode.
    """
    forks = sum(max(0, len(e.trajectories) - 1) for e in episodes)
    cut = sum(interruptions(t) for e in episodes for t in e.trajectories)
    replies = sum(e.turns for e in episodes)
    broken = sum(r.error is not None for e in episodes for r in e.rewards)
    return {
        "rollout/forks": forks / max(1, len(episodes)),
        "rollout/interrupted": cut / max(1, replies),
        "rollout/broken_rewards": broken / max(1, len(episodes)),
    }


def rollout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return what training reports of its episodes, `rollout/...`; failed ones count in `rollout/failed` only."""
    found = summarise([*episodes])
    of_env = {f"rollout/success/{env}": part.success.value for env, part in found.of_env.items()}
    of_env |= {f"rollout/reward/{env}": part.reward for env, part in found.of_env.items()}
    return (
        trajectory_metrics(episodes)
        | of_env
        | {
            "rollout/success": found.success.value,
            "rollout/reward": found.reward,
            "rollout/turns": found.turns,
            "rollout/tool_calls": found.tool_calls,
            "rollout/tool_errors": found.tool_errors,
            "rollout/failed": float(found.failed),
            "rollout/truncated": sum(e.outcome is Outcome.TRUNCATED for e in episodes) / max(1, len(episodes)),
        }
    )
