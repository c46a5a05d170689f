"""sql-v0: questions to a database, generated for each task, through a tool that only reads.

Task: one of three kinds of database, each of three tables (who, what, and what each did with which), and a question for
a query that joins them, such as "Which product has the largest sum of quantity in 2003?". The answer is a whole number
or a name. Tools: `query`, which takes one SELECT; the database can't be changed by it, and a query that takes too long
or returns too much is cut. Reward: `correct` (weight 1) for the exact answer, `clean` (weight 0.1) for a right answer
without a failed query. An empty answer, or the same to each question, earns nothing, or next to nothing.

Splits: `train`, `eval` and `dev` have other databases, and so other names, numbers and answers.

The demonstrations write the form of the queries well, but half of them miss a condition. What is left to learn is to
ask for all of it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import numpy as np

from agent_rl import seeds
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Task
from agent_rl.envs.quiz import Quiz, draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import tool
from agent_rl.seeds import Stream
from agent_rl.tools.sql import make_read_only
from agent_rl.tools.sql import query as run_query

PEOPLE, THINGS, DEEDS = 12, 10, 60
"""How many rows the tables have."""
YEARS = (2001, 2002, 2003)
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeio"]


@dataclass(frozen=True, slots=True)
class Theme:
    """The words of one kind of database: tables, and the columns that differ."""

    person: str
    place: str
    thing: str
    amount: str
    deed: str
    count: str

    @property
    def schema(self) -> str:
        """The tables and their columns."""
        return (
            f"{self.person}s(id, name, {self.place}), {self.thing}s(id, name, {self.amount}), "
            f"{self.deed}s(id, {self.person}_id, {self.thing}_id, {self.count}, year)"
        )


THEMES = (
    Theme("customer", "city", "product", "price", "order", "quantity"),
    Theme("reader", "town", "book", "pages", "loan", "days"),
    Theme("farmer", "valley", "crop", "weight", "harvest", "bags"),
)

_JOINED = "from {deed}s d join {person}s p on p.id = d.{person}_id join {thing}s t on t.id = d.{thing}_id"
FAMILIES = (
    (
        "What is the sum of {count} times {amount} over the {deed}s of {someone}?",
        f"select sum(d.{{count}} * t.{{amount}}) {_JOINED} where p.name = '{{someone}}'",
        f"select sum(d.{{count}}) {_JOINED} where p.name = '{{someone}}'",
    ),
    (
        "What is the sum of {count} times {amount} over the {deed}s in {year} of {person}s with {place} {somewhere}?",
        f"select sum(d.{{count}} * t.{{amount}}) {_JOINED} where p.{{place}} = '{{somewhere}}' and d.year = {{year}}",
        f"select sum(d.{{count}} * t.{{amount}}) {_JOINED} where p.{{place}} = '{{somewhere}}'",
    ),
    (
        "Which {person} has the largest sum of {count} in {year}?",
        f"select p.name, sum(d.{{count}}) {_JOINED} where d.year = {{year}} group by p.id order by 2 desc limit 1",
        f"select p.name, sum(d.{{count}}) {_JOINED} group by p.id order by 2 desc limit 1",
    ),
    (
        "Which {thing} has the largest sum of {count} over the {deed}s of {person}s with {place} {somewhere}?",
        f"select t.name, sum(d.{{count}}) {_JOINED} where p.{{place}} = '{{somewhere}}' "
        "group by t.id order by 2 desc limit 1",
        f"select t.name, sum(d.{{count}}) {_JOINED} group by t.id order by 2 desc limit 1",
    ),
)
"""Questions, each with the query that answers it, and one that misses a part of it."""


def generate(seed: int, theme: Theme) -> sqlite3.Connection:
    """Return the database of a seed."""
    rng = seeds.rng(Stream.WORLD, seed)
    pairs = rng.choice(len(_SYLLABLES) ** 2, PEOPLE + THINGS + 3, replace=False)
    names = [_SYLLABLES[i // len(_SYLLABLES)] + _SYLLABLES[i % len(_SYLLABLES)] for i in pairs.tolist()]
    places = names[-3:]
    people = [(i + 1, names[i], places[i % 3]) for i in range(PEOPLE)]
    amounts = rng.choice(np.arange(5, 500), THINGS, replace=False).tolist()
    things = [(i + 1, names[PEOPLE + i], amount) for i, amount in enumerate(amounts)]
    drawn = rng.integers((1, 1, 1, 0), (PEOPLE + 1, THINGS + 1, 100, len(YEARS)), (DEEDS, 4)).tolist()
    deeds = [(i + 1, who, what, count, YEARS[year]) for i, (who, what, count, year) in enumerate(drawn)]
    database = sqlite3.connect(":memory:", check_same_thread=False)  # a tool may run in a thread
    tables: tuple[list[tuple[object, ...]], ...] = ([*people], [*things], [*deeds])
    for table, rows in zip(theme.schema.split("), "), tables, strict=True):
        database.execute(f"create table {table.rstrip(')').replace('(id', '(id integer primary key')})")
        name = table.partition("(")[0]
        database.executemany(f"insert into {name} values ({', '.join('?' * len(rows[0]))})", rows)
    database.commit()
    return database


def make_task(split: str, index: int) -> Task:
    """Draw a database of the split, and a question that it answers without a tie."""

    def draw(rng: np.random.Generator) -> Task | None:
        seed, kind = int(rng.integers(2**48)), int(rng.integers(len(THEMES)))
        theme = THEMES[kind]
        database = generate(seed, theme)
        names = database.execute(f"select name, {theme.place} from {theme.person}s").fetchall()
        someone, somewhere = (str(name) for name in names[rng.integers(len(names))])
        words = {name: getattr(theme, name) for name in theme.__slots__}
        words |= {"someone": someone, "somewhere": somewhere, "year": int(rng.choice(YEARS))}
        question, sql, mistake = (text.format(**words) for text in FAMILIES[rng.integers(len(FAMILIES))])
        best = database.execute(sql.replace("limit 1", "limit 2")).fetchall()
        database.close()
        if not best or best[0][0] is None or (len(best) == 2 and best[0][1] == best[1][1]):
            return None
        answer = str(best[0][0])
        return {"seed": seed, "kind": kind, "question": question, "answer": answer, "sql": sql, "mistake": mistake}

    return draw_task(split, index, draw, "seed")


@register("sql-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=6, tool_calls=8))
class Sql(Quiz):
    """Answer a question by queries to a database."""

    snapshot_attributes = ("found", "failed")
    database: sqlite3.Connection | None = None

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Generate the database, and ask."""
        theme = THEMES[int(str(task["kind"]))]
        self.database = generate(int(str(task["seed"])), theme)
        make_read_only(self.database)
        self.answer, self.sql, self.mistake = (str(task[name]) for name in ("answer", "sql", "mistake"))
        self.found: set[str] = set()
        return f"{theme.schema}. {task['question']} Answer with the value alone."

    @tool
    def query(self, sql: str) -> str:
        """Run one SELECT of SQLite on the database, which can't be changed, and return the rows.

        Args:
            sql: the query.
        """
        assert self.database is not None
        rows = run_query(self.database, sql)
        self.found.add(rows)
        return rows

    @reward(weight=0.1, inline=True)
    def clean(self, episode: Episode) -> bool:
        """Whether the answer is right, and no query failed on the way to it."""
        return self.correct(episode) and not self.failed

    def close(self) -> None:
        """Close the database, and end a query that still runs on it."""
        if self.database is not None:
            self.database.interrupt()
            self.database.close()

    def state_hash(self) -> str:
        """Return what the queries found."""
        return self.state_of(self.found)

    def oracle(self) -> Script:
        """Run the right query."""
        (rows,) = yield one_call("query", sql=self.sql)
        yield _first_value(rows)

    def guess(self, rng: np.random.Generator) -> str:
        """Return a number at random."""
        return str(rng.integers(10, 9999))

    def misnamed_call(self) -> Message:
        """Return the right call, with another name for the query."""
        return one_call("query", query=self.sql)

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Run the right query, or one that misses a part of the question."""
        (rows,) = yield one_call("query", sql=self.sql if rng.random() < 0.5 else self.mistake)
        yield _first_value(rows)


def _first_value(rows: Message) -> str:
    return rows.content.splitlines()[-1].partition(" | ")[0]
