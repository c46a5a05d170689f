"""Sub-agents of an episode: whose each trajectory is, and in which of them a turn's reply began."""

from __future__ import annotations

from typing import NamedTuple

from agent_rl.core.episode import Episode
from agent_rl.errors import ConfigError


class SubAgent(NamedTuple):
    """One that the policy called, whose context may have been rewritten since."""

    first: int
    """Its first trajectory."""
    turn: int
    """The turn of its call."""


def sub_agents(episode: Episode) -> list[SubAgent | None]:
    """Return the sub-agent that each trajectory is of; None of the caller's own."""
    trajectories, found = episode.trajectories, list[SubAgent | None]()
    for at, trajectory in enumerate(trajectories):
        fork, spans = trajectory.forked_from, trajectory.spans
        if fork is None or not fork.delegated or not spans:
            found.append(None)
        else:
            found.append(found[fork.parent] if trajectories[fork.parent].is_delegated else SubAgent(at, spans[0].turn))
    return found


def began_sub_agent(episode: Episode, turn: int) -> bool:
    """Return whether a sub-agent was called in a turn."""
    return any(agent is not None and agent.turn == turn for agent in sub_agents(episode))


def caller_at(episode: Episode, turn: int) -> int | None:
    """Return which trajectory, none of a sub-agent, a turn's reply began in; None if nothing was sampled there."""
    agents, trajectories = sub_agents(episode), episode.trajectories
    until = next((at for at, agent in enumerate(agents) if agent is not None and agent.turn == turn), len(agents))
    own = (at for at in reversed(range(until)) if not trajectories[at].is_delegated)
    return next((at for at in own if trajectories[at].before(turn) is not None), None)


def require_caller(episode: Episode, turn: int) -> None:
    """Refuse a turn in which a sub-agent sampled, and its caller did not.

    Raises:
        ConfigError: if it is one.
    """
    if caller_at(episode, turn) is None and any(t.before(turn) is not None for t in episode.trajectories):
        raise amid_sub_agent(episode, turn)


def amid_sub_agent(episode: Episode, turn: int) -> ConfigError:
    """Return the error about a turn before which a sub-agent was at work."""
    return ConfigError(
        f"a sub-agent was at work before turn {turn} of episode {episode.id!r}, and its caller can't be brought back: "
        "continue it where the sub-agent was called, or after its answer"
    )
