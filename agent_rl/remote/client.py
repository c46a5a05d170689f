"""The client: `spec("http://host:8000/shop-v0")` is an environment like any other, played by a server.

All of a process's episodes share one connection to a server, which lives on an event loop of its own: it answers pings
while the trainer computes. A lost connection fails the episodes that were on it, and the next one connects again.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Literal, cast
from urllib.parse import urlsplit

import numpy as np

from agent_rl.core.episode import Episode, EpisodeGroup, Reward
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import JSON, Message, Step, Task
from agent_rl.core.meter import wait_uncounted
from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.errors import ConfigError, RemoteError
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import EnvSpec, parse_id
from agent_rl.gym.reward import GroupRewardMethod, group_reward
from agent_rl.gym.tasks import TaskSource
from agent_rl.gym.tool import ToolSpec
from agent_rl.remote import wire
from agent_rl.remote.wire import Reply, Request
from agent_rl.seeds import RngState
from agent_rl.serving.frames import part
from agent_rl.serving.link import Connection, Link, next_call
from agent_rl.store.codec import dump_line

_MOST_PAGES = 64


def remote_spec(id: str) -> EnvSpec:
    """Return the environment of an address, such as http://host:8000/shop-v0, as its server describes it now.

    Raises:
        ConfigError: if it is no such address, or the server wants another token.
        RemoteError: if no server answers.
        UnknownEnvError: if the server has no such environment.
    """
    parts = urlsplit(id)
    name = parts.path.strip("/")
    if parts.scheme not in ("http", "https") or not parts.netloc or not name:
        raise ConfigError(f"'{id}' is no address of an environment: write http://HOST:PORT/NAME-v0")
    url = f"{parts.scheme}://{parts.netloc}"
    described = part(connection(url).wait(wire.Describe(op="describe", call=next_call(), env=name)).described)
    namespace, own, version = parse_id(described.id)
    cls = _class(url, described)
    at = f"{url}/{namespace}" if namespace else url
    return EnvSpec(at, own, version, cls, RemoteTasks(url, described), described.budget, described.nondeterministic)


def connection(url: str) -> Connection[Reply]:
    """Return this process's connection to a server."""
    return _connection(url, os.getpid())  # threads don't survive a fork


@functools.cache
def _connection(url: str, process: int) -> Connection[Reply]:
    return Connection(f"{url}{wire.PATH}", wire.load_reply, "agent-rl serve")


class RemoteEnv(Env):
    """One episode's world on a server."""

    server: ClassVar[str]
    described: ClassVar[wire.Described]

    def __init__(self, **env_args: JSON) -> None:
        self._args = env_args
        self._tools = self.described.tools
        self._lease = secrets.token_hex(8)
        self._link: Link[Reply] | None = None
        self._state: str | None = None
        self._loss: SandboxLoss | None = None

    @property
    def sandbox_loss(self) -> SandboxLoss | None:
        """How the policy's code ended the sandbox there, if it did."""
        return self._loss

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools in the policy's prompt: after `reset`, the instance's own."""
        return self._tools

    async def reset(self, task: Task, rng: np.random.Generator) -> Sequence[Message]:
        """Take a lease, whose wait for a place is not the environment's time, and begin the episode there."""
        random, lease = RngState.of(rng), self._lease
        self._link = await connection(self.server).link()
        opening = wire.Open(op="open", call=next_call(), lease=lease, env=self.described.id, env_args=self._args)
        await wait_uncounted(self._ask(opening))
        reply = await self._ask(wire.Reset(op="reset", call=next_call(), lease=lease, task=task, rng=random))
        opened = part(reply.opened)
        self._tools, self._state = opened.tools, reply.state
        return opened.observation

    async def step(self, action: Message) -> Step:
        """Take the step there."""
        reply = await self._ask(wire.Act(op="step", call=next_call(), lease=self._lease, action=action))
        self._state = reply.state
        return part(reply.step)

    async def score(
        self, episode: Episode, seconds: float | None = None, judgements: list[Judgement] | None = None
    ) -> tuple[Reward, ...]:
        """Run the `@reward` methods there."""
        line = dump_line(episode).decode()
        request = wire.Score(op="score", call=next_call(), lease=self._lease, episode=line, seconds=seconds)
        reply = await self._ask(request)
        if judgements is not None:
            judgements += reply.judgements
        return part(reply.rewards)

    async def close(self) -> None:
        """Give the lease back; nothing is left to do where the server is gone."""
        link, self._link = self._link, None
        if link is not None:
            with suppress(RemoteError):
                await link.connection.run(link, wire.Close(op="close", call=next_call(), lease=self._lease))

    def script(self, name: Literal["oracle", "demonstrate"], rng: np.random.Generator | None = None) -> Script:
        """Play a script of the environment's, an answer at a time, each a call that blocks."""
        random = None if rng is None else RngState.of(rng)
        observed: tuple[Message, ...] = ()
        while True:
            request = wire.Play(
                op="play", call=next_call(), lease=self._lease, script=name, rng=random, observed=observed
            )
            answer = self._held.connection.wait(request, self._held).answer
            if answer is None:
                return
            observed = yield answer

    @property
    def _held(self) -> Link[Reply]:
        if self._link is None:
            raise RuntimeError(f"{self.server}: the episode has not begun, or was closed")
        return self._link

    async def _ask(self, request: Request) -> Reply:
        return await self._held.connection.run(self._held, request, self._hear)

    def _hear(self, reply: Reply) -> None:
        self._loss = reply.sandbox_loss


