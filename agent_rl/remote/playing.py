"""What a server does with an environment for a client: calls it as an episode does, describes it, plays its scripts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from agent_rl.concurrency import call
from agent_rl.core.messages import Message
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tool import ToolSpec
from agent_rl.remote import wire
from agent_rl.rollout.closing import close_env
from agent_rl.serving.leases import Lease

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class EnvLease(Lease):
    """A lease of one episode's world."""

    spec: EnvSpec
    env: Env | None = None
    script: Script | None = None


async def run(spec: EnvSpec, stage: str, method: Callable[[], T | Awaitable[T]]) -> T:
    """Call a method of the environment as an episode does."""
    thread = f"{spec.id} {stage}" if spec.cls.blocking else None
    return await call(method, thread=thread)


async def state_of(spec: EnvSpec, env: Env) -> str | None:
    """Return what the environment's `state_hash` says."""
    if spec.cls.state_hash is Env.state_hash:
        return None
    return await run(spec, "state_hash", env.state_hash)


async def close(spec: EnvSpec, env: Env) -> None:
    """Close an instance that played no episode; a failure is only a line in the log."""
    try:
        await close_env(env, spec.budget.close_seconds)
    except Exception as error:
        _log.warning("%s: close() failed: %s: %s", spec.id, type(error).__name__, error)


def play(lease: EnvLease, env: Env, request: wire.Play) -> Message | None:
    """Return the next answer of the environment's own script; None at its end."""
    try:
        if lease.script is None:
            if request.script == "oracle":
                script = env.oracle()
            else:
                assert request.rng is not None
                script = env.demonstrate(request.rng.generator())
            if not isinstance(script, Generator):
                raise TypeError(f"{request.script} of {type(env).__name__} is no generator: yield its answers")
            lease.script = script
            answer = next(script)
        else:
            answer = lease.script.send(request.observed)
    except StopIteration:
        return None
    return Message("assistant", answer) if isinstance(answer, str) else answer


def describe(spec: EnvSpec, sizes: dict[str, int | None], held_out: str, tools: tuple[ToolSpec, ...]) -> wire.Described:
    """Return what a client has to know of an environment."""
    cls = spec.cls
    own = ("state_hash", cls.state_hash is not Env.state_hash), ("oracle", cls.oracle is not Env.oracle)
    parameters = inspect.signature(cls).parameters.values()
    return wire.Described(
        id=spec.id,
        about=inspect.getdoc(cls) or "",
        splits=sizes,
        held_out=held_out,
        budget=spec.budget,
        nondeterministic=spec.nondeterministic,
        arguments=[
            wire.Argument(
                name=p.name, required=p.default is p.empty and p.kind is not p.VAR_KEYWORD, more=p.kind is p.VAR_KEYWORD
            )
            for p in parameters
            if p.kind is not p.VAR_POSITIONAL
        ],
        tools=tools,
        methods=[name for name, has in (*own, ("demonstrate", cls.demonstrate is not Env.demonstrate)) if has],
        group_rewards={c.name: c.weight for c in cls.group_reward_components},
        is_judged=cls.is_judged,
    )


async def tools_of(spec: EnvSpec) -> tuple[ToolSpec, ...]:
    """Return the tools of an instance; none if one can't be made without arguments."""
    try:
        env = spec.make()
        try:
            return env.tools
        finally:
            await close(spec, env)
    except Exception as error:
        _log.info("%s: an instance without arguments has no tools: %s", spec.id, error)
        return ()
