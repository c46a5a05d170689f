"""A database agent: 500 questions, a tool that runs SQL, training, evaluation and a plot.

    python examples/sqlite_agent.py

On one core it takes a few minutes; success rises from 34 % to 96 %.
"""

import sqlite3

import numpy as np

import agent_rl as ar

ROWS = ", ".join(f"({n}, {n * 7 % 90 + 10}, {n * 11 % 80 + 10})" for n in range(250))
DB = sqlite3.connect(":memory:", check_same_thread=False)
DB.executescript(f"create table items (id, price, stock); insert into items values {ROWS}; pragma query_only = on")


@ar.register("sqlite-v0", tasks=[{"item": n, "column": c} for n in range(250) for c in ("price", "stock")])
class SQLite(ar.ToolEnv):
    """Say what a table has about an item; one question in ten is held out."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        self.item, self.column = task["item"], task["column"]
        return f"what is the {self.column} of item {self.item}"

    @ar.tool(inline=True)
    def sql(self, query: str) -> str:
        """Run a query and return its first row."""
        return " ".join(map(str, DB.execute(query).fetchone()))

    @ar.reward
    def correct(self, episode: ar.Episode) -> bool:
        return episode.final_text == self.sql(f"select {self.column} from items where id = {self.item}")

    def demonstrate(self, rng: np.random.Generator) -> ar.Script:  # the tiny model begins with these: a random column
        query = f"select {rng.choice(['id', 'price', 'stock'])} from items where id = {self.item}"
        (found,) = yield ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "sql", {"query": query}),))
        yield found.content


if __name__ == "__main__":
    run = ar.train(SQLite, steps=20)  # with start_from=FOLDER, a pretrained model needs no demonstrations
    print("held out:", ar.evaluate(SQLite, run.policy(temperature=0)).success)
    run.folder.joinpath("curve.svg").write_text(run.curve)
