"""Rollouts without training: every finished episode is stored at once, and an interrupted rollout continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from pydantic import Field, model_validator
from rich.markup import escape

from agent_rl.config import Count, Retries, with_settings, write_setting
from agent_rl.core.display import from_here, plural
from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode, Origin, Outcome
from agent_rl.core.judgement import JudgeFault
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.gym.budget import BudgetConfig
from agent_rl.gym.mixture import EnvironmentSettings, EnvSetting, load_environment, members_of
from agent_rl.gym.registry import EnvSpec, load_all_once
from agent_rl.gym.tasks import EVAL
from agent_rl.judge.config import MONEY, JudgeConfig
from agent_rl.policy import AnyPolicy, SamplingSettings, ignored_sampling, open_policy, sampling_params
from agent_rl.policy.by_name import POLICIES
from agent_rl.rollout import Evaluation, Job, split_jobs, stream_finished, summarise
from agent_rl.rollout.closing import check_constructor
from agent_rl.rollout.comparison import require_key, task_keys
from agent_rl.rollout.fit import check_policy_fit
from agent_rl.rollout.usage import load_prices, price_of
from agent_rl.rollout.watch import watching
from agent_rl.runs.commands import command
from agent_rl.runs.folder import file_of, load_imports, read_config, save_config, settings_file, status_of
from agent_rl.runs.stop import Interrupted, Stop
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.selection import episode_ids
from agent_rl.store.shards import episode_file
from agent_rl.view.progress import Progress

if TYPE_CHECKING:
    from agent_rl.checks.floors import Floors

Key: TypeAlias = tuple[str, int]
"""Which task and sample an episode is of: its group and its seed."""


class RolloutSettings(SamplingSettings, EnvironmentSettings):
    """Episodes without training."""

    env: EnvSetting = "calculator-v0"
    """The id of a registered environment; `agent-rl envs` lists them. Or a mixture, as in training."""
    imports: list[str] = Field(default_factory=list)
    """Files that register environments and policies; --import adds one."""
    split: str = EVAL
    """The tasks to play."""
    n: Count = 16
    """Tasks, the first of the split; of a mixture in all, divided by the weights."""
    samples: Count = 1
    """Episodes per task."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of all random numbers."""
    budget: BudgetConfig = BudgetConfig()
    """Instead of the environment's own limits."""
    concurrency: int = Field(64, ge=1)
    """Episodes under way at a time."""
    retries: dict[Ending, Retries] = Field(default_factory=dict)
    """How often an episode is run again if it ends so, such as `retries.sandbox_lost=2`."""
    judge: JudgeConfig = JudgeConfig()
    floors: bool | None = None
    """Whether to print, beside the result, what the oracle and policies without skill score on the same tasks; null for
    32 of them, and no longer than 5 % of the rollout's time, or a second."""
    by: str | None = None
    """A key of the tasks to tell results apart by, `meta.level` in an object; null for `tags` or `tag`, if tasks have
    one."""
    prices: str | None = None
    """A YAML file of what a million tokens cost, as `gpt-5-mini: {input: 0.25, cached: 0.025, output: 2}`."""
    out: str | None = None
    """Where the episodes go; null for runs/<time>-rollout/episodes.jsonl."""

    @model_validator(mode="after")
    def _once(self) -> RolloutSettings:
        choices = (self,) if isinstance(self.env, str) else self.env
        if any(choice.tasks.repeats > 1 for choice in choices):
            raise ValueError("tasks.repeats is for training: a rollout runs a task so often with samples=N")
        return self


CHANGEABLE = ("by", "prices", "floors", "concurrency", *MONEY)
"""Settings that may differ when a rollout is continued: they change no episode that there is."""


@dataclass(frozen=True)
class RolloutResult:
    """What a rollout left."""

    file: Path
    settings: RolloutSettings
    evaluation: Evaluation


def start_rollout(settings: RolloutSettings, progress: Progress) -> RolloutResult:
    """Run a rollout into a file that has no episodes yet, its settings beside it.

    Raises:
        ConfigError: if the file has episodes already, something else has the place of its settings, or there is no such
            environment, split or policy.
        Interrupted: if it was asked to stop; the message says how to continue.
    """
    with file_of(settings.out, "rollout") as file:
        _require_place(file)
        file = file.absolute()  # an environment may change the working directory
        imports = [*settings.imports, *load_imports(settings.policy.folder, settings.imports)]
        settings = _from_anywhere(settings.model_copy(update={"imports": imports}))
        with _open(settings, file, progress) as rollout:
            save_config(file.parent, settings, settings_file(file).name)
            return RolloutResult(file, settings, rollout.run())


