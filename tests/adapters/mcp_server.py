"""An MCP server for the tests, over stdio if it is run as a program."""

from __future__ import annotations

import asyncio
import base64
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAECAAAAABjWKqcAAAAC0lEQVR4nGNgwA4AABgAAdV/xOwAAAAASUVORK5CYII="
)
"""A grey PNG of 5x4 pixels."""


def make_server() -> MCPServer:
    server = MCPServer("probe")
    notes: list[str] = []

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def note(text: str) -> str:
        """Keep a note; return all."""
        notes.append(text)
        return " ".join(notes)

    @server.tool(name="files/list")
    def listing() -> dict[str, int]:
        """Return sizes by name."""
        return {"a.txt": 3}

    @server.tool(structured_output=False)
    def picture() -> list[object]:
        """Return text, a picture, and one that is broken."""
        return ["a dot", Image(data=PICTURE, format="png"), Image(data=b"\x89PNG" * 300, format="png")]

    @server.tool()
    def flood() -> str:
        """Return far too much."""
        return "head" + "x" * 200_000 + "tail"

    @server.tool()
    async def hang() -> str:
        """Never return."""
        await asyncio.sleep(3600)
        return ""

    @server.tool()
    def fail() -> str:
        """Raise."""
        raise ToolError("no such thing")

    @server.tool()
    def die() -> str:
        """End the process."""
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)

    return server


if __name__ == "__main__":
    make_server().run()
