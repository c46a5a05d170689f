"""unlike/belt-v0: sixteen turns at a conveyor belt, all of which have to be right.

Task: "take red and blue"; then the belt brings one colour a turn. A wanted one is answered by "take", another by
"leave". Two hands hold two: with full hands, the answer to a wanted one is "put", and the belt stands still for that
turn. The first wrong answer ends the episode. Reward: `sorted` (weight 1) for sixteen right turns, `way` (weight 0.5)
for the share of them before the first wrong one.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the colours and their order.

The demonstrations know the colours, mostly, and put down at the right time in four of ten cases, else at random: one in
fourteen gets to the end. What is left to learn is when the hands are full, which nothing says: it takes a look back at
what was done since the last "put". The short cut, never to put anything
down, ends after the second wanted one.
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

COLOURS = ("red", "blue", "green", "white", "black", "pink")
TURNS, HANDS = 16, 2


def make_task(split: str, index: int) -> Task:
    """Draw wanted colours, and what the belt brings, until they belong to the split."""

    def draw(rng: np.random.Generator) -> Task:
        drawn = [COLOURS[i] for i in rng.permutation(len(COLOURS))]
        wanted, others = drawn[:2], drawn[2:]
        belt = [str(rng.choice(wanted if rng.random() < 0.5 else others)) for _ in range(TURNS)]
        return {"wanted": wanted, "belt": belt, "puzzle": " ".join([*wanted, *belt])}

    return draw_task(split, index, draw, "puzzle")


@register("unlike/belt-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=TURNS))
class Belt(Env):
    """Take what is wanted from a belt."""

    snapshot_attributes = ("at", "held", "right")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Say what is wanted, and what comes first."""
        wanted, belt = task["wanted"], task["belt"]
        assert isinstance(wanted, list | tuple) and isinstance(belt, list | tuple)
        self.wanted, self.belt = [str(colour) for colour in wanted], [str(colour) for colour in belt]
        self.at = self.held = self.right = 0
        return f"take {' and '.join(self.wanted)}: {self.belt[0]}"

    @property
    def best(self) -> str:
        """The right answer."""
        if self.belt[self.at] not in self.wanted:
            return "leave"
        return "take" if self.held < HANDS else "put"

    def step(self, action: Message) -> Step:
        """Move on, or end at what is wrong."""
        if action.content.strip() != self.best:
            return Step(terminated=True)
        self.held = {"leave": self.held, "take": self.held + 1, "put": 0}[self.best]
        self.at += action.content.strip() != "put"
        self.right += 1
        if self.right == TURNS:
            return Step(terminated=True)
        return Step((Message("user", self.belt[self.at]),))

    def state_hash(self) -> str:
        """Return how far the belt is, and how many the hands hold."""
        return f"{self.at} {self.held}"

    @reward(inline=True)
    def sorted(self, episode: Episode) -> bool:
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
        """Put down at random, more often than not; mistake a colour now and then."""
        while True:
            wanted = (self.belt[self.at] in self.wanted) ^ (rng.random() < 0.02)
            guess = ("put" if rng.random() < 1 / 3 else "take") if wanted else "leave"
            yield guess if guess == "leave" or rng.random() < 0.6 else self.best

    def short_cut(self, rng: np.random.Generator) -> Script:
        """Take all that is wanted."""
        while True:
            yield "take" if self.belt[self.at] in self.wanted else "leave"
