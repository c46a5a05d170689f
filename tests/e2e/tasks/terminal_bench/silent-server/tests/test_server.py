"""The server that was left running: what it had, what it stores, and what it says of the rest."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

JOURNAL = Path("/app/data/journal.jsonl")
BEFORE = {"motd": "welcome back", "rates/eur": "1.08", "ünï": "zwei\nZeilen"}


def ask(path: str, method: str = "GET", text: str | None = None) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    data = None if text is None else text.encode()
    try:
        with urlopen(Request(f"http://127.0.0.1:8080{path}", data, method=method), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def lines() -> list[list[str]]:
    """Return the journal."""
    return [json.loads(line) for line in JOURNAL.read_text(encoding="utf-8").splitlines()]


def test_server_has_its_keys() -> None:
    assert ask("/health") == (200, "ok 3")
    assert {key: ask(f"/keys/{quote(key)}") for key in BEFORE} == {key: (200, text) for key, text in BEFORE.items()}


def test_server_lacks_what_is_removed_or_torn() -> None:
    for key in ("old", "rates/gbp", "never"):
        assert ask(f"/keys/{key}")[0] == ask(f"/keys/{key}", "DELETE")[0] == 404


def test_server_stores_before_it_answers() -> None:
    assert ask("/keys/new%20key", "PUT", "größe") == (204, "")
    assert lines()[-1] == ["put", "new key", "größe"] and ask("/keys/new%20key") == (200, "größe")
    assert ask("/keys/new%20key", "DELETE") == (204, "")
    assert lines()[-1] == ["delete", "new key"] and ask("/keys/new%20key")[0] == 404


def test_server_takes_many_at_once() -> None:
    with ThreadPoolExecutor(16) as pool:
        said = pool.map(lambda n: ask(f"/keys/many{n}", "PUT", str(n)), range(64))
        assert set(said) == {(204, "")}
    assert sorted(line[1] for line in lines()[-64:]) == sorted(f"many{n}" for n in range(64))
