"""search-v0: questions for two searches, over a corpus generated for each task.

Task: in a world of made-up people, cities and countries, "bafo born in which country" needs the city first and then its
country. Tools: `search`, an FTS5 index that returns at most two documents with every word of the query.
Reward: `correct` (weight 1) for the exact answer, `clean` (weight 0.1) for an answer without a failed call.

Splits: `train`, `eval` and `dev`; each task has a world of its own, drawn from the split's name and the task's index,
so no two splits share one. Names are shared, facts are not: nothing can be known without searching.

The demonstrations mostly search for the person alone, get two facts, and follow either. What is left to learn is to
name the relation in the query.
"""

from __future__ import annotations

import functools

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

RELATIONS = {"born": "{person} was born in {city}", "lives": "{person} lives in {city}"}


def make_task(split: str, index: int) -> Task:
    """Draw a world and a question about it."""
    rng = task_rng(split, index)
    names = [NAMES[i] for i in rng.choice(len(NAMES), 3 * PEOPLE, replace=False)]
    people, cities, countries = (names[i * PEOPLE : (i + 1) * PEOPLE] for i in range(3))
    facts = [f"{city} is the capital of {country}" for city, country in zip(cities, countries, strict=True)]
    homes = {}
    for i, person in enumerate(people):
        for offset, (relation, text) in enumerate(RELATIONS.items()):
            homes[person, relation] = (i + offset) % PEOPLE
            facts.append(text.format(person=person, city=cities[homes[person, relation]]))
    person, relation = people[rng.integers(PEOPLE)], list(RELATIONS)[rng.integers(len(RELATIONS))]
    return {
        "facts": [facts[i] for i in rng.permutation(len(facts))],
        "person": person,
        "relation": relation,
        "answer": countries[homes[person, relation]],
    }


@functools.lru_cache(maxsize=1024)
def _index(facts: tuple[str, ...]) -> SearchIndex:
    return SearchIndex(facts)


@register(
    "search-v0",
    tasks=make_task,
    splits=("train", "eval", "dev"),
    budget=Budget(turns=5, tool_calls=8),
)
class Search(Quiz):
    """Find out a country by way of a city."""

    snapshot_attributes = ("found", "failed")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask in which country the person was born, or lives."""
        facts = task["facts"]
        assert isinstance(facts, list | tuple)
        self.index = _index(tuple(str(fact) for fact in facts))
        self.person, self.relation = str(task["person"]), str(task["relation"])
        self.answer = str(task["answer"])
        self.found: set[str] = set()
        return f"{self.person} {self.relation} in which country"

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
        """Search for the person with the relation, then for the city's country."""
        (found,) = yield one_call("search", query=f"{self.person} {self.relation}")
        (found,) = yield one_call("search", query=f"{_last_word(found)} capital")
        yield _last_word(found)

    def guess(self, rng: np.random.Generator) -> str:
        """Return a name at random."""
        return str(rng.choice(NAMES))

    def misnamed_call(self) -> Message:
        """Return a search for the person, with another name for the query."""
        return one_call("search", q=self.person)

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Search for the person, often without the relation, and follow one of the facts found."""
        vague = rng.random() < 0.6
        (found,) = yield one_call("search", query=self.person if vague else f"{self.person} {self.relation}")
        facts = found.content.split("; ")
        city = facts[rng.integers(len(facts))].split()[-1]
        if stops_early:
            yield city
            return
        (found,) = yield one_call("search", query=f"{city} capital")
        yield _last_word(found)


def _last_word(message: Message) -> str:
    return message.content.split()[-1]
