"""unlike/stock-v0: an inventory with three tools, two of which write.

Task: "9 lamp for ada". `stock` says how many there are, `ship` sends some to a customer, `order` buys more. What there
is enough of is shipped; else as many as were wanted are ordered, and nothing is shipped. Tools that write end the
episode. Reward: `settled` (weight 1) if exactly this was done, with the item, the number and the customer that were
named.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the task's text and its stock.

The demonstrations have the form right, and get the number wrong now and then. In three of ten they compare, in three
they ship from a stock of 5 on, whatever is wanted, and else at random. What is left to learn is to compare the two
numbers, up to 9. The short cuts: to ship what is few without a look earns 72 %, and to ship from a stock of 5 on, 78 %.
"""

from __future__ import annotations

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script, ToolEnv
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import tool

ITEMS = ("bed", "bench", "chair", "chest", "clock", "desk", "lamp", "mirror", "rug", "shelf", "sofa", "stool")
NAMES = ("ada", "ben", "cleo", "dora", "emil", "finn", "gina", "hugo")
MOST = 9
"""Of the wanted number, and of the stock."""


def make_task(split: str, index: int) -> Task:
    """Draw orders until one, with its stock, belongs to the split."""

    def draw(rng: np.random.Generator) -> Task:
        wanted, stock = int(rng.integers(1, MOST + 1)), int(rng.integers(MOST + 1))
        text = f"{wanted} {rng.choice(ITEMS)} for {rng.choice(NAMES)}"
        return {"text": text, "stock": stock, "puzzle": f"{text} of {stock}"}

    return draw_task(split, index, draw, "puzzle")


@register("unlike/stock-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=3, tool_calls=3))
class Stock(ToolEnv):
    """Ship what there is enough of, and order the rest."""

    snapshot_attributes = ("seen", "done")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Say what is wanted."""
        text = str(task["text"])
        wanted, self.item, _, self.name = text.split()
        self.wanted, self.left = int(wanted), int(str(task["stock"]))
        self.seen = False
        self.done: tuple[str, ...] = ()
        return text

    @tool(inline=True)
    def stock(self, item: str) -> int:
        """Say how many of an item there are."""
        if item != self.item:
            raise ValueError(f"no item '{item}'")
        self.seen = True
        return self.left

    @tool(inline=True, ends=True)
    def ship(self, item: str, count: int, name: str) -> str:
        """Send some of an item to a customer."""
        self.done = ("ship", item, str(count), name)
        return "done"

    @tool(inline=True, ends=True)
    def order(self, item: str, count: int) -> str:
        """Buy more of an item."""
        self.done = ("order", item, str(count))
        return "done"

    def state_hash(self) -> str:
        """Return whether the stock was looked at."""
        return str(self.seen)

    @reward(inline=True)
    def settled(self, episode: Episode) -> bool:
        """Whether what had to be done was done."""
        to = (self.name,) if self._enough else ()
        return self.done == ("ship" if to else "order", self.item, str(self.wanted), *to)

    def oracle(self) -> Script:
        """Look, then ship or order."""
        yield one_call("stock", item=self.item)
        yield self._write(self.wanted, ships=self._enough)

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Look, mostly; then compare, or look at the stock alone, or at nothing; give a wrong number now and then."""
        if rng.random() < 0.9:
            yield one_call("stock", item=self.item)
        ships = (self._enough, self._many, bool(rng.random() < 0.5))[rng.choice(3, p=(0.3, 0.3, 0.4))]
        yield self._write(self.left if rng.random() < 0.1 else self.wanted, ships=ships)

    def short_cut(self, rng: np.random.Generator) -> Script:
        """Ship if there is more than half of what there can be."""
        yield one_call("stock", item=self.item)
        yield self._write(self.wanted, ships=self._many)

    @property
    def _enough(self) -> bool:
        return self.left >= self.wanted

    @property
    def _many(self) -> bool:
        return self.left > MOST // 2

    def _write(self, count: int, *, ships: bool) -> Message:
        if ships:
            return one_call("ship", item=self.item, count=count, name=self.name)
        return one_call("order", item=self.item, count=count)
