"""`judge`: a judge's score of the finished episode as a component of an environment's reward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

from agent_rl.core.episode import Episode, EpisodeGroup
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import JSON, Task
from agent_rl.errors import ConfigError, DefinitionError, did_you_mean
from agent_rl.gym.env import Env
from agent_rl.gym.mixture import members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.reward import RewardComponent, mark_reward
from agent_rl.judge.base import GroupJudge, Judge
from agent_rl.judge.evolving import EvolvingJudge
from agent_rl.judge.files import load_rubric, rubric_of
from agent_rl.judge.rubric import Rubric
from agent_rl.judge.rules import RuleJudge
from agent_rl.policy.openai_client import without_requests
from agent_rl.registries import file_of

E = TypeVar("E", bound=Env)

_RULES = RuleJudge()
_of_run: ContextVar[Judge | None] = ContextVar("judge", default=None)


@contextmanager
def use_judge(judge: Judge | None) -> Iterator[None]:
    """Let a judge score the episodes that are run meanwhile, unless an environment names its own."""
    before = _of_run.set(judge)
    try:
        yield
    finally:
        _of_run.reset(before)


def judge(
    *,
    rubric: str | Path | Rubric | Mapping[str, JSON] | None = None,
    weight: float = 1.0,
    name: str | None = None,
    judge: Judge | GroupJudge | None = None,
    rubric_key: str = "rubric",
    group: bool = False,
) -> JudgeReward:
    """Let a judge reward an environment's episodes: a decorator of the class, or the value of an attribute.

    The component's value is `Judgement.score`; the judgement goes into `Episode.judgements`. Where the judge fails,
    there is no score, and the episode has no part in its group's baseline. A rubric of rules alone asks no model.

    Example::

        @ar.register("essay-v0", tasks="essays.jsonl")
        @ar.judge(rubric="essay.yaml", weight=0.5)
        class Essay(ar.Env): ...

    Args:
        rubric: a rubric, a mapping as a rubric file holds it, or a file, relative to that of the class; None for the
            one that each task has.
        weight: its factor in the episode's reward; 0 only records it.
        name: the component's; the attribute's name if left out, and "judge" in a decorator.
        judge: who judges; None for the run's: `judge.model` of its settings, or `use_judge`.
        rubric_key: the key of a task's rubric.
        group: compare the episodes of one task with each other, by a `GroupJudge`.

    Raises:
        DefinitionError: if the weight is not finite.
    """
    return JudgeReward(rubric, weight, name, judge, rubric_key, group)


class JudgeReward:
    """A component of a reward that a judge gives; `judge` makes it."""

    def __init__(
        self,
        rubric: str | Path | Rubric | Mapping[str, JSON] | None,
        weight: float,
        name: str | None,
        judge: Judge | GroupJudge | None,
        rubric_key: str,
        group: bool,
    ) -> None:
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise DefinitionError(f"@ar.judge has weight={weight}; give a finite number")
        if judge is not None and not hasattr(judge, method := "rank" if group else "judge"):
            raise DefinitionError(f"@ar.judge(group={group}) has a judge without the method {method}: {judge!r}")
        self._given, self._weight, self._name = rubric, weight, name
        self._judge, self._key, self._is_of_group = judge, rubric_key, group
        self._owner: type | None = None

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._owner = owner
        component = RewardComponent(
            self._name or attribute, self._weight, attribute, is_async=True, is_judged=not self._is_of_group
        )
        mark_reward(self, component, group=self._is_of_group)

    def __call__(self, cls: type[E]) -> type[E]:
        """Add the component to a class."""
        attribute = self._name or "judge"
        if not (isinstance(cls, type) and issubclass(cls, Env)):
            raise DefinitionError(f"@ar.judge is on {cls!r}, which is no subclass of agent_rl.Env")
        if attribute in vars(cls) or not isinstance(inspect.getattr_static(cls, attribute, self), JudgeReward):
            raise DefinitionError(f"{cls.__name__} has a '{attribute}' already: write @ar.judge(name=...)")
        setattr(cls, attribute, self)
        self.__set_name__(cls, attribute)
        cls.collect_rewards()
        return cls

    def __get__(self, env: Env | None, owner: type) -> object:
        """Return the method that an instance has."""
        if env is None:
            return self
        return self.rank if self._is_of_group else self.score

    async def score(self, episode: Episode) -> Judgement | None:
        """Return the judge's judgement of an episode; None of demonstrations and floors, which no model is paid for."""
        rubric = self.rubric_for(episode.task)
        if rubric.needs_model and (episode.origin.purpose == "demonstration" or without_requests.get()):
            return None
        return await self._judge_of(rubric).judge(episode, rubric)

    async def rank(self, group: EpisodeGroup) -> list[Judgement]:
        """Return the judgement of each episode of a group."""
        rubric = self.rubric_for(group.task)
        return await self._group_judge_of(rubric).rank(group.episodes, rubric)

    @cached_property
    def rubric(self) -> Rubric | None:
        """The rubric of all tasks; None if each has one of its own.

        Raises:
            ConfigError: if its file can't be read.
        """
        given = self._given
        if given is None or isinstance(given, Rubric):
            return given
        if isinstance(given, Mapping):
            return rubric_of(given, self._owner.__name__ if self._owner else "rubric")
        file = file_of(self._owner) if self._owner else None
        return load_rubric((file.parent if file else Path.cwd()) / given)

    def rubric_for(self, task: Task) -> Rubric:
        """Return the rubric that an episode of a task is judged by.

        Raises:
            ConfigError: if it can't be read, or the task has none.
        """
        if self.rubric is not None:
            return self.rubric
        if self._key not in task:
            hint = did_you_mean(self._key, task)
            raise ConfigError(
                f"a task has no '{self._key}' to be judged by.{hint} Name another key, @ar.judge(rubric_key=...), or "
                "give a rubric for all tasks, @ar.judge(rubric=...)"
            )
        return rubric_of(task[self._key], self._key)

    def check(self, spec: EnvSpec) -> None:
        """Refuse a rubric without a judge, or one that can't be read.

        Raises:
            ConfigError: naming what to set.
        """
        splits = () if self.rubric is not None else spec.tasks.splits
        for task in [spec.tasks.get(split, 0) for split in splits] or [{}]:
            rubric = self.rubric_for(task)
            _ = self._group_judge_of(rubric) if self._is_of_group else self._judge_of(rubric)

    @property
    def may_ask_run(self) -> bool:
        """Whether it may ask the run's judge: it names none, and rules alone may not decide.

        Raises:
            ConfigError: if the rubric's file can't be read.
        """
        return self._judge is None and (self._is_of_group or self.rubric is None or self.rubric.needs_model)

    def _judge_of(self, rubric: Rubric) -> Judge:
        if self._judge is not None:
            return cast(Judge, self._judge)
        asks_run = rubric.needs_model or evolving_judge() is not None
        return _judge_of_run(rubric) if asks_run else _RULES

    def _group_judge_of(self, rubric: Rubric) -> GroupJudge:
        found = self._judge or _judge_of_run(rubric)
        if not hasattr(found, "rank"):
            raise ConfigError(
                f"@ar.judge(group=True): the judge '{found.name}' compares no episodes: set judge.model=NAME, or name "
                "one with a method `rank`, @ar.judge(judge=...)"
            )
        return cast(GroupJudge, found)


