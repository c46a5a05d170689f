"""Several samples of a task, and two policies on the same tasks: pass@k, pass^k, intervals, a paired test."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Task
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.gym.tasks import task_key, task_values
from agent_rl.seeds import Stream, rng

EXACT = 12
"""Up to so many tasks that differ, all signs are tried."""
DRAWS, AT_ONCE = 10_000, 500
"""Random signs, and resampled sets of tasks; how many are held at once."""
MANY = 2000
"""Groups up to which an interval is found by resampling."""
TASK = "task."
"""What may stand before a key of the tasks."""
TAG_KEYS = ("tags", "tag")
"""The keys of a task by which results are split, if no other is asked for."""


def pass_at_k(successes: int, n: int, k: int) -> float:
    """Return the chance that one of `k` samples succeeds, without bias from `n` samples (Chen et al. 2021)."""
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_hat_k(successes: int, n: int, k: int) -> float:
    """Return the chance that all of `k` samples succeed, without bias from `n` samples (Yao et al. 2024)."""
    return math.comb(successes, k) / math.comb(n, k)


def pass_rates(episodes: Iterable[Episode], k: int) -> tuple[float, float]:
    """Return pass@k and pass^k, means over the tasks with at least `k` samples of known success; NaN without any."""
    counts = [
        (sum(value > 0 for value in known), len(known))
        for known in values_by_task(episodes, success_of).values()
        if len(known) >= k
    ]
    if not counts:
        return math.nan, math.nan
    at, hat = ([estimate(c, n, k) for c, n in counts] for estimate in (pass_at_k, pass_hat_k))
    return float(np.mean(at)), float(np.mean(hat))


def mean_interval(groups: Collection[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of all values, by drawing whole groups: the samples of a task.

    It is NaN of less than two groups: one tells nothing of how others differ.
    """
    return interval_of_sums([sum(group) for group in groups], [len(group) for group in groups])


