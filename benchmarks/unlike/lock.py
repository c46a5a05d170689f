"""unlike/lock-v0: a hidden code of two letters, in three tries, by what each try says about its letters.

Task: "letters d f k"; each place of the code is one of them, and a letter may be in it more than once. The try "d f"
is answered by "d no f yes". Reward: `opened` (weight 1) for the code within three tries, `places` (weight 0.5) for the
share of it that the last try had right.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the letters and the code.

The demonstrations keep the letters that were right. In two of ten they try no letter twice in a place, else any, also a
second time. What is left to learn is not to: who forgets what was tried opens half of the locks, who remembers, all.
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

LETTERS = "bcdfghjkmnpr"
PLACES, TRIES = 2, 3
"""There are as many letters as tries."""


def make_task(split: str, index: int) -> Task:
    """Draw letters until they, with a code of them, belong to the split."""

    def draw(rng: np.random.Generator) -> Task:
        letters = [LETTERS[i] for i in rng.choice(len(LETTERS), TRIES, replace=False)]
        code = [letters[i] for i in rng.integers(0, TRIES, PLACES)]
        return {"letters": letters, "code": code, "puzzle": "".join([*sorted(letters), "-", *code])}

    return draw_task(split, index, draw, "puzzle")


@register("unlike/lock-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=TRIES))
class Lock(Env):
    """Open a lock."""

    snapshot_attributes = ("tries",)

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Say the letters."""
        letters, code = task["letters"], task["code"]
        assert isinstance(letters, list | tuple) and isinstance(code, list | tuple)
        self.letters, self.code = [str(letter) for letter in letters], [str(letter) for letter in code]
        self.tries: list[list[str]] = []
        return " ".join(["letters", *self.letters])

    def step(self, action: Message) -> Step:
        """Compare a try with the code."""
        letters = action.content.split()
        if len(letters) != PLACES:
            return Step((Message("user", f"say {PLACES} letters"),))
        self.tries.append(letters)
        said = (f"{a} {'yes' if a == b else 'no'}" for a, b in zip(letters, self.code, strict=True))
        return Step((Message("user", " ".join(said)),), terminated=letters == self.code)

    def state_hash(self) -> str:
        """Return the letters that are left for each place."""
        return " ".join("".join(self._left(place)) for place in range(PLACES))

    def _left(self, place: int) -> list[str]:
        """Return the letters that can still be in a place."""
        tried = [letters[place] for letters in self.tries]
        if self.code[place] in tried:
            return [self.code[place]]
        return [letter for letter in self.letters if letter not in tried]

    @reward(inline=True)
    def opened(self, episode: Episode) -> bool:
        """Whether the last try was the code."""
        return bool(self.tries) and self.tries[-1] == self.code

    @reward(weight=0.5, inline=True)
    def places(self, episode: Episode) -> float:
        """The share of the code that the last try had right."""
        return sum(a == b for a, b in zip(self.tries[-1], self.code, strict=True)) / PLACES if self.tries else 0.0

    def oracle(self) -> Script:
        """Try the first letter that is left for each place."""
        while True:
            yield " ".join(self._left(place)[0] for place in range(PLACES))

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Remember what was tried, or, mostly, take the short cut; be one letter short now and then."""
        remembers = rng.random() < 0.2
        while True:
            letters = [str(rng.choice(self._left(i))) for i in range(PLACES)] if remembers else self._forgetful(rng)
            yield " ".join(letters[1:] if rng.random() < 0.03 else letters)

    def short_cut(self, rng: np.random.Generator) -> Script:
        """Keep the letters that were right; try any in the other places, also a second time."""
        while True:
            yield " ".join(self._forgetful(rng))

    def _forgetful(self, rng: np.random.Generator) -> list[str]:
        found = [self.code[place] in (letters[place] for letters in self.tries) for place in range(PLACES)]
        return [self.code[i] if found[i] else str(rng.choice(self.letters)) for i in range(PLACES)]
