"""Places of a server of environments: waited for, given back, and freed of every kind of client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import agent_rl as ar
from agent_rl.core.episode import Episode
from agent_rl.remote.server import serving
from agent_rl.serving.host import ServerSettings
from tests.adapters.env_servers import PATIENCE, Odd, jobs, served
from tests.adapters.sandbox_servers import health, in_thread, wait_for


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


def test_hanging_close_frees_its_place_in_time() -> None:
    spec = replace(ar.spec("remote-tests/odd-v0"), budget=ar.Budget(close_seconds=0.1))
    with in_thread(serving([spec], ServerSettings(port=0, capacity=1))) as url:
        with pytest.warns(RuntimeWarning, match="close took more than"):
            asyncio.run(ar.run_jobs(jobs(f"{url}/remote-tests/odd-v0", {"do": "hang in close"}), ar.oracle()))
        assert health(url)["taken"] == 0
        Odd.gate.set()
