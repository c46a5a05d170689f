"""Starts of Docker sandboxes that are cut short, on a double of the engine: nothing is left of them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import pack
from agent_rl.sandboxes.docker import DockerSandboxes

pytest.importorskip("docker")
PATIENCE = 20.0


class Starting:
    """What an engine does for a backend: it gives streams to agents that don't exist, each to one of a container."""

    def __init__(self) -> None:
        self.theirs: list[socket.socket] = []
        """The other ends of the streams."""
        self.says_ready = self.is_busy = False
        """Whether an agent says that it is there; whether the engine fails to start a container."""
        self.is_asked, self.may_answer, self.is_removed = threading.Event(), threading.Event(), threading.Event()
        self.may_answer.set()
        self.removals = list[str]()
        """Of each attempt, the container; the first fails if the engine is busy."""

    def stream(self, *_: object) -> socket.socket:
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE)
        if self.is_busy:
            raise SandboxError("the Docker engine is busy")
        ours, theirs = socket.socketpair()
        theirs.settimeout(PATIENCE)
        self.theirs.append(theirs)
        if self.says_ready:
            frame = pack({"ready": True})
            theirs.sendall(struct.pack(">BxxxL", 1, len(frame)) + frame)
        return ours

    def remove(self, container: str) -> None:
        self.removals.append(container)
        if self.is_busy and len(self.removals) == 1:
            raise SandboxError("the Docker engine is busy")
        self.is_removed.set()

    def has_ended(self, number: int) -> bool:
        """Whether a stream is closed on our side."""
        while self.theirs[number].recv(1 << 16):
            pass
        return True


@pytest.fixture
def engine() -> Iterator[Starting]:
    starting = Starting()
    yield starting
    for stream in starting.theirs:
        stream.close()


@pytest.fixture
def sandboxes(engine: Starting, monkeypatch: pytest.MonkeyPatch) -> DockerSandboxes:
    made = DockerSandboxes(host="unix:///nowhere/docker.sock")
    fake = {
        "is_podman": lambda: False,
        "has_selinux": lambda: False,
        "image_files": lambda image, paths, labels: dict.fromkeys(paths, b""),
        "labelled": lambda label: {},
        "create": lambda *a, **k: "c1",
        "start": engine.stream,
        "join": engine.stream,
        "remove": engine.remove,
    }
    for name, method in fake.items():
        monkeypatch.setattr(made.engine, name, method)
    return made


def test_docker_retries_a_failed_removal(engine: Starting, sandboxes: DockerSandboxes) -> None:
    engine.is_busy = True

    async def main() -> None:
        with pytest.raises(SandboxError, match="busy"):
            await sandboxes.open()
        assert engine.removals == ["c1"]
        await sandboxes.close()

    asyncio.run(main())
    assert engine.removals == ["c1", "c1"]


def test_docker_open_cancelled_in_the_engine_leaves_nothing(engine: Starting, sandboxes: DockerSandboxes) -> None:
    engine.may_answer.clear()

    async def main() -> None:
        opening = asyncio.create_task(sandboxes.open())
        await asyncio.to_thread(engine.is_asked.wait)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled() and not engine.theirs

    asyncio.run(main())
    engine.may_answer.set()
    assert engine.is_removed.wait(PATIENCE) and engine.has_ended(0)


def test_docker_open_cancelled_with_its_loop_leaves_nothing(engine: Starting, sandboxes: DockerSandboxes) -> None:
    opened = list(sandboxes._open)

    async def main() -> None:
        opening = asyncio.create_task(sandboxes.open())
        while not opened:  # it waits for the agent
            opened.extend(sandboxes._open)
            await asyncio.sleep(0.001)
        opening.cancel()  # and the loop ends when that has come to the sandbox, and to nothing further

    asyncio.run(main())
    assert engine.is_removed.wait(PATIENCE) and engine.has_ended(0)


@pytest.mark.parametrize("when", ["in the engine", "before it is ready"])
def test_docker_user_cancelled_leaves_no_stream(engine: Starting, sandboxes: DockerSandboxes, when: str) -> None:
    engine.says_ready = True

    async def main() -> None:
        box = await sandboxes.open()
        engine.says_ready = False
        engine.is_asked.clear()
        if when == "in the engine":
            engine.may_answer.clear()
        calling = asyncio.create_task(box.exec(["true"], user="tests"))
        await asyncio.to_thread(engine.is_asked.wait)
        while when != "in the engine" and len(engine.theirs) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        calling.cancel()
        await asyncio.wait([calling])
        engine.may_answer.set()
        while len(engine.theirs) < 2:
            await asyncio.sleep(0.001)
        assert await asyncio.to_thread(engine.has_ended, 1)
        assert calling.cancelled() and box.loss is None and not engine.removals
        await box.close()

    asyncio.run(main())
    assert engine.has_ended(0)
