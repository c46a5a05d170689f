"""Episodes that a person plays at a terminal, stored as demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from agent_rl.concurrency import CallingThread
from agent_rl.core.episode import Episode, Origin
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import BudgetConfig
from agent_rl.gym.mixture import EnvironmentSettings, load_environment
from agent_rl.gym.registry import EnvSpec, load_all_once
from agent_rl.gym.tasks import TRAIN, task_key
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.run import run_judge
from agent_rl.policy.human import Ask, HumanPolicy
from agent_rl.replay.play import play_episode
from agent_rl.rollout import Job, split_jobs
from agent_rl.runs.folder import file_of, save_config, settings_file
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.shards import shards_of

TRIED = 20
"""Tasks of a split that are looked at for each new one, at most."""


class PlaySettings(EnvironmentSettings):
    """What a person plays."""

    env: str
    """The id of a registered environment; `agent-rl envs` lists them."""
    imports: list[str] = Field(default_factory=list)
    """Files that register environments; --import adds one."""
    split: str = TRAIN
    """The tasks to play."""
    n: int = Field(1, ge=1)
    """Tasks, one after the other: the first of the split that the file has no episode of."""
    seed: int = Field(0, ge=0)
    """Of the environment's random numbers."""
    budget: BudgetConfig = BudgetConfig()
    """Instead of the environment's own limits."""
    judge: JudgeConfig = JudgeConfig()
    out: str | None = None
    """Where the episodes go, behind those that are there; null for runs/<time>-play/episodes.jsonl."""


def play(
    settings: PlaySettings, ask: Ask, say: Callable[[str], object], on_episode: Callable[[Episode], object]
) -> Path:
    """Let a person play; store each episode when it is over, and return the file.

    Args:
        settings: what to play.
        ask: shows what was said, and reads what the person answers; called in this thread.
        say: shows the person a note.
        on_episode: called with each episode that is stored.

    Raises:
        ConfigError: if there is no such environment or split, or no task is left.
        KeyboardInterrupt: if the person drops an episode; those before it are stored.
    """
    load_all_once(settings.imports)
    env = load_environment(settings, split=settings.split, budget=settings.budget)
    with file_of(settings.out, "play") as out:
        thread = CallingThread()
        jobs = _left(settings, env, out)
        with run_judge(settings.judge, env, out.parent):
            for job in jobs:
                episode, has_quit = thread.serve(play_episode(job, HumanPolicy(ask, thread), say))
                if episode is not None:
                    _store(episode, settings, out)
                    on_episode(episode)
                if has_quit:
                    break
        return out


def _left(settings: PlaySettings, env: EnvSpec, out: Path) -> list[Job]:
    """Return the jobs of the first tasks that a file has no episode of."""
    known = {task_key(episode.task) for episode in read_episodes(out)} if shards_of(out) else set()
    origin = Origin("demonstration", settings.split)
    most = settings.n + len(known)
    for tried in (most, TRIED * most):  # a split may have a task several times
        jobs = split_jobs(env, tried, 1, settings.seed, origin=origin, env_args=settings.env_args)
        tasks = {task_key(job.task): job for job in reversed(jobs)}
        left = [job for key, job in reversed(tasks.items()) if key not in known][: settings.n]
        if len(left) == settings.n or len(jobs) < tried:
            break
    if not left:
        raise ConfigError(f"{out} has an episode of every task of split '{settings.split}': choose another out=FILE")
    return left


def _store(episode: Episode, settings: PlaySettings, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if not (beside := settings_file(out)).exists():
        save_config(out.parent, settings, beside.name)
    with EpisodeWriter(out) as writer:
        writer.write(episode)
