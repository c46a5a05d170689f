"""unlike/hops-v0: a name that takes three look-ups, each with two ways to go on.

Task: "river of work of friend of bafo": who bafo's friend is, where that one works, and which river is there. `find`
says two facts of a name, of which the question names one. Reward: `correct` (weight 1) for the exact answer, `clean`
(weight 0.1) for an answer without a failed call.

Splits: `train`, `eval` and `dev`; each task has a world of its own, drawn from the split's name and the task's index.

The demonstrations follow the right fact in three of ten look-ups, else either. What is left to learn is to read the
question at each of the three look-ups. The short cut, to follow whatever comes first, earns 12.5 %; to stop after two
earns nothing.
"""

from __future__ import annotations

import numpy as np

from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import Quiz, one_call, task_rng
from agent_rl.envs.search import NAMES
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.tool import tool

RELATIONS = (("friend", "boss"), ("home", "work"), ("river", "hill"))
"""What is known of a person, of a person's friend or boss, and of a place."""


def make_task(split: str, index: int) -> Task:
    """Draw a world, in which every name is found once, and a way through it."""
    rng = task_rng(split, index)
    names = [NAMES[i] for i in rng.choice(len(NAMES), 15, replace=False)]  # one person, 2 others, 4 places, 8 answers
    facts, way, at = {}, list[str](), 0
    for number, name in enumerate(names[:7]):
        pair = RELATIONS[(number + 1).bit_length() - 1]
        told = [f"{relation} {names[2 * number + 1 + i]}" for i, relation in enumerate(pair)]
        facts[name] = ", ".join(told if rng.random() < 0.5 else reversed(told))
    for pair in RELATIONS:
        chosen = int(rng.integers(2))
        way.append(pair[chosen])
        at = 2 * at + 1 + chosen
    return {"facts": facts, "person": names[0], "way": way, "answer": names[at]}


@register("unlike/hops-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=5, tool_calls=6))
class Hops(Quiz):
    """Follow three relations."""

    snapshot_attributes = ("found", "failed")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask for the name at the end of the way."""
        facts, way = task["facts"], task["way"]
        assert isinstance(facts, dict) and isinstance(way, list | tuple)
        self.facts = {str(name): str(told) for name, told in facts.items()}
        self.person, self.way = str(task["person"]), [str(relation) for relation in way]
        self.answer = str(task["answer"])
        self.found: set[str] = set()
        return " of ".join([*reversed(self.way), self.person])

    @tool(inline=True)
    def find(self, name: str) -> str:
        """Say two facts of a person or a place.

        Args:
            name: such as "bafo".
        """
        if name not in self.facts:
            raise ValueError(f"no facts of '{name}'")
        self.found.add(name)
        return self.facts[name]

    def state_hash(self) -> str:
        """Return the names whose facts were found."""
        return self.state_of(self.found)

    def oracle(self) -> Script:
        """Follow the relations that the question names."""
        name = self.person
        for relation in self.way:
            (found,) = yield one_call("find", name=name)
            name = dict(fact.split() for fact in found.content.split(", "))[relation]
        yield name

    def short_cut(self, rng: np.random.Generator) -> Script:
        """Follow what comes first."""
        name = self.person
        for _ in self.way:
            (found,) = yield one_call("find", name=name)
            name = found.content.split(", ")[0].split()[-1]
        yield name

    def guess(self, rng: np.random.Generator) -> str:
        """Return a name at random."""
        return str(rng.choice(NAMES))

    def misnamed_call(self) -> Message:
        """Return a look-up of the person, with another name for the argument."""
        return one_call("find", person=self.person)

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Follow the right fact, or, mostly, either."""
        name = self.person
        for relation in self.way[: 2 if stops_early else 3]:
            (found,) = yield one_call("find", name=name)
            facts = dict(fact.split() for fact in found.content.split(", "))
            name = facts[relation if rng.random() < 0.3 else str(rng.choice(list(facts)))]
        yield name
