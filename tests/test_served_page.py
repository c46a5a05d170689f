"""The served page: read only, for this machine or for who knows the token, while a run is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from agent_rl.errors import ConfigError
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.view.page.follow import Followed
from agent_rl.view.page.serve import PageSettings, serving_page
from tests.episodes import example_episode

Answer = tuple[int, bytes, dict[str, str]]


def ask(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def value(url: str, path: str) -> object:
    status, body, _ = ask(url, path)
    assert status == 200, body
    return json.loads(body)


def events(answer: HTTPResponse) -> Iterator[dict[str, int]]:
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with EpisodeWriter(tmp_path) as writer:
        writer.write(example_episode("one"))
    return tmp_path


def test_served_run_grows(run: Path) -> None:
    with serving_page(run, PageSettings(port=0)) as url:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("GET", "/api/changes")
        answer = connection.getresponse()
        changes = events(answer)
        assert next(now for now in changes if now["heads"] == 1)
        (run / "metrics.jsonl").write_text('{"kind": "train", "step": 0, "x": 1}\n{"torn')
        with EpisodeWriter(run, name="other") as writer:
            writer.write(example_episode("two/2"))
        assert next(now for now in changes if now["heads"] == 2 and now["metrics"] == 1)
        answer.close()
        connection.close()
        assert value(url, "/api/metrics") == [{"kind": "train", "step": 0, "x": 1}]
        heads = value(url, "/api/heads?from=1")
        assert isinstance(heads, dict) and heads["id"] == ["two/2"]
        episode = value(url, f"/api/episode/{quote('two/2', safe='')}")
        assert isinstance(episode, dict) and episode["id"] == "two/2" and len(episode["cut"]) == 3
        assert value(url, "/api/select?where=id%3Dt*&search=RED+CHAIR") == ["two/2"]
        status, said, _ = ask(url, "/api/select?where=rewrd%3C1")
        assert status == 400 and b"Did you mean 'reward'?" in said


def test_followed_run_that_is_resumed_loses_what_was_cut_off(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    with EpisodeWriter(tmp_path) as writer, EpisodeWriter(tmp_path, name="other") as other:
        writer.write(example_episode("kept"))
        checkpoint = writer.position
        for id in ("undone", "again"):
            writer.write(example_episode(id))
        other.write(example_episode("elsewhere"))
        followed.read()
        assert [row["id"] for row in followed.rows] == ["kept", "undone", "again", "elsewhere"]
        before = followed.counts()
        writer.cut(checkpoint)
        for id in ("a", "again", "b"):  # longer than what was there: the file is no shorter
            writer.write(example_episode(id, task={"long": "x" * 5000}))
        followed.read()
    assert [row["id"] for row in followed.rows] == ["kept", "a", "again", "b", "elsewhere"]
    assert followed.counts() == {**before, "begun": 1, "heads": 5}
    again = followed.episode("again")
    assert again is not None and "long" in again.task and followed.episode("undone") is None
    followed.read()
    assert followed.counts()["begun"] == 1


def test_server_refuses_what_is_no_page(run: Path) -> None:
    (run / "secret").write_text("secret")
    with serving_page(run, PageSettings(port=0)) as url:
        status, page, headers = ask(url, "/")
        assert status == 200 and b'data-source="served"' in page and headers["x-frame-options"] == "DENY"
        assert ask(url, "/", "HEAD")[1] == b"" and ask(url, "/api/run", "POST")[0] == 501
        for path in (
            "/secret",
            "/../secret",
            "/api/../secret",
            "/api/episode/..%2fsecret",
            "//secret",
            "/api/episode/",
        ):
            status, said, _ = ask(url, path)
            assert status == 404 and b"secret" not in said, path
        assert ask(url, "/api/heads?from=x")[0] == 400
        for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
            assert ask(url, "/api/heads", Host=host)[0] == 403, host
        assert ask(url, "/api/run", Host="localhost:1")[0] == 200


def test_other_machines_need_the_token(run: Path) -> None:
    with pytest.raises(ConfigError, match="AGENT_RL_SERVER_TOKEN"):
        PageSettings("0.0.0.0")
    with serving_page(run, PageSettings(port=0, token="hush")) as url:
        assert ask(url, "/")[0] == ask(url, "/?token=other")[0] == ask(url, "/", Cookie="agent_rl_1=x")[0] == 401
        assert ask(url, "/api/run", Authorization="Bearer hush")[0] == 200
        status, _, headers = ask(url, "//evil.example/?token=hush")
        cookie = headers["set-cookie"]
        assert status == 303 and headers["location"] == "/" and "HttpOnly" in cookie and "hush" not in cookie
        assert ask(url, "/api/run", Cookie=cookie.partition(";")[0])[0] == 200


def test_command_serves_until_interrupted(run: Path) -> None:
    """Of `agent-rl view runs/latest --serve`, on any free port."""
    command = [sys.executable, "-m", "agent_rl", "view", str(run), "--serve", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as served:
        assert served.stdout is not None
        first = served.stdout.readline()
        url = first.split()[-1]
        assert url.startswith("http://127.0.0.1:"), first + served.stdout.read()
        assert ask(url, "/")[0] == 200
        served.send_signal(signal.SIGINT)
        rest = served.stdout.read()
        assert served.wait(30) == 0 and "Traceback" not in rest, rest
