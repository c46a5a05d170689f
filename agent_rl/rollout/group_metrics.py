"""Metrics of groups: how the samples of each task compare, and whether a policy still explores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent_rl.core.episode import ROUNDING, Episode, group_episodes


def group_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return what a step's scored episodes say of their groups; nothing of nothing.

    Returns:
        `rollout/groups_mixed`, `rollout/groups_solved`, `rollout/groups_unsolved`: shares of the groups: whose rewards
            differ, and else those of which every episode succeeded, and the others.
        `rollout/tokens`, `rollout/tokens_max`: sampled tokens of an episode, mean and most.
        `rollout/repeated`: the share of episodes whose replies are, token by token, those of an earlier one of its
            group.
        `rollout/same_answer`: the share of episodes with the most frequent last answer, where tasks differ.
    """
    scored = [e for e in episodes if e.reward is not None]
    if not scored:
        return {}
    groups = [group.episodes for group in group_episodes(scored)]
    equal = [group for group in groups if _spread(group) <= ROUNDING]
    solved = sum(all(e.success for e in group) for group in equal)
    tokens = [sum(int(t.own_loss_mask.sum()) for t in e.trajectories) for e in scored]
    found = {
        "rollout/groups_mixed": 1 - len(equal) / len(groups),
        "rollout/groups_solved": solved / len(groups),
        "rollout/groups_unsolved": (len(equal) - solved) / len(groups),
        "rollout/tokens": sum(tokens) / len(scored),
        "rollout/tokens_max": float(max(tokens)),
        "rollout/repeated": 1 - sum(len({_replies(e) for e in group}) for group in groups) / len(scored),
    }
    if len(groups) > 1:
        answers = Counter(e.final_text for e in scored if e.final_text)
        found["rollout/same_answer"] = max(answers.values(), default=0) / len(scored)
    return found


def _spread(group: Sequence[Episode]) -> float:
    """By how much the rewards of scored episodes differ."""
    rewards = [episode.reward or 0.0 for episode in group]
    return max(rewards) - min(rewards)


def _replies(episode: Episode) -> object:
    """What the policy sampled; its text where ids are not known."""
    if episode.trajectories:
        return tuple(t.token_ids[t.own_loss_mask].tobytes() for t in episode.trajectories)
    said = (m for m in episode.messages if m.role == "assistant")
    return tuple((m.content, str([(call.name, call.arguments) for call in m.tool_calls])) for m in said)
