"""The server: plays environments for clients elsewhere, each episode in a place that its client leases.

A client has one connection for all of its episodes. A connection that ends, or doesn't answer pings, frees all places
of its client; a lease that is not used for its time to live is freed, too. Each is closed before it is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import reprlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar, assert_never

from agent_rl.concurrency import call, in_thread
from agent_rl.core.episode import EpisodeGroup
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Step
from agent_rl.errors import ConfigError, RemoteError, UnknownEnvError, did_you_mean
from agent_rl.gym.env import Env, messages_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.reward import as_reward
from agent_rl.remote import wire
from agent_rl.remote.leases import Lease, Leases, Owner
from agent_rl.remote.playing import close, describe, play, problem, run, state_of, tools_of
from agent_rl.remote.wire import Reply, Request
from agent_rl.rollout.closing import close_env
from agent_rl.store.codec import load_line

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request as Handshake
    from websockets.http11 import Response

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server serves."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 for any that is free."""
    capacity: int = 1024
    """Episodes at a time."""
    ttl: float = 3600.0
    """Seconds that an episode may wait for its client's next call."""
    wait: float = 60.0
    """Seconds that a client waits for a place before it is refused."""
    ping: float = 20.0
    """Seconds between pings of a connection, and until one that was not answered ends it."""
    token: str = ""
    """What clients have to know."""

    def __post_init__(self) -> None:
        for name in ("capacity", "ttl", "wait", "ping"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name}={value}: give a positive number")
        if self.host not in wire.LOCAL and not self.token:
            raise ConfigError(
                f"host={self.host} lets other machines in: set {wire.TOKEN} here and where the clients run, "
                "to a secret of your own"
            )


@contextlib.asynccontextmanager
async def serving(specs: Sequence[EnvSpec], settings: ServerSettings) -> AsyncGenerator[str, None]:
    """Serve environments as long as the context lasts; yield the server's address.

    Raises:
        ConfigError: if websockets is not installed, or the address can't be used.
    """
    wire.require_websockets()
    from websockets.asyncio.server import serve

    server = Server(specs, settings)
    try:
        listening = await serve(
            server.connected,
            settings.host,
            settings.port,
            process_request=server.admit,
            origins=[None],  # a page in a browser names its own, and is no client
            compression=None,
            max_size=wire.MAX_BYTES,
            ping_interval=settings.ping,
            ping_timeout=settings.ping,
            close_timeout=settings.ping,
            server_header=None,
        )
    except OSError as error:
        raise ConfigError(f"{settings.host}:{settings.port} can't be served on: {error}") from error
    sweeping = asyncio.create_task(server.sweep())
    try:
        async with listening:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield f"http://{host}:{next(iter(listening.sockets)).getsockname()[1]}"
    finally:
        sweeping.cancel()


