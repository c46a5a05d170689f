"""The targets of attacks: things of the host that code in a sandbox must not reach."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECRET = "host-secret-" + secrets.token_hex(8)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Victims:
    """The names that an attack's code finds defined are those of `names`."""

    names: dict[str, object]
    process: subprocess.Popen[bytes]
    listeners: list[socket.socket]
    file: Path
    own: Path
    """A file of the user's; no other user may access it."""
    memory: ctypes.Array[ctypes.c_char] = field(repr=False)

    def __post_init__(self) -> None:
        self._before = self.own.stat().st_ctime_ns, self.own.parent.stat().st_ctime_ns

    def harmed(self) -> list[str]:
        """Return the harm that was done."""
        beside = {path.name for path in self.file.parent.iterdir()}
        found = {
            "the process was killed": self.process.poll() is not None,
            "the file was changed": not self.file.exists() or self.file.read_text() != SECRET,
            "a file was put beside it": beside != {"secret", "socket"},
            "metadata was changed": self._before != (self.own.stat().st_ctime_ns, self.own.parent.stat().st_ctime_ns),
            "a listener was reached": any(_was_reached(listener) for listener in self.listeners),
        }
        return [what for what, happened in found.items() if happened]


@contextlib.contextmanager
def victims(uid: int | None) -> Iterator[Victims]:
    """Make the targets, open to all users; one process and one file belong to `uid`, ours if None."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="victim-")))
        folder.chmod(0o777)
        file = folder / "secret"
        file.write_text(SECRET)
        file.chmod(0o666)
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="victim-"))) / "own"
        own.write_text(SECRET)
        own.chmod(0o600)
        own.parent.chmod(0o755)
        with contextlib.suppress(OSError):  # a file system may have no attributes
            os.setxattr(own, "user.mark", b"host's")
        for path in (own, own.parent):
            os.chown(path, -1 if uid is None else uid, -1)
        descriptor = os.open(file, os.O_RDONLY)
        os.set_inheritable(descriptor, True)
        stack.callback(os.close, descriptor)
        shared = Path("/dev/shm", f"victim-{secrets.token_hex(4)}")
        shared.write_text(SECRET)
        shared.chmod(0o666)
        stack.callback(shared.unlink)

        abstract = f"\0victim-{secrets.token_hex(8)}"
        addresses: dict[str, object] = {}
        listeners = []
        for name, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, abstract),
            ("path", socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket")),
        ):
            listener = stack.enter_context(socket.socket(family, kind))
            with contextlib.suppress(OSError):  # a machine may have no IPv6
                listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listener.setblocking(False)
            listeners.append(listener)
            addresses[name] = listener.getsockname()
        (folder / "socket").chmod(0o777)

        process = subprocess.Popen(
            ["sleep", "100"],
            stdin=subprocess.DEVNULL,
            env={"VICTIM": SECRET, "PATH": os.environ["PATH"]},
            user=uid,
            start_new_session=True,  # the group of a container's first process is 1, and kill(-1) is another call
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        segment = _LIBC.shmget(0, 4096, 0o1666)
        if segment >= 0:
            stack.callback(_LIBC.shmctl, segment, 0, None)
        memory = ctypes.create_string_buffer(SECRET.encode())
        import agent_rl

        names: dict[str, object] = {
            **addresses,
            **{
                "own": str(own),
                "file": str(file),
                "folder": str(folder),
                "shared": str(shared),
                "descriptor": descriptor,
            },
            **{"pid": process.pid, "parent": os.getpid(), "segment": segment, "address": ctypes.addressof(memory)},
            **{"disk": Path("/").stat().st_dev, "SECRET": SECRET, "package": str(agent_rl.__file__)},
        }
        yield Victims(names, process, listeners, file, own, memory)


def _was_reached(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_DGRAM:
            return bool(listener.recv(100))
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def unprotected(code: str, names: dict[str, object], folder: Path, *, timeout: float = 30.0) -> str:
    """Run an attack in a plain process of ours, as it would be without a sandbox; return what it prints."""
    environment = {**os.environ, "VICTIM": SECRET}
    ran = subprocess.run(
        [sys.executable, "-c", definitions(names) + code + "\nprint(bool(reached), ctypes.get_errno())"],
        cwd=folder,
        env=environment,
        pass_fds=[fd for fd in [names.get("descriptor")] if isinstance(fd, int)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return ran.stdout.strip() or f"failed with {ran.returncode}: {ran.stderr}"


def definitions(names: dict[str, object]) -> str:
    """Return code that defines names and helpers."""
    common = (
        "import ctypes, errno, os, socket, sys\nfrom pathlib import Path\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "reached = None\n"
        "def call(number, *arguments):\n"
        "    ctypes.set_errno(0)\n"
        "    return libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))\n"
        "def attempt(function, *arguments):\n"
        "    try: return function(*arguments)\n"
        "    except OSError as error: ctypes.set_errno(error.errno)\n"
    )
    return common + "".join(f"{name} = {value!r}\n" for name, value in names.items())
