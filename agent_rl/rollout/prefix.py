"""Prefixes: what an episode holds before the policy's reply of a turn, for the one who continues it there."""

from __future__ import annotations

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Source
from agent_rl.policy.base import Prefix
from agent_rl.policy.shortening import summarised
from agent_rl.rendering.base import Renderer
from agent_rl.rollout.sub_agents import caller_at, sub_agents


def prefix_of(episode: Episode, turn: int, token_ids: tuple[int, ...], context: tuple[Message, ...] = ()) -> Prefix:
    """Return the dialogue before the policy's reply of a turn, given the ids that the engine had seen by then.

    Args:
        episode: which is continued.
        turn: of the reply.
        token_ids: that the engine had seen.
        context: what they say, by `context_before`.
    """
    agents = {agent for agent in sub_agents(episode) if agent is not None and agent.turn < turn}
    messages, sampled = messages_before(episode, turn), _sampled_before(episode, turn)
    return Prefix(messages, token_ids, turn, sampled, episode.seed, len(agents), context)


def context_before(episode: Episode, turn: int, renderer: Renderer) -> tuple[Message, ...]:
    """Return what the ids before the policy's reply of a turn say, where a summary stands for a part of the messages.

    None where no summary does, or it was made before the episode was forked, and where sub-agents were at work, whose
    answers are in no message.
    """
    trajectories, at = episode.trajectories, caller_at(episode, turn)
    if any(trajectory.is_delegated for trajectory in trajectories):
        return ()
    present = trajectories[-1 if at is None else at] if trajectories else None
    while present is not None and present.forked_from is not None:
        earlier, since = trajectories[present.forked_from.parent], present.spans[0].turn
        if earlier.last_turn == since:  # what was sampled in it already is the summary
            before, reply = earlier.split_reply()
            said = messages_before(episode, turn)[len(messages_before(episode, since)) :]
            return (*summarised(messages_before(episode, 0), renderer.parse(reply, before, ()).content), *said)
        present = earlier
    return ()


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
