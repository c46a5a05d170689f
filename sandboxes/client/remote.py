"""The agent on another machine: its entry point, and the source texts that are sent to it."""

from __future__ import annotations

import functools
import importlib.util
import marshal
import struct
from collections.abc import Mapping
from pathlib import Path

from agent_rl.sandboxes import agent
from agent_rl.sandboxes.calls import WORK

_FILES = {file.stem: file for file in Path(agent.__file__).parent.glob("*.py")}
ENTRY = _FILES["bootstrap"].read_text(encoding="utf-8")
"""For `python3 -c`: an agent that ends when its stdin does, and when its lifetime is over."""
_ANY_VERSION = 2
"""Of marshal's format: one that every Python reads."""


def greeting(lifetime: float, user: str = "", home: str = WORK, variables: Mapping[str, str] | None = None) -> bytes:
    """Return what `ENTRY` reads first: the agent's modules and settings.

    Args:
        lifetime: seconds until it ends.
        user: who runs the code, if not the agent's own user.
        home: the folder that code starts in; it stands for `WORK` where that is another one.
        variables: of the environment of all that runs there, in addition to PATH, HOME and LANG.
    """
    data = marshal.dumps((home, user, lifetime, dict(variables or {}), *_modules()), _ANY_VERSION)
    return struct.pack(">I", len(data)) + data


@functools.cache
def _modules() -> tuple[dict[str, str], bytes, bytes]:
    """Return the agent's source texts by module, and as bytecode for a Python whose magic number is the second."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in _FILES.items()}
    sources = {"agent" if name == "__init__" else f"agent.{name}": text for name, text in texts.items()}
    codes = {name: compile(text, name, "exec", dont_inherit=True) for name, text in sources.items()}
    return sources, importlib.util.MAGIC_NUMBER, marshal.dumps(codes)
