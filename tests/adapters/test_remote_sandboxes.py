"""Leases of sandboxes on servers: they come back from every kind of client, and none is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.core.meter import Meter, meter
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.calls import ExecResult
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.remote import RemoteSandboxes
from agent_rl.serving import link
from agent_rl.testing import FakeSandboxes
from tests.adapters.sandbox_servers import PATIENCE, ROOT, health, serve_command, served, wait_for
from tests.sandbox.backends import LIMITS

WORKER = """
import asyncio, sys
from agent_rl.sandboxes.remote import RemoteSandboxes

async def main(url, name, count):
    sandboxes = RemoteSandboxes(url)
    opened = [await sandboxes.open(owner=name) for _ in range(count)]
    for number, sandbox in enumerate(opened):
        await sandbox.write_file("mine", f"{name} {number}".encode())
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        found = [await sandbox.read_file("mine") for sandbox in opened]
        print(found == [f"{name} {number}".encode() for number in range(count)], flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

LEASES = int(os.environ.get("AGENT_RL_BAR", "0")) or 40
"""Jails, at once; AGENT_RL_BAR=1000 is the bar, and takes 6 GB and some minutes."""


def worker(url: str, name: str, count: int, code: str = WORKER) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, url, name, str(count)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


# Places


def test_thousand_leases_survive_workers_killed_at_random() -> None:
    """Each of 1,000 places is its owner's until that is killed, and then it is free."""
    backend, chance = FakeSandboxes(), random.Random(19)
    with served(backend, capacity=1000) as url, ExitStack() as ended:
        workers = [ended.enter_context(worker(url, str(number), 200)) for number in range(5)]
        try:
            assert [each.stdout.readline() for each in workers] == ["ready\n"] * 5
            assert health(url)["taken"] == 1000
            chance.shuffle(workers)
            while workers:
                workers.pop().kill()
                wait_for(lambda: health(url)["taken"] == 200 * len(workers), "the places of the killed")
                for each in workers:
                    print("check", file=each.stdin, flush=True)
                assert [each.stdout.readline() for each in workers] == ["True\n"] * len(workers)
        finally:
            for each in workers:
                each.kill()
        assert len(backend.opened) == 1000 and all(fake.closed for fake in backend.opened)
        counts = health(url)
        assert (counts["opened"], counts["lost"], counts["refused"], counts["expired"]) == (1000, 1000, 0, 0)


HOLDER = """
import asyncio, sys
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.remote import RemoteSandboxes

async def main(url, name, count):
    sandboxes = RemoteSandboxes(url, limits=Limits(memory=64 << 20, disk=1 << 20), wait=600)
    opened = []
    for number in range(count):
        opened.append(await sandboxes.open(owner=name))
        await opened[-1].write_file("mine", f"{name} {number}".encode())
        await opened[-1].run_python(f"mine = {number}")
        print(number, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        files = [await sandbox.read_file("mine") for sandbox in opened]
        values = [(await sandbox.run_python("mine")).value for sandbox in opened]
        right = files == [f"{name} {n}".encode() for n in range(count)] and values == [*map(str, range(count))]
        print("right" if right else f"{files} {values}", flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def below(pid: int) -> int:
    """Return how many processes descend from one."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return len(family) - 1


def test_leases_of_real_jails_survive_workers_killed_at_random() -> None:
    """All places are jails, held at once; workers are killed while they open theirs, and while they hold them."""
    each, chance = LEASES // 5, random.Random(19)
    with ExitStack() as ended:
        server, url = ended.enter_context(serve_command("--capacity", str(LEASES), "--wait", "600", "tier=jail"))
        workers = list[subprocess.Popen[str]]()

        def start() -> None:
            name = str(next(names))
            workers.append(ended.enter_context(worker(url, name, each, HOLDER)))
            ended.callback(workers[-1].kill)

        names = itertools.count()
        for _ in range(5):
            start()
        for _ in range(3):  # killed while they open
            victim = workers[chance.randrange(5)]
            for _ in range(chance.randrange(1, each)):
                victim.stdout.readline()
            victim.kill()
            workers.remove(victim)
            start()
        for holder in workers:
            while holder.stdout.readline() != f"{each - 1}\n":
                assert holder.poll() is None
        wait_for(lambda: health(url)["taken"] == 5 * each, "the places of those killed while they opened")
        jails = below(server.pid)
        assert jails >= 2 * 5 * each, "each has an agent and an interpreter"
        chance.shuffle(workers)
        while workers:
            workers.pop().kill()
            wait_for(lambda: health(url)["taken"] == each * len(workers), "the places of the killed")
            for holder in workers:
                print("check", file=holder.stdin, flush=True)
            assert [holder.stdout.readline() for holder in workers] == ["right\n"] * len(workers)
        counts = health(url)
        print(f"{counts['opened']} leases of {5 * each} places, {jails} processes, then {below(server.pid)}; {counts}")
        assert counts["opened"] == counts["lost"] > 5 * each and counts["refused"] == counts["expired"] == 0
        wait_for(lambda: below(server.pid) <= 1, "all but the process that makes jails")


def test_leases_end_in_any_order_of_cancelled_calls() -> None:
    """However opening, running and closing are cancelled, every sandbox is closed and every place free."""
    chance = random.Random(7)

    async def use(sandboxes: RemoteSandboxes) -> None:
        sandbox = await sandboxes.open()
        try:
            await sandbox.run_python("1")
            await sandbox.write_file("a", b"b")
        finally:
            await sandbox.close()

    async def main(url: str) -> None:
        sandboxes = RemoteSandboxes(url)
        tasks = [asyncio.create_task(use(sandboxes)) for _ in range(200)]
        for _ in range(300):
            chance.choice(tasks).cancel()
            await asyncio.sleep(0.001 * chance.random())
        await asyncio.gather(*tasks, return_exceptions=True)

    backend = FakeSandboxes()
    with served(backend, capacity=20) as url:
        asyncio.run(main(url))
        wait_for(lambda: health(url)["taken"] == health(url)["waiting"] == 0, "the places")
        assert all(fake.closed for fake in backend.opened)


def test_wait_for_a_place_is_not_the_environments_time() -> None:
    async def main(url: str) -> float:
        sandboxes, running = RemoteSandboxes(url), Meter()
        kept = await sandboxes.open()
        meter.set(running)
        opening = asyncio.create_task(sandboxes.open())
        await asyncio.sleep(0.5)
        await kept.close()
        await (await opening).close()
        return running.spent

    with served(FakeSandboxes(), capacity=1) as url:
        assert asyncio.run(main(url)) < -0.4


def runs(marker: str) -> bool:
    """Whether a process of this machine has that among its arguments."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if marker.encode() in file.read_bytes().split(b"\0"):
                return True
    return False


def test_killed_client_takes_its_processes_along() -> None:
    marker = f"{os.getpid()}.{time.monotonic_ns()}"
    code = f"kept = await sandboxes.open(); await kept.start(['sleep', '{marker}'])"
    script = WORKER.replace("opened = ", f"{code}\n    opened = ")
    with served(LocalSandboxes(LIMITS)) as url:
        command = [sys.executable, "-c", script, url, "x", "1"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout.readline() == "ready\n"
            wait_for(lambda: runs(marker), "the process")
            client.kill()
        wait_for(lambda: health(url)["taken"] == 0 and not runs(marker), "the end of its sandboxes")


FROZEN = """
import asyncio, os, signal, sys
from agent_rl.sandboxes.remote import RemoteSandboxes

async def main(url):
    sandbox = await RemoteSandboxes(url).open()
    await sandbox.write_file("a", b"x" * (15 << 20))
    reads = [asyncio.create_task(sandbox.read_file("a")) for _ in range(8)]
    await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main(sys.argv[1]))
