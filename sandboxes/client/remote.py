"""The agent on another machine: its entry point, and the source texts that are sent to it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from agent_rl.sandboxes import agent
from agent_rl.sandboxes.base import WORK

_FILES = {file.stem: file for file in Path(agent.__file__).parent.glob("*.py")}
ENTRY = _FILES["bootstrap"].read_text()
"""For `python3 -c`: an agent that ends when its stdin does, and when its lifetime is over."""


def greeting(lifetime: float, user: str = "", home: str = WORK, variables: Mapping[str, str] | None = None) -> bytes:
    """Return what `ENTRY` reads first: the agent's source texts and settings.

    Args:
        lifetime: seconds until it ends.
        user: who runs the code, if not the agent's own user.
        home: the folder that code starts in; it stands for `WORK` where that is another one.
        variables: of the environment of all that runs there, in addition to PATH, HOME and LANG.
    """
    sources = {"agent" if name == "__init__" else f"agent.{name}": file.read_text() for name, file in _FILES.items()}
    text = json.dumps((home, user, lifetime, sources, dict(variables or {}))).encode()
    return struct.pack(">I", len(text)) + text
