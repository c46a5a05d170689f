"""Environments behind an OpenEnv server: `from_openenv("http://host:8000")` makes an `Env` of what it serves.

An episode is a session on the server's WebSocket. What an action is, the server says: text where an action has one
field, which is a string; else a tool, `act`, with the action's fields; or the tools that an MCP environment lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import reprlib
import sys
import time
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from agent_rl.core.messages import JSON, Message, Step, Task, ToolCall, ToolErrorKind
from agent_rl.core.meter import meter, sleep_uncounted
from agent_rl.errors import ConfigError, InfrastructureError
from agent_rl.gym.env import Env
from agent_rl.gym.tasks import world_seed
from agent_rl.gym.tool import ToolSpec
from agent_rl.gym.tool_messages import as_text
from agent_rl.worker_threads import in_thread

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

WAIT = 60.0
"""Seconds that an episode waits for a session of a server that is full, and for an answer."""
REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""What the policy's action is to blame for: it reads the message."""


class OpenEnvError(InfrastructureError):
    """The server, or the way to it, failed."""


class OpenEnv(Env):
    """A session of an OpenEnv server. A task's `seed`, else a hash of it, and its `options` are those of `reset`."""

    url: ClassVar[str]

    def __init__(self) -> None:
        self._socket: ClientConnection | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self.field: str | None = None
        """Of an action that is text."""
        self.is_mcp = self._over = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The server's, once `reset` has asked for them."""
        return self._tools

    def describe(self, observation: Mapping[str, JSON]) -> str:
        """Return an observation as text: its fields, or the value of the only one."""
        said = {key: value for key, value in observation.items() if value not in (None, "", [], {})}
        return as_text(next(iter(said.values())) if len(said) == 1 else said) if said else "ready"

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open a session, ask for its tools, and begin."""
        schema = await in_thread(functools.partial(_action_schema, self.url), "from_openenv: schema")
        fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        required = [name for name in schema.get("required", ()) if name in fields]
        self.is_mcp = not fields or "tool_name" in fields or fields.keys() == {"type"}
        options = cast("Mapping[str, JSON]", task.get("options", {}))
        begun = await self._begin({"seed": world_seed(task), **options})
        if self.is_mcp:
            listed = (await self._asked("step", {"type": "list_tools"}))["observation"]["tools"]
            self._tools = tuple(ToolSpec(tool["name"], tool["description"], tool["input_schema"]) for tool in listed)
        elif len(required) == 1 and fields[required[0]].get("type") == "string":
            self.field = required[0]
        else:
            parameters = {**schema, "properties": fields, "required": required}
            self._tools = (
                ToolSpec("act", schema.get("description") or "Act.", cast("Mapping[str, JSON]", parameters)),
            )
        return self.describe(begun["observation"])

    async def step(self, action: Message) -> Step:
        """Send the answer or the calls, one after the other; a message without the calls that it takes is the end."""
        if self._over:
            raise RuntimeError("the episode is over")
        if self.field is not None:
            return await self._act(None, {self.field: action.content})
        if not action.tool_calls:
            self._over = True
            return Step(terminated=True)
        steps = []
        for call in action.tool_calls:
            steps.append(await self._called(call))
            if steps[-1].terminated:
                break
        said = tuple(itertools.chain.from_iterable(step.observation for step in steps))
        return Step(said, sum(step.reward for step in steps), steps[-1].terminated)

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _called(self, call: ToolCall) -> Step:
        if call.error is not None:
            return Step((_failed(call, ToolErrorKind.MALFORMED, f"malformed call: {call.error}"),))
        if call.name not in (known := [tool.name for tool in self._tools]):
            complaint = f"there is no tool '{call.name}'; the tools are: {', '.join(known)}"
            return Step((_failed(call, ToolErrorKind.UNKNOWN_TOOL, complaint),))
        arguments = dict(call.arguments)
        if self.is_mcp:
            return await self._act(call, {"type": "call_tool", "tool_name": call.name, "arguments": arguments})
        return await self._act(call, arguments)

    async def _act(self, call: ToolCall | None, action: Mapping[str, JSON]) -> Step:
        try:
            answer = await self._asked("step", action)
        except _RefusedError as error:
            refused = Message("user", f"error: {error}")
            return Step((_failed(call, ToolErrorKind.BAD_ARGUMENTS, str(error)) if call else refused,))
        self._over = bool(answer.get("done"))
        observation = answer["observation"]
        if call is None:
            said = Message("user", self.describe(observation))
        elif self.is_mcp and observation.get("error"):
            said = _failed(call, ToolErrorKind.EXCEPTION, str(observation["error"].get("message")))
        else:
            text = _result(observation.get("result")) if self.is_mcp else self.describe(observation)
            said = Message("tool", text, tool_call_id=call.id, name=call.name)
        return Step((said,), float(answer.get("reward") or 0.0), terminated=self._over)

    async def _begin(self, options: Mapping[str, JSON]) -> Any:
        """Open a session and reset it; wait while the server is full, which is not the environment's time."""
        until, running, pause = time.monotonic() + WAIT, meter.get(), 0.1
        while True:
            asked = time.monotonic()
            try:
                return await self._asked("reset", options)
            except _FullError as error:
                await self.close()
                if time.monotonic() > until:
                    full = f"{self.url} has had no session free for {WAIT:g} s: {error}"
                    raise OpenEnvError(f"{full}; raise its max_concurrent_envs, or play fewer at a time") from error
                if running is not None:
                    running.excuse(asked, time.monotonic())
                await sleep_uncounted(pause)
                pause = min(2 * pause, 2.0)  # many wait, and each asks by a new connection

    async def _asked(self, kind: str, data: Mapping[str, JSON]) -> Any:
        """Send a message; return the data of its answer."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            sent = json.dumps({"type": kind, "data": data}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _RefusedError(f"it holds what UTF-8 can't: {error}") from None
        try:
            async with asyncio.timeout(WAIT):
                if self._socket is None:
                    address = self.url.replace("http", "ws", 1) + "/ws"
                    self._socket = await connect(address, max_size=None, proxy=None)
                with contextlib.suppress(ConnectionClosed):  # a full server says so, and closes
                    await self._socket.send(sent, text=True)
                said = await self._socket.recv()
        except (OSError, TimeoutError, WebSocketException) as error:
            raise OpenEnvError(f"the OpenEnv server at {self.url} gave no answer to {kind}: {error!r}") from error
        try:
            is_error, data = _read(said)
        except (ValueError, LookupError, TypeError) as error:
            answer = f"the OpenEnv server at {self.url} answers {kind} with {reprlib.repr(said)}"
            raise OpenEnvError(f"{answer}, which is not OpenEnv's protocol: {error!r}") from error
        if not is_error:
            return data
        code, message = data.get("code"), str(data.get("message"))
        if code == "CAPACITY_REACHED":
            raise _FullError(message)
        if code in REFUSED and kind == "step":
            raise _RefusedError(_reasons(data) or message)
        raise OpenEnvError(f"the OpenEnv server at {self.url} failed in {kind}: {message} ({code})")


class _FullError(Exception):
    """The server has as many sessions as it takes."""


class _RefusedError(Exception):
    """The server does not take the action."""


def from_openenv(url: str) -> type[OpenEnv]:
    """Return an `Env` class of what an OpenEnv server serves, for `@ar.register`; the server is reached by episodes.

    Args:
        url: the server's address, such as "http://localhost:8000".

    Raises:
        ConfigError: if it is no such address, or `websockets` is missing.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"from_openenv({url!r}): give the server's address, such as 'http://localhost:8000'")
    try:
        import websockets  # noqa: F401
    except ImportError as error:
        raise ConfigError("from_openenv needs websockets: pip install 'agent-rl[serve]'") from error
    members = {"url": url.rstrip("/"), "__doc__": f"What {url} serves, by OpenEnv's protocol."}
    return type("Served", (OpenEnv,), members | {"__module__": sys._getframe(1).f_globals["__name__"]})


