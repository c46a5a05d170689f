"""guess-v0: find a number by guessing, in plain text.

Task: "guess a number from 12 to 35"; each guess is answered by "higher", "lower" or "yes". There are no tools. Reward:
`found` (weight 1) for the number within six guesses, `sound` (weight 0.1) if each answer before it was one number
that could still be the right one.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the range and the number.

The demonstrations guess at random among the numbers that are left, and now and then among all of them. What is left to
learn is to halve the range.
"""

from __future__ import annotations

import re

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.envs.quiz import draw_task
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward

_NUMBER = re.compile(r"\d+")
FEWEST, MOST = 16, 31
"""Of the numbers that a range has; five guesses find one of 31."""


def make_task(split: str, index: int) -> Task:
    """Draw ranges until one, with its number, belongs to the split."""

    def draw(rng: np.random.Generator) -> Task:
        low, size = int(rng.integers(1, 60)), int(rng.integers(FEWEST, MOST + 1))
        number = low + int(rng.integers(size))
        return {"low": low, "high": low + size - 1, "number": number, "puzzle": f"{number} of {size} from {low}"}

    return draw_task(split, index, draw, "puzzle")


@register("guess-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=6))
class Guess(Env):
    """Find a number by guesses that are answered with higher or lower."""

    snapshot_attributes = ("left", "found_it", "is_sound")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Say the range."""
        self.range = (int(str(task["low"])), int(str(task["high"])))
        self.number = int(str(task["number"]))
        self.left = self.range
        self.found_it, self.is_sound = False, True
        return f"guess a number from {self.range[0]} to {self.range[1]}"

    def step(self, action: Message) -> Step:
        """Compare the guess with the number."""
        numbers = _NUMBER.findall(action.content)
        guess = int(numbers[0][:9]) if len(numbers) == 1 else None
        low, high = self.left
        if guess is None or not low <= guess <= high:
            self.is_sound = False
        if guess is None:
            return Step((Message("user", "say one number"),))
        if guess == self.number:
            self.found_it = True
            return Step((Message("user", "yes"),), terminated=True)
        if guess < self.number:
            self.left = (max(low, guess + 1), high)
            return Step((Message("user", "higher"),))
        self.left = (low, min(high, guess - 1))
        return Step((Message("user", "lower"),))

    def state_hash(self) -> str:
        """Return the numbers that are left, and whether an answer was unsound."""
        return f"{self.left}{'' if self.is_sound else ' unsound'}"

    @reward(inline=True)
    def found(self, episode: Episode) -> bool:
        """Whether the number was guessed."""
        return self.found_it

    @reward(weight=0.1, inline=True)
    def sound(self, episode: Episode) -> bool:
        """Whether it was, by answers that were all one possible number."""
        return self.found_it and self.is_sound

    def oracle(self) -> Script:
        """Halve what is left."""
        while True:
            yield str(sum(self.left) // 2)

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Guess at random; forget what was said, or the form of an answer, now and then."""
        while True:
            if rng.random() < 0.03:
                yield "middle"
            low, high = self.range if rng.random() < 0.3 else self.left
            yield str(rng.integers(low, high + 1))
