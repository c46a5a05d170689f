"""agent_rl.tools.remote_search: a retriever and a web search, their cache, and servers that fail."""

import asyncio
import email.utils
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest
from tree import run_python

import agent_rl as ar
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.errors import ConfigError, ToolServerError
from agent_rl.gym.tool import AnyTool
from agent_rl.gym.tool_calls import call_tools
from agent_rl.gym.tool_limits import pause
from agent_rl.tools.answer_cache import AnswerCache
from agent_rl.tools.remote_search import _seconds_until, retrieve_tool, web_search_tool
from tests.web_server import drip, reply, serving

DOCUMENTS = [{"id": str(i), "contents": f'"Title {i}"\ntext {i}'} for i in range(5)]
HITS = [{"title": f"T{i}", "url": f"https://h/{i}", "description": f"about {i}"} for i in range(9)]


class Server:
    """Takes searches; `faults` are the statuses or kinds of the next answers, before good ones."""

    def __init__(self) -> None:
        self.faults: list[int | str] = []
        self.asked: list[dict[str, object]] = []
        self.headers: dict[str, str] = {}

    def __call__(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        parts = urlsplit(handler.path)
        self.asked.append(json.loads(body) if body else {k: v[0] for k, v in parse_qs(parts.query).items()})
        self.headers = dict(handler.headers)
        match self.faults.pop(0) if self.faults else "":
            case "":
                self.answer(handler, parts.path)
            case int(status):
                reply(handler, "no", "text/plain", status, Retry_After="7")
            case "hang":
                time.sleep(20)
            case "drip":
                drip(handler, b"HTTP/1.1 200 OK\r\n\r\n[", 20)
            case "cut":
                reply(handler, '{"result": [[{"docu', Content_Length="1000")
            case "no JSON":
                reply(handler, '{"result": [[{"docu')
            case "other":
                reply(handler, '{"error": "overloaded"}')

    def answer(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        if path == "/retrieve":
            scored = [{"document": document, "score": 1.0} for document in DOCUMENTS]
            reply(handler, json.dumps({"result": [scored]}), "application/json")
        else:
            reply(
                handler, json.dumps({"web": {"results": HITS}} if path == "/web" else {"web": {}}), "application/json"
            )


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with serving(server) as found:
        yield found


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not waited for."""
    asked: list[float] = []
    monkeypatch.setattr("agent_rl.gym.tool_calls.pause", lambda done, error: asked.append(pause(done, error)) or 0)
    return asked


def search(tool: AnyTool, *queries: str) -> tuple[Message, ...]:
    calls = [ToolCall(str(i), tool.spec.name, {"query": query}) for i, query in enumerate(queries)]
    return asyncio.run(call_tools({tool.spec.name: tool}, calls, None))


def test_retrieve_asks_as_search_r1(server, url):
    tool = retrieve_tool(f"{url}/retrieve", k=2)
    (message,) = search(tool, "who?")
    assert message.content == "[1] Title 0: text 0\n[2] Title 1: text 1"
    assert server.asked == [{"queries": ["who?"], "topk": 2, "return_scores": True}]
    assert list(tool.spec.parameters["properties"]) == ["query"]


@pytest.mark.parametrize("post", [False, True])
def test_web_search_asks_as_configured(server, url, post, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "secret")
    options = {"results": "web.results", "query_parameter": "text", "parameters": {"count": "20"}, "k": 2}
    tool = web_search_tool(f"{url}/web", post=post, key_variable="SEARCH_KEY", key_header="X-Key", **options)
    (message,) = search(tool, "a & b")
    assert message.content == "[1] T0: about 0 <https://h/0>\n[2] T1: about 1 <https://h/1>"
    assert server.asked == [{"text": "a & b", "count": "20"}]
    assert server.headers["X-Key"] == "secret"
    monkeypatch.setenv("SEARCH_KEY", "other")
    search(web_search_tool(f"{url}/web", key_variable="SEARCH_KEY", **options), "c")
    assert server.headers["Authorization"] == "Bearer other"
    assert search(web_search_tool(f"{url}/empty", **options), "c")[0].content == "no results"


@pytest.mark.parametrize("fault", [500, 503, 429, 401, 302, "hang", "drip", "cut", "no JSON", "other"])
def test_search_outlives_failures(server, url, fault, pauses):
    server.faults = [fault, fault]
    tool = retrieve_tool(f"{url}/retrieve", seconds=0.3, retries=2)
    assert search(tool, "who?")[0].content.startswith("[1] Title 0")
    assert pauses == ([7, 7] if isinstance(fault, int) else [0.5, 1.0])
    server.faults = [fault] * 3
    with pytest.raises(ToolServerError, match=r"127\.0\.0\.1"):
        search(tool, "who?")


def test_search_server_that_is_down_costs_no_score(pauses):
    with socket.socket() as refusing:  # bound, and not listening
        refusing.bind(("127.0.0.1", 0))
        down = retrieve_tool(f"http://127.0.0.1:{refusing.getsockname()[1]}/retrieve", retries=1)

        class Down(ar.ToolEnv):
            extra_tools = (down,)

            def reset(self, task, rng):
                return "?"

            @ar.reward
            def always(self, episode) -> float:
                return 0.0

            def oracle(self):
                yield Message("assistant", tool_calls=(ToolCall("c", "search", {"query": "x"}),))

        ar.register("down-v0", tasks=[{}])(Down)
        (episode,) = ar.run("down-v0", n=1, split="train")
    assert episode.reward is None and episode.error is not None and episode.error.type == "ToolServerError"


def test_search_refusal_is_the_querys_doing(server, url, pauses):
    server.faults = [400]
    (message,) = search(retrieve_tool(f"{url}/retrieve"), "who?")
    assert message.tool_error is ToolErrorKind.EXCEPTION and "refused the query: no" in message.content
    assert not pauses


def test_web_search_without_its_key_says_which(url, pauses, monkeypatch):
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    with pytest.raises(ToolServerError, match="SEARCH_KEY"):
        search(web_search_tool(url, results="web", key_variable="SEARCH_KEY", retries=0), "c")
    with pytest.raises(ConfigError, match="title, address and text"):
        web_search_tool(url, results="web", fields=("title", "text"))
    with pytest.raises(ConfigError, match="rate=0"):
        retrieve_tool(url, rate=0)


def test_search_cache_keeps_good_answers(server, url, tmp_path, pauses):
    cache = tmp_path / "folder" / "answers.sqlite"
    tool = retrieve_tool(f"{url}/retrieve", cache=cache, rate=1000, retries=0)
    server.faults = [500, "no JSON"]
    for _ in range(2):
        with pytest.raises(ToolServerError):
            search(tool, "who?")
    first, again = search(tool, "who?")[0], search(tool, "who?")[0]
    assert first.content == again.content and len(server.asked) == 3
    search(retrieve_tool(f"{url}/retrieve", cache=cache), "who?", "what?")
    search(retrieve_tool(f"{url}/retrieve", cache=cache, k=4), "who?")
    assert [asked["queries"] for asked in server.asked[3:]] == [["what?"], ["who?"]]


FILL = """
import sys
from agent_rl.tools.answer_cache import AnswerCache
cache, worker = AnswerCache(sys.argv[1]), sys.argv[2]
for i in range(30):
    cache.put(f"{worker} {i}", "x" * 1000)
    cache.put("common", worker)
    assert cache.get(f"{worker} {i}") is not None
"""


def test_cache_is_safe_for_processes(tmp_path):
    path = str(tmp_path / "answers.sqlite")
    with ThreadPoolExecutor() as pool:
        ran = [*pool.map(lambda worker: run_python("-c", FILL, path, str(worker)), range(3))]
    assert [each.returncode for each in ran] == [0, 0, 0], ran[0].stderr
    cache = AnswerCache(path)
    assert all(cache.get(f"{w} {i}") == "x" * 1000 for w in range(3) for i in range(30))
    assert cache.get("common") in ("0", "1", "2") and cache.get("none") is None


def test_search_goes_on_without_its_cache(server, url, tmp_path, pauses, caplog):
    cache = tmp_path / "answers.sqlite"
    tool = retrieve_tool(f"{url}/retrieve", cache=cache, retries=0)
    cache.unlink()  # which SQLite makes again, without the table
    assert [answer.tool_error for answer in search(tool, "who?", "what?")] == [None, None]
    assert "without its cache: no such table" in caplog.text and len(server.asked) == 2


def test_cache_refuses_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("no database, but some text that is long enough " * 10)
    with pytest.raises(ConfigError, match=r"notes.txt.*can't be used"):
        AnswerCache(tmp_path / "notes.txt")


def test_retry_after_is_read():
    assert [_seconds_until(when) for when in ("12", None, "soon")] == [12, None, None]
    assert 50 < (_seconds_until(email.utils.formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert _seconds_until("Wed, 21 Oct 2015 07:28:00 GMT") == 0
