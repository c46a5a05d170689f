"""Stored episodes judged: many at a time, each judgement on disk when it is finished, continued where it stopped.

Nothing is played: no environment, engine or policy is started.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agent_rl.concurrency import run_together
from agent_rl.config import check_config
from agent_rl.core.episode import Episode
from agent_rl.core.judgement import JudgeFault
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.gym.tasks import task_key
from agent_rl.judge.base import Judge
from agent_rl.judge.build import build_judge
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.files import load_rubric, rubric_of
from agent_rl.judge.judged import EpisodeSource, Judged, JudgedEpisode, JudgedHeader, JudgedWriter, load_judged
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.panel import Panel
from agent_rl.judge.rubric import Rubric
from agent_rl.store.episodes import episode_at
from agent_rl.store.selection import Selection, select
from agent_rl.store.shards import Place, episode_file
from agent_rl.store.where import fields_of, parse_where
from agent_rl.version import __version__
from agent_rl.worker_threads import outside_loop

OF_TASK = "task:"
"""Before a key, in the place of a rubric's file: each task has its own there."""
CALLS = "calls.jsonl"
"""The log of calls, in the folder of the judged files that share it."""
PASSING = {JudgeFault.SERVER, JudgeFault.TIMEOUT, JudgeFault.COST, JudgeFault.TOO_LONG}
"""Faults that another run may not meet: it judges these episodes once more."""
VERDICTS = {"samples", "permute", "per_call", "temperature", "max_tokens", "structured"}
"""The settings of a judge that its verdicts depend on."""
RubricChoice: TypeAlias = str | os.PathLike[str] | Mapping[str, JSON] | Rubric
"""A rubric, its file, what such a file holds, or "task:KEY" for the one that each task has under a key."""


@dataclass(frozen=True)
class Plan:
    """The episodes to judge, the rubric, the judge, and the file of the judgements."""

    selection: Selection
    rubric: Rubric | None
    """None where each task has its own."""
    task_key: str
    judge: JudgeConfig | Judge
    out: Path
    calls: Path

    @property
    def config(self) -> JudgeConfig:
        """The judge's settings; the defaults for one that was given and has none."""
        if isinstance(self.judge, ModelJudge):
            return self.judge.config
        return self.judge if isinstance(self.judge, JudgeConfig) else JudgeConfig()

    def rubric_of(self, episode: Episode) -> Rubric:
        """Return the rubric of an episode.

        Raises:
            ConfigError: if its task has none, or it can't be read.
        """
        return self.rubric or task_rubric(episode, self.task_key)

    @contextmanager
    def open_judge(self) -> Iterator[Judge]:
        """Give the judge; one that was made for it is closed at the end."""
        if not isinstance(self.judge, JudgeConfig):
            yield self.judge
            return
        judge = build_judge(self.judge, self.calls)
        try:
            yield judge
        finally:
            judge.close()

    def open_file(self, judge: Judge) -> JudgedWriter:
        """Open the judged file.

        Raises:
            ConfigError: if it holds judgements by another judge, under another rubric, or of other episodes.
            StoreError: if it is no judged file, it is damaged, or another writer has it open.
        """
        source = EpisodeSource.of(self.selection.path)
        versions = {"agent_rl": __version__}
        settings = _settings_of(judge)
        return JudgedWriter(self.out, JudgedHeader(judge.name, self.rubric, self.task_key, settings, versions, source))


def _settings_of(judge: Judge) -> dict[str, JSON]:
    """Return the settings that a judge's verdicts depend on, but for their defaults; of a panel, its members'."""
    if isinstance(judge, Panel):
        members: list[JSON] = [_settings_of(member) for member in judge.judges]
        return {"members": members} if any(members) else {}
    return judge.config.model_dump(include=VERDICTS, exclude_defaults=True) if isinstance(judge, ModelJudge) else {}


@dataclass
class Judging:
    """A plan under way: the judgements that its file lacks, or has with a passing fault."""

    plan: Plan
    judge: Judge
    writer: JudgedWriter
    on_judged: Callable[[Judging], object] = lambda judging: None
    """Called after each judgement."""
    done: int = 0
    """Judgements that this run made."""
    is_out_of_money: bool = False
    places: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        final = {each.episode for each in self.writer.before.judgements if not set(each.faults) & PASSING}
        selected = self.plan.selection
        self.places = [place for place, id in zip(selected.places, selected.ids, strict=True) if id not in final]

    async def run(self) -> None:
        """Judge all; of what the limit of cost cuts short only the usage is kept.

        Raises:
            ConfigError: if the judge or a task's rubric can't be used.
        """
        left = iter(self.places)
        if self.places:
            await run_together([partial(self._work, left)] * min(self.plan.config.concurrency, len(self.places)))

    async def _work(self, left: Iterator[Place]) -> None:
        for place in left:
            episode = episode_at(self.plan.selection.path, place)
            rubric = self.plan.rubric_of(episode)
            judgement = await self.judge.judge(episode, rubric)
            is_cut = JudgeFault.COST in judgement.faults
            if judgement.usage or not is_cut:
                own = None if self.plan.rubric else rubric
                self.writer.write(JudgedEpisode(judgement, episode.group_id, own, task_key(episode.task)))
            self.is_out_of_money |= is_cut
            if not is_cut:
                self.done += 1
                self.on_judged(self)
            if self.is_out_of_money:
                return