def resume_rollout(
    path: str,
    progress: Progress,
    *,
    retry_failed: bool = False,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> RolloutResult:
    """Run what is missing of a rollout, with its own settings.

    Args:
        path: its file or folder.
        progress: where to show it.
        retry_failed: whether to run episodes again that failed, or that a judge did not score as its limit of cost was
            spent; the file keeps those, too.
        changes: of settings in CHANGEABLE.

    Raises:
        CheckpointError: if there are no settings beside the file.
        Interrupted: as `start_rollout` does.
    """
    file = episode_file(path)
    if not settings_file(file).exists():
        raise CheckpointError(f"{file} can't be continued: {settings_file(file)}, with its settings, is not there")
    file = file.absolute()
    stored = read_config(file.parent, RolloutSettings, settings_file(file).name)
    settings = _from_anywhere(with_settings(stored, changes))
    with _open(settings, file, progress) as rollout:
        return RolloutResult(file, settings, rollout.run(retry_failed=retry_failed))


def is_unpaid(episode: Episode) -> bool:
    """Return whether an episode has no score as a judge's limit of cost was spent."""
    return episode.reward is None and any(JudgeFault.COST in judgement.faults for judgement in episode.judgements)


@dataclass(frozen=True)
class _Rollout:
    """The jobs of a rollout, its policy and its file."""

    jobs: Sequence[Job]
    policy: AnyPolicy
    concurrency: int
    writer: EpisodeWriter
    progress: Progress

    @property
    def file(self) -> Path:
        """Where the episodes go."""
        return self.writer.path

    def run(self, *, retry_failed: bool = False) -> Evaluation:
        """Run and store the jobs that have no episode in the file; evaluate all, in the order of the jobs."""
        stored = list(read_episodes(self.file))
        episodes = {_key(episode): episode for episode in stored}  # the last of each: earlier ones were run again
        if retry_failed:
            episodes = {key: e for key, e in episodes.items() if e.outcome is not Outcome.FAILED and not is_unpaid(e)}
        left = self._left(episodes)
        stop = Stop(self.progress.say, "Stopping; Ctrl-C again does not wait for what is under way.")
        again = ["retry_failed=true"] if retry_failed else []
        stop.hint = f"continue with: {command('rollout', write_setting('resume', from_here(self.file)), *again)}"
        try:
            with stop.on_signals(), watching(status_of(self.file)):
                asyncio.run(self._store(left, episodes, stop))
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            raise Interrupted(
                f"{len(episodes)} of {plural(len(self.jobs), 'episode')} in {from_here(self.file)}; {stop.hint}"
            ) from error
        final = {episode.id for episode in episodes.values()}
        return summarise([episodes[_key(job)] for job in self.jobs], [e for e in stored if e.id not in final])

    def _left(self, episodes: Container[Key]) -> list[Job]:
        """Return the jobs without an episode; whole groups where a reward compares their episodes."""
        left = [job for job in self.jobs if _key(job) not in episodes]
        ranked = {job.group_id for job in left if job.spec.cls.group_reward_components}
        return [job for job in self.jobs if job.group_id in ranked or _key(job) not in episodes]

    async def _store(self, jobs: Sequence[Job], episodes: dict[Key, Episode], stop: Stop) -> None:
        stop.cancel_when_asked()
        before, started = len(episodes), time.monotonic()
        async with aclosing(stream_finished(jobs, self.policy, concurrency=self.concurrency)) as stream:
            async for finished in stream:
                for episode in finished:
                    self.writer.write(episode)
                    episodes[_key(episode)] = episode
                rate = (len(episodes) - before) / max(time.monotonic() - started, 1e-9)
                seconds = (len(self.jobs) - len(episodes)) / rate
                detail = f"{rate:.3g} episodes/s, {timedelta(seconds=round(seconds))} left"
                self.progress.phase("rollout", len(episodes) - 1, len(self.jobs), detail)


def _require_place(file: Path) -> None:
    """Refuse a file that has episodes, and one whose settings would overwrite something else."""
    if stored := len(episode_ids(file)):
        raise ConfigError(
            f"{file} has {plural(stored, 'episode')} already: name another file, or continue it: "
            f"{command('rollout', write_setting('resume', str(file)))}"
        )
    if (beside := settings_file(file)).exists():
        try:
            read_config(file.parent, RolloutSettings, beside.name)
        except CheckpointError as error:
            raise ConfigError(
                f"{beside} would be overwritten: the settings of {file} go there. Name another file: out=FILE"
            ) from error


@contextmanager
def _open(settings: RolloutSettings, file: Path, progress: Progress) -> Iterator[_Rollout]:
    load_all_once(settings.imports)
    jobs = rollout_jobs(settings)
    params = sampling_of(settings, progress)
    env = _environment(settings)
    for member in members_of(env, settings.env_args):
        if member.args:  # or each episode would fail
            check_constructor(member.spec, member.args)
    if settings.split == EVAL and (note := env.tasks.describe_held_out()):
        progress.say(f"[yellow]{settings.env_id}: {note}.[/yellow]")
    if (found := len(jobs) // settings.samples) < settings.n:
        progress.say(
            f"[yellow]n={settings.n}: split '{settings.split}' has {plural(found, 'task')} and no more.[/yellow]"
        )
    _require_results(settings, jobs)

    from agent_rl.judge.run import run_judge  # a mistake above shows before

    with open_policy(settings.policy, params, env) as policy, run_judge(settings.judge, env, file.parent):
        if warning := check_policy_fit(jobs, policy):
            progress.say(f"warning: {escape(warning)}")
        with EpisodeWriter(file) as writer:  # which locks it, before its settings are written
            yield _Rollout(jobs, policy, settings.concurrency, writer, progress)


def _from_anywhere(settings: RolloutSettings) -> RolloutSettings:
    """Let the file of prices be found from any folder, and the model, too, when `runs/latest` is another run."""
    named = settings.policy.model_dump()
    folders = ("folder", "model", "tokenizer", *(("name",) if settings.policy.name not in POLICIES else ()))
    found = {key: str(Path(name).resolve()) for key in folders if (name := named.get(key)) and Path(name).exists()}
    prices = settings.prices and str(Path(settings.prices).resolve())
    return settings.model_copy(update={"prices": prices, "policy": settings.policy.model_copy(update=found)})


def _require_results(settings: RolloutSettings, jobs: Sequence[Job]) -> None:
    """Refuse a tag or prices that would only fail once all episodes have run."""
    if settings.by is not None:
        require_key(f"by={settings.by}", settings.by, task_keys(job.task for job in jobs))
    if settings.prices is not None:
        prices = load_prices(settings.prices)
        if settings.policy.name == "openai":
            price_of(str((settings.policy.model_extra or {}).get("model")), prices)


def rollout_jobs(settings: RolloutSettings) -> list[Job]:
    """Return the jobs of a rollout.

    Raises:
        ConfigError: if there is no such environment or split, or it takes no such arguments.
    """
    origin = Origin("rollout", settings.split)
    env, args = _environment(settings), settings.env_args
    jobs = split_jobs(env, settings.n, settings.samples, settings.seed, origin=origin, env_args=args)
    return [replace(job, retries=settings.retries) for job in jobs] if settings.retries else jobs


def floors_of(ran: RolloutResult, took: float) -> dict[str, Floors]:
    """Return the floors beside a rollout of so many seconds; if they were asked for, its judge scores them, too."""
    from agent_rl.checks.floors import floors_beside
    from agent_rl.judge.run import run_judge

    settings, folder = ran.settings, ran.file.parent
    judge = run_judge(settings.judge, _environment(settings), folder) if settings.floors else nullcontext()
    with judge:
        return floors_beside(rollout_jobs(settings), settings.floors, took)


def _environment(settings: RolloutSettings) -> EnvSpec:
    return load_environment(settings, split=settings.split, budget=settings.budget)


def sampling_of(settings: SamplingSettings, progress: Progress) -> SamplingParams:
    """Return how a policy samples; say what it has no use for."""
    if note := ignored_sampling(settings):
        progress.say(f"[yellow]{note}.[/yellow]")
    return sampling_params(settings.policy, settings.temperature, settings.max_tokens)


def _key(of: Job | Episode) -> Key:
    return of.group_id, of.seed
