"""MCP servers and sessions with them.

Sessions live in an event loop of their own, in a thread: a shared one outlives `asyncio.run`. A server that does not
start, or dies, fails the episode, which is then not scored; an error that a tool reports, and a call that takes too
long, is a message to the model.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from agent_rl.concurrency import AsyncOnce, LoopThread
from agent_rl.core.images import Image
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, DefinitionError, ToolServerError, did_you_mean
from agent_rl.gym.tool import MAX_OUTPUT, AnyTool, Tool, ToolSpec
from agent_rl.gym.tool_limits import DEFAULT_TIMEOUT
from agent_rl.pacing import Pace
from agent_rl.tools.mcp_results import parts_of, text_of

STDERR = 500
"""Characters of what a server wrote to stderr that an error shows."""
_TRANSPORT = {-32000, -32600, -32700}
"""Codes of JSON-RPC errors by which the SDK says that the connection is closed, or carries no MCP."""
_HTTP_ERROR = "Server returned an error response"
"""What the SDK says of an HTTP status without a JSON-RPC error; the code is that of a tool's failure."""


class McpServer:
    """An MCP server: how to reach it, and what of it a model may use."""

    def __init__(
        self,
        server: str | object,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
        shared: bool = False,
        only: Sequence[str] = (),
        prefix: str = "",
        start_seconds: float = 30.0,
        timeout: float | None = DEFAULT_TIMEOUT,
        max_output: int = MAX_OUTPUT,
        rate: float | None = None,
    ) -> None:
        """Declare it; nothing is started.

        Args:
            server: the command to start, or the URL of one that runs; or an object of the SDK, such as an `MCPServer`
                in this process.
            arguments: of the command.
            env: variables of the command, which inherits PATH, HOME and the like only.
            cwd: the folder that the command runs in.
            headers: of the requests to the URL, such as an authorization.
            shared: whether all episodes of the process use one session, which is opened with the first and again if
                it was lost; otherwise each has its own.
            only: the server's names of the tools to offer; all if empty.
            prefix: what the model reads before each name, where two servers have a tool of one name.
            start_seconds: until the server has said what tools it has.
            timeout: seconds of a call.
            max_output: characters of a result.
            rate: calls per second, of all episodes of the process and all tools of the server together.
        """
        self.server, self.arguments = server, arguments
        self.env, self.cwd, self.headers = env, cwd, headers
        self.is_shared, self.only, self.prefix = shared, tuple(only), prefix
        self.start_seconds, self.timeout, self.max_output = start_seconds, timeout, max_output
        self.rate_limit = None if rate is None else Pace(rate)
        self._shared = AsyncOnce(self._start)

    def __str__(self) -> str:
        return " ".join((str(self.server), *self.arguments))

    async def open(self) -> McpSession:
        """Return a session, the shared one if it is.

        Raises:
            ConfigError: if there is no package `mcp`, or no tool of a name in `only`.
            DefinitionError: if two tools would have the same name.
            ToolServerError: if the server does not start, or does not answer.
        """
        _sdk()
        return await (_loop().run(self._share()) if self.is_shared else self._start())

    async def _start(self) -> McpSession:
        session = McpSession(self)
        try:
            await session.start()
        except BaseException:  # a cancellation may come when it has just been opened
            await session.close()
            raise
        return session

    async def _share(self) -> McpSession:
        once = self._shared
        session = await once.get()
        if session.is_lost:
            if self._shared is once:
                self._shared = AsyncOnce(self._start)
            session = await self._shared.get()
        return session


