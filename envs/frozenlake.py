"""frozenlake-v0: Gymnasium's FrozenLake by text, on a map of each task's own.

Task: a map of 4 times 4 fields with a way from S to G; an answer names a direction. Reward: Gymnasium's own, 1 for the
step onto G; a hole or sixteen turns end the episode with nothing. `solved` (weight 0) is whether G was reached.
`env_args.is_slippery=true` makes two of three steps slip to a side, where the oracle is no longer perfect.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the map.

The demonstrations know the shortest way but take a step at random now and then, also into a hole. What is left to learn
is to look.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from agent_rl.core.messages import Task
from agent_rl.envs.quiz import draw_task
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.from_gym import GymnasiumEnv
from agent_rl.gym.registry import register

SIZE = 4
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def make_task(split: str, index: int) -> Task:
    """Draw maps until one belongs to the split."""

    def draw(rng: np.random.Generator) -> Task:
        return {"map": " ".join(generate_random_map(SIZE, p=0.7, seed=int(rng.integers(2**31))))}

    return draw_task(split, index, draw, "map")


@register("frozenlake-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=16))
class FrozenLake(GymnasiumEnv):
    """Walk over a frozen lake without falling into a hole."""

    gym_id = "FrozenLake-v1"
    gym_args = {"is_slippery": False}  # noqa: RUF012
    action_names = tuple(MOVES)

    def make(self, task: Task) -> gymnasium.Env[Any, Any]:
        """Make the lake of the task's map."""
        self.rows = str(task["map"]).split()
        return super().make({**task, "gym_args": {"desc": self.rows}})

    def oracle(self) -> Script:
        """Take the shortest way from wherever a step led to."""
        while True:
            yield self.best_move()

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Take the shortest way, but four of ten steps at random."""
        while True:
            yield str(rng.choice(list(MOVES))) if rng.random() < 0.4 else self.best_move()

    def best_move(self) -> str:
        """Return the first step of a shortest way to the goal."""
        state: int = self._game.unwrapped.s  # type: ignore[attr-defined]
        first = {divmod(state, SIZE): ""}
        ahead = deque(first)
        while ahead:
            row, column = ahead.popleft()
            for name, (down, right) in MOVES.items():
                place = (row + down, column + right)
                if place in first or not all(0 <= part < SIZE for part in place):
                    continue
                first[place] = first[row, column] or name
                field = self.rows[place[0]][place[1]]
                if field == "G":
                    return first[place]
                if field != "H":
                    ahead.append(place)
        raise ValueError(f"there is no way to G in {self.rows}")
