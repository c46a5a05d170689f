"""What a server of sandboxes and its clients say to each other, in the frames of `agent_rl.serving`.

`open` takes a lease: one place in the server, with one sandbox in it. The other requests are the methods of `Sandbox`,
and of the processes and streams that it has, which are named by handles.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Guarantee, Limits
from agent_rl.sandboxes.calls import Command, ExecResult, FileAccessError, PythonResult
from agent_rl.sandboxes.process import Launch, Logs, Output, ProcessError
from agent_rl.sandboxes.remote.packing import PackedSnapshot
from agent_rl.serving import frames
from agent_rl.serving.frames import Cancel, load

PATH = "/sandboxes/v1"
"""Where the server takes connections; the number rises when frames change."""


class Capabilities(frames.Request):
    """Ask what is guaranteed there."""

    op: Literal["capabilities"]


class Open(frames.Request):
    """Take a lease, and open a sandbox."""

    op: Literal["open"]
    lease: str = Field(max_length=64)
    """The client's own name for it."""
    owner: str
    limits: Limits | None
    lifetime: float = Field(gt=0, le=366 * 86400)
    wait: float = Field(ge=0)
    """Seconds that it is waited for a place, at most; the server's own, if those are fewer."""


class Ask(frames.Request):
    """The base of what is asked of a sandbox."""

    lease: str


class RunCommand(Ask):
    """Run a command to its end."""

    op: Literal["run_command"]
    command: Command


class RunPython(Ask):
    """Run code in the interpreter."""

    op: Literal["run_python"]
    code: bytes
    timeout: float
    max_output: int


class ReadFile(Ask):
    """Ask for a file's bytes."""

    op: Literal["read_file"]
    path: str
    max_bytes: int


class WriteFile(Ask):
    """Write a file."""

    op: Literal["write_file"]
    path: str
    data: bytes


class TakeSnapshot(Ask):
    """Ask for a snapshot."""

    op: Literal["snapshot"]


class Restore(Ask):
    """Bring a snapshot's files and variables into a sandbox."""

    op: Literal["restore"]
    snapshot: PackedSnapshot


class Start(Ask):
    """Start a process that outlives the call."""

    op: Literal["start"]
    launch: Launch


class Connect(Ask):
    """Connect to a server in the sandbox."""

    op: Literal["connect"]
    address: int | str
    timeout: float


class OfStream(Ask):
    """The base of what is asked of a process or a stream."""

    handle: int


class Read(OfStream):
    """Ask for the next bytes."""

    op: Literal["read"]
    max_bytes: int
    timeout: float


class Write(OfStream):
    """Write bytes."""

    op: Literal["write"]
    data: bytes
    timeout: float


class WriteEof(OfStream):
    """Say that no more comes."""

    op: Literal["write_eof"]


class EndStream(OfStream):
    """End a process or a stream, and forget its handle."""

    op: Literal["end"]


class ReadLogs(OfStream):
    """Ask for the last bytes of stdout and stderr."""

    op: Literal["logs"]
    max_bytes: int


class Wait(OfStream):
    """Ask how a process ended."""

    op: Literal["wait"]
    timeout: float


class Signal(OfStream):
    """Send a process a signal."""

    op: Literal["signal"]
    number: int


class Resize(OfStream):
    """Change the size of a process's pty."""

    op: Literal["resize"]
    rows: int
    columns: int


class Close(Ask):
    """End the sandbox and give the lease back, whatever it is doing."""

    op: Literal["close"]


OfSandbox: TypeAlias = (
    RunCommand | RunPython | ReadFile | WriteFile | TakeSnapshot | Restore | Start | Connect | Close | OfStream
)
Request: TypeAlias = Annotated[
    Capabilities
    | Open
    | RunCommand
    | RunPython
    | ReadFile
    | WriteFile
    | TakeSnapshot
    | Restore
    | Start
    | Connect
    | Read
    | Write
    | WriteEof
    | EndStream
    | ReadLogs
    | Wait
    | Signal
    | Resize
    | Cancel
    | Close,
    Field(discriminator="op"),
]


class Problem(frames.Problem):
    """An exception, and how the sandbox was lost, if it is that."""

    loss: SandboxLoss | None = None

    def error(self) -> Exception:
        """Return the exception, as the sandbox would have raised it here."""
        if self.type == "SandboxError":
            return SandboxError(self.message, self.loss)
        own = {"FileAccessError": FileAccessError, "ProcessError": ProcessError, "FrameSizeError": ConfigError}
        return own[self.type](self.message) if self.type in own else super().error()


class Reply(frames.Reply):
    """The answer to a call: an error, or what was asked for."""

    error: Problem | None = None
    capabilities: dict[Guarantee, str | None] | None = None
    taken: int | None = Field(None, ge=0)
    """Of the server's places, now."""
    capacity: int | None = Field(None, gt=0)
    executed: ExecResult | None = None
    ran: PythonResult | None = None
    out: bytes = b""
    """stdout of either, which is empty in there."""
    err: bytes = b""
    data: bytes | None = None
    snapshot: PackedSnapshot | None = None
    missing: str | None = None
    """What `restore` says is."""
    handle: int | None = None
    output: Output | None = None
    logs: Logs | None = None
    status: int | None = None
    loss: SandboxLoss | None = None
    """How the sandbox was lost, if a call has found out."""


load_request = partial(load, TypeAdapter[Request](Request))
load_reply = partial(load, TypeAdapter(Reply))
