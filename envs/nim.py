"""nim-v0: take stones in turns; the last one wins. For two players, each with an episode of its own.

Task: "20 stones, take 1 to 3 in turn, the last one wins"; an answer is a number. Anything else takes one stone, so that
every match ends. Reward: `won` (weight 1), `legal` (weight 0.1) if every answer was a number that could be taken.

`ar.run("nim-v0", [one, other])` lets two policies meet, and training with `self_play=true` a policy and itself.
Alone, a policy plays against a perfect opponent; the first player can win every task.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the stones and of how many may be taken.

The demonstrations take at random every other time. What is left to learn is to leave a multiple of one more than may be
taken.
"""

from __future__ import annotations

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import draw_task
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.game import Game
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward

MOST = range(2, 10)
"""How many stones may be taken at once."""
ROUNDS = 6
"""That a match takes at most, if one of two plays well."""


def make_task(split: str, index: int) -> Task:
    """Draw stones that the first player can win, until they belong to the split."""

    def draw(rng: np.random.Generator) -> Task | None:
        most = int(rng.choice(MOST))
        stones = int(rng.integers(most + 2, ROUNDS * (most + 1)))
        won = stones % (most + 1) != 0
        return {"stones": stones, "most": most, "puzzle": f"{stones} by {most}"} if won else None

    return draw_task(split, index, draw, "puzzle")


@register("nim-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=32))
class Nim(Game):
    """Take the last stone."""

    winner: int | None = None

    def begin(self, task: Task, rng: np.random.Generator) -> None:
        """Say the rules."""
        self.left, self.most = int(str(task["stones"])), int(str(task["most"]))
        self.fouls: set[int] = set()
        self.tell(f"{self.left} stones, take 1 to {self.most} in turn, the last one wins")

    def play(self, action: Message) -> None:
        """Take stones."""
        taken = action.content.strip()
        legal = taken in {str(n) for n in range(1, min(self.most, self.left) + 1)}
        if not legal:
            self.fouls.add(self.turn)
        self.left -= int(taken) if legal else 1
        mover, self.turn = self.turn, 1 - self.turn
        self.tell(f"{self.left} left", self.turn)
        if not self.left:
            self.winner, self.over = mover, True

    def state_hash(self) -> str:
        """Return the stones that are left, and the seats that broke the rules."""
        return f"{self.left}{sorted(self.fouls)}"

    @reward
    def won(self, episode: Episode) -> bool:
        """Whether the player took the last stone."""
        return self.winner == episode.seat

    @reward(weight=0.1)
    def legal(self, episode: Episode) -> bool:
        """Whether all its answers were legal, and the match came to an end."""
        return self.over and episode.seat not in self.fouls

    def oracle(self) -> Script:
        """Leave a multiple of one more than may be taken, or take one."""
        while True:
            yield str(self.left % (self.most + 1) or 1)

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Take at random every other time, and too much now and then."""
        while True:
            right = self.left % (self.most + 1) or 1
            anything = int(rng.integers(1, min(self.most, self.left) + 1))
            yield str(self.most + 1 if rng.random() < 0.02 else right if rng.random() < 0.5 else anything)
