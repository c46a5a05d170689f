"""The close of an environment: to its end, and within its time."""

from __future__ import annotations

import asyncio
import inspect

from agent_rl.concurrency import maybe_await, to_the_end
from agent_rl.gym.budget import overdue
from agent_rl.gym.env import Env
from agent_rl.worker_threads import in_thread


async def close_env(env: Env, seconds: float | None) -> None:
    """Close an environment, to the end even if the caller is cancelled meanwhile.

    Raises:
        TimeoutError: if it takes longer than `seconds`.
    """
    if type(env).close is not Env.close:
        await to_the_end(_close_within(env, seconds))


async def _close_within(env: Env, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds) as clock:
            if inspect.iscoroutinefunction(env.close):
                await env.close()
            else:  # it may never return
                await maybe_await(await in_thread(env.close, f"{type(env).__name__}.close", quick=True))
    except TimeoutError:
        if not clock.expired():
            raise
        raise overdue("close", seconds) from None
