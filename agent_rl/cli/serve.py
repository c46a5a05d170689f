"""`agent-rl serve`: play environments for clients elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from agent_rl.gym.registry import spec
from agent_rl.remote.server import serving
from agent_rl.rollout.watch import INTERVAL
from agent_rl.serving.frames import TOKEN
from agent_rl.serving.host import ServerSettings
from agent_rl.worker_threads import at_intervals


def serve(arguments: argparse.Namespace) -> int:
    """Serve environments until Ctrl-C or SIGTERM."""
    specs = [spec(env) for env in arguments.envs]
    settings = server_settings(arguments)
    run_server(settings, serving(specs, settings), "episodes", lambda url: [f"env={url}/{env.id}" for env in specs])
    return 0


def server_settings(arguments: argparse.Namespace, *, plain: bool = True) -> ServerSettings:
    """Return the settings of a server's arguments, with the token from the environment.

    Raises:
        ConfigError: if they don't fit each other.
    """
    a, token = arguments, os.environ.get(TOKEN, "")
    return ServerSettings(
        a.host, a.port, a.capacity, a.ttl, a.wait, token=token, tls_cert=a.tls_cert, tls_key=a.tls_key, plain=plain
    )


def run_server(
    settings: ServerSettings,
    serving: AbstractAsyncContextManager[str],
    what: str,
    lines: Callable[[str], Iterable[str]],
) -> None:
    """Serve until Ctrl-C or SIGTERM; print how clients use the address, and where its counts are."""

    async def run() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with serving as url:
            print("\n".join(lines(url)))
            token = f"; clients need {TOKEN}" if settings.token else ""
            print(f"{settings.capacity} {what} at a time; counts: {url}/health{token}", flush=True)
            await ended.wait()

    with at_intervals(INTERVAL, lambda: None, "agent_rl watchdog"):  # which says where a frozen server is
        asyncio.run(run())
