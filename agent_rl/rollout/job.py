"""Job: what to run, from the beginning or from a turn of an earlier episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.making import made_quickly
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.core.trajectory import Source
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import AnyPolicy, Conversation, Prefix, Resumable

Call: TypeAlias = Callable[..., Awaitable[object]]
"""Calls a method of the environment, given a stage's name, the method and its arguments, within its time."""
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
            raise ConfigError(f"episode {episode.id!r} has {episode.turns} turns, counted from 0: there is no {turn}")
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

    def prefix_of(self, policy: AnyPolicy, tools: Sequence[ToolSpec]) -> Prefix:
        """Return the dialogue before the turn. In a fork it is the fork's ids: those that the engine had seen by then.

        A turn that began with a summary, or a sub-agent's answer, is continued after it.

        Args:
            policy: who continues.
            tools: the environment's.
        """
        return prefix_of(self.episode, self.turn, seen_before(self.episode, self.turn))

    async def reach(self, env: Env, reset: Reset, call: Call) -> None:
        """Bring a fresh environment to what it was before the turn.

        Args:
            env: the fresh environment.
            reset: resets it as the episode's was.
            call: how its methods are called.
        """
        await reset(env)
        await call("restore", env.restore, self.snapshot)

    def begin(self, policy: AnyPolicy, env: Env) -> Conversation:
        """Begin the policy's conversation where the prefix ends.

        Raises:
            PolicyError: if the policy can't continue.
        """
        return resume_policy(policy, env, self.seed, self.prefix_of(policy, env.tools))


def resume_policy(policy: AnyPolicy, env: Env, seed: int, prefix: Prefix) -> Conversation:
    """Begin a policy's conversation after a prefix.

    Raises:
        PolicyError: if it can't.
    """
    return require_resumable(policy).resume(env.tools, seed, prefix)


def require_resumable(policy: AnyPolicy) -> Resumable:
    """Return a policy.

    Raises:
        PolicyError: if it can't continue an episode.
    """
    if not isinstance(policy, Resumable):
        raise PolicyError(f"{type(policy).__name__} can't continue an episode: it has no resume(tools, seed, prefix)")
    return policy


def messages_before(episode: Episode, turn: int) -> tuple[Message, ...]:
    """Return an episode's messages up to the policy's reply of a turn."""
    later = sum(1 + step.messages for step in episode.steps[turn:])
    return episode.messages[: len(episode.messages) - later]


def prefix_of(episode: Episode, turn: int, token_ids: tuple[int, ...]) -> Prefix:
    """Return the dialogue before the policy's reply of a turn, given the ids that the engine had seen by then."""
    agents = {first for first, began in sub_agents(episode) if 0 <= began < turn}
    messages, sampled = messages_before(episode, turn), _sampled_before(episode, turn)
    return Prefix(messages, token_ids, turn, sampled, episode.seed, len(agents))


def seen_before(episode: Episode, turn: int) -> tuple[int, ...]:
    """Return the ids that the engine had seen before the policy's reply of a turn; none if it sampled nothing in it."""
    at = _context(episode, turn)
    ids = None if at is None else episode.trajectories[at].before(turn)
    return () if ids is None else tuple(ids.tolist())


def require_caller(episode: Episode, turn: int) -> None:
    """Refuse a turn in which a sub-agent sampled, and its caller did not.

    Raises:
        ConfigError: if it is one.
    """
    if _context(episode, turn) is None and any(t.before(turn) is not None for t in episode.trajectories):
        raise amid_sub_agent(episode, turn)


def amid_sub_agent(episode: Episode, turn: int) -> ConfigError:
    """Return the error about a turn before which a sub-agent was at work."""
    return ConfigError(
        f"a sub-agent was at work before turn {turn} of episode {episode.id!r}, and its caller can't be brought back: "
        "continue it where the sub-agent was called, or after its answer"
    )


def began_sub_agent(episode: Episode, turn: int) -> bool:
    """Return whether a sub-agent was called in a turn."""
    return any(began == turn for _, began in sub_agents(episode))


def sub_agents(episode: Episode) -> list[tuple[int, int]]:
    """Return whose each trajectory is: a sub-agent's first one and the turn of its call; -1 and -1 of the caller's."""
    trajectories, found = episode.trajectories, list[tuple[int, int]]()
    for at, trajectory in enumerate(trajectories):
        fork, spans = trajectory.forked_from, trajectory.spans
        if fork is None or not fork.delegated or not spans:
            found.append((-1, -1))
        else:
            found.append(found[fork.parent] if trajectories[fork.parent].is_delegated else (at, spans[0].turn))
    return found


def _context(episode: Episode, turn: int) -> int | None:
    """Return which trajectory, none of a sub-agent, a turn's reply began in; None if nothing was sampled there."""
    agents, trajectories = sub_agents(episode), episode.trajectories
    until = next((at for at, (_, began) in enumerate(agents) if began == turn), len(agents))
    own = (at for at in reversed(range(until)) if not trajectories[at].is_delegated)
    return next((at for at in own if trajectories[at].before(turn) is not None), None)


def _sampled_before(episode: Episode, turn: int) -> int | None:
    """Return how many tokens were sampled before the policy's reply of a turn.

    None of a continuation, which does not hold what its parent sampled.
    """
    trajectories, agents = episode.trajectories, sub_agents(episode)
    if episode.parent is not None and trajectories:
        return None
    replied = _context(episode, turn) or 0
    return sum(
        span.stop - span.start
        for i, trajectory in enumerate(trajectories)
        for span in trajectory.spans
        # a turn's summary is in an earlier trajectory than its reply, a sub-agent's answer in a later one
        if span.source is Source.POLICY
        and (span.turn < turn or (span.turn == turn and (i < replied or 0 <= agents[i][1] < turn)))
    )


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
