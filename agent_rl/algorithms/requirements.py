"""What an algorithm needs computed, read off its config; without torch."""

from __future__ import annotations

from agent_rl.algorithms import components
from agent_rl.algorithms.config import AlgorithmConfig


class Requirements:
    """What is to be computed for an algorithm: it follows from what its parts read."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        objective, mask = components.objective[config.objective], config.negative_mask
        reads = components.advantage[config.advantage].reads
        loss_reads = {*objective.reads, *(components.negative_mask[mask].reads if mask else ())}
        self.recomputes_old = config.recomputes_old
        """A forward pass for old; else it is the rollout's own."""
        self.needs_greedy = "baselines" in reads
        """A greedy episode of each group."""
        self.needs_states = "states" in reads
        """`Env.state_hash` of every turn."""
        self.needs_values = "state_values" in reads
        """`Experience.state_values`, of continuations that `state_values.plan` asks for."""
        self.needs_distributions = "sum_pi_squared" in reads
        """`ScoredRows.sum_pi_squared`, of the distributions that tokens came from."""
        self.needs_scores_before_update = objective.prepare is not None
        """The whole batch, scored and prepared before each update."""
        self.needs_reference_for_advantages = config.kl.where == "reward" or "reference_logprobs" in reads
        """Log-probabilities of all rows under the policy that the run started from."""
        self.needs_reference_for_loss = config.kl.where != "none" or "reference_logprobs" in loss_reads
        """Those of the rows that have a gradient."""
        self.needs_reference = self.needs_reference_for_advantages or self.needs_reference_for_loss
