"""Rows of episodes for training elsewhere: messages, exact token ids with their loss mask, and pairs to prefer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent_rl.core.episode import ROUNDING, Episode
from agent_rl.core.messages import JSON
from agent_rl.core.turns import turns
from agent_rl.formats.chat import chat_messages
from agent_rl.gym.tasks import task_key

IGNORED = -100
"""The label of a token without a loss, as Hugging Face's and PyTorch's losses have it."""


def message_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, JSON]]:
    """Yield an episode's messages in OpenAI's format, beside what it was about and what it earned."""
    for episode in episodes:
        yield {"messages": chat_messages(episode.messages), **_facts(episode)}


def sft_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, JSON]]:
    """Yield the token ids of each trajectory with its loss mask: 1 where the policy sampled the token.

    `labels` says the same: the ids, and -100 where there is no loss. What a fork shares with the trajectory that it
    left has its loss there. An episode without token ids is its messages, with a `weight` of 1 for its replies, and of
    0 for those that its opening shows as an example.
    """
    for episode in episodes:
        for number, trajectory in enumerate(episode.trajectories):
            mask, ids = trajectory.own_loss_mask, trajectory.token_ids
            labels = [id if learned else IGNORED for id, learned in zip(ids.tolist(), mask.tolist(), strict=True)]
            tokens = {"input_ids": ids.tolist(), "loss_mask": mask.astype(int).tolist(), "labels": labels}
            yield {**tokens, "trajectory": number, **_facts(episode)}
        if not episode.trajectories:
            messages, opening = chat_messages(episode.messages), len(next(turns(episode)).messages)
            weighted = [
                m | ({"weight": int(at >= opening)} if m["role"] == "assistant" else {})
                for at, m in enumerate(messages)
            ]
            yield {"messages": weighted, **_facts(episode)}


def preference_rows(episodes: Iterable[Episode]) -> Iterator[dict[str, JSON]]:
    """Yield the best and the worst sample of each group, where their rewards differ, as conversations of TRL's form.

    The prompt is what the environment said first, and the arguments of calls are objects: chat templates write those as
    JSON themselves, and few of them take a text. Two of a group that were opened differently are no pair, nor are two
    of an evaluation, whose tasks are one group, with different tasks. One that ended before the first reply is in none.
    """
    best: dict[tuple[str, str, str], Episode] = {}
    worst: dict[tuple[str, str, str], Episode] = {}
    for episode in episodes:
        if episode.reward is None or episode.origin.greedy or next(turns(episode)).messages == episode.messages:
            continue
        key = (episode.env, episode.group_id, task_key(episode.task))
        if key not in best or _reward(episode) > _reward(best[key]):
            best[key] = episode
        if key not in worst or _reward(episode) < _reward(worst[key]):
            worst[key] = episode
    for key, chosen in best.items():
        rejected = worst[key]
        opening, other = (next(turns(e)).messages for e in (chosen, rejected))
        if opening == other and _reward(chosen) - _reward(rejected) > ROUNDING:
            yield {
                "prompt": chat_messages(opening, as_objects=True),
                "chosen": chat_messages(chosen.messages[len(opening) :], as_objects=True),
                "rejected": chat_messages(rejected.messages[len(opening) :], as_objects=True),
                "chosen_reward": chosen.reward,
                "rejected_reward": rejected.reward,
                "chosen_id": chosen.id,
                "rejected_id": rejected.id,
                "env": chosen.env,
            }


def _reward(episode: Episode) -> float:
    return episode.reward if episode.reward is not None else 0.0


def _facts(episode: Episode) -> dict[str, JSON]:
    return {
        "id": episode.id,
        "env": episode.env,
        "group": episode.group_id,
        "task": episode.task,
        "reward": episode.reward,
        "success": episode.success,
    }