class McpSession:
    """A session with a server; `tools` by the names that the model uses."""

    tools: Mapping[str, AnyTool]

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.is_lost = False
        """Whether the server has closed the connection."""
        self._is_open = False
        self._ended = asyncio.Event()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stderr: IO[str] | None = None

    async def start(self) -> None:
        """Open the session.

        Raises:
            ConfigError: if there is no tool of a name in `only`.
            DefinitionError: if two tools would have the same name.
            ToolServerError: if it is not open within `start_seconds`.
        """
        self.tools = self._tools(await _loop().run(self._open()))

    async def call(self, name: str, /, **arguments: JSON) -> str:
        """Call a tool by the server's name; return the text of its result, as for a reward that looks at the state.

        An image is a line of it; a model that calls the tool gets the image.

        Raises:
            RuntimeError: if the tool reports an error.
            ToolServerError: if the server can't be reached.
        """
        return text_of(await _loop().run(self._call(name, arguments)))

    async def close(self) -> None:
        """End the session, and with it the process of a server that was started for it."""
        await _loop().run(self._end())

    async def _open(self) -> Sequence[Any]:
        """Start the task that holds the session; return what tools there are."""
        async with _starting():  # a start takes a second of CPU, and many at a time would all be late
            opened: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(opened))
            try:
                async with asyncio.timeout(self.server.start_seconds) as clock:
                    return await opened
            except TimeoutError:
                if not clock.expired():
                    raise
                raise self._failure(f"did not start within {self.server.start_seconds:g} s") from None

    async def _hold(self, opened: asyncio.Future[Sequence[Any]]) -> None:
        """Keep the session open: what it consists of is entered and left in this task."""
        with tempfile.TemporaryFile("w+", errors="replace") as self._stderr:
            try:
                async with _sdk().Client(_transport(self.server, self._stderr)) as self._client:
                    page = await self._client.list_tools()
                    described = [*page.tools]
                    while page.next_cursor:
                        page = await self._client.list_tools(cursor=page.next_cursor)
                        described += page.tools
                    opened.set_result(described)
                    self._is_open = True
                    await self._ended.wait()
            except BaseException as error:
                if not opened.done():
                    opened.set_exception(self._failure(f"did not start: {_cause(error)}"))
            finally:
                self.is_lost = True

    async def _end(self) -> None:
        self._ended.set()
        if self._task is not None:
            if not self._is_open:
                self._task.cancel()
            await asyncio.wait([self._task])

    async def _call(self, name: str, arguments: Mapping[str, JSON]) -> list[str | Image]:
        if self.is_lost:
            raise self._failure("has closed the connection")
        try:
            result = await self._client.call_tool(name, dict(arguments))
        except _sdk().MCPError as error:
            if error.code not in _TRANSPORT and error.message != _HTTP_ERROR:
                raise RuntimeError(error.message) from None
            self.is_lost = True
            raise self._failure(f"was lost: {error.message}") from error
        parts = parts_of(result)
        if result.is_error:
            raise RuntimeError(text_of(parts))
        return parts

    def _failure(self, what: str) -> ToolServerError:
        """Return the error of a server, with the end of what it wrote to stderr."""
        said = ""
        if self._stderr is not None and not self._stderr.closed:
            self._stderr.seek(0)
            said = " ".join(self._stderr.read()[-STDERR:].split())
        return ToolServerError(f"MCP server `{self.server}` {what}{said and f'; its stderr ends with: {said}'}")

    def _tools(self, described: Sequence[Any]) -> Mapping[str, AnyTool]:
        server, names = self.server, [tool.name for tool in described]
        for name in server.only:
            if name not in names:
                known = f" The tools are: {', '.join(names)}."
                raise ConfigError(f"MCP server `{server}` has no tool '{name}'.{did_you_mean(name, names)}{known}")
        tools: dict[str, AnyTool] = {}
        for offered in described:
            if server.only and offered.name not in server.only:
                continue
            made = self._tool(offered)
            if made.spec.name in tools:
                raise DefinitionError(
                    f"MCP server `{server}` has two tools that a model would call '{made.spec.name}', {offered.name} "
                    "one of them: name those that you need in only="
                )
            tools[made.spec.name] = made
        return tools

    def _tool(self, described: Any) -> AnyTool:
        async def call(**arguments: JSON) -> str | list[str | Image]:
            parts = await _loop().run(self._call(described.name, arguments))
            return parts if any(isinstance(part, Image) for part in parts) else text_of(parts)

        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{self.server.prefix}{described.name}")[:64]
        spec = ToolSpec(name, (described.description or described.title or "").strip(), described.input_schema)
        tool = Tool(call, spec=spec, timeout=self.server.timeout, max_output=self.server.max_output)
        tool.rate_limit = self.server.rate_limit
        return tool


@functools.cache
def _sdk() -> Any:
    """Return the package `mcp`.

    Raises:
        ConfigError: if it is not installed, or older than what is used here.
    """
    try:
        package = importlib.import_module("mcp")
    except ImportError:
        raise ConfigError("tools of MCP servers need the package `mcp`: pip install '.[mcp]'") from None
    if not hasattr(package, "Client"):
        raise ConfigError("the package `mcp` is older than 2.0: pip install --upgrade mcp")
    return package


def _transport(server: McpServer, stderr: IO[str]) -> Any:
    if not isinstance(server.server, str):
        return server.server
    if server.server.startswith(("http://", "https://")):
        return _over_http(server.server, dict(server.headers or {}))
    stdio = importlib.import_module("mcp.client.stdio")
    command = stdio.StdioServerParameters(
        command=server.server, args=list(server.arguments), env=dict(server.env or {}), cwd=server.cwd
    )
    return stdio.stdio_client(command, errlog=stderr)


@asynccontextmanager
async def _over_http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    http = importlib.import_module("mcp.client.streamable_http")
    async with (
        http.create_mcp_http_client(headers=headers) as client,
        http.streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


@functools.cache
def _loop() -> LoopThread:
    """Return the event loop that all sessions live in."""
    thread = LoopThread("agent_rl MCP sessions")
    atexit.register(thread.close)
    return thread


@functools.cache
def _starting() -> asyncio.Semaphore:
    return asyncio.Semaphore(os.cpu_count() or 1)


def _cause(error: BaseException) -> BaseException:
    """Return what is wrong, out of the groups that the SDK's tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
