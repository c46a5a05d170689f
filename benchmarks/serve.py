"""Sessions of remote environments at once, and what becomes of their places: `python benchmarks/serve.py`.

A server of one process; clients of several, each with its share of the sessions: episodes of four steps, one after the
other. First a session takes a step as soon as it has its last answer, then one a second or so. Then clients are killed
at random, or stopped, so that their connections stay half open, and others take their place. At the end all places have
to be free.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import agent_rl as ar
from agent_rl.core.messages import Task
from agent_rl.remote.client import RemoteEnv
from agent_rl.remote.server import ServerSettings, serving
from agent_rl.seeds import Stream, rng

STEPS = 4
PING = 2.0
"""Seconds between the server's pings, so that a stopped client is found out soon."""


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


async def session(env: str, think: float, seed: int, until: float, seconds: list[float]) -> None:
    """Play episodes until it is time; add how long each request took."""
    numbers = rng(Stream.WORLD, seed)
    action = ar.Message("assistant", "hello " * 20)
    while time.time() < until:
        world = ar.make(env)
        assert isinstance(world, RemoteEnv)
        for turn in range(STEPS + 1):
            if think:
                await asyncio.sleep(think * numbers.uniform(0.5, 1.5))
            began = time.perf_counter()
            await (world.step(action) if turn else world.reset({"n": 1}, numbers))
            seconds.append(time.perf_counter() - began)
        await world.close()


async def client(env: str, sessions: int, think: float) -> None:
    """Be ready, wait to be told until when, play, and print what was measured."""
    ar.make(env)
    print("ready", flush=True)
    until = float(sys.stdin.readline())
    seconds: list[float] = []
    own = os.getpid() * 1000
    used = time.process_time()
    await asyncio.gather(*(session(env, think, own + i, until, seconds) for i in range(sessions)))
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - used}))


# The server, and what is measured


def health(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


@contextmanager
def server(capacity: int) -> Iterator[tuple[str, int]]:
    """Serve in another process; yield the address and the process's id."""
    words = [sys.executable, __file__, "--serve", str(capacity)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.terminate()


async def serve(capacity: int) -> None:
    async with serving([ar.spec("bench/echo-v0")], ServerSettings(port=0, capacity=capacity, ping=PING)) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def start(url: str, sessions: int, think: float) -> subprocess.Popen[str]:
    """Start a client, and wait until it is ready."""
    words = [sys.executable, __file__, "--client", url, str(sessions), str(think)]
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


def measure(url: str, process: int, clients: int, sessions: int, think: float, seconds: float) -> None:
    """Print the requests a second and their latencies, of all clients together."""
    running = [start(url, sessions // clients, think) for _ in range(clients)]
    began, used = time.time(), cpu_seconds(process)
    until = began + seconds
    go(running, until)
    peak = 0
    while time.time() < until:
        peak = max(peak, health(url)["taken"])
        time.sleep(0.5)
    told = [json.loads(one.communicate()[0]) for one in running]
    used, took = cpu_seconds(process) - used, time.time() - began
    latencies = np.array([each for one in told for each in one["seconds"]])
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    server_cpu, client_cpu = (cpu / len(latencies) * 1e6 for cpu in (used, sum(one["cpu"] for one in told)))
    print(
        f"think {think:3.1f} s: {peak} sessions at once, {len(latencies) / took:,.0f} requests/s, "
        f"p50 {p50:.1f} ms, p99 {p99:.0f} ms; CPU of a request: server {server_cpu:.0f} us, client {client_cpu:.0f} us",
        flush=True,
    )


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=8, help="processes that share them")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=24, help="clients that are killed or stopped")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve))
        return
    if given.client:
        url, sessions, think = given.client
        asyncio.run(client(f"{url}/bench/echo-v0", int(sessions), float(think)))
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with server(given.sessions) as (url, process):
        for think in (0.0, 1.0):
            measure(url, process, given.clients, given.sessions, think, given.seconds)
        kill_at_random(url, given.clients, given.sessions, given.kills)


if __name__ == "__main__":
    main()
