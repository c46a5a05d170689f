"""Which algorithms make the same update as long as theta, old and mu are one policy; without torch.

So it is in the first update of a batch that the trainer's own weights sampled. Every ratio is 1 there: no clip, gate,
cap or correction acts, and what is left of most objectives is the policy gradient. Later updates of a batch, old tokens
and an engine that computes other probabilities tell the algorithms apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_rl.algorithms.config import AlgorithmConfig

_TOKENS = {"reinforce", "likelihood", "ppo-clip", "cispo", "sapo", "dppo-tv", "dppo-kl", "minirl", "m2po", "gspo-token"}
"""Objectives whose gradient is REINFORCE's, token by token, where the ratio is 1."""
_ROWS = {"gspo", "gmpo"}
"""Those that have REINFORCE's if a row has one advantage: each of its tokens carries the mean of their gradients."""
_CENTRED = {"leave-one-out", "batch-normalised"}
"""Advantages that are the reward less the group's mean, times one number if all groups are of one size."""
_TOKENS_ALIKE = {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"}
"""Aggregations in which every token of a batch counts the same."""


def same_updates(configs: Mapping[str, AlgorithmConfig]) -> dict[str, list[str]]:
    """Return for each name the others whose gradient has the same direction, on the same episodes.

    Sizes may differ: by the counts that a loss is divided by, and by what all advantages of a batch are divided by.
    AdamW takes most of that out again. Algorithms that sample or choose episodes in other ways are not the same.
    """
    known = {name: _update(config) for name, config in configs.items()}
    return {name: [n for n, other in known.items() if n != name and other == mine] for name, mine in known.items()}


def _update(config: AlgorithmConfig) -> dict[str, object]:
    """What is left of a config where all ratios are 1; equal ones make the same update, up to its size."""
    left = config.model_dump(exclude={"name", "proximal", "weight", "rejection", "negative_mask"})
    advantage, objective = config.advantage["name"], config.objective["name"]
    centred = advantage in _CENTRED or (advantage == "group-relative" and config.advantage["std"] is False)
    of_episodes = centred or advantage in ("group-relative", "over-greedy")
    if objective in _TOKENS or (objective in _ROWS and of_episodes):
        left["objective"] = "policy gradient"
    if config.kl.where == "none":
        left["kl"] = "none"
        if not config.entropy:  # nothing is added to the policy gradient whose weight beside it matters
            left |= {"count_zero_advantage": None, "denominators": None}
            left["advantage"] = "centred" if centred else config.advantage
            left["aggregation"] = "tokens" if config.aggregation["name"] in _TOKENS_ALIKE else config.aggregation
    return left
