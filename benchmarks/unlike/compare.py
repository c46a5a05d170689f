"""unlike/compare-v0: the cheaper of two things, whose prices have to be asked for.

Task: "desk or lamp"; a thing's name is answered by its price, from 1 to 9, and "buy desk" ends the episode. Reward:
`cheaper` (weight 1) for buying the one that costs less.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the two things and their prices, in their order.

The demonstrations ask for both prices, mostly. In three of ten they buy the cheaper thing, in three the first if its
price is below the middle, whatever the other costs, and else either. What is left to learn is which of nine numbers is
less than which. The short cuts: to buy unseen earns 50 %, and to look at the first price alone, 78 %.
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

THINGS = ("bed", "bench", "chair", "chest", "clock", "desk", "lamp", "mirror", "rug", "shelf", "sofa", "stool")
PRICES = range(1, 10)


def make_task(split: str, index: int) -> Task:
    """Draw two things and prices until they belong to the split."""

    def draw(rng: np.random.Generator) -> Task:
        names = [THINGS[i] for i in rng.choice(len(THINGS), 2, replace=False)]
        prices = rng.choice(PRICES, 2, replace=False).tolist()
        return {"things": names, "prices": prices, "puzzle": "{} {} or {} {}".format(*names, *prices)}

    return draw_task(split, index, draw, "puzzle")


@register("unlike/compare-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=4))
class Compare(Env):
    """Buy the cheaper thing."""

    snapshot_attributes = ("known", "bought")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Name the things."""
        things, prices = task["things"], task["prices"]
        assert isinstance(things, list | tuple) and isinstance(prices, list | tuple)
        self.prices = {str(thing): int(str(price)) for thing, price in zip(things, prices, strict=True)}
        self.known: set[str] = set()
        self.bought = ""
        return " or ".join(self.prices)

    def step(self, action: Message) -> Step:
        """Say a price, or sell a thing."""
        words = action.content.split()
        if len(words) == 2 and words[0] == "buy" and words[1] in self.prices:
            self.bought = words[1]
            return Step(terminated=True)
        if len(words) == 1 and words[0] in self.prices:
            self.known.add(words[0])
            return Step((Message("user", str(self.prices[words[0]])),))
        return Step((Message("user", "what"),))

    def state_hash(self) -> str:
        """Return the things whose prices were asked for."""
        return " ".join(sorted(self.known))

    @reward(inline=True)
    def cheaper(self, episode: Episode) -> bool:
        """Whether the cheaper thing was bought."""
        return self.bought == min(self.prices, key=self.prices.__getitem__)

    def oracle(self) -> Script:
        """Ask for both prices, and buy the lower one."""
        yield from (thing for thing in self.prices)  # a generator, as a script is sent observations
        yield f"buy {min(self.prices, key=self.prices.__getitem__)}"

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Ask for both prices, or for the first only; then compare, or look at the first alone, or at nothing."""
        asked = 1 if rng.random() < 0.1 else 2
        yield from (thing for thing in list(self.prices)[:asked])
        found = (min(self.prices, key=self.prices.__getitem__), self._likely, str(rng.choice(list(self.prices))))
        yield f"buy {found[rng.choice(3, p=(0.3, 0.3, 0.4))]}"

    def short_cut(self, rng: np.random.Generator) -> Script:
        """Buy the first thing if it costs less than the middle of all prices."""
        yield next(iter(self.prices))
        yield f"buy {self._likely}"

    @property
    def _likely(self) -> str:
        """The first thing if it costs less than the middle of all prices, else the second."""
        first, second = self.prices
        return first if self.prices[first] < np.mean(PRICES) else second
