"""OpenEnv's server and client for `benchmarks/serve.py --beside openenv`, each at its best.

The environment is asynchronous, so that its steps need no thread; a session keeps its connection for all its episodes;
the client is the one that makes no objects of answers.
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.generic_client import GenericEnvClient


class Said(Action):
    """What the policy says."""

    message: str


class Heard(Observation):
    """What it hears."""

    text: str = ""


class Echo(Environment):
    """Says again what it was told."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        """Begin."""
        return Heard(text="say something")

    async def step_async(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:
        """Say it again."""
        return Heard(text=action.message)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        """Is abstract, but the server calls `reset_async`."""
        raise NotImplementedError

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:
        """Is abstract, but the server calls `step_async`."""
        raise NotImplementedError

    @property
    def state(self) -> State:
        """Nothing is known."""
        return State()


class OpenEnvSession:
    """A session of an OpenEnv server, on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.client = GenericEnvClient(base_url=url, connect_timeout_s=120.0)

    async def reset(self) -> object:
        """Begin an episode, of the same session."""
        return await self.client.reset()

    async def step(self, text: str) -> object:
        """Say something."""
        return await self.client.step({"message": text})

    async def close(self) -> object:
        """Keep the session: another reset begins its next episode."""
        return None


async def serve(capacity: int) -> None:
    """Serve, once the address is printed."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=capacity)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=capacity)
    await uvicorn.Server(uvicorn.Config(app, log_level="critical")).serve([listening])