def evolving_judge() -> EvolvingJudge | None:
    """Return the run's judge if its rubrics evolve; it is to learn from each step's groups."""
    found = _of_run.get()
    return found if isinstance(found, EvolvingJudge) else None


def judge_rewards(spec: EnvSpec) -> list[tuple[EnvSpec, JudgeReward]]:
    """Return the judges of an environment, or of all that are in a mixture."""
    found = []
    for member, _, _ in members_of(spec, {}):
        for component in (*member.cls.reward_components, *member.cls.group_reward_components):
            given = inspect.getattr_static(member.cls, component.attribute, None)
            if isinstance(given, JudgeReward):
                found.append((member, given))
    return found


def require_judges(spec: EnvSpec) -> None:
    """Refuse an environment with unreadable rubrics, or with rubrics that need a judge, if there is none.

    Raises:
        ConfigError: naming what to set.
    """
    for member, given in judge_rewards(spec):
        try:
            given.check(member)
        except ConfigError as error:
            raise ConfigError(f"{member.id}: {error}") from error


def _judge_of_run(rubric: Rubric) -> Judge:
    if (found := _of_run.get()) is None:
        ids = [c.id for c in rubric.criteria if c.rule is None]
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        lack = f": {', '.join(ids[:3])}{more} has no rule" if ids else " to compare episodes"
        raise ConfigError(
            f"rubric '{rubric.name}' needs a model{lack}.\n"
            "Set judge.model=NAME and judge.base_url=URL, in Python ar.use_judge(JUDGE), or write a rule for each"
        )
    return found
