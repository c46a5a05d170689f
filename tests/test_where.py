"""The language of --where, by the cases of tests/data/where.json: the page's filter has to pass the same."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from agent_rl.errors import ConfigError
from agent_rl.store.where import FIELDS, INNER, parse_where, sort_key, sql_of

TABLE = json.loads((Path(__file__).parent / "data" / "where.json").read_text(encoding="utf-8"))
COLUMNS = (*FIELDS, *INNER)


@pytest.fixture(scope="module")
def database() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    columns = ", ".join(f'"{name}"' for name in COLUMNS)
    made.execute(f"CREATE TABLE episodes ({columns})")
    for row in TABLE["episodes"]:
        assert row.keys() == set(COLUMNS)
        values = [json.dumps(row[name], ensure_ascii=False) if name in INNER else row[name] for name in COLUMNS]
        made.execute(f"INSERT INTO episodes VALUES ({', '.join('?' * len(COLUMNS))})", values)
    return made


def found(database: sqlite3.Connection, *where: str) -> list[str]:
    sql, given = sql_of(parse_where(where))
    return [id for (id,) in database.execute(f"SELECT id FROM episodes WHERE {sql}", given)]


@pytest.mark.parametrize("case", [c for c in TABLE["cases"] if "ids" in c], ids=lambda c: c["where"])
def test_conditions_find_episodes(database: sqlite3.Connection, case: dict[str, object]) -> None:
    assert found(database, str(case["where"])) == case["ids"]


@pytest.mark.parametrize("case", [c for c in TABLE["cases"] if "error" in c], ids=lambda c: c["where"])
def test_conditions_without_meaning_are_refused(case: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_where([case["where"]])
    assert case["error"] in str(refused.value) and str(refused.value).count("\n") < 3


def test_conditions_may_be_long_but_bounded(database: sqlite3.Connection) -> None:
    ids = [row["id"] for row in TABLE["episodes"]]
    assert found(database) == found(database, f"id in ({', '.join(map(str, range(20_000)))}, *)") == ids
    assert found(database, " or ".join(["reward=1"] * 500)) == [ids[1], ids[4]]
    assert found(database, "(" * 100 + "reward=1" + ")" * 100) == [ids[1], ids[4]]
    for long in (" or ".join(["reward=1"] * 501), "(" * 200, "not " * 1000 + "reward=1"):
        with pytest.raises(ConfigError, match="more than 500 conditions"):
            parse_where([long])


def test_conditions_tell_long_whole_numbers_apart(database: sqlite3.Connection) -> None:
    seed = 2**62 + 1
    database.execute("SAVEPOINT before")
    database.execute("UPDATE episodes SET seed = ?", (seed,))
    ids = [row["id"] for row in TABLE["episodes"]]
    assert found(database, f"seed={seed}") == found(database, f"seed in (7, {seed})") == ids
    assert found(database, f"seed>{seed - 1} and seed<{seed + 1} and seed<{2**70}") == ids
    assert found(database, f"seed={seed - 1}") == found(database, f"seed={'9' * 5000}") == []
    database.execute("ROLLBACK TO before")


def test_conditions_give_values_to_sqlite_apart(database: sqlite3.Connection) -> None:
    hostile = "x' OR 1=1; DROP TABLE episodes; --"
    assert found(database, f'id="{hostile}"') == []
    sql, given = sql_of(parse_where([f'id="{hostile}"']))
    assert "DROP" not in sql and given == (hostile,)
    assert sort_key("task.level") == ("json_extract(task, ?)", ('$."level"',))
    with pytest.raises(ConfigError, match=r"--sort rewrd: no such field\. Did you mean 'reward'\?"):
        sort_key("rewrd")
