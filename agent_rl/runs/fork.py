"""Forks that are stored: a group of episodes that continue one of a file from a turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from agent_rl.concurrency import CallingThread
from agent_rl.config import load_config
from agent_rl.core.display import plural
from agent_rl.core.episode import Episode
from agent_rl.gym.budget import BudgetConfig
from agent_rl.gym.registry import load_all_once, spec
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.run import run_judge
from agent_rl.policy import AnyPolicy, SamplingSettings, open_policy
from agent_rl.policy.base import EnvPolicy, require_resumable
from agent_rl.policy.human import HumanPolicy
from agent_rl.replay.fork import fork_group, fork_jobs, verify_prefix
from agent_rl.replay.play import play_episode
from agent_rl.rollout import Job
from agent_rl.rollout.group import stream_finished
from agent_rl.runs.folder import file_of, load_imports, load_imports_beside, save_config, settings_file
from agent_rl.runs.rollout import sampling_of
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.selection import find_episode, samples_of
from agent_rl.store.shards import episode_file
from agent_rl.view.person import Person
from agent_rl.view.progress import Progress, Screen
from agent_rl.worker_threads import outside_loop

HUMAN = "human"
"""The policy that is a person at the terminal."""


class ForkSettings(SamplingSettings):
    """How a stored episode is continued, as in a rollout; or by `policy=human`, who is asked at the terminal."""

    imports: list[str] = Field(default_factory=list)
    """Files that register environments and policies, with those of the episode's run; --import adds one."""
    n: int = Field(1, ge=1)
    """Episodes, a group."""
    seed: int = Field(0, ge=0)
    """Of what the policy samples; the environment's random numbers are the stored episode's."""
    budget: BudgetConfig = BudgetConfig()
    """Instead of the environment's own limits."""
    concurrency: int = Field(64, ge=1)
    """Episodes under way at a time."""
    judge: JudgeConfig = JudgeConfig()
    out: str | None = None
    """Where the episodes go, behind those that are there, as further samples; null for
    runs/<time>-fork/episodes.jsonl."""


@dataclass(frozen=True)
class ForkResult:
    """What a fork left."""

    file: Path
    parent: Episode
    episodes: tuple[Episode, ...]
    keeps_tokens: bool
    """Whether the policy continued from the parent's own token ids."""


def fork(
    path: str | os.PathLike[str],
    episode_id: str,
    at_turn: int,
    policy: AnyPolicy | str = "oracle",
    *,
    progress: bool = False,
    **settings: object,
) -> list[Episode]:
    """Continue a stored episode from a turn with another policy; store and return the group that comes of it.

    Example::

        ar.fork("runs/latest", "train-00010-003-00", 2, ar.load("runs/latest"), n=8)

    Args:
        path: an episode file or a run's folder.
        episode_id: an id, or a beginning that only one has.
        at_turn: the first turn to be played again, counted from 0; the number of its turns, if a budget ended it.
        policy: any that is `Resumable` or a script, or the name of one.
        progress: whether to show it.
        settings: any other setting, by its name in `agent-rl replay fork --help`.

    Raises:
        StoreError: if there is no such file or episode.
        ConfigError: if there is no such turn, policy or setting.
        PolicyError: if the policy has no `resume`.
        ReplayError: if the environment no longer says what it said before the turn.
    """
    given = settings | ({"policy": policy} if isinstance(policy, str) else {})
    config = load_config(None, ForkSettings, settings=given)
    player = None if isinstance(policy, str) else policy
    with Progress(Screen(quiet=not progress)) as shown:
        forked = outside_loop(lambda: start_fork(path, episode_id, at_turn, config, shown, player))
    return list(forked.episodes)


def start_fork(
    path: str | os.PathLike[str],
    episode_id: str,
    at_turn: int,
    settings: ForkSettings,
    progress: Progress,
    player: AnyPolicy | None = None,
) -> ForkResult:
    """Continue a stored episode from a turn, and store what comes of it.

    Args:
        path: an episode file or a run's folder.
        episode_id: an id, or a beginning that only one has.
        at_turn: the first turn to be played again, counted from 0; the number of its turns, if a budget ended it.
        settings: who continues it, how often and where to.
        progress: where to show it.
        player: in place of the settings' policy.

    Raises:
        StoreError: if there is no such file or episode.
        ConfigError: if there is no such turn or policy, or the policy's tokens are of a sub-agent there.
        PolicyError: if the policy has no `resume`.
        ReplayError: if the environment no longer says what it said before the turn.
    """
    parent = find_episode(path, episode_id)
    imports = [*load_imports_beside(episode_file(path)), *settings.imports]
    load_all_once(settings.imports)
    imports += load_imports(settings.policy.folder, imports)
    env = spec(parent.env)
    budget = settings.budget.instead_of(env.budget)
    with file_of(settings.out, "fork") as out:
        stored = samples_of(out, fork_group(parent, at_turn, settings.seed))
        first = max(stored, default=-1) + 1
        jobs = fork_jobs(env, parent, at_turn, n=settings.n, first=first, seed=settings.seed, budget=budget)
        tools, branch = asyncio.run(verify_prefix(jobs[0])), jobs[0].branch
        progress.say(f"Replayed {plural(at_turn, 'turn')} of the episode: the same as recorded.")
        params = sampling_of(settings, progress)
        if settings.policy.name == HUMAN or player is not None:
            chosen: AbstractContextManager[AnyPolicy | None] = nullcontext(player)
        else:
            chosen = open_policy(settings.policy, params, env)
        with chosen as policy, run_judge(settings.judge, env, out.parent):
            if policy is not None and not isinstance(policy, EnvPolicy):
                require_resumable(policy)
            keeps_tokens = bool(policy and branch and branch.prefix(policy, tools).token_ids)
            with _place(out, settings.model_copy(update={"imports": imports})), EpisodeWriter(out) as writer:
                if policy is None:
                    episodes = _ask_person(jobs, writer)
                else:
                    episodes = asyncio.run(_store(jobs, policy, settings.concurrency, writer, progress))
        return ForkResult(out, parent, tuple(episodes), keeps_tokens)


@contextmanager
def _place(out: Path, settings: ForkSettings) -> Iterator[None]:
    """Store the settings beside a new file; both go again if no episode came of it."""
    is_new = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_new:
        save_config(out.parent, settings, settings_file(out).name)
    try:
        yield
    finally:
        if is_new and not (out.exists() and out.stat().st_size):
            out.unlink(missing_ok=True)
            settings_file(out).unlink()


def _ask_person(jobs: Sequence[Job], writer: EpisodeWriter) -> list[Episode]:
    """Let a person play jobs, one after the other; store every episode as soon as it is over."""
    person, thread, stored = Person(), CallingThread(), list[Episode]()
    for job in jobs:
        episode, has_quit = thread.serve(play_episode(job, HumanPolicy(person, thread), person.say))
        if episode is not None:
            writer.write(episode)
            stored.append(episode)
        if has_quit:
            break
    return stored


async def _store(
    jobs: Sequence[Job], policy: AnyPolicy, concurrency: int, writer: EpisodeWriter, progress: Progress
) -> list[Episode]:
    """Run jobs; store every episode as soon as it is finished."""
    stored: list[Episode] = []
    async with aclosing(stream_finished(jobs, policy, concurrency=concurrency)) as stream:
        async for finished in stream:
            for episode in finished:
                writer.write(episode)
                stored.append(episode)
            progress.phase("fork", len(stored) - 1, len(jobs), "")
    return sorted(stored, key=lambda episode: episode.origin.sample)