"""


def test_client_frozen_amid_its_answers_is_gone() -> None:
    """The server's pings wait behind the answers that it doesn't take."""
    with served(ping=2.0) as url, worker(url, "x", 1, FROZEN) as client:
        try:
            wait_for(lambda: health(url)["opened"] == 1, "its sandbox")
            wait_for(lambda: health(url)["taken"] == 0, "its place")
            assert os.waitpid(client.pid, os.WUNTRACED | os.WNOHANG)[0] == client.pid  # it is stopped, and lives
        finally:
            client.kill()


def test_calls_of_a_frozen_server_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PING", 2.0)

    async def main(url: str, server: int) -> None:
        sandbox = await RemoteSandboxes(url).open()
        os.kill(server, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(ar.SandboxError, match="was lost") as raised:
                await sandbox.write_file("a", b"x" * (15 << 20))
        assert raised.value.loss.cause is Cause.BACKEND_GONE

    with serve_command() as (server, url):
        try:
            asyncio.run(main(url, server.pid))
        finally:
            server.send_signal(signal.SIGCONT)


def test_unused_and_outlived_leases_are_freed() -> None:
    async def main(url: str) -> None:
        sandboxes = RemoteSandboxes(url)
        kept = [await sandboxes.open(), await sandboxes.open(lifetime=0.1)]
        await asyncio.to_thread(wait_for, lambda: health(url)["taken"] == 0, "the places")
        for sandbox in kept:
            with pytest.raises(ar.SandboxError, match="ran out") as raised:
                await sandbox.run_python("1")
            assert raised.value.loss.cause is Cause.LIFETIME and not raised.value.loss.is_failure
            await sandbox.close()

    backend = FakeSandboxes()
    with served(backend, ttl=1.0) as url:
        asyncio.run(main(url))
        assert all(fake.closed for fake in backend.opened) and health(url)["expired"] == 2


def test_collected_sandbox_gives_its_lease_back() -> None:
    async def main(url: str) -> None:
        sandbox = await RemoteSandboxes(url).open()
        assert health(url)["taken"] == 1
        del sandbox
        gc.collect()
        await asyncio.to_thread(wait_for, lambda: health(url)["taken"] == 0, "the place")

    with served() as url:
        asyncio.run(main(url))


# A pool of servers


def test_pool_fills_its_servers_evenly_and_waits() -> None:
    async def main(urls: list[str]) -> None:
        sandboxes = RemoteSandboxes(urls, wait=PATIENCE)
        opened = [await sandboxes.open() for _ in range(3)]
        assert sum(health(url)["taken"] for url in urls) == 3 and all(health(url)["taken"] for url in urls)
        opened += [await sandboxes.open() for _ in range(3)]
        assert [health(url)["taken"] for url in urls] == [2, 4]
        waiting = asyncio.create_task(sandboxes.open())
        while not any(health(url)["waiting"] for url in urls):
            await asyncio.sleep(0.01)
        for sandbox in opened:
            await sandbox.close()
        await (await waiting).close()
        with pytest.raises(ar.ConfigError, match="no address"):
            RemoteSandboxes("http://HOST/sandboxes/v1")
        assert (await sandboxes.capabilities())["files"] is None

    with served(capacity=2) as one, served(capacity=4) as two:
        asyncio.run(main([one, two]))


def test_full_servers_say_so() -> None:
    async def main(url: str) -> None:
        sandboxes = RemoteSandboxes(url, wait=0.01)
        held = await sandboxes.open()
        with pytest.raises(ar.SandboxError, match="all 1 places are taken") as raised:
            await sandboxes.open()
        assert raised.value.loss.cause is Cause.NOT_OPENED
        await held.close()
        await (await sandboxes.open()).close()

    with served(capacity=1) as url:
        asyncio.run(main(url))


def test_dead_server_is_infrastructure_and_others_go_on() -> None:
    async def main(url: str) -> None:
        with serve_command() as (dying, gone):
            sandboxes = RemoteSandboxes([gone, url])
            opened = [await sandboxes.open() for _ in range(2)]
            lost = next(sandbox for sandbox in opened if gone in repr(sandbox))
            call = asyncio.create_task(lost.exec(["sleep", "100"], timeout=200))
            await asyncio.sleep(0.3)
            dying.kill()
            for attempt in (call, lost.run_python("1")):
                with pytest.raises(ar.SandboxError, match="was lost") as raised:
                    await attempt
                assert raised.value.loss.cause is Cause.BACKEND_GONE
            assert lost.loss is not None and not lost.loss.is_failure
            opened += [await sandboxes.open() for _ in range(3)]
            for sandbox in opened:
                await sandbox.close()
            assert health(url)["opened"] == 4

    with served() as url:
        asyncio.run(main(url))


def test_losses_keep_their_cause() -> None:
    loss = SandboxLoss(Cause.HOST_MEMORY, "no memory", {"oom_kills": 3})

    def fail(argv: object) -> ExecResult:
        raise ar.SandboxError("the sandbox was lost: no memory", loss)

    async def use(sandbox: Sandbox) -> None:
        with pytest.raises(ar.SandboxError, match="no memory") as raised:
            await sandbox.exec(["true"])
        assert raised.value.loss == sandbox.loss == loss
        await sandbox.close()
        with pytest.raises(ar.SandboxError) as raised:
            await sandbox.exec(["true"])
        assert raised.value.loss.cause is Cause.CLOSED

    async def main(url: str) -> None:
        await use(await RemoteSandboxes(url).open())

    with served(FakeSandboxes(fail)) as url:
        asyncio.run(main(url))


def test_snapshots_move_between_machines() -> None:
    async def main(url: str) -> None:
        local, there = LocalSandboxes(LIMITS), RemoteSandboxes(url)
        sandbox = await there.open()
        await sandbox.write_file("n", b"\xff\x00")
        await sandbox.run_python("x = len(open('n', 'rb').read()) + 40")
        await sandbox.exec(["touch", "made"])
        snapshot = await sandbox.snapshot()
        other, moved = await local.open(), await there.open()
        for each in (other, moved):
            assert await each.restore(snapshot) is None
            assert (await each.run_python("x")).value == "42"
        assert (await moved.snapshot()).digest == (await other.snapshot()).digest == snapshot.digest
        await there.close()
        await local.close()

    with served(LocalSandboxes(LIMITS)) as url:
        asyncio.run(main(url))
