"""Servers of sandboxes for tests: in a thread, or as the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from agent_rl.concurrency import LoopThread
from agent_rl.sandboxes.remote.server import serving
from agent_rl.serving.host import ServerSettings
from agent_rl.testing import FakeSandboxes

PATIENCE = 120.0
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def in_thread(context: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """Run a server in a thread; yield its address."""
    thread = LoopThread("server under test")
    url = thread.wait(context.__aenter__())
    try:
        yield url
    finally:
        thread.wait(context.__aexit__(None, None, None))
        thread.close()


def served(backend: object | None = None, **settings: object) -> AbstractContextManager[str]:
    return in_thread(serving("mine", backend or FakeSandboxes(), ServerSettings(**{"port": 0, **settings})))


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@contextmanager
def serve_command(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "agent_rl", "sandbox", "serve", "--port", "0", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().strip().rpartition("url=")[2]
        finally:
            server.terminate()
