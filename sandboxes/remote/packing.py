"""Texts, code and snapshots as they are sent between a server of sandboxes and its clients.

What code in a sandbox wrote, and code itself, goes as base64: JSON's escapes would make it up to six times as long.
"""

from __future__ import annotations

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.calls import Command
from agent_rl.sandboxes.snapshot import Call, Snapshot
from agent_rl.serving.frames import Frame

MAX_TEXT = 10 * 1024 * 1024
"""Bytes of each of stdout and stderr that a reply holds, at most; the middle of more is dropped."""
_CODE = "utf-8", "surrogatepass"


class CommandCall(Frame):
    """A command of a snapshot."""

    command: Command


class CodeCall(Frame):
    """A piece of Python of a snapshot, and a digest of what it gave."""

    code: bytes
    timeout: float
    max_output: int
    outcome: str


class FileCall(Frame):
    """A file that was written before a snapshot."""

    path: str
    data: bytes


class PackedSnapshot(Frame):
    """A `Snapshot`, which names calls: of these three methods and of no other."""

    files: bytes
    calls: tuple[CommandCall | CodeCall | FileCall, ...]
    has_variables: bool
    gap: str | None
    has_processes: bool


def pack_code(code: str) -> bytes:
    """Return code as it is sent."""
    return code.encode(*_CODE)


def unpack_code(code: bytes) -> str:
    """Return the code that was sent.

    Raises:
        ConfigError: if it is no text.
    """
    try:
        return code.decode(*_CODE)
    except UnicodeDecodeError as error:
        raise ConfigError(f"code that is no text: {error}") from None


def pack_text(text: str) -> tuple[bytes, bool]:
    """Return an output as it is sent, and whether its middle was dropped."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_TEXT:
        return data, False
    return data[: MAX_TEXT // 2] + data[-MAX_TEXT // 2 :], True


def unpack_text(data: bytes) -> str:
    """Return the output that was sent; what a cut has left of a character becomes U+FFFD."""
    return data.decode("utf-8", "replace")


def pack_snapshot(snapshot: Snapshot) -> PackedSnapshot:
    """Return a snapshot as it is sent.

    Raises:
        ConfigError: if it is of a backend of another kind, which names other calls.
    """
    calls: list[CommandCall | CodeCall | FileCall] = []
    for call in snapshot.calls:
        has = dict(call.arguments)
        match call.method:
            case "run_command":
                calls.append(CommandCall.model_validate(has))
            case "run_python":
                has |= {"code": pack_code(str(has["code"])), "outcome": call.outcome}
                calls.append(CodeCall.model_validate(has))
            case "write_file":
                calls.append(FileCall.model_validate(has))
            case _:
                raise ConfigError(f"a snapshot with a call of {call.method!r}, which can't be sent to another machine")
    return PackedSnapshot.model_construct(
        None,
        files=snapshot.files,
        calls=tuple(calls),
        has_variables=snapshot.has_variables,
        gap=snapshot.gap,
        has_processes=snapshot.has_processes,
    )


def unpack_snapshot(packed: PackedSnapshot) -> Snapshot:
    """Return the snapshot that was sent.

    Raises:
        ConfigError: if code in it is no text.
    """
    calls = []
    for call in packed.calls:
        match call:
            case CommandCall():
                calls.append(Call("run_command", {"command": call.command}, ""))
            case CodeCall():
                has = {"code": unpack_code(call.code), "timeout": call.timeout, "max_output": call.max_output}
                calls.append(Call("run_python", has, call.outcome))
            case FileCall():
                calls.append(Call("write_file", {"path": call.path, "data": call.data}, ""))
    return Snapshot(packed.files, tuple(calls), packed.has_variables, packed.gap, packed.has_processes)
