"""The server: plays environments for clients elsewhere, each episode in a place that its client leases."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import assert_never

from agent_rl.concurrency import ENDING, call
from agent_rl.core.episode import EpisodeGroup
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Step
from agent_rl.errors import RemoteError, UnknownEnvError, UserError, did_you_mean
from agent_rl.gym.env import Env, messages_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.reward import as_reward, method_of
from agent_rl.remote import wire
from agent_rl.remote.playing import EnvLease, close, describe, play, run, state_of, tools_of
from agent_rl.remote.wire import Reply, Request
from agent_rl.rollout.closing import close_env
from agent_rl.serving.frames import Cancel
from agent_rl.serving.host import Host, ServerSettings, hosting, problem
from agent_rl.serving.leases import Owner
from agent_rl.store.codec import load_line
from agent_rl.worker_threads import in_thread


def serving(specs: Sequence[EnvSpec], settings: ServerSettings) -> AbstractAsyncContextManager[str]:
    """Serve environments as long as the context lasts; yield the server's address.

    Raises:
        ConfigError: if websockets is not installed, or the address can't be used.
    """
    return hosting(Server(specs, settings))


class Server(Host[EnvLease]):
    """The environments that are served, and their clients."""

    path = wire.PATH

    def __init__(self, specs: Sequence[EnvSpec], settings: ServerSettings) -> None:
        super().__init__(settings)
        self._specs = {spec.id: spec for spec in specs}
        self._described: dict[str, wire.Described] = {}
        self._reading = asyncio.Lock()

    def about(self) -> Mapping[str, object]:
        """Return the environments' names."""
        return {"envs": sorted(self._specs)}

    async def clear(self, lease: EnvLease) -> None:
        """Close a lease's environment."""
        if lease.script is not None:
            lease.script.close()
        if lease.env is not None:
            await close_env(lease.env, lease.patience)

    async def reply(self, owner: Owner[EnvLease], data: str | bytes) -> Reply:
        """Do what a request wants; whatever came of it, say how the policy ended its sandbox, if it did."""
        request = wire.load_request(data)
        try:
            reply = await self._reply(owner, request)
        except BaseException as error:
            if isinstance(error, ENDING):
                raise
            reply = Reply(call=request.call, error=problem(error))
        lease = owner.leases.get(getattr(request, "lease", ""))
        loss = lease.env.sandbox_loss if lease is not None and lease.env is not None else None
        return reply if loss is None else reply.model_copy(update={"sandbox_loss": loss})

    async def _reply(self, owner: Owner[EnvLease], request: Request) -> Reply:
        """Return the reply to a request."""
        reply = Reply(call=request.call)
        match request:
            case wire.Describe():
                reply = Reply(call=request.call, described=await self._describe(self._spec(request.env)))
            case wire.Tasks():
                reply = Reply(call=request.call, tasks=await self._tasks(request))
            case wire.Open():
                await self._open(owner, request)
            case wire.Reset():
                reply = await self._reset(owner, request)
            case wire.Act():
                reply = await self._step(owner, request)
            case wire.Score():
                reply = await self._score(owner, request)
            case wire.Play():
                with self._work(await owner.idle(request.lease)) as (at, env):
                    reply = Reply(call=request.call, answer=play(at, env, request))
            case wire.Compare():
                reply = Reply(call=request.call, values=await self._compare(request))
            case Cancel():
                owner.cancel(request.of)
            case wire.Close():
                if (lease := owner.leases.get(request.lease)) is not None:
                    await self.release(lease)
            case _:
                assert_never(request)
        return reply

    def _spec(self, id: str) -> EnvSpec:
        if (found := self._specs.get(id)) is not None:
            return found
        versions = [spec for name, spec in self._specs.items() if name.rpartition("-v")[0] == id]
        if not versions:
            known = sorted(self._specs)
            raise UnknownEnvError(f"no environment '{id}'.{did_you_mean(id, known)} It serves: {', '.join(known)}")
        return max(versions, key=lambda spec: spec.version)

    async def _describe(self, spec: EnvSpec) -> wire.Described:
        async with self._reading:  # files are read once
            if spec.id not in self._described:
                sizes = await in_thread(lambda: {s: spec.tasks.size(s) for s in spec.tasks.splits}, "agent_rl tasks")
                held_out = spec.tasks.describe_held_out()
                self._described[spec.id] = describe(spec, sizes, held_out, await tools_of(spec))
        return self._described[spec.id]

    async def _tasks(self, asked: wire.Tasks) -> list[Mapping[str, object]]:
        source = self._spec(asked.env).tasks
        size = source.size(asked.split)
        stop = asked.start + asked.count if size is None else min(asked.start + asked.count, size)
        async with self._reading:
            return await in_thread(
                lambda: [source.get(asked.split, i) for i in range(asked.start, stop)], "agent_rl tasks"
            )

    async def _open(self, owner: Owner[EnvLease], request: wire.Open) -> None:
        spec = self._spec(request.env)
        lease = EnvLease(request.lease, owner, spec.budget.close_seconds, spec=spec)
        async with self.opening(lease, self.settings.wait):
            lease.env = spec.make(**request.env_args)

    async def _reset(self, owner: Owner[EnvLease], request: wire.Reset) -> Reply:
        with self._work(await owner.idle(request.lease)) as (lease, env):
            reset = functools.partial(env.reset, request.task, request.rng.generator())
            opening = messages_of(await run(lease.spec, "reset", reset))
            opened = wire.Opened(observation=opening, tools=env.tools)
            return Reply(call=request.call, opened=opened, state=await state_of(lease.spec, env))

    async def _step(self, owner: Owner[EnvLease], request: wire.Act) -> Reply:
        with self._work(await owner.idle(request.lease)) as (lease, env):
            step = await run(lease.spec, "step", functools.partial(env.step, request.action))
            if not isinstance(step, Step):
                raise TypeError(f"step returned {reprlib.repr(step)}: return ar.Step(observation, reward, ...)")
            step = replace(step, observation=messages_of(step.observation), reward=float(step.reward))
            ended = step.terminated or step.truncated
            return Reply(call=request.call, step=step, state=None if ended else await state_of(lease.spec, env))

    async def _score(self, owner: Owner[EnvLease], request: wire.Score) -> Reply:
        with self._work(await owner.idle(request.lease)) as (lease, env):
            if env.asking:  # the client can't tell whom its time ran out on
                raise UserError("the episode's time ran out while the simulated user was asked")
            episode = replace(load_line(request.episode.encode()), env=lease.spec.id)
            judgements: list[Judgement] = []
            rewards = await env.score(episode, request.seconds, judgements)
            return Reply(call=request.call, rewards=rewards, judgements=tuple(judgements))

    @contextlib.contextmanager
    def _work(self, lease: EnvLease) -> Iterator[tuple[EnvLease, Env]]:
        """Keep a lease from running out; `close` cancels what is done for it."""
        assert lease.env is not None
        with self.leases.working(lease):
            yield lease, lease.env

    async def _compare(self, request: wire.Compare) -> list[float | None]:
        spec = self._spec(request.env)
        component = next((c for c in spec.cls.group_reward_components if c.name == request.reward), None)
        if component is None:
            raise RemoteError(f"{spec.id} has no group reward '{request.reward}'")
        episodes = tuple(replace(load_line(line.encode()), env=spec.id) for line in request.episodes)
        env = spec.make(**request.env_args)
        where = f"{spec.cls.__name__}.{component.attribute}"
        try:
            method = functools.partial(method_of(env, component), EpisodeGroup(request.group, episodes))
            values = await call(method, thread=None if component.is_async else where)
            return [as_reward(component, value, where).value for value in values]
        finally:
            await close(spec, env)
