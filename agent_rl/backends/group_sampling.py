"""What an algorithm asks of the rollout: a batch of groups, greedy baselines, and the values of states.

Both backends use these functions; each says how its episodes are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np

from agent_rl.algorithms.dynamic_sampling import DynamicSampling
from agent_rl.algorithms.requirements import Requirements
from agent_rl.algorithms.state_values import plan as plan_continuations
from agent_rl.core.episode import Episode, EpisodeGroup, Outcome
from agent_rl.core.messages import Task
from agent_rl.errors import ConfigError
from agent_rl.gym.env import Env
from agent_rl.gym.mixture import member_of, members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import RL_START, task_key
from agent_rl.judge.run import check_judges
from agent_rl.rollout import Job, continuation
from agent_rl.rollout.closing import check_constructor
from agent_rl.runs.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from agent_rl.algorithms import Algorithm

Groups: TypeAlias = Sequence[EpisodeGroup]
LOOKED_AT = 1000
"""How many training tasks of a task function are compared with those that are held out."""


def require_hooks(spec: EnvSpec, algorithm: Requirements) -> None:
    """Refuse an environment without the hooks that the algorithm needs.

    Raises:
        ConfigError: naming what to define.
    """
    name = algorithm.config.advantage["name"]
    if algorithm.needs_states and spec.cls.state_hash is Env.state_hash:
        raise ConfigError(
            f"advantage={name} compares turns that were taken in the same state, but {spec.id} does not say which that "
            f"is: define {spec.cls.__name__}.state_hash(self), or choose another algorithm"
        )
    if spec.cls.group_reward_components and (algorithm.needs_values or algorithm.needs_greedy):
        raise ConfigError(
            f"advantage={name} compares with single episodes, but {spec.id} has @group_reward methods, which "
            "only reward whole groups: take them out, or choose another algorithm"
        )
    if algorithm.needs_values and not spec.cls.has_snapshots():
        raise ConfigError(
            f"advantage={name} runs episodes on from their turns, but {spec.id} has no snapshots: list the attributes "
            f"that change after reset in {spec.cls.__name__}.snapshot_attributes, or choose another algorithm"
        )


def check_environment(config: RunConfig) -> EnvSpec:
    """Check that a run can use its environment, by making an instance; return its spec.

    Raises:
        UnknownEnvError: if nothing is registered under its id.
        ConfigError: naming the file, argument or split that is wrong, what the constructor raises, or what to define
            or set.
    """
    env = config.load_env()
    for member, args, _ in members_of(env, config.env_args):
        require_hooks(member, Requirements(config.algorithm))
        check_constructor(member, args)
    check_judges(config.judge, env)
    for split in (config.split, config.eval.split):
        env.tasks.size(split)  # reads its file
    return env


class HeldOut(NamedTuple):
    """The tasks that a run is evaluated on."""

    tasks: list[Task]
    which: str
    """They and those that the run trains on, in words."""
    warning: str | None = None
    """What is wrong if it trains on some of them."""


def held_out_tasks(env: EnvSpec, config: RunConfig, demonstrations: int = 0) -> HeldOut:
    """Return the tasks of a run's evaluation, compared with those that it trains on.

    Of a task function, the tasks of the run's first steps and demonstrations are looked at.
    """
    source, split, n = env.tasks, config.eval.split, config.eval.n
    tasks = source.distinct(split, n)
    more = "" if len(tasks) == n else f", all that there are for eval.n={n}"
    which = f"{len(tasks)} task{'s' * (len(tasks) != 1)} of '{split}'{more}"
    train = source.stream(config.split, config.seed)
    if (all_of := source.size(config.split)) is not None:
        positions: Iterable[int] = range(all_of)
    else:
        steps = min(config.steps * config.rollout.groups, LOOKED_AT)
        positions = chain(range(min(demonstrations, LOOKED_AT)), range(RL_START, RL_START + steps))
    trained = {task_key(train.at(position)) for position in positions}
    if both := len(trained & {task_key(task) for task in tasks}):
        warning = (
            f"{both} of {len(tasks)} evaluation tasks are trained on, so that success on '{split}' may be memory: take "
            f"them out of '{config.split}', or set eval.split to other tasks"
        )
        return HeldOut(tasks, f"{which}; {both} of them are in '{config.split}', too: trained on", warning)
    return HeldOut(tasks, f"{which}, none of them among {len(trained)} of '{config.split}'")


def sample_groups(
    plan: DynamicSampling, run: Callable[[int, int], Groups], keep: Callable[[Groups], Sequence[bool]]
) -> tuple[list[EpisodeGroup], DynamicSampling]:
    """Sample groups until the batch is full, or dynamic sampling gives up.

    Args:
        plan: how many groups the batch needs, in how many rounds.
        run: samples groups with the present weights: the position of the first, and how many. A backend may return
            fewer or more.
        keep: says of each group whether it is worth training on.

    Returns:
        All sampled groups, in order, and how it went; `selected` are the positions of the batch's groups.
    """
    groups: list[EpisodeGroup] = []
    while n := plan.groups_to_sample():
        new = run(plan.sampled, n)
        groups += new
        plan = plan.update(keep(new))
    return groups, plan


def worth_training(algorithm: Algorithm) -> Callable[[Groups], list[bool]]:
    """Return the `keep` of `sample_groups`: the algorithm's filters; without dynamic sampling every group is kept."""

    def keep(groups: Groups) -> list[bool]:
        if algorithm.config.refill.max_rounds == 1 or not groups:
            return [True] * len(groups)
        kept = iter(algorithm.experience(groups).kept.tolist())
        return [any(list(islice(kept, len(group.episodes)))) for group in groups]

    return keep


