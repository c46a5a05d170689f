"""Updates: how many gradient steps are taken on a step's batch, and which groups each learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from agent_rl.config import Section
from agent_rl.seeds import Stream, rng


class UpdatesConfig(Section):
    """Several updates of one batch: PPO's mini-batches and epochs (Schulman et al. 2017, Algorithm 1).

    `old` stays what it was before the first of them, so ratios and clips act from the second on. Whole groups go to a
    mini-batch: its prompts are computed once, its pairs and means over prompts stay whole. The learning rate is the
    step's in all of them.
    """

    minibatches: int = Field(1, ge=1)
    """Parts of about as many groups that the batch is dealt into; each is an update."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch."""
    shuffle: bool = True
    """Whether every epoch deals the groups anew, in an order drawn by the run's seed; else in the batch's order."""
    target_kl: float | None = Field(None, gt=0)
    """Nats per token: an update that finds theta this far from old is not taken, nor are those after it in the step;
    the first one always is. KL(old, theta) is estimated by k3 over the sampled tokens of its mini-batch.
    On verl it is measured before the update, and costs a forward pass more. On stored episodes old is theta before the
    step, whoever sampled them, which costs one a step."""

    @property
    def most(self) -> int:
        """The updates of a step that is not stopped."""
        return self.minibatches * self.epochs


def deal(groups: Sequence[int], updates: UpdatesConfig, *key: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the epoch of every update in turn, and the groups that it learns from, in the order of `groups`.

    Sizes of an epoch's mini-batches differ by one at most, the larger ones first; with fewer groups than mini-batches
    there are as many as groups. `key`, such as the run's seed and the step, fixes the order.
    """
    for epoch in range(updates.epochs):
        places = np.arange(len(groups))
        if updates.shuffle and updates.minibatches > 1:
            rng(Stream.MINI_BATCHES, *key, epoch).shuffle(places)
        for part in np.array_split(places, min(updates.minibatches, len(groups))):
            yield epoch, [groups[place] for place in sorted(part)]
