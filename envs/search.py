"""search-v0: questions for two searches, or three, over a corpus generated for each task.

Task: in a world of made-up people, cities and countries, "bafo born in which country" needs the city first and then its
country; a hard one, "bafo born in country that eats what", goes on from there. Tools: `search`, an FTS5 index that
returns at most two documents with every word of the query.
Reward: `correct` (weight 1) for the exact answer, `clean` (weight 0.1) for an answer without a failed call.

Splits: `train`, `eval` and `dev`, and `train-hard`, `eval-hard` and `dev-hard` with three searches; each task has a
world of its own, drawn from the split's name and the task's index, so no two splits share one. Names are shared, facts
are not: nothing can be known without searching.

The demonstrations mostly search for the person alone, get two facts, and follow either; those of hard tasks search so
for the city and the country, too. What is left to learn is to name the relation in the query.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TypeAlias

import numpy as np

from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import Quiz, one_call, task_rng
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.tool import tool
from agent_rl.tools.search import SearchIndex

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmn" for vowel in "aio"]
_PAIRS = ((i, j) for i in range(len(_SYLLABLES)) for j in range(len(_SYLLABLES)) if (7 * i + 5 * j) % 8 == 0)
NAMES = tuple(_SYLLABLES[i] + _SYLLABLES[j] for i, j in _PAIRS)[:72]
PEOPLE = 4
"""How many people, and as many cities and countries, a world has."""

Following: TypeAlias = Generator[Message, tuple[Message, ...], str]
RELATIONS = {"born": "{person} was born in {city}", "lives": "{person} lives in {city}"}
HABITS = {"eats": "{country} eats {thing}", "speaks": "{country} speaks {thing}"}
"""Of the countries, in hard tasks."""


def make_task(split: str, index: int) -> Task:
    """Draw a world and a question about it."""
    rng, habits = task_rng(split, index), HABITS if split.endswith("-hard") else {}
    names = [NAMES[i] for i in rng.choice(len(NAMES), (3 + len(habits)) * PEOPLE, replace=False)]
    people, cities, countries, *things = (names[i : i + PEOPLE] for i in range(0, len(names), PEOPLE))
    facts = [f"{city} is the capital of {country}" for city, country in zip(cities, countries, strict=True)]
    homes = {}
    for i, person in enumerate(people):
        for offset, (relation, text) in enumerate(RELATIONS.items()):
            homes[person, relation] = (i + offset) % PEOPLE
            facts.append(text.format(person=person, city=cities[homes[person, relation]]))
    for text, named in zip(habits.values(), things, strict=True):
        facts += [text.format(country=country, thing=thing) for country, thing in zip(countries, named, strict=True)]
    person, relation = people[rng.integers(PEOPLE)], list(RELATIONS)[rng.integers(len(RELATIONS))]
    home = homes[person, relation]
    task: Task = {
        "facts": [facts[i] for i in rng.permutation(len(facts))],
        "person": person,
        "relation": relation,
        "answer": countries[home],
    }
    if not habits:
        return task
    habit = int(rng.integers(len(habits)))
    return {**task, "habit": list(habits)[habit], "answer": things[habit][home]}


@functools.lru_cache(maxsize=1024)
def _index(facts: tuple[str, ...]) -> SearchIndex:
    return SearchIndex(facts)


@register(
    "search-v0",
    tasks=make_task,
    splits=("train", "eval", "dev", "train-hard", "eval-hard", "dev-hard"),
    budget=Budget(turns=5, tool_calls=8),
)
class Search(Quiz):
    """Find out a country by way of a city, and what it eats or speaks."""

    snapshot_attributes = ("found", "failed")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask in which country the person was born, or lives; or for a habit of it."""
        facts = task["facts"]
        assert isinstance(facts, list | tuple)
        self.index = _index(tuple(str(fact) for fact in facts))
        self.person, self.relation = str(task["person"]), str(task["relation"])
        self.answer = str(task["answer"])
        self.habit = str(task.get("habit", ""))
        self.found: set[str] = set()
        asked = f"country that {self.habit} what" if self.habit else "which country"
        return f"{self.person} {self.relation} in {asked}"

    @tool(inline=True)
    def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: words that must all occur, such as "bafo born".
        """
        documents = [passage.text for passage in self.index.search(query, k=2, every_word=True)]
        self.found.update(documents)
        return "; ".join(documents) or "no results"

    def state_hash(self) -> str:
        """Return the documents found."""
        return self.state_of(self.found)

    def oracle(self) -> Script:
        """Search for the person with the relation, then for the city's country, then for its habit."""
        (found,) = yield one_call("search", query=f"{self.person} {self.relation}")
        (found,) = yield one_call("search", query=f"{_last_word(found)} capital")
        if self.habit:
            (found,) = yield one_call("search", query=f"{_last_word(found)} {self.habit}")
        yield _last_word(found)

    def guess(self, rng: np.random.Generator) -> str:
        """Return a name at random."""
        return str(rng.choice(NAMES))

    def misnamed_call(self) -> Message:
        """Return a search for the person, with another name for the query."""
        return one_call("search", q=self.person)

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Search for the person, often without the relation, and follow one of the facts; so to the end if hard."""
        name = yield from self._follow(rng, self.person, self.relation)
        if not stops_early and self.habit:
            for relation in ("capital", self.habit):
                name = yield from self._follow(rng, name, relation)
        elif not stops_early:
            (found,) = yield one_call("search", query=f"{name} capital")
            name = _last_word(found)
        yield name

    def _follow(self, rng: np.random.Generator, name: str, relation: str) -> Following:
        """Search for a name, often without the relation; return the last word of one of the facts found."""
        vague = rng.random() < 0.6
        (found,) = yield one_call("search", query=name if vague else f"{name} {relation}")
        facts = found.content.split("; ")
        return facts[rng.integers(len(facts))].split()[-1]


def _last_word(message: Message) -> str:
    return message.content.split()[-1]
