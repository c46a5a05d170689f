"""agree-v0: a short talk that any model can hold, with a tool in its prompt; `imports` it."""

from __future__ import annotations

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import ToolEnv
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.tools.calculator import calculator

TASKS = [{"n": n} for n in range(200)]


@register("agree-v0", tasks={"train": TASKS[:100], "eval": TASKS[100:]}, budget=Budget(turns=2))
class Agree(ToolEnv):
    """Say yes or no, twice; of the ways to say it about half score."""

    extra_tools = (calculator,)

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        return f"Is {task['n']} even? Say yes or no."

    def on_answer(self, action: Message) -> Step:
        return Step((Message("user", "Are you sure?"),))

    @reward
    def even(self, episode: Episode) -> bool:
        return sum(len(m.content) for m in episode.messages if m.role == "assistant") % 2 == 0
