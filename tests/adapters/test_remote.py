"""Environments on a server: the same episodes as here, and places that come back from every kind of client."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest

import agent_rl as ar
from agent_rl.core.episode import Episode
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.gym.published import SERVED
from agent_rl.gym.tasks import TaskSource
from agent_rl.policy import Scripted
from agent_rl.remote import wire
from agent_rl.remote.client import connection
from agent_rl.remote.server import serving
from agent_rl.serving.frames import TOKEN
from agent_rl.serving.host import ServerSettings
from tests.adapters.env_servers import PATIENCE, PICTURE, jobs, served
from tests.adapters.sandbox_servers import health, in_thread, wait_for
from tests.sandbox.test_lost_episodes import Work

WORK = "losses-work-v0"
ar.register(WORK, tasks=lambda split, index: {"index": index})(Work)


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


@pytest.mark.parametrize("cause", [Cause.MEMORY, Cause.BACKEND_GONE])
@pytest.mark.parametrize("breaks", ["step", "score", "nowhere"])
def test_remote_losses_of_sandboxes_equal_local_ones(cause: Cause, breaks: str) -> None:
    lose = ar.Message("assistant", tool_calls=(ar.ToolCall("c", "python", {"code": str(cause)}),))
    play = Scripted(lambda env, seed: (reply for reply in (lose, "done")))
    task, env_args = {"index": 0}, {"breaks": breaks, "penalty": 0.5}
    with served(WORK) as url:
        here, there = (asyncio.run(ar.run_jobs(jobs(id, task, **env_args), play))[0] for id in (WORK, f"{url}/{WORK}"))
    assert content(here) == content(there) and there.sandbox_loss == SandboxLoss(cause, "gone")
    assert there.ending == ("sandbox_ended" if cause is Cause.MEMORY else "sandbox_lost")


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

    (episode,) = asyncio.run(ar.run_jobs(jobs(f"{url}/remote-tests/odd-v0", {"do": text}), Scripted(script)))
    assert (episode.error, episode.final_text, episode.task["do"]) == (None, text, text)


def test_cut_steps_free_their_place(url: str) -> None:
    job = replace(jobs(f"{url}/remote-tests/odd-v0", {"do": "wait"})[0], budget=ar.Budget(seconds=1.0))
    (episode,) = asyncio.run(ar.run_jobs([job], ar.oracle()))
    assert episode.stop_reason is ar.StopReason.SECONDS
    wait_for(lambda: health(url)["taken"] == 0, "the place of a cut step")


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
    port, found = 0, []
    for do, count in (("this", 3), ("that", 5)):
        tasks = TaskSource({"train": [{"do": do}] * count})
        context = serving([replace(ar.spec("remote-tests/odd-v0"), tasks=tasks)], ServerSettings(port=port))
        with in_thread(context) as url:
            there = ar.spec(f"{url}/remote-tests/odd-v0").tasks
            found.append((there.get("train", 0)["do"], there.size("train")))
        port = int(url.rpartition(":")[2])
    assert found == [("this", 3), ("that", 5)]


def test_dead_server_fails_episodes_and_a_new_one_plays() -> None:
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


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_server_of_all_addresses_names_its_machine(host: str) -> None:
    with served("guess-v0", host=host, token="secret") as url:
        assert url.startswith(f"http://{socket.gethostname()}:")


def test_address_that_asks_for_tls_in_vain_says_so(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ar.RemoteError, match=r" at https.* \(\w.*\): .* starts one, at http:// without TLS"):
        ar.spec(f"{url.replace('http', 'https')}/guess-v0")
    assert health(url) and not caplog.text  # the server has nothing to say of it


def test_players_of_a_match_meet_on_no_server() -> None:
    with served("nim-v0") as url, pytest.raises(ar.ConfigError, match="on a server, where no players meet"):
        ar.run(f"{url}/nim-v0", ["oracle", "oracle"], n=1)


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
