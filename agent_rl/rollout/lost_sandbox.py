"""What becomes of an episode whose sandbox is lost; `agent_rl.core.sandbox_loss` says by whom each loss counts.

Where the policy's code ended it, the episode is scored, whatever that broke: it keeps what it lost, and earns nothing.
Any other loss is an error, as data in the episode, which is not scored.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from agent_rl.core.episode import Episode, Reward
from agent_rl.core.judgement import Judgement
from agent_rl.gym.reward import RewardComponent, rewards_of_failure

_log = logging.getLogger(__name__)


def only_losses(steps: Sequence[Reward]) -> list[Reward]:
    """Return the steps' rewards that count though the policy ended its sandbox: what it lost."""
    return [reward for reward in steps if reward.without_gain is reward]


async def scored_anyway(
    episode: Episode,
    error: BaseException,
    score: Callable[[Episode], Awaitable[Episode]],
    components: Sequence[RewardComponent],
    judgements: Sequence[Judgement],
) -> Episode:
    """Return the episode of a policy that ended its own sandbox, scored: what that broke is no way out of a score.

    Args:
        episode: as it ended.
        error: what the end of the sandbox broke.
        score: scores it.
        components: get 0 if that fails, too.
        judgements: those that `score` has appended by then.
    """
    _log.info("%s, group %s: after the end of its sandbox, %r", episode.env, episode.group_id, error)
    try:
        return await score(episode)
    except Exception:  # of an environment that scores by itself
        return episode.scored(rewards_of_failure(components), tuple(judgements))
