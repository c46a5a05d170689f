"""Searches that a server answers: a retriever in the manner of Search-R1, and any web search with a JSON API.

A server that is down, busy or broken is an infrastructure failure after some attempts: the episode is not scored.
"""

from __future__ import annotations

import email.utils
import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlencode, urlsplit

from agent_rl.core.messages import JSON
from agent_rl.core.meter import sleep_uncounted
from agent_rl.errors import ConfigError, ToolServerError
from agent_rl.gym.tool import Tool, tool
from agent_rl.pacing import Pace
from agent_rl.tools.answer_cache import AnswerCache
from agent_rl.tools.search import Passage, described
from agent_rl.tools.web import AddressError, request
from agent_rl.worker_threads import in_thread

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BYTES = 10_000_000
"""Of an answer; a longer one is cut, and so no JSON."""
_REFUSALS = (400, 413, 414, 422)
"""Statuses by which a server refuses this query; others are its own trouble."""


def retrieve_tool(
    url: str,
    *,
    k: int = 3,
    cache: str | Path | None = None,
    seconds: float = 10.0,
    retries: int = 3,
    rate: float | None = None,
) -> Tool[[str], Coroutine[object, object, str]]:
    r"""Return a tool `search` that asks a server as Search-R1's, for an environment's `extra_tools`.

    The server takes POST {"queries": [...], "topk": k, "return_scores": true} and answers {"result": [[{"document":
    {"contents": "title\ntext"}, "score": ...}, ...]]}.

    Args:
        url: of the server, such as "http://127.0.0.1:8000/retrieve".
        k: how many passages a call returns.
        cache: a SQLite file that keeps the answers, for all processes of the machine.
        seconds: of a request.
        retries: how often a failed request is sent again.
        rate: requests per second, for all episodes together.
    """
    client = _Client(cache, seconds, rate)

    @tool(retries=retries, timeout=None)  # a request has its own
    async def search(query: str) -> str:
        """Search a corpus for passages; the best are returned.

        Args:
            query: a question, or what the passage is about.
        """
        asked: JSON = {"queries": [query], "topk": k, "return_scores": True}
        return await client.ask(url, asked, {}, lambda answer: _retrieved(answer, k))

    return search


def web_search_tool(
    url: str,
    *,
    results: str,
    query_parameter: str = "q",
    parameters: Mapping[str, JSON] | None = None,
    post: bool = False,
    fields: Sequence[str] = ("title", "url", "description"),
    key_variable: str | None = None,
    key_header: str = "Authorization",
    k: int = 5,
    cache: str | Path | None = None,
    seconds: float = 10.0,
    retries: int = 3,
    rate: float | None = None,
) -> Tool[[str], Coroutine[object, object, str]]:
    """Return a tool `web_search` that asks any web search with a JSON API, for an environment's `extra_tools`.

    Args:
        url: of the API.
        results: where its answer has the list of results, such as "web.results".
        query_parameter: what the API calls the query.
        parameters: others, such as {"count": 10}.
        post: whether they are sent as a JSON object by POST, and not in the URL.
        fields: the names of a result's title, address and text.
        key_variable: the environment variable that holds the key; it is read with each request, and never kept.
        key_header: the header that the key is sent in; in "Authorization", "Bearer" is put before it.
        k: how many results a call returns.
        cache: a SQLite file that keeps the answers, for all processes of the machine.
        seconds: of a request.
        retries: how often a failed request is sent again.
        rate: requests per second, for all episodes together.

    Raises:
        ConfigError: if there are not three fields, or the cache can't be used.
    """
    if isinstance(fields, str) or len(fields) != 3:
        raise ConfigError(f"web_search_tool(fields={fields!r}): name a result's title, address and text")
    client = _Client(cache, seconds, rate)

    @tool(retries=retries, timeout=None)  # a request has its own
    async def web_search(query: str) -> str:
        """Search the web; the best results are returned, with their addresses.

        Args:
            query: a question, or a few words.
        """
        asked = {**(parameters or {}), query_parameter: query}
        headers = {} if key_variable is None else {key_header: _key(key_variable, key_header)}
        where = url if post else f"{url}{'&' if '?' in url else '?'}{urlencode(asked)}"
        return await client.ask(where, asked if post else None, headers, lambda a: _results(a, results, fields, k))

    return web_search


