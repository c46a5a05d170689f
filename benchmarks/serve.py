"""Sessions of remote environments at once, and what becomes of their places: `python benchmarks/serve.py`.

A server of one process; clients of several, each with its share of the sessions: episodes of four steps, one after the
other. First a session takes a step as soon as it has its last answer, then one a second or so. Then clients are killed
at random, or stopped, so that their connections stay half open, and others take their place. At the end all places have
to be free.

`python benchmarks/serve.py --beside openenv`, where openenv-core is (`.venv-adapters`): the same sessions on OpenEnv's
server and ours in turn, and by how much they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

import agent_rl as ar
from agent_rl.core.messages import Task
from agent_rl.remote.client import RemoteEnv
from agent_rl.remote.server import serving
from agent_rl.seeds import Stream, rng
from agent_rl.serving.host import ServerSettings

STEPS = 4
PING = 2.0
"""Seconds between the server's pings, so that a stopped client is found out soon."""
OURS, OPENENV = "agent_rl", "openenv"


@ar.register("bench/echo-v0", tasks={"train": [{"n": 1}], "eval": [{"n": 1}]})
class Echo(ar.Env):
    """Says again what it was told."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Begin."""
        return "say something"

    def step(self, action: ar.Message) -> ar.Step:
        """Say it again."""
        return ar.Step((ar.Message("user", action.content),))


# A client's process


class Session(Protocol):
    """A session of a server: episodes, one after the other."""

    async def reset(self) -> object:
        """Begin an episode."""

    async def step(self, text: str) -> object:
        """Say something."""

    async def close(self) -> object:
        """End the episode."""


class OurSession:
    """A session of `agent-rl serve`: a lease an episode, on its process's connection."""

    def __init__(self, url: str) -> None:
        self.env, self.rng = f"{url}/bench/echo-v0", rng(Stream.WORLD, 0)

    async def reset(self) -> object:
        """Take a lease."""
        self.world = ar.make(self.env)
        assert isinstance(self.world, RemoteEnv)
        return await self.world.reset({"n": 1}, self.rng)

    async def step(self, text: str) -> object:
        """Say something."""
        return await self.world.step(ar.Message("assistant", text))

    async def close(self) -> object:
        """Give the lease back."""
        return await self.world.close()


async def play(session: Session, think: float, seed: int, until: float, seconds: list[float]) -> None:
    """Play episodes until it is time; add how long each request took."""
    numbers = rng(Stream.WORLD, seed)
    while time.time() < until:
        for turn in range(STEPS + 1):
            if think:
                await asyncio.sleep(think * numbers.uniform(0.5, 1.5))
            began = time.perf_counter()
            await (session.step("hello " * 20) if turn else session.reset())
            seconds.append(time.perf_counter() - began)
        await session.close()


async def client(make: Callable[[str], Session], url: str, sessions: int, think: float) -> None:
    """Be ready, wait to be told until when, play, and print what was measured."""
    players = [make(url) for _ in range(sessions)]
    for one in players:  # who keeps a connection has it before the time is taken
        await one.reset()
        await one.close()
    print("ready", flush=True)
    until = float(await asyncio.to_thread(sys.stdin.readline))  # pings are answered meanwhile
    seconds: list[float] = []
    own = os.getpid() * 1000
    used = time.process_time()
    await asyncio.gather(*(play(one, think, own + i, until, seconds) for i, one in enumerate(players)))
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - used}))


# The server, and what is measured


