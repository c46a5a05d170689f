"""faulty-v0: the calculator, in which some episodes crash, some hang, and every other task is slow; `imports` it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from agent_rl.core.messages import Message, Step, Task
from agent_rl.envs.calculator import Calculator, make_task
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import register


def faulty_task(split: str, index: int) -> Task:
    """Return a task of the calculator; held-out ones have no faults."""
    return {**make_task(split, index), "faults": split == "train", "slow": index % 2 == 1}


@register("faulty-v0", tasks=faulty_task, splits=("train", "eval"), budget=Budget(turns=6, tokens=128))
class Faulty(Calculator):
    """A share of episodes crashes, as many hang; a file counts how many environments were made (+) and closed (-).

    A step in a slow task takes `pause` seconds, or half of that.
    """

    def __init__(self, counted: str, share: float = 0.125, pause: float = 0.0) -> None:
        self.counted, self.share, self.pause = Path(counted), share, pause
        self.count("+")

    def count(self, sign: str) -> None:
        with self.counted.open("a") as file:
            file.write(sign)

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        self.rng, self.draw = rng, float(rng.random()) if task["faults"] else 1.0
        self.wait = self.pause if task["slow"] else 0.0
        return super().reset(task, rng)

    async def step(self, action: Message) -> Step:
        if self.draw < self.share:
            raise RuntimeError("the display broke")
        if self.draw < 2 * self.share:
            await asyncio.Event().wait()
        await asyncio.sleep(self.wait * (1 + self.rng.random()) / 2)
        return await super().step(action)

    async def close(self) -> None:
        self.count("-")
