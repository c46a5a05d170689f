"""What every server and its clients say to each other: one JSON object a frame, over one WebSocket for a process.

A request names its `call`, which the reply repeats. The first takes a lease, which later ones name.
"""

from __future__ import annotations

import builtins
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from agent_rl import errors
from agent_rl.core.escaping import ESCAPE, escape, plain, unescape, with_strings
from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.errors import ConfigError, RemoteError, SandboxError

if TYPE_CHECKING:
    from websockets.asyncio.connection import Connection

TOKEN = "AGENT_RL_SERVER_TOKEN"
"""The environment variable with the token that both sides know."""
LOCAL = ("127.0.0.1", "::1", "localhost")
"""Hosts that only this machine reaches, so that no token is needed."""
MAX_BYTES = 32 * 2**20
"""Of one frame. pydantic's parser refuses what is nested more than 200 deep."""
F = TypeVar("F")


class FrameSizeError(RemoteError):
    """A frame that is larger than the other side would take; it was not sent."""


class Frame(BaseModel):
    """The base of all frames; bytes are written as base64."""

    model_config = ConfigDict(
        extra="forbid", ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64", frozen=True
    )


class Request(Frame):
    """The base of requests."""

    op: str
    call: int


class Cancel(Request):
    """Stop a call: its client no longer waits."""

    op: Literal["cancel"]
    of: int
    """The call's number."""


class Problem(Frame):
    """An exception of what is served, or the server's own."""

    type: str
    message: str
    traceback: str = ""
    kind: str = ""
    """The class that it derives from, where `type` is neither Python's nor agent_rl's."""
    loss: SandboxLoss | None = None
    """How a sandbox was lost, if the exception tells of it."""

    def error(self) -> Exception:
        """Return the exception: of the same class if it is Python's or agent_rl's, else of one with its name."""
        base = _known_class(self.kind or self.type)
        if base.__name__ == self.type:
            with suppress(TypeError):  # it takes more than a message
                same = SandboxError(self.message, self.loss) if base is SandboxError else base(self.message)
                if str(same) == self.message:
                    return same
        members = {"__init__": lambda error: None, "__str__": lambda error: self.message, "loss": self.loss}
        name = self.type if self.type.isidentifier() else base.__name__
        return cast(Exception, type(name, (base,), members)())


class Reply(Frame):
    """The answer to a call: an error, or what was asked for."""

    call: int
    error: Problem | None = None


def part(found: F | None) -> F:
    """Return what a reply should have.

    Raises:
        RemoteError: if the server has left it out.
    """
    if found is None:
        raise RemoteError("the server answered without what was asked for")
    return found


def _known_class(name: str) -> type[Exception]:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, ExceptionGroup):
        return found
    return Exception


def require_websockets() -> None:
    """Check that the extra [serve] is installed.

    Raises:
        ConfigError: if it is not.
    """
    if find_spec("websockets") is None:
        raise ConfigError("servers and their clients need websockets: pip install 'agent-rl[serve]', here and there")


def bound_sending(connection: Connection, ping: float) -> None:
    """End a connection whose other side takes none of what is sent, no later than one that doesn't answer pings.

    A ping waits behind what was sent before it, however long that takes.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux
        with suppress(OSError):  # it is closed already
            told = connection.transport.get_extra_info("socket")
            told.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * ping))


def dump(frame: Frame) -> bytes:
    """Return a frame as JSON.

    Raises:
        RemoteError: if it holds something that JSON can't.
        FrameSizeError: if it is too large.
    """
    try:
        data = _json(frame)
        unsafe = ESCAPE.encode() in data
    except PydanticSerializationError as error:
        if not (unsafe := "surrogates not allowed" in str(error)):
            raise RemoteError(f"what is sent holds something that JSON can't: {error}") from error
    if unsafe:
        data = _json(_with_strings(frame, escape))
    if len(data) > MAX_BYTES:
        raise FrameSizeError(f"a frame of {len(data)} bytes is too large: at most {MAX_BYTES}")
    return data


def load(adapter: TypeAdapter[F], data: str | bytes) -> F:
    """Return the frame that some JSON is.

    Raises:
        RemoteError: if it is none.
    """
    try:
        frame = adapter.validate_json(data)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, detail["loc"]))
        raise RemoteError(f"a frame that can't be read: {where}: {detail['msg']}") from None
    has_escapes = ESCAPE in data if isinstance(data, str) else ESCAPE.encode() in data
    return _with_strings(frame, unescape) if has_escapes else frame


def call_of(data: str | bytes) -> int | None:
    """Return the number of the call in a frame that could not be read, if it can be found."""
    head = data[:200] if isinstance(data, bytes) else data[:200].encode()
    found = re.match(rb'{"op":"[a-z_]+","call":(\d{1,18})[,}]', head)
    return int(found[1]) if found else None


def _json(frame: Frame) -> bytes:
    return frame.__pydantic_serializer__.to_json(frame, exclude_defaults=True, warnings=False, fallback=plain)


def _with_strings(value: F, change: Callable[[str], str]) -> F:
    """Return the same frame with all of its strings changed, at any depth."""
    if isinstance(value, list | tuple):
        return type(value)(_with_strings(item, change) for item in value)
    if not isinstance(value, BaseModel):
        return with_strings(value, change)
    changed = {name: _with_strings(getattr(value, name), change) for name in type(value).model_fields}
    return value.model_construct(None, **changed)