def interval_of_sums(sums: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """Return what `mean_interval` does, of the sum and the size of each group.

    Of more than `MANY` groups it is the normal one, which a bootstrap would only find again, slowly.
    """
    totals, counts = np.array(sums, float), np.array(sizes, float)
    if (n := len(totals)) < 2:
        return math.nan, math.nan
    if n > MANY:
        mean = totals.sum() / counts.sum()
        half = 1.959964 * float(np.linalg.norm(totals - mean * counts)) / counts.sum()
        return float(mean - half), float(mean + half)
    generator = rng(Stream.COMPARISON, 0)
    drawn = (generator.integers(n, size=(AT_ONCE, n)) for _ in range(DRAWS // AT_ONCE))
    means = [totals[tasks].sum(axis=1) / counts[tasks].sum(axis=1) for tasks in drawn]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of episodes, A and B, by the tasks that are in both; a task's value is the mean of its samples."""

    measure: str
    tasks: int
    only_first: int
    """Tasks of A that B has not, or not scored."""
    only_second: int
    first: float
    second: float
    difference: float
    """Of B to A."""
    interval: tuple[float, float]
    """The 95 % bootstrap interval of the difference, over tasks; NaN of one task."""
    p: float
    """How likely a difference of this size is if it does not matter which is A, by flipping the tasks' signs."""


def compare(first: Iterable[Episode], second: Iterable[Episode]) -> tuple[Comparison, ...]:
    """Compare two sets of episodes by task: success, where it is known, and reward.

    Raises:
        ConfigError: if they have no scored task in common.
    """
    one, other = list(first), list(second)
    found = [
        compare_means(name, *(_means(values_by_task(episodes, value)) for episodes in (one, other)))
        for name, value in (("success", success_of), ("reward", reward_of))
    ]
    compared = tuple(comparison for comparison in found if comparison is not None)
    if not compared:
        raise ConfigError(NOTHING_IN_COMMON)
    return compared


NOTHING_IN_COMMON = "the two have no task in common that is scored: compare rollouts of one environment and split"


def compare_means(measure: str, first: Mapping[str, float], second: Mapping[str, float]) -> Comparison | None:
    """Compare the tasks' means of two sets of episodes; None without a task in common."""
    both = sorted(first.keys() & second.keys())
    if not both:
        return None
    a, b = (np.array([means[task] for task in both], float) for means in (first, second))
    return Comparison(
        measure,
        len(both),
        len(first) - len(both),
        len(second) - len(both),
        float(a.mean()),
        float(b.mean()),
        float((b - a).mean()),
        mean_interval([[d] for d in (b - a).tolist()]),
        _p_value(b - a),
    )


def success_of(episode: Episode) -> float | None:
    """Return 1 or 0; None if it is not known."""
    return None if episode.success is None else float(episode.success)


def reward_of(episode: Episode) -> float | None:
    """Return the reward; None if it is not scored."""
    return episode.reward


def values_by_task(episodes: Iterable[Episode], value: Callable[[Episode], float | None]) -> dict[str, list[float]]:
    """Return the known values of each task's samples."""
    found: dict[str, list[float]] = defaultdict(list)
    played = list(episodes)
    for episode, task in zip(played, tasks_of(played), strict=True):
        if (known := value(episode)) is not None:
            found[task].append(known)
    return found


def tasks_of(episodes: Sequence[Episode]) -> list[str]:
    """Return a key of each episode's task: equal ones of several environments are different tasks."""
    keys, envs = [task_key(episode.task) for episode in episodes], defaultdict[str, set[str]](set)
    for key, episode in zip(keys, episodes, strict=True):
        envs[key].add(episode.env)
    return [f"{k} {e.env}" if len(envs[k]) > 1 else k for k, e in zip(keys, episodes, strict=True)]


def episodes_by_tag(episodes: Iterable[Episode], key: str | None = None) -> dict[str, list[Episode]]:
    """Return episodes by a key of their tasks, sorted; one with a list of tags is in each of them.

    Args:
        episodes: whose tasks have tags.
        key: of a task, as of `task_values`, or `task.KEY`; None for `tags` or `tag`, without which there is nothing.

    Raises:
        ConfigError: if no task has the key.
    """
    found: dict[str, list[Episode]] = defaultdict(list)
    played = list(episodes)
    key = key or next((name for name in TAG_KEYS if any(name in episode.task for episode in played)), None)
    if key is None or not played:
        return {}
    require_key(f"by={key}", key, task_keys(episode.task for episode in played))
    for episode in played:
        tags = task_values(episode.task).get(key.removeprefix(TASK))
        for tag in dict.fromkeys(map(str, tags if isinstance(tags, list | tuple) else [tags])):
            found[tag].append(episode)
    return dict(sorted(found.items()))


def task_keys(tasks: Iterable[Task]) -> list[str]:
    """Return the keys that tasks have, as of `task_values`."""
    return list(dict.fromkeys(name for task in tasks for name in task_values(task)))


def require_key(setting: str, key: str, keys: Collection[str], fields: Collection[str] = ()) -> None:
    """Check that results can be split by a key.

    Args:
        setting: what named it, for the error.
        key: of a task, as `KEY` or `task.KEY`, or a field.
        keys: those of the tasks.
        fields: what else there is to split by.

    Raises:
        ConfigError: if it is none of them.
    """
    if key not in fields and key.removeprefix(TASK) not in keys:
        known = (*fields, *keys)
        shown = ", ".join(name for name in known if "." not in name)
        raise ConfigError(f"{setting}: no task has such a key.{did_you_mean(key, known)} There are: {shown}.")


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: float(np.mean(of_task)) for task, of_task in values.items()}


def _p_value(differences: npt.NDArray[np.float64]) -> float:
    differing = differences[differences != 0]
    n, size = len(differing), abs(float(differing.sum())) - 1e-12 * float(np.abs(differing).sum())  # sums are rounded
    if n <= EXACT:
        signs = np.array(list(product((-1, 1), repeat=n))).reshape(2**n, n)
        return float(np.mean(np.abs(signs @ differing) >= size))
    generator = rng(Stream.COMPARISON, 1)
    draws = (2 * generator.integers(2, size=(AT_ONCE, n)) - 1 for _ in range(DRAWS // AT_ONCE))
    larger = sum(int(np.sum(np.abs(drawn @ differing) >= size)) for drawn in draws)
    return (larger + 1) / (DRAWS + 1)
