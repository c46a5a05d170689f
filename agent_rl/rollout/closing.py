"""The close of an environment: to its end, and within its time; before a run, the check that it can be made at all."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import suppress

from agent_rl.concurrency import maybe_await, to_the_end
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import overdue
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.worker_threads import in_thread, outside_loop


def check_constructor(spec: EnvSpec, env_args: Mapping[str, JSON]) -> None:
    """Make an instance as an episode does, and close it.

    Raises:
        ConfigError: if the constructor does not take these arguments, or raises.
    """
    spec.check_arguments(env_args)  # a served one's class takes any
    try:
        env = spec.make(**env_args)
    except ConfigError:
        raise
    except Exception as error:  # of the user's own class
        raise ConfigError(f"env={spec.id}: its constructor raises {type(error).__name__}: {error}") from error
    with suppress(Exception):  # it was never reset, so that `close` may lack what that makes
        outside_loop(lambda: asyncio.run(close_env(env, spec.budget.close_seconds)))


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
