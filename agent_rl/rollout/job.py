"""Job: what to run, from the beginning or from a turn of an earlier episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agent_rl.core.display import plural
from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.making import made_quickly
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import AnyPolicy, Conversation, Prefix, require_resumable
from agent_rl.policy.token import TokenPolicy
from agent_rl.rollout.clock import EpisodeClock
from agent_rl.rollout.prefix import context_before, messages_before, prefix_of, seen_before
from agent_rl.rollout.sub_agents import require_caller

Reset: TypeAlias = Callable[[Env], Awaitable[tuple[Message, ...]]]
"""Resets an environment with an episode's task and seed; returns the opening."""

ROLLOUT = Origin("rollout")
"""The origin of a job that says none."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Where an episode leaves an earlier one: right before the policy's reply of a turn.

    Raises:
        ConfigError: if there was no such turn, no snapshot was taken before it, or the policy sampled nothing in it, or
            only a sub-agent did.
    """

    episode: Episode
    turn: int
    seed: int
    """Of what the policy samples from there on; the environment's random numbers continue as in its snapshot."""

    def __post_init__(self) -> None:
        episode, turn = self.episode, self.turn
        if not 0 <= turn < episode.turns:
            raise ConfigError(
                f"episode {episode.id!r} has {plural(episode.turns, 'turn')}, counted from 0: there is no {turn}"
            )
        if turn >= len(episode.snapshots):
            raise ConfigError(
                f"episode {episode.id!r} has no snapshot before turn {turn}: run it with Job(snapshots=True), and "
                "continue it in the same process, as snapshots are not stored"
            )
        if not any(t.before(turn) is not None for t in episode.trajectories):
            raise ConfigError(
                f"episode {episode.id!r} sampled no token in turn {turn}: continue it where it did, or its parent"
            )
        require_caller(episode, turn)

    @property
    def snapshot(self) -> object:
        """The environment's state before the turn."""
        return self.episode.snapshots[self.turn]

    @property
    def tool_calls(self) -> int:
        """How many calls the policy made before the turn."""
        opening = len(messages_before(self.episode, 0))
        return sum(len(m.tool_calls) for m in messages_before(self.episode, self.turn)[opening:])

    def prefix(self, policy: AnyPolicy, tools: Sequence[ToolSpec]) -> Prefix:
        """Return the dialogue before the turn. In a fork it is the fork's ids: those that the engine had seen by then.

        A turn that began with a summary, or a sub-agent's answer, is continued after it.

        Args:
            policy: who continues.
            tools: the environment's.
        """
        context = context_before(self.episode, self.turn, policy.renderer) if isinstance(policy, TokenPolicy) else ()
        return prefix_of(self.episode, self.turn, seen_before(self.episode, self.turn), context)

    async def reach(self, env: Env, reset: Reset, clock: EpisodeClock) -> None:
        """Bring a fresh environment to what it was before the turn.

        Args:
            env: the fresh environment.
            reset: resets it as the episode's was.
            clock: whose time its methods take.
        """
        await reset(env)
        await clock.call("restore", env.restore, self.snapshot)

    def begin(self, policy: AnyPolicy, env: Env) -> Conversation:
        """Begin the policy's conversation where the prefix ends.

        Raises:
            PolicyError: if the policy can't continue.
        """
        return require_resumable(policy).resume(env.tools, self.seed, self.prefix(policy, env.tools))


@made_quickly
@dataclass(frozen=True, slots=True)
class Job:
    """An episode to run: its environment, task and seed."""

    spec: EnvSpec
    task: Task
    seed: int
    group_id: str = ""
    budget: Budget | None = None
    """Instead of the environment's own."""
    env_args: Mapping[str, JSON] = field(default_factory=dict)
    id: str | None = None
    """The episode's id; a random one if left out."""
    origin: Origin = ROLLOUT
    snapshots: bool = False
    """Keep the environment's snapshot before each turn, to continue from."""
    branch: Branch | None = None
    """Where to start, instead of the beginning; see `continuation`."""
    retries: Mapping[Ending, int] = field(default_factory=dict)
    """How often the episode is run again if it ends so; see `agent_rl.core.ending`."""
    policy: AnyPolicy | None = None
    """Who plays, instead of the policy that all jobs are run with."""
    in_match: bool = False
    """Whether it is one player's part of a match, beside its neighbours; see `match_jobs`."""


def continuation(
    spec: EnvSpec,
    episode: Episode,
    turn: int,
    seed: int,
    *,
    budget: Budget | None = None,
    id: str | None = None,
    snapshots: bool = False,
) -> Job:
    """Return a job that continues an episode from one of its turns, with other samples.

    A fresh environment is reset as the episode's was and restored to what it was before the turn; the policy continues
    from the exact token ids that it had seen by then, with random numbers of its own. What was used before the turn
    counts in the budget, save seconds. The new episode is a whole one: it holds the messages and steps from the start,
    and all of it is scored. Only what is sampled from the turn on has a loss.

    Args:
        spec: the episode's environment.
        episode: run with `Job(snapshots=True)`; it may be a continuation itself.
        turn: the first turn to be played again, counted from 0.
        seed: of what the policy samples.
        budget: instead of the environment's own.
        id: of the new episode; a random one if left out.
        snapshots: as in `Job`.

    Raises:
        ConfigError: as `Branch` does.
    """
    branch = Branch(episode, turn, seed)
    return Job(
        spec,
        episode.task,
        episode.seed,
        episode.group_id,
        budget=budget,
        env_args=episode.env_args,
        id=id,
        origin=episode.origin,
        snapshots=snapshots,
        branch=branch,
    )