def health(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


@contextmanager
def server(capacity: int, of: str = OURS) -> Iterator[tuple[str, int]]:
    """Serve in another process; yield the address and the process's id."""
    words = [sys.executable, __file__, "--of", of, "--serve", str(capacity)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.terminate()


async def serve(capacity: int) -> None:
    async with serving([ar.spec("bench/echo-v0")], ServerSettings(port=0, capacity=capacity, ping=PING)) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def start(url: str, sessions: int, think: float, of: str = OURS) -> subprocess.Popen[str]:
    """Start a client, and wait until it is ready."""
    words = [sys.executable, __file__, "--of", of, "--client", url, str(sessions), str(think)]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def go(clients: Iterable[subprocess.Popen[str]], until: float) -> None:
    """Let clients play."""
    for one in clients:
        assert one.stdin is not None
        one.stdin.write(f"{until}\n")
        one.stdin.flush()


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """What the requests of all clients took together."""

    per_second: float
    p50: float
    """Milliseconds, as is `p99`."""
    p99: float
    server: float
    """CPU microseconds of a request, as is `client`."""
    client: float
    peak: int | None
    """Sessions at once, where the server tells."""

    def __str__(self) -> str:
        return (
            f"{self.per_second:,.0f} requests/s, p50 {self.p50:.1f} ms, p99 {self.p99:.0f} ms; "
            f"CPU of a request: server {self.server:.0f} us, client {self.client:.0f} us"
        )


def measure(
    url: str, process: int, clients: int, sessions: int, think: float, seconds: float, of: str = OURS
) -> Measured:
    """Let clients play against a server for some seconds."""
    running = [start(url, sessions // clients, think, of) for _ in range(clients)]
    began, used = time.time(), cpu_seconds(process)
    until = began + seconds
    go(running, until)
    peak = 0
    while time.time() < until:
        peak = max(peak, health(url).get("taken", 0))
        time.sleep(0.5)
    told = [json.loads(one.communicate()[0]) for one in running]
    used, took = cpu_seconds(process) - used, time.time() - began
    latencies = np.array([each for one in told for each in one["seconds"]])
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    per = 1e6 / len(latencies)
    return Measured(len(latencies) / took, p50, p99, used * per, sum(one["cpu"] for one in told) * per, peak or None)


def compare(clients: int, sessions: int, seconds: float, rounds: int) -> None:
    """Measure OpenEnv's server and ours in turn; print each, and the ratio of the least CPU times."""
    found: dict[str, list[Measured]] = {OPENENV: [], OURS: []}
    for _ in range(rounds):
        for of, measured in found.items():
            with server(sessions, of) as (url, process):
                measured.append(measure(url, process, clients, sessions, 0.0, seconds, of))
            print(f"{of}, {sessions} sessions, load {os.getloadavg()[0]:.1f}: {measured[-1]}", flush=True)
    theirs, ours = (
        {side: min(getattr(one, side) for one in found[of]) for side in ("server", "client")} for of in found
    )
    ratios = ", ".join(f"{side} {theirs[side] / ours[side]:.1f}" for side in ours)
    whole = sum(theirs.values()) / sum(ours.values())
    print(f"OpenEnv's least CPU of a request over ours: {ratios}, both {whole:.1f}")


def kill_at_random(url: str, clients: int, sessions: int, kills: int) -> None:
    """Kill or stop clients at random while all play, and start others; print what is left of their places."""
    chance, before, never = random.Random(0), health(url), time.time() + 3600
    running = [start(url, sessions // clients, 0.1) for _ in range(clients)]
    go(running, never)
    ends, gone = {signal.SIGKILL: 0, signal.SIGSTOP: 0}, []
    peak = 0
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 1.0))
        peak = max(peak, health(url)["taken"])
        gone.append(running.pop(chance.randrange(len(running))))
        end = chance.choice(list(ends))
        gone[-1].send_signal(end)
        ends[end] += 1
        running.append(start(url, sessions // clients, 0.1))
        go(running[-1:], never)
    for one in running:
        one.kill()
    ended, gone = time.time(), gone + running
    while (now := health(url))["taken"] or now["clients"]:
        assert time.time() < ended + 300, now
        time.sleep(0.1)
    for one in gone:
        one.kill()
        one.communicate()
    print(
        f"{ends[signal.SIGKILL] + len(running)} clients killed and {ends[signal.SIGSTOP]} stopped, of "
        f"{sessions // clients} sessions each, {peak} at once: {now['opened'] - before['opened']} leases opened, "
        f"{now['lost'] - before['lost']} lost their client; {now['taken']} places taken "
        f"{time.time() - ended:.1f} s after the last"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=8, help="processes that share them")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--kills", type=int, default=24, help="clients that are killed or stopped")
    parser.add_argument("--beside", choices=[OPENENV], help="measure this server and ours in turn, and nothing else")
    parser.add_argument("--rounds", type=int, default=3, help="with --beside")
    parser.add_argument("--of", choices=[OURS, OPENENV], default=OURS, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve or given.client:
        make: Callable[[str], Session] = OurSession
        served = serve
        if given.of == OPENENV:
            import serve_openenv

            make, served = serve_openenv.OpenEnvSession, serve_openenv.serve
        if given.serve:
            asyncio.run(served(given.serve))
        else:
            url, sessions, think = given.client
            asyncio.run(client(make, url, int(sessions), float(think)))
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if given.beside:
        compare(given.clients, given.sessions, given.seconds, given.rounds)
        return
    with server(given.sessions) as (url, process):
        for think in (0.0, 1.0):
            measured = measure(url, process, given.clients, given.sessions, think, given.seconds)
            print(f"think {think:3.1f} s: {measured.peak} sessions at once, {measured}", flush=True)
        kill_at_random(url, given.clients, given.sessions, given.kills)


if __name__ == "__main__":
    main()
