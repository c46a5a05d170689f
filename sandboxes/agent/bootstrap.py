"""The agent's entry point where its files are not: `python3 -c` of this text reads them from stdin, and serves.

So any container or microVM that has a python3 will do, and the agent there is always of the host's version.
"""

import ctypes
import importlib
import importlib.util
import marshal
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_PR_SET_NO_NEW_PRIVS = 38


class _SentModules:
    """Imports modules by name: from their bytecode where it is this Python's, else from their source texts."""

    def __init__(self, sources: Mapping[str, str], magic: bytes, codes: bytes) -> None:
        self._sources = sources
        self._codes: dict[str, CodeType] = marshal.loads(codes) if magic == importlib.util.MAGIC_NUMBER else {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name not in self._sources:
            return None
        return importlib.util.spec_from_loader(name, self, is_package="." not in name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> CodeType:
        return self._codes.get(name) or compile(self._sources[name], name, "exec")


def _take(size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("the host is gone")
    return data


def _become(user: str) -> None:
    """Give up root for good."""
    import pwd

    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main() -> None:
    """Serve stdin and stdout until either the host or the lifetime ends."""
    home, user, lifetime, variables, *modules = marshal.loads(_take(*struct.unpack(">I", _take(4))))
    sys.meta_path.append(_SentModules(*modules))
    agent = importlib.import_module("agent.agent")
    requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    serving = agent.Agent(
        requests, replies, home=home, confine=lambda: _become(user) if user else None, variables=variables
    )
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, lifetime)
    serving.serve()


if __name__ == "__main__":
    main()
