"""Tools of any MCP server, over stdio or streamable HTTP: `pip install '.[mcp]'`.

    @ar.register("notes-v0", tasks=[...])
    class Notes(McpEnv):
        servers = (McpServer("npx", "-y", "@modelcontextprotocol/server-memory"),)

        async def reset(self, task, rng):
            await self.open_servers()
            return task["question"]

The model's calls go to sessions with these servers, of which `mcp_server` says what becomes of a lost one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agent_rl.core.messages import Message, Step
from agent_rl.errors import DefinitionError
from agent_rl.gym.env import ToolEnv
from agent_rl.gym.tool import AnyTool
from agent_rl.tools.mcp_server import McpServer, McpSession

__all__ = ["McpEnv", "McpServer", "McpSession"]


class McpEnv(ToolEnv):
    """A `ToolEnv` with the tools of MCP servers beside its own: `reset` awaits `self.open_servers()`.

    The servers' sessions are closed with the episode, by `close`.
    """

    servers: ClassVar[Sequence[McpServer]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.servers, McpServer):
            raise DefinitionError(f"{cls.__name__}.servers is one McpServer; write servers = (McpServer(...),)")

    def __init__(self) -> None:
        self._sessions: list[McpSession] = []
        self._toolbox: Mapping[str, AnyTool] = self._tools

    @property
    def toolbox(self) -> Mapping[str, AnyTool]:
        """The class's tools and the servers'."""
        return self._toolbox

    async def open_servers(self, *servers: McpServer) -> tuple[McpSession, ...]:
        """Open a session with each of the servers given, such as ones with a folder of this episode, or the class's.

        Raises:
            ConfigError: if there is no package `mcp`, or no tool of a name in `only`.
            DefinitionError: if two tools have the same name.
            ToolServerError: if a server does not start, or does not answer.
        """
        opened = []
        for server in servers or self.servers:
            session = await server.open()
            opened.append(session)
            self._sessions.append(session)
            if twice := self._toolbox.keys() & session.tools.keys():
                raise DefinitionError(
                    f"{type(self).__name__} has two tools '{min(twice)}', one of MCP server `{server}`: give it a "
                    "prefix=, or name the tools that you need in only="
                )
            self._toolbox = {**self._toolbox, **session.tools}
        return tuple(opened)

    async def step(self, action: Message) -> Step:
        """Answer as `ToolEnv` does.

        Raises:
            DefinitionError: if the class has servers, and none was opened: the policy knows nothing of their tools.
        """
        if self.servers and not self._sessions:
            name = type(self).__name__
            raise DefinitionError(f"{name} has servers, and no session with one: let {name}.reset await open_servers()")
        return await super().step(action)

    async def close(self) -> None:
        """Close the sessions that are not shared, and with them the servers that were started for this episode."""
        own, self._sessions = [s for s in self._sessions if not s.server.is_shared], []
        await asyncio.gather(*(session.close() for session in own))
