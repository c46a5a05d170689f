"""Environments on a server: the same episodes as here, and places that come back from every kind of client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import agent_rl as ar
from agent_rl.concurrency import LoopThread
from agent_rl.core.episode import Episode
from agent_rl.gym.published import SERVED
from agent_rl.gym.tasks import TaskSource
from agent_rl.remote import wire
from agent_rl.remote.client import connection
from agent_rl.remote.server import serving
from agent_rl.serving.frames import TOKEN
from agent_rl.serving.host import ServerSettings
from tests.adapters.sandbox_servers import health, wait_for

PATIENCE = 60.0
PICTURE = ar.Image.of(np.zeros((2, 3), np.uint8))
CALL = ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "act", {"text": "x"}),))


@ar.register("remote-tests/odd-v0", tasks={"train": [{"do": "nothing"}], "eval": [{"do": "nothing"}]})
class Odd(ar.ToolEnv):
    """Does what its task says."""

    closed = 0
    gate = threading.Event()

    def __init__(self, name: str = "", size: int = 1) -> None:
        self.name, self.size, self.do = name, size, ""

    def reset(self, task, rng):
        self.do = task["do"]
        self.act_out("reset")
        return f"{self.name}{self.size}{rng.integers(2**40)}{[g.random() for g in rng.spawn(2)]}"

    def act_out(self, where: str) -> None:
        if self.do == f"raise in {where}":
            raise ValueError(f"broken in {where}")
        if self.do == f"lose in {where}":
            raise ar.SandboxError("the sandbox is gone")
        if self.do == f"exit in {where}":
            raise SystemExit(3)

    @ar.tool
    async def act(self, text: str) -> str:
        """Say a text again.

        Args:
            text: what to say.
        """
        if self.do == "wait":
            await asyncio.sleep(600)
        return text

    def on_answer(self, action):
        self.act_out("step")
        if self.do == "show":
            return ar.Step((ar.Message("user", parts=["look", PICTURE]),), terminated=True)
        return ar.Step((ar.Message("user", action.content),), terminated=True)

    @ar.reward
    def scored(self, episode):
        self.act_out("score")
        return None if self.do == "not scored" else len(episode.messages) / 3

    @ar.group_reward(weight=0.5)
    def rank(self, group) -> list[float]:
        return [float(i) for i, _ in enumerate(group.episodes)]

    def close(self) -> None:
        type(self).closed += 1
        if self.do == "hang in close":
            self.gate.wait(PATIENCE)
        self.act_out("close")

    def oracle(self):
        yield CALL
        yield "done"


@contextmanager
def served(*envs: str, **settings: object) -> Iterator[str]:
    thread = LoopThread("server under test")
    context = serving([ar.spec(env) for env in envs], ServerSettings(port=0, **settings))
    url = thread.wait(context.__aenter__())
    try:
        yield url
    finally:
        thread.wait(context.__aexit__(None, None, None))
        thread.close()


def content(episode: Episode) -> Episode:
    return replace(episode, id="", env="", seconds=0.0, error=episode.error and replace(episode.error, traceback=""))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("calculator-v0", "search-v0", "guess-v0", "sql-v0", "remote-tests/odd-v0") as url:
        yield url


@pytest.mark.parametrize("env", ["calculator-v0", "search-v0", "guess-v0", "sql-v0"])
@pytest.mark.parametrize("policy", ["demonstrator", "random"])
def test_remote_episodes_equal_local_ones(url: str, env: str, policy: str) -> None:
    here, there = (ar.run(id, policy, n=6, samples=2, split="eval", seed=7) for id in (env, f"{url}/{env}"))
    assert all(episode.env == f"{url}/{env}" for episode in there)
    assert list(map(content, here)) == list(map(content, there))
    assert health(url)["taken"] == 0


def test_remote_images_arrive_whole(url: str) -> None:
    ids = "remote-tests/odd-v0", f"{url}/remote-tests/odd-v0"
    here, there = (asyncio.run(ar.run_jobs(jobs(id, {"do": "show"}), ar.oracle())) for id in ids)
    assert list(map(content, here)) == list(map(content, there)) and there[0].messages[-1].images == (PICTURE,)


def jobs(id: str, *tasks: ar.Task, samples: int = 1, **env_args: ar.JSON) -> list[ar.Job]:
    return [
        ar.Job(ar.spec(id), task, 5 + i, group_id=str(task), env_args=env_args)
        for task in tasks
        for i in range(samples)
    ]


@pytest.mark.filterwarnings("ignore:.*close.. failed")
def test_remote_failures_equal_local_ones(url: str) -> None:
    kinds = ("raise", "lose", "exit")
    tasks = [{"do": f"{kind} in {where}"} for kind in kinds for where in ("reset", "step", "score", "close")]
    tasks = [{"do": "not scored"}, *(task for task in tasks if not task["do"].startswith("exit"))]
    ids = "remote-tests/odd-v0", f"{url}/remote-tests/odd-v0"
    here, there = (asyncio.run(ar.run_jobs(jobs(id, *tasks, name="n", size=3), ar.oracle())) for id in ids)
    assert list(map(content, here)) == list(map(content, there))
    failures = [(e.error.where, e.error.type) for e in there if e.error]
    assert ("reset", "ValueError") in failures and ("step", "SandboxError") in failures
    assert all(e.reward is None for e in there if e.error)
    assert "broken in step" in next(e.error.traceback for e in there if e.error and e.error.where == "step")
    exits = asyncio.run(ar.run_jobs(jobs(ids[1], {"do": "exit in step"}), ar.oracle()))
    assert exits[0].outcome is ar.Outcome.FAILED  # and the server is there
    assert health(url)["taken"] == 0


def test_remote_episodes_are_verified_while_their_server_is_there(tmp_path: Path) -> None:
    with served("guess-v0", "remote-tests/odd-v0") as url:
        odd = ar.run(f"{url}/remote-tests/odd-v0", n=1, samples=3)
        episodes = [*ar.run(f"{url}/guess-v0", "random", n=4), *odd]
        with ar.EpisodeWriter(tmp_path) as writer:
            for episode in episodes:
                writer.write(episode)
        assert ar.verify(tmp_path).counts == {"same": 7}
        taped = ar.verify(tmp_path, mode="cassette")
        assert taped.counts == {"unverified": 7} and taped.exit_code == 2
    gone = ar.verify(tmp_path)
    assert gone.counts == {"unverified": 7} and "http" in next(iter(gone.reasons))


def test_group_rewards_compare_on_the_server(url: str) -> None:
    episodes = ar.run(f"{url}/remote-tests/odd-v0", n=1, samples=3)
    assert [e.value("rank") for e in episodes] == [0.0, 1.0, 2.0]


def test_arguments_and_ids_are_checked_at_once(url: str) -> None:
    with pytest.raises(ar.ConfigError, match=r"no argument 'nme'\. Did you mean 'name'"):
        ar.spec(f"{url}/remote-tests/odd-v0").check_arguments({"nme": 1})
    with pytest.raises(ar.UnknownEnvError, match="Did you mean 'guess-v0'"):
        ar.spec(f"{url}/gess-v0")
    with pytest.raises(ar.ConfigError, match="http://HOST:PORT/NAME-v0"):
        ar.spec("ftp://here/guess-v0")
    assert ar.spec(f"{url}/guess").id == f"{url}/guess-v0"
    assert [t.name for t in ar.make(f"{url}/calculator-v0").tools] == [t.name for t in ar.make("calculator-v0").tools]


def test_served_environment_is_gymnasiums_too(url: str) -> None:
    there, here = (
        gymnasium.make(id, env=f"{at}guess-v0") for id, at in ((SERVED, f"{url}/"), ("agent_rl/guess-v0", ""))
    )
    for env in (there, here):
        env.reset(seed=3)
    assert there.step("16") == here.step("16")
    there.close()
    here.close()


def test_surrogates_and_floats_survive_the_wire(url: str) -> None:
    text = "half \ud83d, \ufdd0, whole \U0001f600, nul \0"
    call = ar.ToolCall("call_0", "act", {"text": text, "more": float("inf")})

    def script(env: ar.Env, seed: int) -> ar.Script:
        (answer,) = yield ar.Message("assistant", tool_calls=(replace(call, arguments={"text": text}),))
        assert answer.content == text
        (answer,) = yield ar.Message("assistant", tool_calls=(call,))
        assert "no such argument" in answer.content
        yield text

    from agent_rl.policy import Scripted

    (episode,) = asyncio.run(ar.run_jobs(jobs(f"{url}/remote-tests/odd-v0", {"do": text}), Scripted(script)))
    assert (episode.error, episode.final_text, episode.task["do"]) == (None, text, text)


def test_full_server_makes_wait_then_refuses() -> None:
    with served("remote-tests/odd-v0", capacity=2, wait=PATIENCE) as url:
        episodes = ar.run(f"{url}/remote-tests/odd-v0", n=1, samples=9)
        assert [e.outcome for e in episodes] == [ar.Outcome.TERMINATED] * 9
        assert health(url)["opened"] == 9
    with served("remote-tests/odd-v0", capacity=1, wait=0.05) as url, held(url, 1):
        (episode,) = ar.run(f"{url}/remote-tests/odd-v0", n=1)
        assert (episode.error.type, episode.reward) == ("RemoteError", None)
        assert "the server is full: all 1 places" in episode.error.message


HOLDER = """
import asyncio, sys
import agent_rl as ar
from agent_rl.seeds import Stream, rng
async def main(env, n):
    held = [ar.make(env) for _ in range(n)]
    for i, world in enumerate(held):
        await world.reset({"do": "exit in close"}, rng(Stream.ENVIRONMENT, i))
    print("held", flush=True)
    await asyncio.sleep(600)
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@contextmanager
def held(url: str, n: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds places and does nothing with them."""
    words = [sys.executable, "-c", HOLDER, f"{url}/remote-tests/odd-v0", str(n)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "held\n"
            yield client
        finally:
            client.kill()


def test_wait_for_a_place_is_not_the_environments_time() -> None:
    with served("remote-tests/odd-v0", capacity=1, wait=PATIENCE) as url, held(url, 1) as holder:
        job = replace(jobs(f"{url}/remote-tests/odd-v0", {"do": "nothing"})[0], budget=ar.Budget(seconds=1.0))

        async def main() -> list[Episode]:
            playing = asyncio.create_task(ar.run_jobs([job], ar.oracle()))
            await asyncio.sleep(1.5)
            holder.kill()
            return await playing

        (episode,) = asyncio.run(main())
    assert (episode.error, episode.stop_reason) == (None, ar.StopReason.DONE)


def test_places_of_killed_and_frozen_clients_come_back() -> None:
    """A stopped process keeps its connection half open, as a machine does that lost its network; each `close` exits."""
    before = Odd.closed
    with served("remote-tests/odd-v0", capacity=8, wait=PATIENCE, ping=1.0) as url:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with held(url, 8) as client:
                assert (health(url)["taken"], health(url)["clients"]) == (8, 1)
                os.kill(client.pid, number)
                wait_for(lambda: health(url)["taken"] == 0, f"places after {number.name}")
        counts = health(url)
    assert (counts["lost"], counts["clients"], Odd.closed - before) == (16, 0, 17)  # and one to list the tools


def test_unused_leases_run_out() -> None:
    with served("remote-tests/odd-v0", capacity=2, ttl=0.2) as url:

        async def idle() -> None:
            env = ar.make(f"{url}/remote-tests/odd-v0")
            await env.reset({"do": "nothing"}, ar.seeds.rng(ar.seeds.Stream.WORLD, 1))
            while health(url)["taken"]:
                await asyncio.sleep(0.05)
            with pytest.raises(ar.RemoteError, match="the lease is gone: it ran out"):
                await env.step(ar.Message("assistant", "late"))
            await env.close()

        asyncio.run(asyncio.wait_for(idle(), PATIENCE))
        assert health(url)["expired"] == 1


def test_cut_steps_free_their_place(url: str) -> None:
    job = replace(jobs(f"{url}/remote-tests/odd-v0", {"do": "wait"})[0], budget=ar.Budget(seconds=1.0))
    (episode,) = asyncio.run(ar.run_jobs([job], ar.oracle()))
    assert episode.stop_reason is ar.StopReason.SECONDS
    wait_for(lambda: health(url)["taken"] == 0, "the place of a cut step")


def test_hanging_close_frees_its_place_in_time() -> None:
    spec = replace(ar.spec("remote-tests/odd-v0"), budget=ar.Budget(close_seconds=0.1))
    thread = LoopThread("server under test")
    context = serving([spec], ServerSettings(port=0, capacity=1))
    url = thread.wait(context.__aenter__())
    with pytest.warns(RuntimeWarning, match="close took more than"):
        asyncio.run(ar.run_jobs(jobs(f"{url}/remote-tests/odd-v0", {"do": "hang in close"}), ar.oracle()))
    assert health(url)["taken"] == 0
    Odd.gate.set()
    thread.wait(context.__aexit__(None, None, None))
    thread.close()


@contextmanager
def serve_process(port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    line = [sys.executable, "-m", *"agent-rl serve guess-v0".replace("-", "_", 1).split(), "--port", str(port)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().strip().removeprefix("env=")
        finally:
            server.kill()


def test_server_that_was_started_again_is_asked_again() -> None:
    thread, port, found = LoopThread("server under test"), 0, []
    for do, count in (("this", 3), ("that", 5)):
        tasks = TaskSource({"train": [{"do": do}] * count})
        context = serving([replace(ar.spec("remote-tests/odd-v0"), tasks=tasks)], ServerSettings(port=port))
        url = thread.wait(context.__aenter__())
        there = ar.spec(f"{url}/remote-tests/odd-v0").tasks
        found.append((there.get("train", 0)["do"], there.size("train")))
        thread.wait(context.__aexit__(None, None, None))
        port = int(url.rpartition(":")[2])
    thread.close()
    assert found == [("this", 3), ("that", 5)]


def test_dead_server_fails_episodes_and_a_new_one_plays() -> None:
    from agent_rl.policy import Scripted

    def script(env: ar.Env, seed: int) -> ar.Script:
        yield "20"
        server.kill()
        server.wait()
        yield "21"

    with serve_process(0) as (server, env):
        (lost,) = ar.run(env, Scripted(script), n=1)
    assert (lost.outcome, lost.error.type, lost.reward) == (ar.Outcome.FAILED, "RemoteError", None)
    assert issubclass(ar.RemoteError, ar.InfrastructureError)
    with pytest.raises(ar.RemoteError, match="agent-rl serve starts one"):
        ar.run(env, n=1)
    with serve_process(int(env.split(":")[2].split("/")[0])) as (again, same):
        assert same == env
        assert [e.reward for e in ar.run(env, n=3)] == [1.1] * 3
        again.send_signal(signal.SIGTERM)
        assert again.wait(PATIENCE) == 0


def test_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("guess-v0", token="secret") as url:
        assert health(url)["envs"] == ["guess-v0"]
        for wrong in ("", "secre", "Secret"):
            monkeypatch.setenv(TOKEN, wrong)
            with pytest.raises(ar.ConfigError, match=f"401: set {TOKEN}"):
                ar.spec(f"{url}/guess-v0")
        monkeypatch.setenv(TOKEN, "secret")
        assert ar.run(f"{url}/guess-v0", n=1)[0].reward == 1.1
    with pytest.raises(ar.ConfigError, match=TOKEN):
        ServerSettings(host="0.0.0.0")


def handshake(url: str, *headers: str) -> tuple[str, socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=PATIENCE)
    lines = (f"GET {wire.PATH} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade")
    lines += ("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13", *headers, "", "")
    raw.sendall("\r\n".join(lines).encode())
    return raw.recv(4096).split(b"\r\n")[0].decode(), raw


def test_pages_of_browsers_are_refused(url: str) -> None:
    status, raw = handshake(url, "Origin: https://elsewhere.example")
    raw.close()
    assert "403" in status


def test_wrong_frames_are_answered_or_end_the_connection(url: str) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    head = '{"op":"step","call":9,'
    with connect(url.replace("http", "ws") + wire.PATH) as client:
        for frame in (head + '"lease":"x"}', head + '"lease":7,"action":{}}', head + '"lease":"x","no":1}', head):
            client.send(frame)
            reply = wire.load_reply(client.recv(timeout=PATIENCE))
            assert reply.call == 9 and reply.error is not None and reply.error.type == "RemoteError"
        client.send(head + '"lease":"x","action":{"role":"assistant"}}')
        assert "gone" in wire.load_reply(client.recv(timeout=PATIENCE)).error.message
        client.send("no json")
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=PATIENCE)
    assert health(url)["taken"] == 0


def test_episodes_of_a_process_share_a_connection(url: str) -> None:
    for _ in range(3):
        ar.run(f"{url}/guess-v0", n=4)
    assert connection(url) is connection(url)
    assert health(url)["clients"] == 1
