"""Episodes that a person plays: they may stop, or take their last reply back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from agent_rl.core.episode import Episode, EpisodeGroup, StopReason
from agent_rl.errors import InfrastructureError, ReplayError
from agent_rl.gym.env import Env
from agent_rl.policy.human import HumanPolicy, QuitError, UndoError
from agent_rl.replay.fork import ReplayedBranch
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.group import score_groups
from agent_rl.rollout.job import Job


class PlayedRun(EpisodeRun):
    """One episode with a person under way; it ends where the person leaves it."""

    left: QuitError | UndoError | None = None

    async def interact(self, env: Env) -> StopReason:
        """Play; stop where the person does."""
        try:
            return await super().interact(env)
        except (QuitError, UndoError) as left:
            self.left = left
            return StopReason.TURNS

    async def score(self, episode: Episode) -> Episode:
        """Return the episode with its rewards, if it is to be kept."""
        return episode if isinstance(self.left, UndoError) or not episode.turns else await super().score(episode)


class Played(NamedTuple):
    """What came of asking a person to play."""

    episode: Episode | None
    """None if they left before their first reply."""
    has_quit: bool
    """Whether they want to play no further episode."""


async def play_episode(job: Job, policy: HumanPolicy, say: Callable[[str], object]) -> Played:
    """Let a person play an episode.

    To take a reply back, a fresh environment replays the replies before it. Where that says something else, as of the
    time, the person plays from the beginning again.

    Args:
        job: what to play, from its beginning or from a branch.
        policy: the person.
        say: shows the person a note.

    Raises:
        InfrastructureError: if the episode failed before the person's first reply.
    """
    first = job
    parent, own = ((job.branch.episode.id, job.branch.turn), job.branch.turn) if job.branch else (None, 0)
    while True:
        run = PlayedRun(job, policy)
        episode = await run.play()
        if job is not first and episode.error is not None and episode.error.type == ReplayError.__name__:
            say(f"no reply can be taken back, as the environment does not repeat itself: {episode.error.message}")
            say("play from the beginning again" if parent is None else "play from the fork's turn again")
            job = first
            continue
        if not isinstance(run.left, UndoError):
            break
        if parent is not None and episode.turns <= own:
            say("the reply before is the parent's: it can't be taken back")
            turn = episode.turns
        else:
            turn = episode.turns - 1
        whole = replace(episode, stop_reason=StopReason.TURNS)
        job = replace(job, branch=ReplayedBranch(whole, turn, job.seed) if turn else None)
    has_quit = run.left is not None
    if episode.turns <= own:
        if (error := episode.error) is not None:
            raise InfrastructureError(f"{episode.env}: {error.where} raised {error.type}: {error.message}")
        return Played(None, has_quit)
    (group,) = await score_groups([EpisodeGroup(episode.group_id, (replace(episode, parent=parent),))], job.spec)
    return Played(group.episodes[0], has_quit)
