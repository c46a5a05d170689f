"""unlike/hops-v0: a name that takes three look-ups, each with two ways to go on.

Task: "river of work of friend of bafo": who bafo's friend is, where that one works, and which river is there. `find`
says two facts of a name, of which the question names one. Reward: `correct` (weight 1) for the exact answer, `clean`
(weight 0.1) for an answer without a failed call, `along` (weight 0.5) for how far it went before a wrong turn.

Splits: `train`, `eval` and `dev`; each task has a world of its own, drawn from the split's name and the task's index.

The demonstrations follow the right fact in six of ten look-ups, else either. What is left to learn is to read the
question at each of the three look-ups. The short cut, to follow whatever comes first, earns 12.5 %; to stop after two
earns nothing.
"""

from __future__ import annotations

import itertools

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import Quiz, one_call, task_rng
from agent_rl.envs.search import NAMES
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import tool

RELATIONS = (("friend", "boss"), ("home", "work"), ("river", "hill"))
"""What is known of a person, of a person's friend or boss, and of a place."""


def make_task(split: str, index: int) -> Task:
    """Draw a world, in which every name is found once, and a way through it."""
    rng = task_rng(split, index)
    names = [NAMES[i] for i in rng.choice(len(NAMES), 15, replace=False)]  # one person, 2 others, 4 places, 8 answers
    facts, way, stops, at = {}, list[str](), [names[0]], 0
    for number, name in enumerate(names[:7]):
        pair = RELATIONS[(number + 1).bit_length() - 1]
        facts[name] = ", ".join(f"{relation} {names[2 * number + 1 + i]}" for i, relation in enumerate(pair))
    for pair in RELATIONS:
        chosen = int(rng.integers(2))
        way.append(pair[chosen])
        at = 2 * at + 1 + chosen
        stops.append(names[at])
    return {"facts": facts, "way": way, "stops": stops}


@register("unlike/hops-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=5, tool_calls=6))
class Hops(Quiz):
    """Follow three relations."""

    snapshot_attributes = ("asked", "failed")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask for the name at the end of the way."""
        facts, way, stops = task["facts"], task["way"], task["stops"]
        assert isinstance(facts, dict) and isinstance(way, list | tuple) and isinstance(stops, list | tuple)
        self.facts = {str(name): str(told) for name, told in facts.items()}
        self.way, self.stops = [str(relation) for relation in way], [str(name) for name in stops]
        self.person, self.answer = self.stops[0], self.stops[-1]
        self.asked: list[str] = []
        return " of ".join([*reversed(self.way), self.person])

    @tool(inline=True)
    def find(self, name: str) -> str:
        """Say two facts of a person or a place.

        Args:
            name: such as "bafo".
        """
        if name not in self.facts:
            raise ValueError(f"no facts of '{name}'")
        self.asked.append(name)
        return self.facts[name]

    def state_hash(self) -> str:
        """Return the names that were asked for, in their order, as a detour costs `along`."""
        return self.state_of(f"{number} {name}" for number, name in enumerate(self.asked))

    @reward(weight=0.5, inline=True)
    def along(self, episode: Episode) -> float:
        """The share of the stops that came in their order, from the first one on."""
        pairs = zip(self.stops, [*self.asked, episode.final_text.strip()], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(self.stops)

    def oracle(self) -> Script:
        """Follow the relations that the question names."""
        for name in self.stops[:-1]:
            yield one_call("find", name=name)
        yield self.answer

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
            name = facts[relation if rng.random() < 0.6 else str(rng.choice(list(facts)))]
        yield name