def plan_judging(
    episodes: str | os.PathLike[str],
    rubric: RubricChoice,
    judge: JudgeConfig | Judge,
    *,
    out: str | os.PathLike[str] | None = None,
    calls: str | os.PathLike[str] | None = None,
    where: Sequence[str] = (),
    search: str = "",
    limit: int | None = None,
) -> Plan:
    """Return what is to be judged, and write and ask nothing; arguments as of `judge_episodes`.

    Raises:
        ConfigError: if the rubric can't be read, no episode fits, or the rubric needs a model and there is none, or has
            no use for the one there is.
        StoreError: if the episodes can't be read.
    """
    found, key = read_rubric(rubric)
    if "outcome" not in fields_of(parse_where(where)):
        where = (*where, "outcome!=failed")  # which no reward is of, either
    selected = select(episodes, where=where, search=search, limit=2**62 if limit is None else limit)
    file = episode_file(episodes)
    if not selected.places:
        raise ConfigError(f"{file}: {selected.none}{' ' + ' and '.join(where) if selected.total else ''}")
    if found is not None and isinstance(judge, JudgeConfig):
        require_use(found, judge)
    by = (judge.model or "rules") if isinstance(judge, JudgeConfig) else judge.name
    name = f"{found.name if found else key}-{by}".replace("/", "-").replace(" ", "-")
    target = file.parent / "judged" / f"{name}.jsonl" if out is None else Path(out)
    if target.resolve() == file.resolve():
        raise ConfigError(f"-o {target} is the file of the episodes: name another one")
    return Plan(selected, found, key, judge, target, target.parent / CALLS if calls is None else Path(calls))


def judge_episodes(
    episodes: str | os.PathLike[str],
    rubric: RubricChoice,
    judge: str | Mapping[str, object] | Judge | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    calls: str | os.PathLike[str] | None = None,
    where: Sequence[str] = (),
    search: str = "",
    limit: int | None = None,
) -> Judged:
    """Judge stored episodes under a rubric and return the judgements; called again, it makes the missing ones.

    Example::

        judged = ar.judge_episodes("runs/latest", "helpful.yaml", {"model": "gpt-5-mini", "samples": 3})

    Args:
        episodes: an episode file or a run's folder.
        rubric: one, its file or content, or "task:KEY" for the one that each task has under a key.
        judge: a model's name, settings as of `judge.*`, or a judge; None for a rubric of rules.
        out: the judged file; None for judged/<rubric>-<judge>.jsonl beside the episodes.
        calls: the log of calls, none of which is made twice; None for calls.jsonl beside the judged file.
        where: conditions that all hold, such as "reward<0.5" or "id=train-*"; without one on the outcome, episodes that
            failed are left out.
        search: a text that was said.
        limit: the most episodes, the first that fit.

    Raises:
        ConfigError: if the rubric, the judge or a condition has no meaning, or no episode fits.
        StoreError: if a file can't be read, or holds other judgements.
    """
    by: JudgeConfig | Judge
    if isinstance(judge, Mapping):
        by = check_config(JudgeConfig, judge)
    else:
        by = JudgeConfig(model=judge) if judge is None or isinstance(judge, str) else judge
    plan = plan_judging(episodes, rubric, by, out=out, calls=calls, where=where, search=search, limit=limit)
    with plan.open_judge() as asked, plan.open_file(asked) as writer:
        outside_loop(lambda: asyncio.run(Judging(plan, asked, writer).run()))
    return load_judged(plan.out)


def require_use(rubric: Rubric, config: JudgeConfig) -> None:
    """Refuse a rubric that needs a model without one, and a model that a rubric of rules does not ask.

    Raises:
        ConfigError: naming what to set.
    """
    if config.model is None:
        rubric.require_rules()
    elif not rubric.needs_model:
        raise ConfigError(
            f"judge.model={config.model}: rubric '{rubric.name}' never asks it, as every criterion has a rule"
        )


def read_rubric(rubric: RubricChoice) -> tuple[Rubric | None, str]:
    """Return a rubric and an empty string, or None and the key of "task:KEY"."""
    if isinstance(rubric, Rubric):
        return rubric, ""
    if isinstance(rubric, Mapping):
        return load_rubric(rubric), ""
    name = os.fspath(rubric)
    return (None, name.removeprefix(OF_TASK)) if name.startswith(OF_TASK) else (load_rubric(name), "")


def task_rubric(episode: Episode, key: str) -> Rubric:
    """Return the rubric that an episode's task has under a key.

    Raises:
        ConfigError: if it has none, or it can't be read.
    """
    if key not in episode.task:
        raise ConfigError(
            f"{OF_TASK}{key}: the task of episode '{episode.id}' has no '{key}'.{did_you_mean(key, episode.task)} "
            f"It has: {', '.join(episode.task)}."
        )
    return rubric_of(episode.task[key], key)
