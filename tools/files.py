"""Files in a sandbox, for a model to read, write and edit."""

from __future__ import annotations

from agent_rl.gym.sandboxed import HasSandbox
from agent_rl.gym.tool import tool

MAX_FILE = 64 * 1024
"""Bytes of the largest file that the model may read, or edit."""


@tool(timeout=None)  # the sandbox has a timeout of its own
async def read_file(self: HasSandbox, path: str) -> str:
    """Return a file's text.

    Args:
        path: relative to the working folder, or absolute.
    """
    return (await self.sandbox.read_file(path, max_bytes=MAX_FILE)).decode(errors="backslashreplace")


@tool(timeout=None)
async def write_file(self: HasSandbox, path: str, text: str) -> str:
    """Write a file, in place of one that is there, and the folders above it.

    Args:
        path: relative to the working folder, or absolute.
        text: all of it.
    """
    data = text.encode(errors="surrogateescape")
    await self.sandbox.write_file(path, data)
    return f"wrote {len(data)} bytes"


@tool(timeout=None)
async def edit_file(self: HasSandbox, path: str, old: str, new: str) -> str:
    """Replace a piece of a file's text that occurs once.

    Args:
        path: relative to the working folder, or absolute.
        old: the piece, with enough around it to be the only one.
        new: what stands there afterwards.
    """
    text = (await self.sandbox.read_file(path, max_bytes=MAX_FILE)).decode(errors="surrogateescape")
    if (count := text.count(old) if old else 0) != 1:
        raise ValueError(f"the old text occurs {count} times in {path}, not once")
    await self.sandbox.write_file(path, text.replace(old, new).encode(errors="surrogateescape"))
    return f"edited {path}"


files = (read_file, write_file, edit_file)
"""All three, for an environment's `extra_tools`."""
