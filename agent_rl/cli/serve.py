"""`agent-rl serve`: play environments for clients elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from agent_rl.gym.registry import spec
from agent_rl.remote.server import ServerSettings, serving
from agent_rl.remote.wire import TOKEN


def serve(arguments: argparse.Namespace) -> int:
    """Serve environments until Ctrl-C or SIGTERM."""
    specs = [spec(env) for env in arguments.envs]
    a = arguments
    settings = ServerSettings(a.host, a.port, a.capacity, a.ttl, a.wait, token=os.environ.get(TOKEN, ""))

    async def run() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with serving(specs, settings) as url:
            for env in specs:
                print(f"env={url}/{env.id}")
            token = f"; clients need {TOKEN}" if settings.token else ""
            print(f"{settings.capacity} episodes at a time; counts: {url}/health{token}", flush=True)
            await ended.wait()

    asyncio.run(run())
    return 0
