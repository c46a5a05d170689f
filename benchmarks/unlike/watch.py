"""unlike/watch-v0: sixteen open doors on a watchman's round, all of which have to be treated rightly.

Task: each turn names a door that stands open. It is answered by "lock"; one that was locked before on this round, by
"call". The first wrong answer ends the episode. Reward: `round` (weight 1) for sixteen right turns, `way` (weight 0.5)
for the share of them before the first wrong one.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the doors and their order.

The demonstrations know whether a door was locked before in six of ten cases, else guess: one in thirty gets to the end.
What is left to learn is to look back for the same door. The short cut, never to call, ends at the first one that comes
again.
"""

from __future__ import annotations

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.envs.quiz import draw_task
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward

DOORS = ("attic", "barn", "cellar", "gate", "hall", "kitchen", "office", "pantry", "shed", "shop", "stable", "vault")
TURNS = 16


def make_task(split: str, index: int) -> Task:
    """Draw doors until they belong to the split."""

    def draw(rng: np.random.Generator) -> Task:
        doors = [DOORS[i] for i in rng.integers(0, len(DOORS), TURNS)]
        return {"doors": doors, "puzzle": " ".join(doors)}

    return draw_task(split, index, draw, "puzzle")


@register("unlike/watch-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=TURNS))
class Watch(Env):
    """Walk a watchman's round."""

    snapshot_attributes = ("right",)

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Come to the first door."""
        doors = task["doors"]
        assert isinstance(doors, list | tuple)
        self.doors = [str(door) for door in doors]
        self.right = 0
        return self.doors[0]

    @property
    def best(self) -> str:
        """The right answer."""
        return "call" if self.doors[self.right] in self.doors[: self.right] else "lock"

    def step(self, action: Message) -> Step:
        """Come to the next door, or end at what is wrong."""
        if action.content.strip() != self.best:
            return Step(terminated=True)
        self.right += 1
        if self.right == TURNS:
            return Step(terminated=True)
        return Step((Message("user", self.doors[self.right]),))

    def state_hash(self) -> str:
        """Return how far the round is, and what was locked."""
        return " ".join([str(self.right), *sorted(set(self.doors[: self.right]))])

    @reward(inline=True)
    def round(self, episode: Episode) -> bool:
        """Whether all turns were right."""
        return self.right == TURNS

    @reward(weight=0.5, inline=True)
    def way(self, episode: Episode) -> float:
        """The share of right turns before the first wrong one."""
        return self.right / TURNS

    def oracle(self) -> Script:
        """Answer rightly."""
        while True:
            yield self.best

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Call at random, less often than not."""
        while True:
            guess = "call" if rng.random() < 1 / 3 else "lock"
            yield guess if rng.random() < 0.4 else self.best

    def short_cut(self, rng: np.random.Generator) -> Script:
        """Lock every door."""
        while True:
            yield "lock"