def _class(url: str, described: wire.Described) -> type[RemoteEnv]:
    """Return the class of a server's environment, with those of the optional methods that are defined there."""

    async def state_hash(self: RemoteEnv) -> str | None:
        return self._state

    def oracle(self: RemoteEnv) -> Script:
        return self.script("oracle")

    def demonstrate(self: RemoteEnv, rng: np.random.Generator) -> Script:
        return self.script("demonstrate", rng)

    optional = {"state_hash": state_hash, "oracle": oracle, "demonstrate": demonstrate}
    methods: dict[str, object] = {name: optional[name] for name in described.methods}
    for number, (name, weight) in enumerate(described.group_rewards.items()):
        methods[f"group_reward_{number}"] = group_reward(weight=weight, name=name)(_group_reward(name))
    about = {"server": url, "described": described, "__doc__": described.about, "__module__": url}  # of no file
    cls = cast("type[RemoteEnv]", type(parse_id(described.id)[1], (RemoteEnv,), methods | about))
    cls.is_judged = described.is_judged
    kinds = {True: inspect.Parameter.VAR_KEYWORD, False: inspect.Parameter.KEYWORD_ONLY}
    parameters = [
        inspect.Parameter(
            argument.name,
            kinds[argument.more],
            default=inspect.Parameter.empty if argument.required or argument.more else None,
        )
        for argument in sorted(described.arguments, key=lambda argument: argument.more)
    ]
    cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return cls


def _group_reward(name: str) -> GroupRewardMethod:
    async def compare(self: RemoteEnv, group: EpisodeGroup) -> list[float | None]:
        lines = [dump_line(episode).decode() for episode in group.episodes]
        env, args = self.described.id, self._args
        server = connection(self.server)
        request = wire.Compare(
            op="compare", call=next_call(), env=env, env_args=args, reward=name, group=group.id, episodes=lines
        )
        return part((await server.run(await server.link(), request)).values)

    return compare


class RemoteTasks(TaskSource):
    """The tasks of a server's environment, a page of them at a time."""

    def __init__(self, url: str, described: wire.Described) -> None:
        super().__init__(splits=tuple(described.splits))
        self.holds_out = False  # the server has divided them
        self._url, self._env = url, described
        self._pages: OrderedDict[tuple[str, int], Sequence[Task]] = OrderedDict()

    def size(self, split: str) -> int | None:
        """Return how many tasks a split has there."""
        return self._env.splits[self.require(split)]

    def get(self, split: str, index: int) -> Task:
        """Return one task.

        Raises:
            IndexError: if the split has no task of that index.
            RemoteError: if the server is gone.
        """
        split = self.require(split)
        size = self.size(split)
        if index < 0 or (size is not None and index >= size):
            raise IndexError(f"split '{split}' has the tasks 0 to {(size or 0) - 1}, not {index}")
        page, place = divmod(index, wire.MAX_TASKS)
        key = (split, page)
        if key not in self._pages:
            start, count = page * wire.MAX_TASKS, wire.MAX_TASKS
            request = wire.Tasks(op="tasks", call=next_call(), env=self._env.id, split=split, start=start, count=count)
            self._pages[key] = part(connection(self._url).wait(request).tasks)
            if len(self._pages) > _MOST_PAGES:
                self._pages.popitem(last=False)
        return self._pages[key][place]

    def describe_held_out(self) -> str:
        """Describe what the server holds out as `eval`."""
        return self._env.held_out
