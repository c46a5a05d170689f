"""The database in which each person is one customer."""

import json
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest


def rows(statement: str) -> list[list[object]]:
    """Return what the database answers."""
    with urlopen("http://db:4001/", json.dumps([statement]).encode()) as answer:
        (found,) = json.load(answer)
    return found


def test_customers_are_one_a_person() -> None:
    assert rows("SELECT id, email, name FROM customers ORDER BY id") == [
        [1, "ada@example.org", "Ada L."],
        [2, "bob@example.org", "Bob"],
        [3, "eve@example.org", "Eve"],
        [10, "dan@example.org", "Dan"],
        [12, "eva@example.org", "Eva"],
    ]


def test_orders_are_their_customers() -> None:
    assert rows("SELECT customer, sum(cents), count(*) FROM orders GROUP BY customer ORDER BY customer") == [
        [1, 1504, 3],
        [2, 355, 3],
        [3, 999, 1],
        [10, 1, 1],
        [12, 60, 1],
    ]


def test_vouchers_are_their_customers() -> None:
    given = {"AUTUMN": 3, "BIRTHDAY": 1, "SPRING": 1, "SUMMER": 2, "WINTER": None}
    assert dict(rows("SELECT code, given_to FROM vouchers")) == given


def test_newsletters_are_their_customers() -> None:
    subscribed = [[1, "news"], [1, "sales"], [2, "news"], [2, "sales"], [12, "news"]]
    assert rows("SELECT customer, topic FROM newsletters ORDER BY 1, 2") == subscribed


def test_index_refuses_an_email_twice() -> None:
    (found,) = rows("SELECT sql FROM sqlite_master WHERE type = 'index' AND name = 'customers_email'")
    assert "UNIQUE" in str(found[0]).upper()
    with pytest.raises(HTTPError, match="400"):
        rows("INSERT INTO customers VALUES (99, 'ada@example.org', 'Nobody', '2026-03-01')")
