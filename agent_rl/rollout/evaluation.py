"""Evaluation: success, reward, use and failures over a split's tasks, with confidence intervals."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from agent_rl.core.display import Displayed
from agent_rl.core.episode import Episode, Outcome
from agent_rl.policy.interruption import interruptions
from agent_rl.rollout.comparison import (
    episodes_by_tag,
    interval_of_sums,
    mean_interval,
    pass_rates,
    reward_of,
    success_of,
    tasks_of,
    values_by_task,
)
from agent_rl.rollout.group_metrics import group_metrics
from agent_rl.rollout.judged import judge_metrics
from agent_rl.rollout.usage import Prices, Quantiles, UsageTotals, load_prices, total_cost, total_usage


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
        return wilson_interval(self.value, self.n) if self.n else (0.0, 1.0)

    def __str__(self) -> str:
        if not self.n:
            return "unknown: no episode has a reward that says it"
        low, high = self.interval
        return f"{self.value:6.1%} [{low:.1%}, {high:.1%}] of {self.n}"


def wilson_interval(p: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion of `n` trials."""
    z = 1.959964
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))  # min and max: rounding at 0 and 1


def rate_interval(successes: Sequence[int], sizes: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % interval of a success rate from each task's successes and samples.

    It is Wilson's, or with several samples of a task a bootstrap over tasks. That doubts nothing where all tasks have
    the same rate, as one alone has: there it is Wilson's of as many trials as tasks.
    """
    rate, tasks = Rate(sum(successes), sum(sizes)), len(sizes)
    if tasks == rate.n:
        return rate.interval
    if len({count / n for count, n in zip(successes, sizes, strict=True)}) == 1:
        return wilson_interval(rate.value, tasks)
    return interval_of_sums(successes, sizes)


@dataclass(frozen=True, slots=True)
class Evaluation(Displayed):
    """What a set of episodes says about a policy. Failed episodes count as neither success nor failure."""

    success: Rate
    reward: float
    """Mean over the scored episodes; NaN if none was."""
    failed: int
    """Episodes that an error ended: of the environment, a reward, a sandbox, an engine."""
    turns: float
    tool_calls: float
    tool_errors: float
    episodes: tuple[Episode, ...] = field(default=(), repr=False, compare=False)
    retried: tuple[Episode, ...] = field(default=(), repr=False, compare=False)
    """Failures that were run again: they count in what was used, and in nothing else."""

    def row(self, split: str, sampling: str) -> dict[str, float | int | str]:
        """Return the evaluation as a row of metrics."""
        means = {name: getattr(self, name) for name in ("reward", "failed", "turns", "tool_calls", "tool_errors")}
        row = {"split": split, "sampling": sampling, **asdict(self.success), "success": self.success.value, **means}
        for env, found in self.of_env.items():
            row |= {f"success/{env}": found.success.value, f"n/{env}": found.success.n, f"reward/{env}": found.reward}
        return row

    def pass_at(self, k: int) -> float:
        """Return the chance that one of `k` samples of a task succeeds, without bias; NaN with fewer samples."""
        return pass_rates(self.episodes, k)[0]

    def pass_hat(self, k: int) -> float:
        """Return the chance that all of `k` samples of a task succeed (pass^k), without bias; NaN with fewer."""
        return pass_rates(self.episodes, k)[1]

    @property
    def tasks(self) -> int:
        """How many tasks were played."""
        return len({*tasks_of(self.episodes)})

    @property
    def samples(self) -> int:
        """The most samples of a task whose success is known."""
        return max(map(len, values_by_task(self.episodes, success_of).values()), default=0)

    @property
    def success_interval(self) -> tuple[float, float]:
        """The 95 % interval of the success rate: Wilson's, or with several samples of a task a bootstrap over tasks."""
        groups = values_by_task(self.episodes, success_of).values()
        return rate_interval([int(sum(group)) for group in groups], [len(group) for group in groups])

    @property
    def reward_interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the mean reward, over tasks; NaN of one task alone."""
        return mean_interval(values_by_task(self.episodes, reward_of).values())

    def by(self, key: str | None = None) -> dict[str, Evaluation]:
        """Return the evaluation of each tag, a key of the tasks; None for `tags` or `tag`, if they have one.

        Raises:
            ConfigError: if no task has the key.
        """
        return {tag: summarise(episodes) for tag, episodes in episodes_by_tag(self.episodes, key).items()}

    @property
    def of_env(self) -> dict[str, Evaluation]:
        """The evaluation of each environment; empty if there is only one."""
        own = {env: [e for e in self.episodes if e.env == env] for env in dict.fromkeys(e.env for e in self.episodes)}
        return {env: summarise(episodes) for env, episodes in own.items()} if len(own) > 1 else {}

    @property
    def usage(self) -> UsageTotals:
        """Tokens, attempts and latency of a served model's replies."""
        return total_usage((*self.episodes, *self.retried))

    def cost(self, prices: str | os.PathLike[str] | Prices) -> float:
        """Return what the episodes cost, by a file of prices: `gpt-5-mini: {input: 0.25, cached: 0.025, output: 2}`.

        Raises:
            ConfigError: if the file can't be read, or a model has no price.
        """
        known = prices if isinstance(prices, Mapping) else load_prices(prices)
        return total_cost((*self.episodes, *self.retried), known)

    @property
    def seconds(self) -> Quantiles:
        """How long an episode took."""
        return Quantiles.of([episode.seconds for episode in self.episodes])

    @property
    def stops(self) -> Mapping[str, int]:
        """How many episodes ended for each reason."""
        return dict(Counter(str(episode.stop_reason) for episode in self.episodes))

    @property
    def failures(self) -> Mapping[str, int]:
        """How many episodes failed, by stage and class."""
        return dict(Counter(f"{e.error.where}: {e.error.type}" for e in self.episodes if e.error is not None))


def summarise(episodes: Sequence[Episode], retried: Sequence[Episode] = ()) -> Evaluation:
    """Summarise finished episodes; all means are per episode. `retried` are failures that were run again."""
    known = [e.success for e in episodes if e.success is not None]
    rewards = [e.reward for e in episodes if e.reward is not None]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    return Evaluation(
        success=Rate(sum(known), len(known)),
        reward=mean(rewards),
        failed=sum(e.outcome is Outcome.FAILED for e in episodes),
        turns=mean([float(e.turns) for e in episodes]),
        tool_calls=mean([float(e.tool_calls) for e in episodes]),
        tool_errors=mean([float(sum(e.tool_errors.values())) for e in episodes]),
        episodes=tuple(episodes),
        retried=tuple(retried),
    )


def trajectory_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Count forks, sub-agents, interruptions and rewards that broke.

    Returns:
        `rollout/forks`: trajectories beyond the first, per episode, sub-agents' apart; 0 as long as every message could
            be appended.
        `rollout/delegated`: sub-agents' trajectories, per episode.
        `rollout/interrupted`: the share of replies that were cut short with given tokens.
        `rollout/broken_rewards`: rewards whose method failed, per episode.
    """
    delegated = sum(t.is_delegated for e in episodes for t in e.trajectories)
    forks = sum(max(0, len(e.trajectories) - 1) for e in episodes) - delegated
    cut = sum(interruptions(t) for e in episodes for t in e.trajectories)
    replies = sum(e.turns for e in episodes)
    broken = sum(r.error is not None for e in episodes for r in e.rewards)
    return {
        "rollout/forks": forks / max(1, len(episodes)),
        "rollout/delegated": delegated / max(1, len(episodes)),
        "rollout/interrupted": cut / max(1, replies),
        "rollout/broken_rewards": broken / max(1, len(episodes)),
    }


def rollout_metrics(
    episodes: Sequence[Episode], judge_prices: str | None = None, *, tried_again: Sequence[Episode] = ()
) -> dict[str, float]:
    """Return what training reports of its episodes, `rollout/...`; failed ones have no success and no reward.

    Judges report `judge/...`, their cost by a file of prices; of tasks that were tried again, nothing else counts.
    """
    found = summarise(episodes)
    of_env = {f"rollout/success/{env}": part.success.value for env, part in found.of_env.items()}
    of_env |= {f"rollout/reward/{env}": part.reward for env, part in found.of_env.items()}
    own = {
        "rollout/success": found.success.value,
        "rollout/reward": found.reward,
        "rollout/turns": found.turns,
        "rollout/tool_calls": found.tool_calls,
        "rollout/tool_errors": found.tool_errors,
        "rollout/failed": float(found.failed),
        "rollout/truncated": sum(e.outcome is Outcome.TRUNCATED for e in episodes) / max(1, len(episodes)),
    }
    failed = Counter(e.ending for e in episodes if e.outcome is Outcome.FAILED)
    of_env |= {f"rollout/failed/{k}": float(n) for k, n in failed.items()}
    lost = Counter(e.sandbox_loss.cause for e in episodes if e.sandbox_loss is not None)
    of_env |= {f"rollout/sandbox_lost/{cause}": n / len(episodes) for cause, n in lost.items()}
    of_judges = judge_metrics([*episodes, *tried_again], judge_prices)
    return trajectory_metrics(episodes) | own | group_metrics(episodes) | of_env | of_judges
