"""wordnet-v0: real questions over a real corpus, the 242,644 passages of WordNet and GCIDE; most take two searches.

Task: "Of what is the thing that ... is a kind of itself a kind?", places in places, capitals, years of birth; in the
corpus of `agent_rl.envs.wordnet_corpus`, which is built by one command. Tools: `search`, the best passages by BM25.
Reward: `correct` (weight 1) for one of the answer's names, `clean` (weight 0.1) for an answer without a failed call,
`supported` (weight 0.1) for a right answer whose passages were all found.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the question.

The demonstrations guess, search for what the question names and take the first thing that it leads to, or follow the
right names. What is left to learn is to search a second time.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import Quiz, one_call, part_of
from agent_rl.envs.wordnet_corpus import COMMAND, corpus_folder
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.task_files import read_rows
from agent_rl.gym.tool import tool
from agent_rl.tools.search import MAX_PASSAGE, SearchIndex, described, open_index

_ARTICLE = re.compile(r"^(a|an|the) ")


class Questions:
    """The tasks of one split, read when they are needed."""

    def __init__(self, split: str) -> None:
        self.split = split

    def __iter__(self) -> Iterator[Task]:
        return (task for task in _all_tasks(corpus_folder()) if part_of(str(task["question"])) == self.split)


@functools.lru_cache(maxsize=4)
def _all_tasks(folder: Path) -> tuple[Task, ...]:
    file = folder / "tasks.jsonl"
    if not file.is_file():
        raise ConfigError(f"wordnet-v0 has no corpus in {folder}: build it by `{COMMAND}`")
    return tuple(read_rows(file, "all", folder))


@functools.lru_cache(maxsize=4)
def _index(folder: Path) -> SearchIndex:
    return open_index(folder / "passages.jsonl")


def wordnet_index() -> SearchIndex:
    """Return the index of the whole corpus."""
    return _index(corpus_folder())


@register(
    "wordnet-v0",
    tasks={split: Questions(split) for split in ("train", "eval", "dev")},
    budget=Budget(turns=6, tool_calls=8),
)
class WordNet(Quiz):
    """Answer a question by searches in WordNet and a dictionary."""

    snapshot_attributes = ("found", "failed")

    def __init__(self, results: int = 5, characters: int = MAX_PASSAGE) -> None:
        """Take how many passages a search returns, and how long one may be: a small model reads few and short ones.

        Raises:
            ConfigError: if that leaves nothing to read.
        """
        if results < 1 or characters < 1:
            raise ConfigError(f"results={results}, characters={characters}: a search returns at least 1 of either")
        self.results, self.characters = results, characters

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask."""
        self.index = wordnet_index()
        self.question = str(task["question"])
        self.answers, self.support, self.names = (texts(task[name]) for name in ("answers", "support", "names"))
        self.answer = self.answers[0]
        self.found: set[str] = set()
        return f"{self.question} Answer with the name or the year alone."

    @tool
    def search(self, query: str) -> str:
        """Search an encyclopaedic dictionary for passages with words of the query; the best are returned.

        Args:
            query: a question, or the words that tell it from others.
        """
        passages = self.index.search(query, self.results)
        self.found.update(passage.id for passage in passages)
        return described(passages, self.characters)

    @reward(inline=True)
    def correct(self, episode: Episode) -> bool:
        """Whether the final answer is one of the right names, with or without an article."""
        return _folded(episode.final_text) in map(_folded, self.answers)

    @reward(weight=0.1, inline=True)
    def supported(self, episode: Episode) -> bool:
        """Whether the answer is right, and the searches found every passage that it follows from."""
        return self.correct(episode) and {*self.support} <= self.found

    def state_hash(self) -> str:
        """Return what of the supporting passages has been found."""
        return self.state_of(self.found & {*self.support})

    def oracle(self) -> Script:
        """Search for each name on the way, beside that which it leads to, and answer."""
        for name, ahead in itertools.pairwise((*self.names, self.answer)):
            yield one_call("search", query=f"{name} {ahead}")
        yield self.answer

    def guess(self, rng: np.random.Generator) -> str:
        """Return a name of the question, or a year."""
        return str(rng.integers(1500, 1990)) if "year" in self.question else self.names[0]

    def misnamed_call(self) -> Message:
        """Return the first search, with another name for the query."""
        return one_call("search", q=self.names[0])

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Search for the first name, and for the next one only now and then."""
        # a name is as good a query as the whole question (in two passages of 300 characters 74 of 100 answers are
        # within reach by either), and a fifth of its tokens to copy
        first, *others = self.names
        yield one_call("search", query=first)
        if stops_early or rng.random() < 0.4:
            yield self.names[-1]
            return
        for name in others:
            yield one_call("search", query=name)
        yield self.answer


def texts(values: object) -> tuple[str, ...]:
    """Return a list of a task as text."""
    assert isinstance(values, list | tuple)
    return tuple(str(value) for value in values)


def _folded(text: str) -> str:
    return _ARTICLE.sub("", text.strip(" .\n\"'").replace("_", " ").casefold())
