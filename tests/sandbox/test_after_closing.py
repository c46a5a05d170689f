"""What is left on the machine after a sandbox was closed, and honest code that what bounds sandboxes must not break."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.client import answers
from tests.sandbox.backends import Backend

SILENT = """
import socket
door = socket.create_server(("127.0.0.1", 0), backlog=200)
for _ in range(200):
    ours, theirs = socket.create_connection(door.getsockname()), door.accept()[0]
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2**31 - 1)
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_IP, 21, 255)  # IP_MINTTL: what comes is dropped
    ours.send(b"x")
    ours.close(), theirs.close()
"""
"""Closed connections whose ends hear nothing of each other."""
SLOW = """
import socket, time
door, sent, got = socket.create_server(("127.0.0.1", 0)), 0, 0
client, server = socket.create_connection(door.getsockname()), door.accept()[0]
client.setblocking(False)
try:
    while True: sent += client.send(bytes(50000))
except BlockingIOError: client.close()
time.sleep(4)
while data := server.recv(1 << 16): got += len(data)
sent == got > 100_000
"""
"""A reader that takes its time, after the other end was closed."""
THREADS = """
import threading
stop, made = threading.Event(), 0
def work():
    kept = [bytes(600) for _ in range(1000)]
    stop.wait()
for _ in range(40): threading.Thread(target=work).start(); made += 1
stop.set()
made
"""


def orphans() -> int:
    """Return how many closed connections the machine keeps, in all networks."""
    words = Path("/proc/net/sockstat").read_text().split()
    return int(words[words.index("orphan") + 1])


@pytest.mark.sandbox
def test_closed_connections_end_soon_after_their_sandbox(sandboxes, backend: Backend, run):
    if not backend.has_sockets or backend.needs is not None:
        pytest.skip(f"{backend.name}: it has no sockets, or its connections are another machine's")

    async def main() -> tuple[int, str | None]:
        hostile, honest, before = await sandboxes.open(), await sandboxes.open(), orphans()
        assert (await hostile.run_python(SILENT)).error is None
        made = orphans() - before
        await hostile.close()
        result = await honest.run_python(SLOW)
        until = time.monotonic() + 20
        while orphans() - before > 50 and time.monotonic() < until:  # it took 85 to 145 s, and those of days are left
            await asyncio.sleep(0.1)
        assert made > 150 and orphans() - before <= 50
        await honest.close()
        return made, result.value

    assert run(main())[1] == "True"


def test_threads_take_little_of_the_address_space(sandboxes, run):
    async def main() -> None:
        box = await sandboxes.open(limits=Limits())
        assert (await box.run_python(THREADS)).value == "40"
        script = await box.exec(["python3", "-c", THREADS + "print(made)"])
        assert script.stdout == "40\n", script.stderr
        assert (await box.run_python("import os\nos._exit(0)")).state_lost  # the next is a program of its own
        assert (await box.run_python(THREADS)).value == "40"
        await box.close()

    run(main())


def test_program_without_address_space_names_the_limit_once(sandboxes, run, caplog):
    """As Node.js says it."""
    said = "Fatal process OOM in Failed to reserve virtual memory for CodeRange"
    answers._tell_of_address_space.cache_clear()

    async def main() -> None:
        box = await sandboxes.open()
        for status in (0, 1, 1):
            await box.exec(["sh", "-c", f"echo {said} >&2; exit {status}"])
            assert len(caplog.records) == (status > 0)
        await box.close()

    run(main())
    assert "Limits.memory" in caplog.text and "Node.js" in caplog.text
