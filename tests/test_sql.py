"""sql-v0, and the tool that queries a database: it only reads, and neither hangs nor floods."""

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.gym.registry import spec
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import Job, run_episode, summarise
from agent_rl.tools import sql as sql_tool
from agent_rl.tools.sql import make_read_only, open_read_only, query
from tests.doubles import assert_plays_again, plays

SQL = spec("sql-v0")


def answer(*messages: str | Message, index: int = 0) -> Episode:
    script = Scripted(lambda env, seed: (message for message in messages))
    return asyncio.run(run_episode(Job(SQL, SQL.tasks.get("train", index), 0), script))


def ask(sql: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("c", "query", {"sql": sql}),))


@pytest.mark.parametrize("split", SQL.tasks.splits)
def test_sql_oracle_solves_every_task(split):
    assert {(e.success, round(e.reward or 0, 9)) for e in plays(SQL, split, oracle(), 60)} == {(True, 1.1)}


def test_sql_splits_share_no_task():
    train, dev, test = ({SQL.tasks.get(split, i)["seed"] for i in range(100)} for split in ("train", "dev", "eval"))
    assert len(train) == len(dev) == len(test) == 100
    assert not train & dev and not train & test and not dev & test


def test_sql_tasks_depend_on_split_and_index_only():
    assert [SQL.tasks.get("train", i) for i in (3, 1)] == [SQL.tasks.get("train", i) for i in (3, 1)]


def test_sql_answers_are_spread():
    tasks = [SQL.tasks.get("eval", i) for i in range(200)]
    assert Counter(task["answer"] for task in tasks).most_common(1)[0][1] <= 5
    assert sum(str(task["answer"]) in str(task["question"]) for task in tasks) == 0


def test_sql_demonstrations_are_well_formed_but_often_fail():
    result = summarise(plays(SQL, "train", demonstrator(), 200))
    assert result.failed == 0 and 0.3 < result.success.value < 0.7 and 0 < result.tool_errors < 0.2


def test_sql_reward_requires_the_exact_answer():
    right = str(SQL.tasks.get("train", 0)["answer"])
    assert answer(f" {right}\n").reward == pytest.approx(1.1)
    assert answer(ask("select nothing"), right).reward == 1.0
    assert [answer(text).reward for text in ("", "0", "x", f"it is {right}", right + "0")] == [0.0] * 5


def test_sql_episode_replays():
    assert all(map(assert_plays_again, plays(SQL, "train", demonstrator(), 20)))


def test_sql_database_survives_changes():
    (table, *_) = str(answer("").messages[0].content).split("(")
    right = str(SQL.tasks.get("train", 0)["answer"])
    changes = (f"delete from {table}", f"update {table} set name = 'x'", f"drop table {table}")
    episode = answer(*map(ask, changes), ask(f"select count(*) from {table}"), right)
    refused = [m for m in episode.messages if m.tool_error is not None]
    assert [m.tool_error for m in refused] == [ToolErrorKind.EXCEPTION] * 3
    assert episode.messages[-2].content == "count(*)\n12"


# The tool


@pytest.fixture
def database():
    made = sqlite3.connect(":memory:", check_same_thread=False)
    made.execute("create table numbers(n integer primary key, name)")
    made.executemany("insert into numbers values (?, ?)", [(n, f"name {n}") for n in range(1000)])
    made.commit()
    make_read_only(made)
    yield made
    made.close()


def test_query_returns_columns_and_rows(database):
    assert query(database, "select n, name, null as gap from numbers where n < 2") == (
        "n | name | gap\n0 | name 0 | null\n1 | name 1 | null"
    )
    assert query(database, "select n from numbers where n < 0") == "no rows"
    assert "create table numbers" in query(database, "select sql from sqlite_master").lower()
    assert query(
        database, "with recursive t(x) as (select 1 union all select x + 1 from t where x < 3) select * from t"
    )


@pytest.mark.parametrize(
    "sql",
    [
        "insert into numbers values (5000, 'x')",
        "delete from numbers",
        "create table more(x)",
        "create temp table more(x)",
        "drop table numbers",
        "pragma query_only = off",
        "pragma writable_schema = on",
        "select * from pragma_database_list",
        "attach '/tmp/other.sqlite' as other",
        "vacuum into '/tmp/other.sqlite'",
        "begin immediate",
        "select load_extension('x')",
        "select readfile('/etc/passwd')",
        "select random()",
        "select datetime('now')",
        "select current_timestamp",
        "select randomblob(4)",
        "select 1; delete from numbers",
        "explain nonsense",
        "select '" + "x" * 5000 + "'",
        "select hex(zeroblob(1000000000))",
        "select printf('%.*c', 1000000000, 'x')",
        "",
        "nonsense \0",
    ],
)
def test_query_refuses_more_than_reading(database, sql):
    with pytest.raises((sqlite3.Error, ValueError)):
        if query(database, sql) == "no rows":  # of an empty query
            raise ValueError
    assert query(database, "select count(*) from numbers").endswith("\n1000")


ENDLESS = "with recursive t(x) as (select 1 union all select x + 1 from t) select count(*) from t"


@pytest.mark.parametrize("sql", [ENDLESS, "select count(*) from numbers a, numbers b, numbers c"])
def test_query_ends_after_its_steps(database, sql):
    with pytest.raises(TimeoutError, match="takes too long"):
        query(database, sql)
    assert query(database, "select 1") == "1\n1"


def test_query_ends_when_its_time_is_over(database, monkeypatch):
    monkeypatch.setattr(sql_tool, "SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="takes too long"):
        query(database, "select count(*) from numbers a, numbers b")


def test_query_keeps_its_limits_beside_others(database):
    limits = []

    class Watched(sqlite3.Connection):
        def set_progress_handler(self, handler, n):
            limits.append(handler)
            super().set_progress_handler(handler, n)

        def execute(self, *statement):
            time.sleep(0.005)  # for another thread
            return super().execute(*statement)

    shared = sqlite3.connect(":memory:", factory=Watched, check_same_thread=False)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: query(shared, "select 1"), range(8))) == {"1\n1"}
    shared.close()
    assert len(limits) == 16 and not any(limits[1::2]), "a query had another's limits, or none"


def test_query_cuts_long_results(database):
    lines = query(database, "select n from numbers").splitlines()
    assert lines[:2] == ["n", "0"] and lines[-1] == "999" and len(lines) == sql_tool.MAX_ROWS + 2
    assert lines[21] == "[... 960 rows left out ...]"
    long = "replace('" + "x" * 500 + "', 'x', 'xyz')"
    assert query(database, f"select {long} as long").endswith("…")
    assert len(query(database, f"select n, {long} as long from numbers")) < 10_000


def test_open_read_only_serves_files_and_threads(tmp_path: Path):
    path = tmp_path / "a b?.sqlite"
    with sqlite3.connect(path) as writer:
        writer.execute("create table t as select 1 as x")
    writer.close()
    database, found = open_read_only(path), []
    with pytest.raises(sqlite3.DatabaseError):
        query(database, "delete from t")
    thread = threading.Thread(target=lambda: found.append(query(database, "select x from t")))
    thread.start()
    thread.join()
    database.close()
    assert found == ["x\n1"]
    with pytest.raises(sqlite3.OperationalError):
        open_read_only(tmp_path / "missing.sqlite")
