"""Mixtures: several environments in one run, by weights; a batch holds groups of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

import numpy as np
from pydantic import BeforeValidator, Field, JsonValue

from agent_rl.config import Section
from agent_rl.core.messages import JSON, Task
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import BudgetConfig
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec, load_all_once, spec
from agent_rl.gym.task_selection import TaskSelection, select_tasks
from agent_rl.gym.tasks import RL_START, TRAIN, TaskSource, TaskStream
from agent_rl.seeds import Stream, rng

FINEST = 1000
"""Weights are read as fractions with at most this denominator."""


class EnvChoice(Section):
    """One environment of a mixture."""

    env: str
    """The id of a registered environment."""
    weight: float = Field(1.0, gt=0)
    """Its share of the tasks, relative to the others'."""
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    tasks: TaskSelection = TaskSelection()


def _choices(value: object) -> object:
    if isinstance(value, Mapping):
        value = [value]
    return value if not isinstance(value, Sequence) or isinstance(value, str) else [*map(_choice, value)]


def _choice(value: object) -> object:
    return {"env": value} if isinstance(value, str) else value


EnvSetting: TypeAlias = Annotated[
    str | Annotated[tuple[EnvChoice, ...], Field(min_length=1)], BeforeValidator(_choices)
]
"""The setting `env`: an id, or a list of ids and `EnvChoice`s, a mixture."""


class EnvironmentSettings(Section):
    """The settings of every run's environment, or environments."""

    env: EnvSetting
    """The id of a registered environment; `agent-rl envs` lists them. Or a mixture, a list of ids and of
    `{env: ID, weight: 3, env_args: ..., tasks: ...}`."""
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    tasks: TaskSelection = TaskSelection()
    """Which of its tasks."""

    @property
    def env_id(self) -> str:
        """The environment's id; of a mixture all of them."""
        return self.env if isinstance(self.env, str) else "+".join(choice.env for choice in self.env)


class Member(NamedTuple):
    """An environment of a run."""

    spec: EnvSpec
    args: Mapping[str, JSON]
    weight: float = 1.0


class Assignment(NamedTuple):
    """What a run's task asks for: an environment, its arguments, and the task that `reset` is given."""

    spec: EnvSpec
    env_args: Mapping[str, JSON]
    task: Task


@dataclass(frozen=True, slots=True)
class Mixture(EnvSpec):
    """Several environments as one; its tasks say of which environment they are, see `assign`."""

    members: tuple[Member, ...] = ()

    @property
    def id(self) -> str:
        """The ids of its environments."""
        return "+".join(member.spec.id for member in self.members)


def mix(members: Sequence[Member]) -> Mixture:
    """Return environments as one; a token budget is the largest of theirs, if all have one."""
    tokens = [member.spec.budget.tokens for member in members]
    budget = replace(members[0].spec.budget, tokens=None if None in tokens else max(n for n in tokens if n is not None))
    return Mixture("", "mixture", 0, Env, MixedTasks(members), budget, members=tuple(members))


def members_of(env: EnvSpec, env_args: Mapping[str, JSON]) -> tuple[Member, ...]:
    """Return the environments of a run: a mixture's, or the one that it has."""
    return env.members if isinstance(env, Mixture) else (Member(env, env_args),)


def member_of(env: EnvSpec, id: str) -> EnvSpec:
    """Return the environment of an id, of a mixture or the only one."""
    return next(m.spec for m in env.members if m.spec.id == id) if isinstance(env, Mixture) else env


def assign(env: EnvSpec, env_args: Mapping[str, JSON], task: Task) -> Assignment:
    """Return what a task of a run asks for."""
    if not isinstance(env, Mixture):
        return Assignment(env, env_args, task)
    member = env.members[cast(int, task["member"])]
    return Assignment(member.spec, member.args, cast(Task, task["task"]))


def load_environment(settings: EnvironmentSettings, *, split: str, budget: BudgetConfig) -> EnvSpec:
    """Return the environment that a run's settings describe, with its tasks and budget.

    Args:
        settings: of the run.
        split: what the selection's `offset`, `limit` and `repeats` are of.
        budget: instead of the environments' own.

    Raises:
        UnknownEnvError: if there is no such environment.
        ConfigError: if the arguments don't fit, there is no such split, or settings of one environment are given beside
            a mixture.
    """
    env, args, tasks = settings.env, settings.env_args, settings.tasks
    if isinstance(env, str):
        return _load(EnvChoice(env=env, env_args=args, tasks=tasks), split, budget)
    if args or tasks != TaskSelection():
        own = "env_args" if args else "tasks"
        raise ConfigError(f"{own} is for one environment; of a mixture each has its own: env=[{{env: ID, {own}: ...}}]")
    return mix([Member(_load(choice, split, budget), choice.env_args, choice.weight) for choice in env])


