"""Prefixes: what an episode holds before the policy's reply of a turn, for the one who continues it there."""

from __future__ import annotations

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Source
from agent_rl.policy.base import Prefix
from agent_rl.rollout.sub_agents import caller_at, sub_agents


def prefix_of(episode: Episode, turn: int, token_ids: tuple[int, ...]) -> Prefix:
    """Return the dialogue before the policy's reply of a turn, given the ids that the engine had seen by then."""
    agents = {agent for agent in sub_agents(episode) if agent is not None and agent.turn < turn}
    messages, sampled = messages_before(episode, turn), _sampled_before(episode, turn)
    return Prefix(messages, token_ids, turn, sampled, episode.seed, len(agents))


def messages_before(episode: Episode, turn: int) -> tuple[Message, ...]:
    """Return an episode's messages up to the policy's reply of a turn."""
    later = sum(1 + step.messages for step in episode.steps[turn:])
    return episode.messages[: len(episode.messages) - later]


def seen_before(episode: Episode, turn: int) -> tuple[int, ...]:
    """Return the ids that the engine had seen before the policy's reply of a turn; none if it sampled nothing in it."""
    at = caller_at(episode, turn)
    ids = None if at is None else episode.trajectories[at].before(turn)
    return () if ids is None else tuple(ids.tolist())


def _sampled_before(episode: Episode, turn: int) -> int | None:
    """Return how many tokens were sampled before the policy's reply of a turn.

    None of a continuation, which does not hold what its parent sampled.
    """
    trajectories, agents = episode.trajectories, sub_agents(episode)
    if episode.parent is not None and trajectories:
        return None
    replied = caller_at(episode, turn) or 0
    return sum(
        span.stop - span.start
        for at, (trajectory, agent) in enumerate(zip(trajectories, agents, strict=True))
        for span in trajectory.spans
        # a turn's summary is in an earlier trajectory than its reply, a sub-agent's answer in a later one
        if span.source is Source.POLICY
        and (span.turn < turn or (span.turn == turn and (at < replied or (agent is not None and agent.turn < turn))))
    )
