"""Frames between a server of sandboxes and its clients, honest ones and such with mistakes in them."""

from __future__ import annotations

import json
import random
from typing import Any

from agent_rl.core.escaping import ESCAPE
from tests.sandbox.mutations import VALUES, mutated

WORDS = (*VALUES, "KeyError", "KeyboardInterrupt", "a b", f"{ESCAPE}d800", f"{ESCAPE}0000", "1e999", "%", "/w==")
_LIMITS = {"memory": 9, "cpu_seconds": 1, "file_size": 1, "open_files": 9}
_COMMAND = {"argv": ["true"], "input": "eA==", "cwd": "/work", "env": {"A": "b"}, "timeout": 5.0, "max_output": 9}
_COMMAND |= {"limits": _LIMITS, "user": ""}
_SNAPSHOT = {"files": "eA==", "has_variables": True, "gap": None, "has_processes": False}
_SNAPSHOT["calls"] = [
    {"command": _COMMAND},
    {"code": "MQ==", "timeout": 1.0, "max_output": 9, "outcome": "x"},
    {"path": "f", "data": "eA=="},
]
_LAUNCH = {"argv": ["cat"], "cwd": "/work", "env": {}, "limits": _LIMITS, "pty": [24, 80], "user": ""}
_OPEN = {"owner": "x", "limits": {"memory": 1 << 20, "processes": 9, "cpus": 1.0, "disk": 9, "files": 9}}
REQUESTS: dict[str, dict[str, Any]] = {
    "capabilities": {},
    "open": {"lease": "a", **_OPEN, "lifetime": 60.0, "wait": 0.0},
    "run_command": {"lease": "a", "command": _COMMAND},
    "run_python": {"lease": "a", "code": "MQ==", "timeout": 1.0, "max_output": 9},
    "read_file": {"lease": "a", "path": "f", "max_bytes": 9},
    "write_file": {"lease": "a", "path": "f", "data": "eA=="},
    "snapshot": {"lease": "a"},
    "restore": {"lease": "a", "snapshot": _SNAPSHOT},
    "start": {"lease": "a", "launch": _LAUNCH},
    "connect": {"lease": "a", "address": 80, "timeout": 1.0},
    "read": {"lease": "a", "handle": 1, "max_bytes": 9, "timeout": 1.0},
    "write": {"lease": "a", "handle": 1, "data": "eA==", "timeout": 1.0},
    "write_eof": {"lease": "a", "handle": 1},
    "end": {"lease": "a", "handle": 1},
    "logs": {"lease": "a", "handle": 1, "max_bytes": 9},
    "wait": {"lease": "a", "handle": 1, "timeout": 1.0},
    "signal": {"lease": "a", "handle": 1, "number": 9},
    "resize": {"lease": "a", "handle": 1, "rows": 9, "columns": 9},
    "cancel": {"of": 1},
    "close": {"lease": "a"},
}
"""A request of each kind that a client could send, without its number."""
_ENDED = {"stdout": "", "stderr": "", "timed_out": False, "truncated": False, "seconds": 0.1, "sandbox_lost": False}
_LOSS = {"cause": "memory", "reason": "x", "evidence": {"status": -9, "oom_kills": 1}}
REPLY: dict[str, Any] = {
    "capabilities": {"files": "a mount namespace", "network": None},
    "taken": 1,
    "capacity": 9,
    "executed": {"returncode": 0, **_ENDED},
    "ran": {**_ENDED, "value": "4", "error": None, "state_lost": False, "plots": ["iVBORw0KGgo="]},
    "out": "b3V0",
    "err": "/w==",
    "data": "eA==",
    "snapshot": _SNAPSHOT,
    "missing": "x",
    "handle": 1,
    "output": {"data": "eA==", "dropped": 0, "ended": False},
    "logs": {"stdout": "x", "stderr": "", "truncated": False},
    "status": 0,
    "loss": None,
    "error": None,
}
"""What answers any request."""
_PROBLEM = {"type": "SandboxError", "message": "x", "traceback": "Traceback ...", "kind": "OSError", "loss": _LOSS}


def spoiled(draw: random.Random, value: Any) -> Any:
    """Return a value of JSON's kinds, of which one part, at any depth, is not what it should be."""
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inside or draw.random() < 0.2:
        return draw.choice(WORDS)
    changed, at = value.copy(), draw.choice(inside)
    if isinstance(changed, dict) and draw.random() < 0.15:
        changed[str(draw.choice(("type", "x", "", ESCAPE)))] = changed.pop(at)
    else:
        changed[at] = spoiled(draw, value[at])
    return changed


def request(draw: random.Random, call: int, handle: int) -> str | bytes:
    """Return a request with mistakes in it, most of which leave its number to be found."""
    op = draw.choice((*REQUESTS, *("open",) * 3, *("start",) * 2))
    rest = REQUESTS[op]
    for key, values in (("lease", "aaaab"), ("handle", (handle, handle, handle, 0)), ("of", range(call - 2, call + 2))):
        if key in rest:
            rest = {**rest, key: draw.choice(values)}
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        rest = spoiled(draw, rest)
    frame = {"op": op, "call": call if draw.random() < 0.95 else draw.choice(WORDS)}
    return _written(draw, {**frame, **rest} if isinstance(rest, dict) else rest)


def reply(draw: random.Random | None, call: int) -> str | bytes:
    """Return a reply, with mistakes in it if any are to be drawn."""
    frame: Any = {"call": call, **REPLY}
    if draw is None:
        return json.dumps(frame)
    if draw.random() < 0.3:
        frame["error"] = _PROBLEM
    if draw.random() < 0.4:
        frame = {key: value for key, value in frame.items() if key == "call" or draw.random() < 0.6}
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        frame = spoiled(draw, frame)
    return _written(draw, frame)


def _written(draw: random.Random, frame: object) -> str | bytes:
    text = json.dumps(frame, separators=(",", ":"), ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    if draw.random() < 0.25:
        text = text[:20] + mutated(draw, text[20:])
    return text if draw.random() < 0.5 else text.decode(errors="replace")