def add_greedy(groups: Groups, run: Callable[[Groups], Sequence[Episode]]) -> list[EpisodeGroup]:
    """Add a baseline to each group: an episode of its task that is sampled greedily, from `run`, one a group."""
    return [replace(group, greedy=episode) for group, episode in zip(groups, run(groups), strict=True)]


def value_states(
    groups: Groups,
    spec: EnvSpec,
    algorithm: Algorithm,
    rng: np.random.Generator,
    run: Callable[[list[Job]], Sequence[Episode]],
) -> tuple[Tensor, dict[str, float]]:
    """Estimate the values of a batch's states by episodes that continue from them.

    Args:
        groups: the batch's; their episodes were run with `Job(snapshots=True)`. States of those that the algorithm
            keeps are valued.
        spec: their environment, or a mixture.
        algorithm: with `needs_values`.
        rng: draws the continuations' seeds, and the states to value if the budget is not enough for all.
        run: runs jobs with the policy that sampled the groups, and returns their episodes in order; they are neither
            stored nor trained on.

    Returns:
        `Experience.state_values` of the groups' episodes, float64 `[E, K]`, and the metrics of `StateValuePlan.values`.
    """
    episodes = episodes_of(groups)
    x = algorithm.experience(groups)
    found = plan_continuations(episodes, x.kept.tolist(), algorithm.config.vine, rng)
    ran = run([_continued(spec, episodes[s.episode], s.turn, s.seed) for s in found.starts])
    excluded = (algorithm.endings.get(e.ending) == "exclude" for e in ran)
    continued = [replace(e, outcome=Outcome.FAILED) if out else e for e, out in zip(ran, excluded, strict=True)]
    gamma = cast(float, algorithm.config.advantage.get("gamma", 1.0))  # a knob of state-values; yours may have none
    return found.values(continued, (len(episodes), x.states.shape[1]), gamma=gamma)


def _continued(spec: EnvSpec, episode: Episode, turn: int, seed: int) -> Job:
    return continuation(member_of(spec, episode.env), episode, turn, seed)


def episodes_of(groups: Groups) -> list[Episode]:
    """Return the sampled episodes of all groups, in order."""
    return [episode for group in groups for episode in group.episodes]


def greedy_of(groups: Groups) -> list[Episode]:
    """Return the groups' baselines, where they have any."""
    return [group.greedy for group in groups if group.greedy is not None]