def _action_schema(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/schema", timeout=WAIT) as answer:
            return json.load(answer)["action"]
    except (OSError, ValueError, LookupError) as error:
        raise OpenEnvError(f"{url}/schema gave no schema: {error}; is this an OpenEnv server?") from error


def _read(said: str | bytes) -> tuple[bool, Mapping[str, Any]]:
    """Return whether an answer is an error, and its data."""
    answer = json.loads(said)
    is_error, data = answer["type"] == "error", answer["data"]
    for part in (data,) if is_error else (data, data["observation"]):
        if not isinstance(part, Mapping):
            raise TypeError(f"{reprlib.repr(part)} is no object")
    float(data.get("reward") or 0.0)
    return is_error, data


def _failed(call: ToolCall, kind: ToolErrorKind, complaint: str) -> Message:
    return Message("tool", f"error: {complaint}", tool_call_id=call.id, name=call.name, tool_error=kind)


def _reasons(data: Mapping[str, Any]) -> str:
    """Return what is wrong with an action, in a line."""
    errors = data.get("errors") or ()
    return "; ".join(f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in errors)


def _result(result: Any) -> str:
    """Return an MCP result as text: its data, or its parts."""
    if isinstance(result, Mapping) and "content" in result:
        data = result.get("data")
        parts = [str(part.get("text", "")) for part in result["content"] if isinstance(part, Mapping)]
        return as_text(data) if data is not None else "\n".join(parts)
    return as_text(result)
