"""Servers of the installed openenv-core on loopback, played through the adapter."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

import agent_rl as ar
from agent_rl.envs.adapters import openenv
from agent_rl.envs.quiz import one_call
from agent_rl.policy import Scripted

pytestmark = pytest.mark.filterwarnings("ignore")  # an error in a server's thread would be its answer

SEEDS = {"train": [{"seed": n} for n in range(8)], "eval": [{"seed": n} for n in range(8, 12)]}


class Said(Action):
    message: str


class Guess(Action):
    """Guess a number."""

    number: int
    loud: bool = False


class Heard(Observation):
    text: str = ""


class Echo(Environment):  # type: ignore[type-arg]
    SUPPORTS_CONCURRENT_SESSIONS = True
    open = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).open += 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.word = random.Random(seed).choice(["yes", "no", "well", "so", "then"])
        return Heard(text=f"Say {self.word}.")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:
        said = action.message == self.word
        return Heard(text=f"You said {action.message}.", done=said, reward=float(said))

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        type(self).open -= 1


class Number(Echo):
    SUPPORTS_CONCURRENT_SESSIONS = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.number = (seed or 0) % 9
        return Heard(text="Which digit?")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Heard:  # type: ignore[override]
        if action.number > 9:
            raise ValueError("that is no digit")
        done = action.number == self.number
        return Heard(text=("less", "more")[action.number < self.number], done=done, reward=float(done))


class Tools(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("adder")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        return Heard(text="Add 2 and 3.")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Heard:
        return Heard(text="what?")

    def step(self, action: Action, timeout_s: float | None = None, **rest: Any) -> Observation:
        return self._paid(super().step(action, timeout_s=timeout_s, **rest))

    async def step_async(self, action: Action, timeout_s: float | None = None, **rest: Any) -> Observation:
        return self._paid(await super().step_async(action, timeout_s=timeout_s, **rest))

    def _paid(self, observation: Observation) -> Observation:
        if isinstance(observation, CallToolObservation) and "5" in str(observation.result):
            return observation.model_copy(update={"reward": 1.0, "done": True})
        return observation

    @property
    def state(self) -> State:
        return State()


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    """Three servers: text, a tool, and MCP tools."""
    apps = {
        "echo": create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=64),
        "number": create_fastapi_app(Number, Guess, Heard, max_concurrent_envs=1),
        "tools": create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=64),
    }
    servers, threads, urls = [], [], {}
    for name, app in apps.items():
        listening = socket.create_server(("127.0.0.1", 0))
        urls[name] = f"http://127.0.0.1:{listening.getsockname()[1]}"
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="error")))
        threads.append(threading.Thread(target=servers[-1].run, args=([listening],)))
        threads[-1].start()
    until = time.monotonic() + 60
    while not all(server.started for server in servers) and time.monotonic() < until:
        time.sleep(0.05)
    yield urls
    for server in servers:
        server.should_exit = True
    for thread in threads:
        thread.join(30)


def test_text_is_an_action_of_one_field(served: dict[str, str]) -> None:
    class Repeat(ar.from_openenv(served["echo"])):  # type: ignore[misc]
        async def reset(self, task: ar.Task, rng: Any) -> str:
            self.said = str(await super().reset(task, rng))
            return self.said

        def oracle(self) -> ar.Script:
            yield self.said.removeprefix("Say ").removesuffix(".")

    ar.register("openenv-test/echo-v0", tasks=SEEDS)(Repeat)

    def obedient(env: ar.Env, seed: int) -> ar.Script:
        (heard,) = yield "eh"
        assert heard.content == "You said eh."
        for word in ("yes", "no", "well", "so", "then"):  # noqa: UP028 - a tuple takes no answers
            yield word

    episodes = ar.run("openenv-test/echo-v0", Scripted(obedient), n=8, samples=2)
    assert all(e.reward == 1.0 and e.outcome is ar.Outcome.TERMINATED for e in episodes)
    assert {e.messages[0].content for e in episodes} > {"Say yes."} and episodes[0].messages[0] == episodes[1].messages[
        0
    ]
    report = ar.check("openenv-test/echo-v0", n=2)
    assert {finding.check for finding in report.findings} <= {"floor", "gap"}, report.findings  # a word is seldom luck
    assert report.score("oracle", "eval").reward == 1.0
    until = time.monotonic() + 30
    while Echo.open and time.monotonic() < until:
        time.sleep(0.05)
    assert Echo.open == 0


def test_full_server_is_waited_for_and_refusals_are_read(served: dict[str, str]) -> None:
    ar.register("openenv-test/number-v0", tasks=SEEDS)(ar.from_openenv(served["number"]))

    def seek(env: ar.Env, seed: int) -> ar.Script:
        assert [tool.name for tool in env.tools] == ["act"] and env.tools[0].parameters["required"] == ["number"]
        (answer,) = yield one_call("act", number="many")
        assert answer.tool_error == "bad_arguments" and "number" in answer.content
        (answer,) = yield one_call("act", number=10)
        assert "that is no digit" in answer.content
        for n in range(9):
            yield one_call("act", number=n)

    episodes = ar.run("openenv-test/number-v0", Scripted(seek), n=8)
    assert [e.reward for e in episodes] == [1.0] * 8, [e.error for e in episodes]
    report = ar.check("openenv-test/number-v0", n=2)
    assert not report.findings, report.findings


def test_tools_of_mcp_environments_are_called(served: dict[str, str]) -> None:
    ar.register("openenv-test/tools-v0", tasks=SEEDS)(ar.from_openenv(served["tools"]))

    def adding(env: ar.Env, seed: int) -> ar.Script:
        assert [tool.name for tool in env.tools] == ["add"] and env.tools[0].description == "Add two numbers."
        (answer,) = yield one_call("add", a=1, b=1)
        assert answer.content == "2"
        (answer,) = yield one_call("sub", a=1)
        assert "there is no tool 'sub'" in answer.content
        (answer,) = yield one_call("add", a="x")
        assert answer.content
        yield one_call("add", a=2, b=3)

    (episode,) = ar.run("openenv-test/tools-v0", Scripted(adding))
    assert (episode.reward, episode.turns, episode.outcome) == (1.0, 4, ar.Outcome.TERMINATED), episode.messages
    assert ar.run("openenv-test/tools-v0", "nothing")[0].outcome is ar.Outcome.TERMINATED


def test_dead_server_fails_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "WAIT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ar.register("openenv-test/dead-v0")(ar.from_openenv(f"http://127.0.0.1:{port}/"))
    (episode,) = ar.run("openenv-test/dead-v0", "nothing")
    assert episode.outcome is ar.Outcome.FAILED and episode.error is not None and "/schema" in episode.error.message
    with pytest.raises(ar.ConfigError, match="give the server's address"):
        ar.from_openenv("localhost:8000")


def test_address_of_an_openenv_server_is_none_of_ours(served: dict[str, str]) -> None:
    with pytest.raises(ar.ConfigError, match=r"/v\d+ answers 403: .*; no `agent-rl serve` of this version listens"):
        ar.run(f"{served['echo']}/echo-v0")


class ByHand:
    """A server on one port that answers a schema, resets, and each step with the next of `answers`."""

    def __init__(self, *answers: str | bytes, places: int = 8, seconds: float = 0.0) -> None:
        self.answers, self.places, self.seconds, self.open = answers, places, seconds, 0

    def schema(self, socket: ServerConnection, request: Request) -> Response | None:
        text = {"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"]}
        return socket.respond(200, json.dumps({"action": text})) if request.path == "/schema" else None

    async def play(self, socket: ServerConnection) -> None:
        if self.open == self.places:
            await socket.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}))
            return
        self.open += 1
        async for _ in socket:
            await socket.send(seen())
            for answer in self.answers:
                await socket.recv()
                await asyncio.sleep(self.seconds)
                await socket.send(answer)
        self.open -= 1

    async def play_tasks(self, name: str, budget: ar.Budget, n: int) -> list[ar.Episode]:
        async with serve(self.play, "127.0.0.1", 0, process_request=self.schema) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            ar.register(f"openenv-test/{name}-v0", budget=budget)(ar.from_openenv(url))
            return await asyncio.to_thread(ar.run, f"openenv-test/{name}-v0", "empty", n=n)


def seen(reward: object = None, done: bool = False) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "reward": reward, "done": done}})


@pytest.mark.parametrize("answer", ["<html>", "[1]", '{"data": {}}', '{"type": "state", "data": {}}', seen("high")])
def test_answer_of_another_protocol_is_the_servers_failure(answer: str) -> None:
    (episode,) = asyncio.run(ByHand(answer).play_tasks("unreadable", ar.Budget(turns=4), 1))
    assert (episode.ending, episode.reward) == ("tool_infra", None) and episode.error is not None
    assert "http://127.0.0.1" in episode.error.message and "not OpenEnv's protocol" in episode.error.message


def test_wait_for_a_full_server_is_not_the_environments_time() -> None:
    by_hand = ByHand(seen(1), seen(1, done=True), places=1, seconds=0.6)
    episodes = asyncio.run(by_hand.play_tasks("one-place", ar.Budget(turns=4, seconds=4.5), 4))
    assert [(e.ending, e.reward) for e in episodes] == [("ok", 2.0)] * 4, [e.error for e in episodes]