class Server:
    """What is served, and the clients."""

    def __init__(self, specs: Sequence[EnvSpec], settings: ServerSettings) -> None:
        self.settings = settings
        self.leases = Leases(settings.capacity, settings.ttl)
        self.clients: set[Owner] = set()
        self.expired = self.lost = 0
        """Leases that ran out, and that lost their client."""
        self._specs = {spec.id: spec for spec in specs}
        self._described: dict[str, wire.Described] = {}
        self._reading = asyncio.Lock()
        self._started = time.monotonic()

    def health(self) -> dict[str, object]:
        """Return the counts that `GET /health` answers with."""
        leases = self.leases
        return {
            "envs": sorted(self._specs),
            "capacity": leases.capacity,
            "taken": leases.taken,
            "waiting": leases.waiting,
            "clients": len(self.clients),
            "opened": leases.opened,
            "refused": leases.refused,
            "expired": self.expired,
            "lost": self.lost,
            "seconds": round(time.monotonic() - self._started, 1),
        }

    async def admit(self, connection: ServerConnection, request: Handshake) -> Response | None:
        """Answer plain HTTP, and refuse who doesn't know the token."""
        path = request.path.partition("?")[0]
        if path == "/health":
            return connection.respond(HTTPStatus.OK, json.dumps(self.health()) + "\n")
        if path != wire.PATH:
            return connection.respond(HTTPStatus.NOT_FOUND, f"there are /health and {wire.PATH}, a WebSocket\n")
        given = ", ".join(request.headers.get_all("Authorization")).encode()
        if self.settings.token and not hmac.compare_digest(given, f"Bearer {self.settings.token}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, f"set {wire.TOKEN} to the server's\n")
        return None

    async def connected(self, socket: ServerConnection) -> None:
        """Answer a client until its connection ends; then free what it held."""
        from websockets.exceptions import ConnectionClosed

        owner, answers = Owner(), set[asyncio.Task[None]]()
        self.clients.add(owner)
        try:
            async for data in socket:
                answer = asyncio.create_task(self._answer(owner, socket, data))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
        except ConnectionClosed:
            pass  # without a goodbye
        finally:
            try:
                for answer in answers:
                    answer.cancel()
                left = list(owner.leases.values())
                self.lost += len(left)
                await asyncio.gather(*(self._release(lease) for lease in left), return_exceptions=True)
            finally:
                self.clients.remove(owner)

    async def sweep(self) -> None:
        """Free the leases that run out, until cancelled."""
        while True:
            await asyncio.sleep(min(self.settings.ttl / 4, 5.0))
            overdue = self.leases.overdue()
            self.expired += len(overdue)
            await asyncio.gather(*map(self._release, overdue), return_exceptions=True)

    async def _answer(self, owner: Owner, socket: ServerConnection, data: str | bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        number = wire.call_of(data)
        if number is None:
            await socket.close(1007, "a frame begins with its op and its call")
            return
        try:
            reply = await self._reply(owner, wire.load_request(data))
            sent = wire.dump(reply)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            sent = wire.dump(Reply(call=number, error=problem(error)))
        if not socket.transport.is_closing():  # which is known before the connection counts as closed
            with contextlib.suppress(ConnectionClosed):
                await socket.send(sent)

    async def _reply(self, owner: Owner, request: Request) -> Reply:
        """Return the reply to a request."""
        match request:
            case wire.Describe():
                reply = Reply(call=request.call, described=await self._describe(self._spec(request.env)))
            case wire.Tasks():
                reply = Reply(call=request.call, tasks=await self._tasks(request))
            case wire.Open():
                reply = await self._open(owner, request)
            case wire.Act():
                reply = await self._step(owner, request)
            case wire.Score():
                async with self._work(await owner.idle(request.lease)) as (at, env):
                    episode = replace(load_line(request.episode.encode()), env=at.spec.id)
                    judgements: list[Judgement] = []
                    rewards = await env.score(episode, request.seconds, judgements)
                    reply = Reply(call=request.call, rewards=rewards, judgements=tuple(judgements))
            case wire.Play():
                async with self._work(await owner.idle(request.lease)) as (at, env):
                    reply = Reply(call=request.call, answer=play(at, env, request))
            case wire.Compare():
                reply = Reply(call=request.call, values=await self._compare(request))
            case wire.Cancel():
                if (lease := owner.leases.get(request.lease)) is not None and lease.work is not None:
                    lease.work.cancel()
                reply = Reply(call=request.call)
            case wire.Close():
                if (lease := owner.leases.get(request.lease)) is not None:
                    await self._release(lease)
                reply = Reply(call=request.call)
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

    async def _open(self, owner: Owner, request: wire.Open) -> Reply:
        if request.lease in owner.leases:
            raise RemoteError(f"the lease {request.lease!r} is open")
        lease = Lease(request.lease, owner, self._spec(request.env))
        lease.work = asyncio.current_task()
        owner.leases[lease.id] = lease
        try:
            await self.leases.take(lease, self.settings.wait)
            lease.env = env = lease.spec.make(**request.env_args)
            rng = request.rng.generator()
            opening = messages_of(await run(lease, "reset", functools.partial(env.reset, request.task, rng)))
            opened = wire.Opened(observation=opening, tools=env.tools)
            return Reply(call=request.call, opened=opened, state=await state_of(lease, env))
        except BaseException:
            lease.work = None
            with contextlib.suppress(Exception):
                await self._release(lease)
            raise
        finally:
            lease.work = None
            self.leases.renew(lease)

    async def _step(self, owner: Owner, request: wire.Act) -> Reply:
        async with self._work(await owner.idle(request.lease)) as (lease, env):
            step = await run(lease, "step", functools.partial(env.step, request.action))
            if not isinstance(step, Step):
                raise TypeError(f"step returned {reprlib.repr(step)}: return ar.Step(observation, reward, ...)")
            step = replace(step, observation=messages_of(step.observation), reward=float(step.reward))
            ended = step.terminated or step.truncated
            return Reply(call=request.call, step=step, state=None if ended else await state_of(lease, env))

    @contextlib.asynccontextmanager
    async def _work(self, lease: Lease) -> AsyncGenerator[tuple[Lease, Env], None]:
        """Keep a lease from running out; `close` cancels what is done for it."""
        assert lease.env is not None
        lease.work = asyncio.current_task()
        try:
            yield lease, lease.env
        finally:
            lease.work = None
            self.leases.renew(lease)

    async def _compare(self, request: wire.Compare) -> list[float | None]:
        spec = self._spec(request.env)
        component = next((c for c in spec.cls.group_reward_components if c.name == request.reward), None)
        if component is None:
            raise RemoteError(f"{spec.id} has no group reward '{request.reward}'")
        episodes = tuple(replace(load_line(line.encode()), env=spec.id) for line in request.episodes)
        env = spec.make(**request.env_args)
        where = f"{spec.cls.__name__}.{component.attribute}"
        try:
            method = functools.partial(getattr(env, component.attribute), EpisodeGroup(request.group, episodes))
            values = await call(method, thread=None if component.is_async else where)
            return [as_reward(component, value, where).value for value in values]
        finally:
            await close(spec, env)

    async def _release(self, lease: Lease) -> None:
        """Stop the work on a lease, close its environment, and free its place in any case."""
        lease.owner.leases.pop(lease.id, None)
        seconds = lease.spec.budget.close_seconds
        if (work := lease.work) is not None:
            work.cancel()
            await asyncio.wait([work], timeout=seconds)
        if not self.leases.drop(lease):
            return
        try:
            if lease.script is not None:
                lease.script.close()
            if lease.env is not None:
                await close_env(lease.env, seconds)
        except SystemExit as error:  # which would end the server
            raise RuntimeError(f"SystemExit: {error}") from error
        finally:
            self.leases.free()