class _Client:
    """Asks a server for JSON: again if that failed, at a rate, and never what the cache has."""

    def __init__(self, cache: str | Path | None, seconds: float, rate: float | None) -> None:
        self._cache = None if cache is None else AnswerCache(cache)
        self._seconds = seconds
        self._limit = None if rate is None else Pace(rate)

    async def ask(self, url: str, asked: JSON, headers: Mapping[str, str], read: Callable[[JSON], str]) -> str:
        """Return what `read` makes of the answer; None as `asked` is a GET.

        Raises:
            ToolServerError: if the server gives no answer that can be read.
            ValueError: if it refuses the query.
        """
        key = hashlib.blake2b(json.dumps([url, asked]).encode(), digest_size=16).hexdigest()
        if self._cache is not None:
            kept = await _cached(partial(self._cache.get, key))
            if kept is not None:
                return read(json.loads(kept))
        if self._limit is not None:
            await self._limit.wait(sleep=sleep_uncounted)
        where = urlsplit(url)._replace(query="").geturl()
        answer = await in_thread(partial(self._send, url, asked, headers, where), where)
        try:
            text = read(json.loads(answer))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ToolServerError(f"{where} answered {answer[:200]!r}: {type(error).__name__}: {error}") from error
        if self._cache is not None:
            await _cached(partial(self._cache.put, key, answer))
        return text

    def _send(self, url: str, asked: JSON, headers: Mapping[str, str], where: str) -> str:
        body = None if asked is None else json.dumps(asked).encode()
        sent = {"Accept": "application/json", "Content-Type": "application/json", **headers}
        method = "GET" if body is None else "POST"
        try:
            response = request(url, method=method, body=body, headers=sent, seconds=self._seconds, max_bytes=MAX_BYTES)
        except (OSError, AddressError) as error:
            raise ToolServerError(f"{where}: {type(error).__name__}: {error}") from error
        answer = response.body.decode(errors="replace")
        if response.status in _REFUSALS:
            raise ValueError(f"the server refused the query: {answer[:200]}")
        if response.status != 200:
            failure = ToolServerError(f"{where} answered with status {response.status}: {answer[:200]}")
            failure.retry_after = _seconds_until(response.headers["Retry-After"])
            raise failure
        return answer


async def _cached(use: Callable[[], T]) -> T | None:
    """Use a cache, without which a search goes on where it fails: as if it held nothing."""
    try:
        return await in_thread(use, "search cache", quick=True)
    except sqlite3.Error as error:
        _log.warning("a search goes on without its cache: %s", error)
        return None


def _seconds_until(when: str | None) -> float | None:
    """Return what a Retry-After header means; None if there is none that can be read."""
    if when is None:
        return None
    if when.strip().isdecimal():
        return float(when)
    try:
        return max(email.utils.parsedate_to_datetime(when).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _retrieved(answer: JSON, k: int) -> str:
    (found,) = cast("Mapping[str, list[list[dict[str, Any]]]]", answer)["result"]
    documents = [item.get("document", item) for item in found[:k]]
    passages = []
    for document in documents:
        title, _, text = str(document["contents"]).partition("\n")
        passages.append(Passage(text.strip(), title.strip(' "'), str(document.get("id", ""))))
    return described(passages)


def _results(answer: JSON, path: str, fields: Sequence[str], k: int) -> str:
    found: Any = answer
    for step in path.split("."):
        found = found.get(step)  # APIs leave out what is empty
        if found is None:
            _log.info("a web search's answer has no %s: no results", path)
            return described(())
    passages = []
    for item in found[:k]:
        title, address, text = (str(item.get(field) or "") for field in fields)
        passages.append(Passage(f"{text} <{address}>", title))
    return described(passages)


def _key(variable: str, header: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ToolServerError(f"web_search needs a key: set the environment variable {variable}")
    return f"Bearer {key}" if header == "Authorization" else key