def environment_of(settings: Mapping[str, Any]) -> EnvSpec:
    """Import a run's files and return its environment, in another process, from its settings as JSON.

    Args:
        settings: `env`, `imports`, and where they are set `env_args`, `tasks` and `split`.
    """
    load_all_once(settings["imports"])
    own = {name: settings[name] for name in ("env", "env_args", "tasks") if name in settings}
    found = EnvironmentSettings.model_validate(own)
    return load_environment(found, split=settings.get("split", TRAIN), budget=BudgetConfig())


def _load(choice: EnvChoice, split: str, budget: BudgetConfig) -> EnvSpec:
    found = spec(choice.env)
    found.check_arguments(choice.env_args)
    tasks = select_tasks(found.tasks, choice.tasks, split)
    return replace(found, tasks=tasks, budget=budget.instead_of(found.budget))


class MixedTasks(TaskSource):
    """The tasks of several environments, each as `{"member": its number, "task": the task}`.

    The order comes in blocks, as short as the weights allow, of which each holds every environment by its weight: with
    weights 3 and 1, any four tasks from a multiple of four on are three of the first and one of the second. A block
    begins with the demonstrations, and one with the batches of reinforcement learning.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._sources = [member.spec.tasks for member in members]
        shares = [Fraction(member.weight).limit_denominator(FINEST) for member in members]
        if 0 in shares:
            raise ConfigError(f"weight={members[shares.index(Fraction(0))].weight}: give at least {1 / FINEST:g}")
        whole = [int(share * math.lcm(*(s.denominator for s in shares))) for share in shares]
        self.counts = [n // math.gcd(*whole) for n in whole]
        """How many tasks of each environment a block has."""
        first, *others = self._sources
        self.splits = tuple(split for split in first.splits if all(split in other.splits for other in others))
        self.holds_out = False
        self.ids = [member.spec.id for member in members]
        if not self.splits:
            raise ConfigError(f"{' and '.join(self.ids)} have no split in common")

    def size(self, split: str) -> int | None:
        """Return None: a mixture has no end."""
        self.require(split)
        return None

    def get(self, split: str, index: int) -> Task:
        """Return a task, each environment's in their own order."""
        member, place = self.place(0, index)
        source = self._sources[member]
        return tagged(member, source.get(split, place % (source.size(split) or place + 1)))

    def place(self, seed: int, position: int) -> tuple[int, int]:
        """Return the number of the environment at a position, and the position among its own tasks."""
        ahead = -RL_START % sum(self.counts) if position >= RL_START else 0  # to the next block
        block, offset = divmod(position + ahead, sum(self.counts))
        order = rng(Stream.MIXTURE, seed, block).permutation(np.repeat(np.arange(len(self.counts)), self.counts))
        member = int(order[offset])
        return member, block * self.counts[member] + int((order[:offset] == member).sum())

    def divide(self, n: int) -> list[int]:
        """Return how many of `n` tasks are each environment's, by the largest remainders."""
        shares = [n * count / sum(self.counts) for count in self.counts]
        whole = [math.floor(share) for share in shares]
        for member in sorted(range(len(shares)), key=lambda k: whole[k] - shares[k])[: n - sum(whole)]:
            whole[member] += 1
        return whole

    def distinct(self, split: str, n: int) -> list[Task]:
        """Return the first different tasks of each environment, `n` in all, divided by weight."""
        parts = zip(self._sources, self.divide(n), strict=True)
        return [tagged(k, task) for k, (source, share) in enumerate(parts) for task in source.distinct(split, share)]

    def stream(self, split: str, seed: int = 0) -> TaskStream:
        """Return the endless sequence of a split."""
        return _MixedStream(self, split, seed, [source.stream(split, seed) for source in self._sources])

    def describe_held_out(self) -> str:
        """Describe the tasks held out of environments that name no split `eval`."""
        notes = ((id, source.describe_held_out()) for id, source in zip(self.ids, self._sources, strict=True))
        return "; ".join(f"{id}: {note}" for id, note in notes if note)


class _MixedStream(TaskStream):
    def __init__(self, source: MixedTasks, split: str, seed: int, streams: Sequence[TaskStream]) -> None:
        super().__init__(source, split, seed)
        self._mixed, self._streams = source, streams

    def at(self, position: int) -> Task:
        member, place = self._mixed.place(self.seed, position)
        return tagged(member, self._streams[member].at(place))

    def again(self, position: int, earlier: Iterable[int] = ()) -> int:
        member, place = self._mixed.place(self.seed, position)
        is_endless = self._streams[member].source.size(self.split) is None
        return self.equal(position, earlier) if is_endless else self._streams[member].again(place)


def tagged(member: int, task: Task) -> Task:
    """Return a mixture's task."""
    return {"member": member, "task": dict(task)}
