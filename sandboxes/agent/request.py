"""A request to the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """What the host wants: the head of its frame, and the body."""

    op: str
    id: int
    body: bytes
    argv: tuple[str, ...] = ()
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    timeout: float = 30.0
    keep: int = 4096
    limits: Mapping[str, int] = field(default_factory=dict)
    pty: Sequence[int] | None = None
    address: int | str = 0
    handle: int = 0
    at: int = 0
    number: int = 0
    now: bool = False
